"""Heads made to measure: a given horizon and spectrum over a given law of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from limitlens.attention.head import Head
from limitlens.errors import Array, InputError

LARGEST_HORIZON = 1000  # n = 30,000 tokens are hardmax long before


def designed_head(
    covariance: Array, horizon: float, *, spectrum: str | Sequence[float] = "flat", seed: int = 0
) -> Head:
    """A head whose B = Σ^{1/2} A Σ^{1/2} has largest singular value `horizon`, with V the identity.

    B = R diag(s) with R a rotation drawn uniformly from SO(d), so that d = 1 gives A = +horizon/Σ.

    Parameters
    ----------
    covariance : (d, d)
        Σ, the covariance of the tokens. Directions without variance are left alone.
    spectrum : "flat", "1/k" or a sequence of d numbers
        The shape of s; it is scaled so that its largest entry is `horizon`.
    """
    if not 0 <= horizon <= LARGEST_HORIZON:
        raise InputError(
            f"the horizon is {horizon:g}; expected a number from 0 to {LARGEST_HORIZON:,}, such as 1.5: far beyond, "
            "attention is hardmax (limitlens hardmax)"
        )
    dim = len(covariance)
    if isinstance(spectrum, str):
        shapes = {"flat": np.ones(dim), "1/k": 1 / np.arange(1, dim + 1)}
        if spectrum not in shapes:
            raise InputError(f"the spectrum is {spectrum!r}; expected flat, 1/k or {dim} comma-separated numbers")
        shape = shapes[spectrum]
    else:
        shape = np.asarray(spectrum, dtype=np.float64)
        if shape.shape != (dim,) or not np.isfinite(shape).all() or (shape < 0).any() or not shape.any():
            raise InputError(
                f"the spectrum has {shape.size} entries; expected {dim} finite numbers >= 0, not all zero, "
                "one for each dimension"
            )
    values, vectors = np.linalg.eigh(covariance)
    keep = values > 1e-12 * max(values.max(), 1e-300)
    inverse_root = (vectors[:, keep] / np.sqrt(values[keep])) @ vectors[:, keep].T
    whitened = random_rotation(dim, seed) * (horizon * shape / shape.max())
    return Head(inverse_root @ whitened @ inverse_root)


def random_rotation(dim: int, seed: int) -> Array:
    """A rotation drawn uniformly from SO(d): the orthogonal factor of a Gaussian matrix, with signs put right."""
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0x2071]))
    orthogonal, triangular = np.linalg.qr(generator.standard_normal((dim, dim)))
    orthogonal *= np.sign(np.diag(triangular))
    if np.linalg.det(orthogonal) < 0:
        orthogonal[:, 0] *= -1
    return np.asarray(orthogonal)
