"""`scaling`: one question, whether attention over n keys averages, selects or collapses, asked in four ways."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from limitlens.cost import check_cost
from limitlens.errors import InputError, as_array, check_number, check_seed
from limitlens.experiments.heat_flow import HeatFlow, heat_flow
from limitlens.experiments.real_keys import RealKeys, median_exponent, real_keys
from limitlens.experiments.scaling_limits import ScalingLimits, scaling_limits
from limitlens.experiments.schedules import Schedules, follow_schedules
from limitlens.experiments.weight_samples import MOST_DRAWN, check_replicates
from limitlens.measures.named import sample_from_file
from limitlens.theory.scaling.laws import named_law

A_KEY, A_QUERY, A_PAIR = 1e-6, 0.3, 1e-6  # seconds for a key that is drawn, a real query, its distance to a key

MOST_DIM = 400  # beyond, the weights of a sphere of keys are no numbers in float64


def scaling(
    *,
    dim: int | None = None,
    n: float = 10_000,
    theta: float | None = None,
    beta: float | None = None,
    law: str = "uniform",
    concentration: float = 5.0,
    cosine: float = 1.0,
    sub: int = 2,
    power: float = 1.0,
    keys: ArrayLike | str | Path | None = None,
    queries: ArrayLike | str | Path | None = None,
    neighbours: int | None = None,
    normalise: bool = False,
    schedules: str | Sequence[float] | None = None,
    heat: bool = False,
    layers: int = 400,
    amplitude: float = 0.5,
    replicates: int = 2000,
    seed: int = 0,
    yes: bool = False,
) -> ScalingLimits | RealKeys | Schedules | HeatFlow:
    """Does attention over n keys average, select a handful or collapse onto one? Predicted beside measured.

    `n` keys lie on the sphere S^{dim−1}, dim being 5, or 2 with `heat`; `theta` is their effective number (1, the
    critical scale, by default), or the inverse temperature `beta` is given instead. What comes back:

    - `ScalingLimits` for a `law`: "uniform"; "vmf" with `concentration` and `cosine` to the query; "subsphere" of its
      own dimension `sub`; "power" of the density near the query.
    - `RealKeys` for `keys` (n, d) and `queries` (q, d), arrays or .npy files: `neighbours` nearest keys are fitted
      (about √n by default), `normalise` projects both onto the sphere.
    - `Schedules` for context lengths `schedules`, "lo:hi:k" or a sequence, over a law or real keys.
    - `HeatFlow` for `heat=True`: a density 1 + `amplitude` cos through `layers`.

    >>> found = ll.scaling(dim=5, n=1000, theta=1, replicates=100)
    >>> found.regime, round(found.inputs['beta'], 1)
    ('selective', 38.2)
    """
    check_seed(seed)
    if theta is not None and beta is not None:
        raise InputError("both theta and beta were given; expected one, since each follows from the other")
    if heat:
        if keys is not None or schedules is not None:
            raise InputError("heat was given with another study; expected it alone, on uniform keys")
        dim, beta = 2 if dim is None else dim, 2000.0 if beta is None else beta
        return heat_flow(dim, beta, layers, amplitude, n=_count(n), seed=seed, yes=yes)
    if keys is not None or queries is not None:
        if keys is None or queries is None:
            raise InputError("one of keys and queries was given; expected both, to look at and to look from")
        seen, looking = as_array("keys", _rows(keys), ndim=2), as_array("queries", _rows(queries), ndim=2)
        pairs = float(len(seen)) * len(looking)
        check_cost("scaling", seconds=A_QUERY * len(looking) + A_PAIR * pairs, memory=16.0 * pairs, yes=yes)
        if schedules is not None:
            local = median_exponent(looking, seen, neighbours, normalise).local
            return follow_schedules(schedules, local, theta=theta, beta=beta)
        given = {"keys": keys, "queries": queries}
        files = {name: str(where) for name, where in given.items() if isinstance(where, (str, Path))}
        target = 1.0 if theta is None else theta
        return real_keys(looking, seen, beta, target, neighbours, normalise=normalise, seed=seed, files=files)
    dim = 5 if dim is None else dim
    check_number("the concentration", concentration, "a number from 0 to 1e9", below=1e9)
    check_number("dim", dim, f"an integer from 2 to {MOST_DIM}, for keys on a sphere", low=2, below=MOST_DIM + 1)
    gap_law = named_law(law, dim, concentration=concentration, cosine=cosine, sub=sub, power=power)
    if schedules is not None:
        about: dict[str, Any] = {"law": law, "dim": dim} | ({"sub": sub} if law == "subsphere" else {})
        return follow_schedules(schedules, gap_law, theta=theta, beta=beta, about=about)
    theta = 1.0 if theta is None and beta is None else theta
    drawn = check_replicates(replicates) * min(n, MOST_DRAWN)
    check_cost("scaling", seconds=A_KEY * drawn, memory=200.0 * replicates, yes=yes)
    return scaling_limits(gap_law, _count(n), theta, beta, replicates=replicates, seed=seed, name=law, dim=dim)


def _rows(given: ArrayLike | str | Path) -> ArrayLike:
    """An array as given, or that of a .npy file."""
    return sample_from_file(str(given)).tokens if isinstance(given, (str, Path)) else given


def _count(n: float) -> int:
    if not float(n).is_integer():
        raise InputError(f"n is {n:g}; expected a whole number of keys")
    return int(n)
