"""Laws and heads given by numbers on the command line: the options --mean, --covariance, --matrix and --value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from typer import Context, Option

from limitlens.cli.common import spectrum_of
from limitlens.errors import Array, InputError

if TYPE_CHECKING:
    from limitlens.attention.head import Head
    from limitlens.measures import Measure

_FORM = "A|A,B,C|FILE.npy"
Mean = Annotated[str | None, Option(metavar=_FORM, help="gaussian: mean of the tokens; a number is for all entries.")]
Covariance = Annotated[str | None, Option(metavar=_FORM, help="gaussian: variance, variances or covariance matrix.")]
Matrix = Annotated[
    str | None, Option(metavar=_FORM, help="Score matrix of the head, or its diagonal, instead of --horizon.")
]
Value = Annotated[
    str | None, Option(metavar=_FORM, help="Value matrix V, its diagonal, or a multiple of I; default: identity.")
]
NAMED_OPTIONS = ("concentration", "components", "separation")  # parameters of named laws
LAW_OPTIONS = ("measure", "dim", "mean", "covariance", *NAMED_OPTIONS)  # against --sample
HEAD_OPTIONS = ("horizon", "horizons", "spectrum")  # that contradict --matrix


def array_of(option: str, text: str) -> Array:
    """Value of an option as an array: one number (), numbers separated by commas (k,), or the contents of a .npy file.

    >>> array_of("--mean", "3,0").tolist()
    [3.0, 0.0]
    """
    from limitlens.measures.named import array_from_file

    if text.endswith(".npy"):
        return np.array(array_from_file(text, "numbers"), dtype=np.float64)
    try:
        values = np.array([float(part) for part in text.split(",")])
    except ValueError:
        expected = "a number, numbers such as 1,2,5, or a .npy file"
        raise InputError(f"{option} is {text[:80]!r}; expected {expected}") from None
    return values if "," in text else values[0]


def law_of(
    call: Context, measure: str, dim: int, *, mean: str | None = None, covariance: str | None = None,
    matrix: str | None = None, sample: str | None = None, **others: Any,
) -> Measure:  # fmt: skip
    """Law of the tokens that the options of a command describe; arrays give the dimension if --dim is left out."""
    from limitlens.measures import Gaussian
    from limitlens.measures.named import named_measure, sample_from_file

    given = _given(call, LAW_OPTIONS)
    if sample is not None and given:
        raise InputError(f"both --sample and --{given[0]} were given; expected --sample alone, which replaces the law")
    if sample is not None:
        return sample_from_file(sample)
    texts = {"mean": mean, "covariance": covariance, "matrix": matrix}
    arrays = {name: array_of(f"--{name}", text) for name, text in texts.items() if text is not None}
    own = [name for name in arrays if name != "matrix"]
    if own and measure != "gaussian":
        raise InputError(f"--{own[0]} was given with --measure {measure}; expected --measure gaussian")
    lengths = {name: len(array) for name, array in arrays.items() if array.ndim}
    lengths |= {"dim": dim} if "dim" in given else {}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"--{name} {length}" for name, length in lengths.items())
        raise InputError(f"the dimensions are {shown}; expected the same")
    dim = next(iter(lengths.values()), dim)
    if not own:
        return named_measure(measure, dim, **{name: others[name] for name in NAMED_OPTIONS if name in others})
    center = arrays.get("mean", np.zeros(()))
    return Gaussian(np.full(dim, center) if center.ndim == 0 else center, arrays.get("covariance", 1.0))


def matrix_of(option: str, text: str, dim: int) -> Array:
    """Matrix (rows, dim) given by an option: a number is a multiple of the identity, several numbers a diagonal."""
    given = array_of(option, text)
    matrix = given if given.ndim > 1 else np.diag(given if given.ndim else np.full(max(dim, 0), given))
    wanted = f"({dim}, {dim})" if option == "--matrix" else f"{dim} columns"
    if matrix.shape != (dim if option == "--matrix" else len(matrix), dim):
        raise InputError(f"{option} has shape {given.shape}; expected {wanted}, as the tokens have")
    return matrix


def head_of(
    call: Context, law: Measure, *, matrix: str | None = None, value: str | None = None, horizon: float = 1.0,
    spectrum: str = "flat", seed: int = 0, **_: Any,
) -> Head:  # fmt: skip
    """Head with the matrices of --matrix and --value; without --matrix, a random one of this horizon and spectrum."""
    from limitlens.attention.head import Head, designed_head

    values = None if value is None else matrix_of("--value", value, law.dim)
    if matrix is None:
        return Head(designed_head(law, horizon, spectrum=spectrum_of(spectrum), seed=seed).A, values)
    if clash := _given(call, HEAD_OPTIONS):
        raise InputError(f"both --matrix and --{clash[0]} were given; expected one, since --matrix gives the head")
    return Head(matrix_of("--matrix", matrix, law.dim), values)


def _given(call: Context, names: tuple[str, ...]) -> list[str]:
    """Those of the options `names` that stand on the command line."""
    return [name for name in names if str(call.get_parameter_source(name)).endswith("COMMANDLINE")]
