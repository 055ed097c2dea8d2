"""Quadrature rules: tanh-sinh for integrands with power singularities at the ends, and Gauss-Legendre panels.

The tanh-sinh rule substitutes v = 1 / (1 + exp(−π sinh t)), which puts nodes close to both ends of (0, 1). The
trapezoidal rule in t then converges almost exponentially for analytic integrands times v^p, p > −1.
"""

from functools import lru_cache

import numpy as np

from limitlens.errors import Array

_REACH = 5.0  # v starts at exp(−π sinh 5) ≈ 1e-101: v^p integrates to 1e-15 down to p = −0.85


@lru_cache(maxsize=8)
def tanh_sinh(nodes: int) -> tuple[Array, Array, Array]:
    """Nodes v, complements 1 − v (both to full relative accuracy) and weights on (0, 1); each of shape (nodes,)."""
    t = np.linspace(-_REACH, _REACH, nodes)
    exponent = np.pi * np.sinh(t)
    node, complement = 1 / (1 + np.exp(-exponent)), 1 / (1 + np.exp(exponent))
    weight = np.pi * np.cosh(t) * node * complement * (t[1] - t[0])
    for array in (node, complement, weight):
        array.setflags(write=False)  # all callers share the cached arrays
    return node, complement, weight


def panels(edges: Array, order: int = 16) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights on each panel between consecutive `edges`: two arrays (panels · order,)."""
    node, weight = np.polynomial.legendre.leggauss(order)
    half = np.diff(edges)[:, None] / 2
    centre = (edges[1:] + edges[:-1])[:, None] / 2
    return (centre + half * node).ravel(), (half * weight).ravel()
