"""Exception for bad input (`InputError`), and checks of arguments that raise it."""

import math
import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[np.float64]
Progress: TypeAlias = Callable[[float, float], None]  # called with (done, total), in any unit

LARGEST = 1e100  # largest argument allowed: squares of larger numbers, or of their inverses, overflow


class InputError(ValueError):
    """Bad input from a user. The message is one sentence: what was given, what was expected and what to do."""


def as_array(name: str, value: ArrayLike | Any, *, ndim: int | tuple[int, ...] | None = None) -> Array:
    """Convert numbers, sequences or tensors to a float64 array; an `InputError` about `name` if one is not finite."""
    if hasattr(value, "detach"):  # a torch tensor, recognised without importing torch
        value = value.detach().cpu()
        value = (value if value.is_complex() else value.double()).numpy()
    try:
        given = np.asarray(value)
        if given.dtype.kind == "c":
            raise TypeError("they are complex")
        array = given.astype(np.float64, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} could not be read as numbers ({error}); give real numbers") from None
    if ndim is not None:
        allowed = (ndim,) if isinstance(ndim, int) else ndim
        if array.ndim not in allowed:
            expected = " or ".join(str(number) for number in allowed)
            raise InputError(f"{name} has shape {array.shape}; expected {expected} dimension(s), so reshape it first")
    if array.size and not np.isfinite(array).all():
        where = tuple(int(index) for index in np.argwhere(~np.isfinite(array))[0])
        raise InputError(f"{name} holds {array[where]} at index {where}; expected finite numbers, so clean it first")
    return array


def check_number(
    name: str, value: float, expected: str, *, low: float = 0.0, closed: bool = True, below: float = LARGEST
) -> float:
    """Return `value` as a float if low ≤ value < below (low < value unless `closed`); else raise an `InputError`."""
    check_kind(name, value, Real, expected)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floating point
        number = math.inf if value > 0 else -math.inf
    if not (low < number < below or (closed and number == low)):
        limit = f", and less than {LARGEST:g}" if below == LARGEST and number >= below else ""
        raise InputError(f"{name} is {number:g}; expected {expected}{limit}")
    if not closed and 0 < abs(number) < 1 / LARGEST:  # a range that includes 0 may come near it
        raise InputError(f"{name} is {number:g}; expected {expected}, and not so close to 0")
    return number


def check_kind(name: str, value: Any, kinds: Any, expected: str) -> None:
    """Raise an `InputError` unless `value` is an object of a class `kinds` (or one of them); a bool is no number."""
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise InputError(f"{name} is {_shown(value)}; expected {expected}")


def check_seed(seed: int) -> int:
    """Return a random seed as an int if it is a non-negative integer; otherwise raise an `InputError`."""
    if not isinstance(seed, Integral) or seed < 0:
        raise InputError(f"the seed is {_shown(seed)}; expected an integer from 0 on")
    return int(seed)


def check_relative(error: float) -> float:
    """Return a relative error as a float if it lies in (0, 1); otherwise raise an `InputError`."""
    return check_number("the error", error, "a share between 0 and 1, such as 0.05 for 5%", closed=False, below=1)


def _shown(value: Any) -> str:
    """Short text of a bad value for an error message: its repr, or the name of its type if the repr is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"a {type(value).__name__}"


def check_covariance(name: str, covariance: Array) -> Array:
    """Return a covariance matrix (dim, dim) if it is symmetric positive semi-definite; else raise an `InputError`."""
    if covariance.ndim != 2 or covariance.shape[0] != covariance.shape[1]:
        raise InputError(f"{name} has shape {covariance.shape}; expected a square matrix (dim, dim)")
    scale = float(np.abs(covariance).max(initial=0.0))
    if not np.allclose(covariance, covariance.T, rtol=1e-8, atol=1e-12 * max(scale, 1e-300)):
        raise InputError(f"{name} is not symmetric; expected a covariance matrix, so pass (S + S.T) / 2 if you mean it")
    symmetric = (covariance + covariance.T) / 2
    smallest = float(np.linalg.eigvalsh(symmetric)[0]) if symmetric.size else 0.0
    if smallest < -1e-10 * max(scale, 1e-300):
        given = f"{name} has the negative eigenvalue {smallest:.3g}; expected a positive semi-definite matrix"
        raise InputError(f"{given}, so clip its eigenvalues at zero or check how it was estimated")
    return symmetric


def in_options(message: str) -> str:
    """Replace Python arguments in a message by options of the command line, such as special='bos' by --special bos."""

    def option(match: re.Match[str]) -> str:
        return f"--{match[1].replace('_', '-')}{' ' * bool(match[2])}{match[2] or ''}"

    return re.sub(r"\b([a-z_]+)=(?:True\b|'(\w+)')", option, message)
