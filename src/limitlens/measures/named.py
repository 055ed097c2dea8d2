"""Distributions of tokens by their names on the command line, and samples of tokens read from files."""

import os
from typing import Any

import numpy as np

from limitlens.errors import InputError, check_number
from limitlens.measures import Ball, Cube, Gaussian, GaussianMixture, Measure, Sample, Sphere, VonMisesFisher
from limitlens.measures.base import check_dim

NAMES = ("gaussian", "mixture", "sphere", "vmf", "ball", "cube")


def named_measure(
    name: str, dim: int, *, concentration: float = 5.0, components: int = 2, separation: float = 2.0
) -> Measure:
    """Distribution of tokens in dimension `dim`, by its name on the command line (`--measure`).

    "gaussian" is N(0, I). "mixture" is `components` Gaussians N(m, I) of equal weight, with m evenly spaced on the
    first axis between ±separation. "sphere" and "ball" are uniform with radius 1, and "cube" is uniform on [−1, 1]^d.
    "vmf" is the von Mises-Fisher distribution of this `concentration` around the first axis.
    """
    axis = np.zeros(check_dim(dim))
    axis[0] = 1
    match name:
        case "gaussian":
            return Gaussian(np.zeros(dim), 1.0)
        case "mixture":
            expected = "at least 2 and at most 1,000, or use gaussian"
            check_number("the number of components", components, expected, low=2, below=1001)
            check_number("the separation", separation, "a number from 0 to 1e15", below=1e15)
            means = np.linspace(-separation, separation, components)[:, None] * axis
            return GaussianMixture(np.full(components, 1 / components), means, 1.0)
        case "sphere" | "ball" | "cube":
            return {"sphere": Sphere, "ball": Ball, "cube": Cube}[name](dim)
        case "vmf":
            return VonMisesFisher(axis, concentration)
    raise InputError(f"the measure is {name!r}; expected one of {', '.join(NAMES)}")


def sample_from_file(path: str) -> Sample:
    """Empirical distribution of the tokens (n, d) in the .npy file at `path`; no code in the file is executed."""
    tokens = array_from_file(path, "tokens of shape (n, dim)")
    if tokens.ndim != 2:
        raise InputError(f"{path!r} holds {tokens.dtype} of shape {tokens.shape}; expected real numbers (n, dim)")
    return Sample(tokens)


def array_from_file(path: str, expected: str) -> np.ndarray[Any, Any]:
    """Real numbers in the .npy file at `path`, as a memory map; errors say that `expected` was expected."""
    if not os.path.isfile(path):  # excludes pipes and devices, which may never end
        raise InputError(f"there is no file {path[:200]!r}; expected a .npy file with {expected}")
    try:
        with open(path, "rb") as file:
            if file.read(6) != b"\x93NUMPY":  # archives are refused: their contents may have any size
                raise ValueError
        with np.errstate(over="ignore"):  # in the number of bytes that a header claims
            array = np.load(path, mmap_mode="r", allow_pickle=False)  # a map fails if the file is shorter
    except Exception:  # a malformed header can raise any exception in the parser
        raise InputError(f"{path!r} cannot be read as a .npy file of numbers; save an array with numpy.save") from None
    if not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array):
        raise InputError(f"{path!r} holds {array.dtype}; expected real numbers, {expected}")
    return np.asarray(array)
