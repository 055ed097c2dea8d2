"""Laws by name, as the command line spells them, and samples from files."""

import os

import numpy as np

from limitlens.errors import InputError, check_number
from limitlens.measures import Ball, Cube, Gaussian, GaussianMixture, Measure, Sample, Sphere, VonMisesFisher
from limitlens.measures._shared import check_dim

NAMES = ("gaussian", "mixture", "sphere", "vmf", "ball", "cube")


def named_measure(
    name: str, dim: int, *, concentration: float = 5.0, components: int = 2, separation: float = 2.0
) -> Measure:
    """The standard law of a name in dimension `dim`.

    gaussian: N(0, I). mixture: `components` equal parts N(m, I), their m even along the first axis between ±separation.
    sphere, ball: the unit ones. cube: [−1, 1]^d. vmf: `concentration` around the first axis.
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
    """The tokens of a .npy file of shape (n, d). Nothing in the file is executed."""
    if not os.path.isfile(path):  # neither a pipe nor a device, which may never end
        raise InputError(f"there is no file {path[:200]!r}; expected a .npy file with tokens of shape (n, dim)")
    try:
        with open(path, "rb") as file:
            if file.read(6) != b"\x93NUMPY":  # an archive is not even opened: what it holds may be of any size
                raise ValueError
        with np.errstate(over="ignore"):  # of the number of bytes that a header claims
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)  # a map fails where the file holds less
    except Exception:  # a header is parsed by Python, which throws whatever it likes at one that lies
        raise InputError(f"{path!r} cannot be read as a .npy file of numbers; save tokens with numpy.save") from None
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.number) or np.iscomplexobj(tokens):
        raise InputError(f"{path!r} holds {tokens.dtype} of shape {tokens.shape}; expected real numbers (n, dim)")
    return Sample(tokens)
