"""Attention over infinitely many tokens; this module does not import torch, which loads slowly."""

from typing import Any

import numpy as np

from limitlens.attention.head import Head, as_head
from limitlens.errors import Array
from limitlens.measures.custom import TokenLaw, as_measure


def limit(measure: TokenLaw, head: Head, x: Any) -> Array:
    """Attention over infinitely many tokens, Γ(x) = V ∇K(A x): queries (..., d) to (..., v).

    >>> ll.limit(ll.Gaussian(0.0, 1.0), ll.Head(1.5), [[0.5], [1.0]]).tolist()
    [[0.75], [1.5]]
    """
    law = as_measure(measure)
    head = as_head(head, law.dim)
    mean = law.grad_K(head.tilts(x))
    return mean if head.value_map is None else np.asarray(mean @ head.value_map.T + head.value_bias)
