"""Errors at every size that the central limit theorem predicts from one sample (plug-in variance).

With weights w over n₀ tokens and output Γ, the plug-in variance of the output is Σ w² |v − Γ|², and it falls like 1/n.
An atom (sink) with score a and value v_a that every context contains has the share 1 − ρ(n) of the mass, so that among
n tokens and the atom

    E|error|² ≈ ρ² (n₀/n) Σ w² |v − g|²,    g = (1 − ρ) v_a + ρ Γ,    ρ = n e^{lse} / (n₀ e^a + n e^{lse}).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from limitlens.arrays import array_like
from limitlens.attention.state import State


def plug_in_errors(
    lse: Tensor, output: Tensor, second: Tensor, atom: State | None, sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """Predicted squared errors and squared outputs for every size, per query: (..., m, J) twice.

    The arguments describe attention over n₀ tokens, the last size: log-sum-exp (..., m), outputs (..., m, v), and
    Σ w² (v, |v|², 1) (..., m, v + 2).
    """
    share = array_like(lse, np.asarray(sizes) / sizes[-1])
    rest, limit = torch.ones_like(share), output[..., None, :]
    if atom is not None:
        rest = torch.sigmoid(lse[..., None] + share.log() - atom.lse[..., None])
        limit = torch.lerp(atom.output[..., None, :], limit, rest[..., None])  # (..., m, J, v)
    outputs = limit.square().sum(-1)
    across = (limit * second[..., None, :-2]).sum(-1)
    spread = second[..., -2, None] - 2 * across + outputs * second[..., -1, None]  # Σ w² |v − g|²
    errors = rest.square() / share * spread.clamp_min(0)
    return errors, outputs.expand_as(errors)
