"""`scaling`: does attention over n keys average over many, select a few or collapse onto one?"""

from pathlib import Path

from numpy.typing import ArrayLike

from limitlens.cost import check_cost
from limitlens.errors import InputError, check_number, check_seed
from limitlens.experiments.real_keys import RealKeys, read_vectors, real_keys
from limitlens.experiments.scaling_limits import ScalingLimits, scaling_limits
from limitlens.experiments.weight_samples import MOST_DRAWN, check_count, check_replicates
from limitlens.theory.scaling.laws import GapLaw, named_law

KEY_SECONDS = 1e-6  # to draw one key
MOST_DIM = 400  # the weights of keys on a sphere of higher dimension overflow float64


def scaling(
    *,
    dim: int = 5,
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
    replicates: int = 2000,
    seed: int = 0,
    yes: bool = False,
) -> ScalingLimits | RealKeys:
    """Predict and measure whether attention over n keys averages, selects a few keys or collapses onto one.

    The `n` keys lie on the sphere S^{dim−1}. `theta` is their effective number (by default 1, the critical scale);
    the inverse temperature `beta` may be given instead. The keys follow a `law`: "uniform"; "vmf" (von Mises-Fisher)
    with `concentration` and `cosine` between mean direction and query; "subsphere" of dimension `sub`; "power", a
    density that behaves like |q − k|^power near the query. The result is a `ScalingLimits`.

    With `keys` (n, d) and `queries` (q, d), arrays or .npy files, the law near each query is estimated from its
    `neighbours` nearest keys (about √n by default); `normalise` projects both onto the sphere. The result is a
    `RealKeys`.

    >>> result = ll.scaling(dim=5, n=1000, theta=1, replicates=100)
    >>> result.regime, round(result.inputs['beta'], 1)
    ('selective', 38.2)
    """
    check_seed(seed)
    check_one_scale(theta, beta)
    if keys is not None or queries is not None:
        query_rows, key_rows = read_vectors(queries, keys, yes)
        named = {"keys": keys, "queries": queries}
        files = {name: str(path) for name, path in named.items() if isinstance(path, (str, Path))}
        target = 1.0 if theta is None else theta
        return real_keys(query_rows, key_rows, beta, target, neighbours, normalise=normalise, seed=seed, files=files)
    gap_law = sphere_law(law, dim, concentration=concentration, cosine=cosine, sub=sub, power=power)
    theta = 1.0 if theta is None and beta is None else theta
    drawn = check_replicates(replicates) * min(n, MOST_DRAWN)
    check_cost("scaling", seconds=KEY_SECONDS * drawn, memory=200.0 * replicates, yes=yes)
    return scaling_limits(gap_law, check_count(n), theta, beta, replicates=replicates, seed=seed, name=law, dim=dim)


def sphere_law(law: str, dim: int, *, concentration: float, cosine: float, sub: int, power: float) -> GapLaw:
    """Law of the gap 1 − <q, k> between a query and keys on S^{dim−1}, by the name of the law of the keys."""
    check_number("the concentration", concentration, "a number from 0 to 1e9", below=1e9)
    check_number("dim", dim, f"an integer from 2 to {MOST_DIM}, for keys on a sphere", low=2, below=MOST_DIM + 1)
    return named_law(law, dim, concentration=concentration, cosine=cosine, sub=sub, power=power)


def check_one_scale(theta: float | None, beta: float | None) -> None:
    """Refuse θ and β together: each determines the other."""
    if theta is not None and beta is not None:
        raise InputError("both theta and beta were given; expected one, since each follows from the other")
