"""Design of heads with a given horizon and spectrum over a given law of tokens."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from limitlens.attention.head import Head
from limitlens.errors import Array, InputError, as_array, check_covariance, check_number, check_seed
from limitlens.measures.custom import TokenLaw, as_measure

HARDMAX_BEYOND = 1000  # largest horizon: attention over 30,000 tokens is hardmax long before


def designed_head(
    measure: TokenLaw | ArrayLike, horizon: float, *, spectrum: str | Sequence[float] = "flat", seed: int = 0
) -> Head:
    """A head whose B = Σ^{1/2} A Σ^{1/2} has largest singular value `horizon`, with V the identity.

    B = R diag(s) with R a rotation drawn uniformly from SO(d), so that d = 1 gives A = +horizon/Σ. The shape of s is
    "flat", "1/k" or d numbers, scaled to the horizon. Σ (d, d) may be given instead of the law of tokens; directions
    without variance are ignored.

    >>> ll.designed_head(ll.Gaussian(0.0, 4.0), horizon=2.0).A.tolist()
    [[0.5]]
    """
    wanted = f"a number from 0 to {HARDMAX_BEYOND:,}, such as 1.5: far beyond, attention is hardmax"
    check_number("the horizon", horizon, wanted, below=HARDMAX_BEYOND * (1 + 1e-9))
    check_seed(seed)
    if hasattr(measure, "grad_K"):
        law = as_measure(cast("TokenLaw", measure))
        law.check_spread()
        covariance = law.covariance
    else:
        covariance = check_covariance("covariance", as_array("covariance", measure, ndim=2))
    dim = len(covariance)
    if isinstance(spectrum, str):
        shapes = {"flat": np.ones(dim), "1/k": 1 / np.arange(1, dim + 1)}
        if spectrum not in shapes:
            raise InputError(f"the spectrum is {spectrum!r}; expected flat, 1/k or {dim} numbers")
        shape = shapes[spectrum]
    else:
        shape = np.asarray(spectrum, dtype=np.float64)
        if shape.shape != (dim,) or not np.isfinite(shape).all() or (shape < 0).any() or not shape.any():
            wanted = f"{dim} finite numbers >= 0, not all zero, one for each dimension"
            raise InputError(f"the spectrum has {shape.size} entries; expected {wanted}")
    values, vectors = np.linalg.eigh(covariance)
    keep = values > 1e-12 * max(values.max(), 1e-300)
    inverse_root = (vectors[:, keep] / np.sqrt(values[keep])) @ vectors[:, keep].T
    whitened = random_rotation(dim, seed) * (horizon * shape / shape.max())
    return Head(inverse_root @ whitened @ inverse_root)


def random_rotation(dim: int, seed: int) -> Array:
    """Random rotation, uniform on SO(d): the orthogonal factor of a Gaussian matrix, with corrected signs."""
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0x2071]))
    orthogonal, triangular = np.linalg.qr(generator.standard_normal((dim, dim)))
    orthogonal *= np.sign(np.diag(triangular))
    if np.linalg.det(orthogonal) < 0:
        orthogonal[:, 0] *= -1
    return np.asarray(orthogonal)
