"""Laws by name, as the command line spells them, and samples from files."""

from pathlib import Path

import numpy as np

from limitlens.errors import InputError, check_number
from limitlens.measures import Ball, Cube, Gaussian, GaussianMixture, Measure, Sample, Sphere, VonMisesFisher

NAMES = ("gaussian", "mixture", "sphere", "vmf", "ball", "cube")


def named_measure(
    name: str, dim: int, *, concentration: float = 5.0, components: int = 2, separation: float = 2.0
) -> Measure:
    """The standard law of a name in dimension `dim`.

    gaussian: N(0, I). mixture: `components` equal parts N(m, I), their m even along the first axis between ±separation.
    sphere, ball: the unit ones. cube: [−1, 1]^d. vmf: `concentration` around the first axis.
    """
    check_number("the dimension", dim, "a positive integer", low=1)
    axis = np.eye(dim)[0]
    match name:
        case "gaussian":
            return Gaussian(np.zeros(dim), 1.0)
        case "mixture":
            check_number("the number of components", components, "at least 2, or use gaussian", low=2)
            means = np.linspace(-separation, separation, components)[:, None] * axis
            return GaussianMixture(np.full(components, 1 / components), means, 1.0)
        case "sphere" | "ball" | "cube":
            return {"sphere": Sphere, "ball": Ball, "cube": Cube}[name](dim)
        case "vmf":
            return VonMisesFisher(axis, concentration)
    raise InputError(f"the measure is {name!r}; expected one of {', '.join(NAMES)}")


def sample_from_file(path: str) -> Sample:
    """The tokens of a .npy file of shape (n, d). Nothing in the file is executed."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no file {path!r}; expected a .npy file with tokens of shape (n, dim)")
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError):
        raise InputError(f"{path!r} cannot be read as a .npy file of numbers; save tokens with numpy.save") from None
    if not isinstance(tokens, np.ndarray):
        raise InputError(f"{path!r} holds several arrays; expected one array of shape (n, dim) saved with numpy.save")
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.number) or np.iscomplexobj(tokens):
        raise InputError(f"{path!r} holds {tokens.dtype} of shape {tokens.shape}; expected real numbers (n, dim)")
    return Sample(tokens)
