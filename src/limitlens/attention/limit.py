"""Attention over infinitely many tokens; no torch, so that theory never waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from limitlens.attention.head import Head
from limitlens.errors import Array, InputError
from limitlens.measures.own import TokenLaw, as_measure


def limit(measure: TokenLaw, head: Head, x: Any) -> Array:
    """Attention over infinitely many tokens, Γ(x) = V ∇K(A x): queries (..., d) to (..., v)."""
    law = as_measure(measure)
    if law.dim != head.dim:
        raise InputError(f"the measure has dimension {law.dim} and the head {head.dim}; expected the same")
    mean = law.grad_K(head.tilts(x))
    return mean if head.value_map is None else np.asarray(mean @ head.value_map.T + head.value_bias)
