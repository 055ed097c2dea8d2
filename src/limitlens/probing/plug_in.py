"""The error that the central limit theorem predicts for every size, from one sample.

With weights w over n₀ tokens and output Γ, the plug-in variance of the output is Σ w² |v − Γ|², and it falls like 1/n.
The atom that every context contains takes the share 1 − ρ(n) of the mass, so that among n tokens and the atom, whose
value is v_a,

    E|error|² ≈ ρ² (n₀/n) Σ w² |v − g|²,    g = (1 − ρ) v_a + ρ Γ,    ρ = n e^{lse} / (n₀ e^a + n e^{lse}).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.state import State
from limitlens.lazily import beside


@dataclass(frozen=True, eq=False)
class Sample:
    """Attention of queries over n₀ tokens, with what the squares of the weights say."""

    lse: Tensor  # (..., m): log-sum-exp of the scores
    output: Tensor  # (..., m, v)
    mass2: Tensor  # (..., m): Σ w²
    mean2: Tensor  # (..., m, v): Σ w² v
    square2: Tensor  # (..., m): Σ w² |v|²


def plug_in_errors(sample: Sample, atom: State | None, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Predicted squared errors and squared outputs for every size, of which the last is n₀: (..., m, J) twice."""
    share = beside(sample.lse, np.asarray(sizes) / sizes[-1])
    rest, limit = torch.ones_like(share), sample.output[..., None, :]
    if atom is not None:
        rest = torch.sigmoid(sample.lse[..., None] + share.log() - atom.lse[..., None])
        limit = torch.lerp(atom.output[..., None, :], limit, rest[..., None])  # (..., m, J, v)
    outputs = limit.square().sum(-1)
    across = (limit * sample.mean2[..., None, :]).sum(-1)
    spread = sample.square2[..., None] - 2 * across + outputs * sample.mass2[..., None]
    errors = rest.square() / share * spread.clamp_min(0)
    return errors, outputs.expand_as(errors)
