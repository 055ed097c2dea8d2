"""The error that the central limit theorem predicts for every size, from one sample.

With weights w over n₀ tokens and output Γ, the plug-in variance of the output is Σ w² |v − Γ|², and it falls like 1/n.
The atom that every context contains takes the share 1 − ρ(n) of the mass, so that among n tokens and the atom, whose
value is v_a,

    E|error|² ≈ ρ² (n₀/n) Σ w² |v − g|²,    g = (1 − ρ) v_a + ρ Γ,    ρ = n e^{lse} / (n₀ e^a + n e^{lse}).
"""

from __future__ import annotations

import torch
from torch import Tensor

from limitlens.attention.state import State


def plug_in_errors(sample: State, atom: State | None, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Predicted squared errors and squared outputs for every size, per query: (..., m, J) twice.

    `sample` is attention over n₀ tokens, (..., m) with its detail.
    """
    errors, outputs = [], []
    shares = torch.tensor(sizes, dtype=torch.float64, device=sample.lse.device) / sample.count
    for share in shares:
        rest, limit = torch.ones_like(sample.lse), sample.output
        if atom is not None:
            rest = torch.sigmoid(sample.lse + share.log() - atom.lse)
            limit = torch.lerp(atom.output, sample.output, rest[..., None])
        errors.append(rest.square() / share * sample.spread(limit).sum(-1))
        outputs.append(limit.square().sum(-1))
    return torch.stack(errors, -1), torch.stack(outputs, -1)
