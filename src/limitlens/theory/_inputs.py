"""Checks of arguments that several predictions share."""

from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from limitlens.errors import Array, InputError, as_array, check_number
from limitlens.measures.base import Measure

check_nonnegative = partial(check_number, expected="a finite number that is zero or positive")
check_level = partial(check_number, "level", expected="between 0 and 1, such as 0.95", closed=False, below=1.0)


def as_sizes(sizes: ArrayLike) -> Array:
    """Numbers of tokens n as an array (sizes,), from one number or several."""
    return np.atleast_1d(as_array("sizes", sizes, ndim=(0, 1)))


def score_matrix(A: ArrayLike, dim: int) -> Array:
    """The score matrix A as a (dim, dim) array."""
    matrix = as_array("A", A, ndim=2)
    if matrix.shape != (dim, dim):
        raise InputError(f"A has shape {matrix.shape}; expected ({dim}, {dim}) to match the covariance")
    return matrix


def value_matrix(V: ArrayLike | None, dim: int) -> Array:
    """The value matrix V as a (d_out, dim) array; the identity where V is None."""
    if V is None:
        return np.eye(dim)
    matrix = as_array("V", V, ndim=2)
    if matrix.shape[1] != dim:
        raise InputError(f"V has shape {matrix.shape}; expected (d_out, {dim})")
    return matrix


def one_tilt(measure: Measure, tilt: ArrayLike) -> Array:
    """A single tilt as an array of shape (d,)."""
    t = measure.check_tilts(tilt)
    if t.ndim != 1:
        raise InputError(f"tilt has shape {t.shape}; expected one tilt of shape ({measure.dim},)")
    return t
