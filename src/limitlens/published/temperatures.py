"""Published experiments on temperature: weights of one query, heat flow of tokens, critical factors of real heads."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from limitlens.arrays import native, to_numpy
from limitlens.attention.kernels import choose_device
from limitlens.attention.subset import scores_of
from limitlens.errors import Array, InputError
from limitlens.estimate import Estimate
from limitlens.experiments.heat_flow import heat_flow
from limitlens.experiments.scaling import scaling_limits
from limitlens.experiments.weight_samples import Quantity, sample_ordered
from limitlens.models import Captured, Corpus, LoadedModel, Windows, capture, load, open_corpus
from limitlens.published.catalogue import Number
from limitlens.published.reproduction import Work
from limitlens.sampling.cells import parse_grid, parse_sizes
from limitlens.statistics.critical_factor import critical_of_first
from limitlens.statistics.documents import jackknife, over_documents, p_value
from limitlens.theory import KeyPoints, PoissonPoints, critical_beta, participation
from limitlens.theory.scaling.heat import heat_growth
from limitlens.theory.scaling.laws import uniform

LOGARITHMIC = {"half": 0.5, "one": 1.0, "two": 2.0}  # exponents γ of the laws (ln n)^γ that are compared
LEVEL = 0.05  # a law is rejected for a head if its p-value is below this
FEWEST = 4  # documents: errors come from their scatter, also with one left out
BYTES = 8  # of a token, at most on average: files are read in pieces that are long enough for the largest length
NEAR = 16  # queries of the context length n have at least n (1 − 1/16) keys
RANKS = np.array([1, 2, 3, 4, 6, 8, 11, 16, 22, 32])


def critical_weights(work: Work, *, dims: list[int], n: int, replicates: int) -> None:
    """Measure the largest softmax weights at the temperature where θ, the effective number of keys, is 1."""
    rng = np.random.default_rng(work.seed)
    for dim in work.each(dims):
        law = uniform(dim)
        known = scaling_limits(law, n, 1.0, replicates=replicates, seed=work.seed)
        finite, poisson = KeyPoints(law, n, critical_beta(n, law)), PoissonPoints(1.0, law.a)
        found, limit = (sample_ordered(of, RANKS[-1], replicates, rng)[:, RANKS - 1] for of in (finite, poisson))
        work.draw(f"d = {dim}, n keys", RANKS, found.mean(0), found.std(0, ddof=1) / math.sqrt(replicates))
        work.draw(f"d = {dim}, limit", RANKS, limit.mean(0), line=True)
        work.numbers[f"participation_{dim}"] = _number(known.quantities["participation"])
        if dim == 3:
            work.numbers["inverse_top_3"] = _number(known.quantities["inverse_top_weight"])


def three_regimes(work: Work, *, dim: int, n: int, thetas: list[float], replicates: int) -> None:
    """Measure Σw² of the softmax weights as θ, the effective number of keys, falls from averaging to collapse."""
    law = uniform(dim)
    rows = [scaling_limits(law, n, theta, replicates=replicates, seed=work.seed) for theta in work.each(thetas)]
    shared = [row.quantities["participation"] for row in rows]
    work.draw(f"{n:,} keys", thetas, [one.measured.value for one in shared], [one.measured.stderr for one in shared])
    fine = np.geomspace(thetas[-1], thetas[0], 50)
    work.draw("scaling limit", fine, [participation(PoissonPoints(theta, law.a)) for theta in fine], line=True)
    work.draw("many keys share: 1/(2^a θ)", fine[fine > 1], 1 / (2**law.a * fine[fine > 1]), line=True)
    growth = math.log(critical_beta(1e12, law) / critical_beta(1e9, law)) / math.log(1e3)
    leak = rows[-1].collapse.get("one_minus_top_weight")
    work.numbers["effective_keys"] = _number(rows[0].averaging["effective_sample_size"])
    work.numbers["critical"] = _number(shared[thetas.index(1)])
    if leak is not None:
        work.numbers["leak"] = _number(leak)
    work.numbers["growth"] = Number(Estimate(growth), 2 / (dim - 1))


def backward_heat(work: Work, *, dim: int, beta: float, layers: int, amplitude: float, n: int) -> None:
    """Compare a density after many attention layers, and n tokens after one, with the backward heat equation."""
    flow = heat_flow(dim, beta, layers, amplitude, n=n, seed=work.seed)
    layer, first = np.arange(len(flow.modes)), flow.modes[:, 0]
    every = slice(None, None, max(1, layers // 25))
    work.draw("attention, first mode", layer[every], first[every])
    work.draw("backward heat", layer, amplitude * np.exp(heat_growth(1, dim) * layer / beta), line=True)
    found = {"mode": flow.mode_1, "variance": flow.gaussian_variance}
    found |= {"drift": flow.tokens[1].drift_slope, "noise": flow.tokens[1].noise}
    work.numbers |= {key: _number(one) for key, one in found.items()}


def critical_log_n(
    work: Work, *, correlations: list[float], sizes: list[int], dim: int, gammas: str, queries: int
) -> None:
    """Find the γ at which a token gives itself half of the softmax weight at inverse temperature β = γ log n.

    The tokens have correlations close to ρ. If they are exactly ρ, the weight is 1/(1 + (n−1) n^{−γ(1−ρ)}), one half at
    γ = log(n−1)/log n · 1/(1−ρ).
    """
    rng = np.random.default_rng(work.seed)
    grid = np.array(parse_grid(gammas, "gammas"))  # γ (1 − ρ)
    found = np.empty((2, len(sizes), len(correlations)))
    for place in work.each(list(np.ndindex(found.shape[1:]))):
        n, rho = sizes[place[0]], correlations[place[1]]
        across = rng.standard_normal((n, dim))
        across /= np.linalg.norm(across, axis=1, keepdims=True)
        scores = math.log(n) / (1 - rho) * (rho + (1 - rho) * (across[:queries] @ across.T))
        scores -= np.diagonal(scores)[:, None]
        weights = np.stack([1 / np.exp(gamma * scores).sum(1) for gamma in grid])
        halfway = np.array([np.interp(0.5, row, grid) for row in weights.T])
        found[:, *place] = halfway.mean(), halfway.std(ddof=1) / math.sqrt(len(halfway))
    left = 1 - np.array(correlations)
    for (gamma, stderr), n in zip(np.moveaxis(found, 1, 0), sizes, strict=True):
        work.draw(f"n = {n:,}", correlations, gamma / left, stderr / left)
    work.draw("1/(1−ρ)", fine := np.linspace(0, max(correlations), 60), 1 / (1 - fine), line=True)
    last = {f"transition_{rho:g}": found[:, -1, place] for place, rho in enumerate(correlations)}
    work.numbers |= {key: Number(Estimate(*one)) for key, one in {**last, "transition_few": found[:, 0, 0]}.items()}


def critical_scaling(
    work: Work, *, model: str | LoadedModel, corpus: str, sizes: str, documents: int, queries: int
) -> None:  # fmt: skip
    """Fit laws of growth to the critical factor of each head, over context lengths within long documents.

    The critical factor of a query, the factor on its scores that makes its largest softmax weight 1/5, is computed over
    all keys that it sees, with and without the first token. A head's factor at a length is the median over queries.
    """
    lengths = parse_sizes(sizes)
    if len(lengths) < 3 or lengths[0] < NEAR:
        raise InputError(f"the sizes are {sizes!r}; expected at least three context lengths of {NEAR} tokens or more")
    loaded = load(model, device=choose_device("auto")) if isinstance(model, str) else model
    if not loaded.causal:
        raise InputError(f"{loaded.name} is an encoder, whose context does not grow; give a decoder such as smollm2")
    windows = _long_documents(loaded, corpus, documents, lengths[-1])
    work.warnings += windows[0].warnings
    logs = np.log([_factors(loaded, one, lengths, queries) for one in work.each(windows)])
    heads = np.isfinite(logs).all((0, 1, 3))
    work.numbers |= {"documents": Number(Estimate(len(windows))), "heads": Number(Estimate(heads.sum()))}
    for way, (prefix, label) in enumerate((("", "all keys"), ("other_", "without the first token"))):
        rows = logs[:, way, heads]
        found = _growth(rows, lengths)
        parts = [list(_growth(np.delete(rows, place, 0), lengths).values()) for place in range(len(rows))]
        work.record(prefix, found, found.values(), jackknife(np.array(parts), 0))
        gain = np.exp(rows - rows[..., :1])
        work.draw(f"median head, {label}", lengths, *over_documents(lambda mean: np.median(mean, 0), gain))
        for share in (10, 90) if way == 0 else ():
            work.draw(f"{share}% of heads below, {label}", lengths, np.percentile(gain.mean(0), share, 0))
    fine = np.geomspace(lengths[0], lengths[-1], 40)
    for law, power in zip(("(ln n)^½", "ln n", "(ln n)²"), LOGARITHMIC.values(), strict=True):
        work.draw(law, fine, (np.log(fine) / np.log(fine[0])) ** power, line=True)


def _number(found: Quantity) -> Number:
    return Number(found.measured if found.measured.stderr > 0 else Estimate(found.measured.value), found.predicted)


def _long_documents(loaded: LoadedModel, corpus: str, count: int, length: int) -> list[Windows]:
    """The first `length` tokens of each of up to `count` documents of a corpus that are as long."""
    each = (Corpus(corpus, partial(iter, [text])) for text in open_corpus(corpus, BYTES * length).documents())
    read = (Windows(loaded, one, length=length, tokens=length, fewer=True) for one in each)
    found = list(islice((one for one in read if one.count), count))
    if len(found) < FEWEST:
        given = f"the corpus {corpus!r} holds {len(found)} documents of {length:,} tokens"
        raise InputError(f"{given}; expected at least {FEWEST}, so give longer documents or shorter lengths")
    return found


def _factors(loaded: LoadedModel, window: Windows, lengths: Sequence[int], queries: int) -> Array:
    """Critical factors (2, heads, lengths) of one document, medians over queries: all keys, without the first."""
    layers: list[Array] = []

    def take(call: Captured) -> None:
        if call.slides(lengths[-1]):  # its context does not grow
            return
        places = [np.linspace(n - n // NEAR, n - 1, queries).astype(int) for n in lengths]
        layers.append(np.stack([np.median(_of_queries(call, some), -1) for some in places], -1))

    with torch.no_grad(), _repeated_keys(), capture(loaded.model, take) as run_until_last_attention:
        run_until_last_attention(torch.as_tensor(window[0], dtype=torch.long, device=loaded.model.device)[None])
    if not layers:
        raise InputError(f"{loaded.name} has sliding windows in all layers; give a model with full attention")
    return np.concatenate(layers, 1)


@contextmanager
def _repeated_keys() -> Iterator[None]:
    """Make transformers repeat the keys of grouped heads within the block, as it does for a masked text.

    In float32 torch has no fused kernel for groups: it would hold all scores, 120 GiB for 32,768 tokens and 12 heads.
    """
    from transformers.integrations import sdpa_attention as library

    own = library.use_gqa_in_sdpa
    library.use_gqa_in_sdpa = lambda *_, **__: False
    try:
        yield
    finally:
        library.use_gqa_in_sdpa = own


def _of_queries(call: Captured, places: NDArray[np.int64]) -> Array:
    """Critical factors (2, heads, queries) of queries at some positions: over all keys seen, and without the first."""
    n = int(places.max()) + 1
    key, query = call.key[0, :, :n].float(), call.scale * call.query[0, :, places].float()
    scores = scores_of(query.reshape(len(key), -1, key.shape[-1]), key, call.softcap).reshape(-1, len(places), n)
    if call.bias is not None:
        scores = scores + call.bias.expand(*call.bias.shape[:2], call.query.shape[2], -1)[0, :, places, :n]
    rows, counts = native(scores.double().flatten(0, 1)), np.tile(places + 1, len(scores))
    found = to_numpy(*(critical_of_first(rows[:, first:], counts - first) for first in (0, 1)))
    return np.stack(found).reshape(2, -1, len(places))


def _growth(logs: Array, lengths: Sequence[int]) -> dict[str, Any]:
    """Growth of log factors (documents, heads, lengths), and how well each law predicts documents it was not fitted to.

    Exponents are slopes of least-squares lines. A law explains the share 1 − loss/(loss of no growth) of the growth,
    where the loss is the mean squared error about a document's mean, with exponents fitted to the other documents.
    """
    x, z = (at - at.mean() for at in (np.log(lengths), np.log(np.log(lengths))))
    bend = x**2 - np.mean(x**2) - x * (x**3).sum() / (x @ x)  # orthogonal to every line in ln n
    slopes = logs @ z / (z @ z)
    mean, stderr = slopes.mean(0), slopes.std(0, ddof=1) / np.sqrt(len(slopes))
    bends = logs.mean((0, 1)) @ bend / (bend @ bend)
    level = logs - logs.mean(-1, keepdims=True)
    each = (level @ of / (of @ of) for of in (x, z))  # exponents (documents, heads)
    power, logarithmic = ((one.sum(0) - one) / (len(one) - 1) for one in each)  # those of all other documents
    laws = {name: gamma * z for name, gamma in LOGARITHMIC.items()}
    laws |= {"power": power[..., None] * x, "log": logarithmic[..., None] * z}
    laws["shared"] = power.mean(1)[:, None, None] * x
    losses = {name: np.square(level - law).mean(-1) for name, law in laws.items()}  # (documents, heads)
    found = {
        "log_exponent": np.median(mean),
        "power_exponent": np.median(logs.mean(0) @ x / (x @ x)),
        "spread": np.sqrt(max(mean.var(ddof=1) - np.square(stderr).mean(), 0.0)),
        "curvature_power": bends,
        "curvature_log": bends - mean.mean() * (z @ bend) / (bend @ bend),
    }
    found |= {f"explained_{name}": 1 - loss.mean() / np.square(level).mean() for name, loss in losses.items()}
    for name, gamma in LOGARITHMIC.items():
        pairs = zip(mean - gamma, stderr, strict=True)
        found[f"share_{name}"] = np.mean([p_value(gap, bar, len(logs) - 1) > LEVEL for gap, bar in pairs])
    rivals = [*LOGARITHMIC, "power"]
    for name in rivals:
        behind = np.stack([losses[other] - losses[name] for other in rivals if other != name])
        clear = behind.mean(1) > 2 * behind.std(1, ddof=1) / np.sqrt(len(logs))
        found[f"prefer_{name}"] = clear.all(0).mean()
    return found
