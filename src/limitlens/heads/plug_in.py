"""The error that the central limit theorem predicts for every size, from one sample.

With weights w over n₀ tokens and output Γ, the plug-in variance of the output is Σ w² |v − Γ|², and it falls like 1/n.
The atom that every context contains takes the share 1 − ρ(n) of the mass, so that among n tokens and the atom, whose
value is v_a,

    E|error|² ≈ ρ² (n₀/n) Σ w² |v − g|²,    g = (1 − ρ) v_a + ρ Γ,    ρ = n e^{lse} / (n₀ e^a + n e^{lse}).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from limitlens.attention.state import State


def plug_in_errors(scores: Tensor, value: Tensor, atom: State | None, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Predicted squared errors and squared outputs for every size, per query.

    Parameters
    ----------
    scores : (..., Q, n₀)
        Of Q queries.
    value : (..., n₀, v)
    atom : State of (..., Q), optional
    sizes : list of int

    Returns
    -------
    errors, outputs : (..., Q, J) each
    """
    lse = scores.logsumexp(-1).double()
    weights = torch.exp(scores - lse[..., None].float())
    squares = weights.square()
    output, mean2 = (weights @ value).double(), (squares @ value).double()
    norm2 = (squares @ value.square().sum(-1, keepdim=True)).double()[..., 0]
    mass2 = squares.sum(-1).double()
    errors, outputs = [], []
    for n in sizes:
        share = n / scores.shape[-1]
        rest, limit = torch.ones_like(lse), output
        if atom is not None:
            rest = torch.sigmoid(lse + math.log(share) - atom.lse)
            limit = (1 - rest)[..., None] * atom.output + rest[..., None] * output
        norm = limit.square().sum(-1)
        spread = norm2 - 2 * (limit * mean2).sum(-1) + norm * mass2
        errors.append(rest.square() / share * spread.clamp_min(0))
        outputs.append(norm)
    return torch.stack(errors, -1), torch.stack(outputs, -1)
