"""Error curves of a law of tokens: every size and replicate in one pass over the tokens, with few queries.

The queries of a replicate are its first m tokens; at size n the first min(n, m) of them count. Tokens are exchangeable,
so these are a uniform draw from the n tokens, and for n ≤ m they are all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.design import HARDMAX_BEYOND
from limitlens.attention.device import choose_device
from limitlens.attention.head import Head
from limitlens.attention.kernels import Kernel, state_of
from limitlens.attention.kernels.reference import attend as plain_kernel
from limitlens.attention.state import State
from limitlens.curves.estimators import QuerySums, TokenSums, replicate_errors
from limitlens.curves.reference import Reference, reference_for
from limitlens.curves.uniform import UniformErrors, uniform_errors
from limitlens.errors import Array, InputError, Progress
from limitlens.experiments.study_result import MOMENT, Curve, Later
from limitlens.measures import Gaussian
from limitlens.measures.base import Measure
from limitlens.measures.own import TokenLaw, as_measure
from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.streams import PAGE
from limitlens.theory import curve, rates, validity
from limitlens.theory.proxy import proxy_reach
from limitlens.theory.spectrum import Reach, reach

CHUNK_FLOATS = 1 << 22  # bound on the tokens, keys, values and limits held at once, in numbers
DEVICE_TIMES = 512  # as many on a GPU, which many replicates fill: some 20 GB
FLOOR_QUERIES = 4  # queries attended again in float64 to know the numerical floor
PILOT_REPLICATES, PILOT_QUERIES = 16, 256
# Queries at least: with as many a dimension, tokens cost as much to draw as to attend, and fewer save no time. Among
# few, one far query makes a rare replicate, of which the intervals of the output error do not know until it is seen.
PER_DIMENSION, FEWEST_QUERIES = 8, 128
# Wanted share of query noise in a squared error. Where errors hardly scatter it is removed nearly exactly, so that the
# less they do, the more noise may be.
NOISE_SHARE, MOST_NOISE = 0.06, 0.3
PLAIN_SCATTER = np.pi / 2 - 1  # squared coefficient of variation of |N|, the scatter of a scalar error
MOST_QUERIES = PAGE  # so that the queries of a replicate lie on its first page


# What replicates gave, by name: errors.* and noise.* (replicates, sizes), fewer.* (replicates, sizes, 2 or 4), controls
# (replicates, sizes, F), and the numerical floor (1, sizes), which is 0 where it was not asked for.
Rows: TypeAlias = dict[str, Array]


def study(
    measure: TokenLaw,
    head: Head,
    sizes: str | Sequence[int] = "1000:30000:12",
    *,
    replicates: int = 200,
    queries: int | None = None,
    mask_self: bool = False,
    radius: float | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
) -> Curve:
    """Errors of attention over n tokens against its limit, for nested sizes n, and their rates.

    A `Sample` is drawn from without replacement and compared with attention over all of it. There are as many `queries`
    per replicate as a pilot asks for: 3% of bias in an error that scatters as much as itself, up to 16% in one that
    hardly scatters; what bias there is, is measured and removed. `mask_self` leaves each query's own token out of its
    softmax; with a `radius` the uniform error over the ball of this radius is measured too. `progress` is called with
    (done, total); an interrupt (Ctrl-C) returns the curve of the replicates finished so far.
    """
    started = time.perf_counter()
    measure, cells = as_measure(measure), Cells(parse_sizes(sizes))
    if replicates < 2:
        raise InputError(f"replicates is {replicates}; expected at least 2, since error bars come from their scatter")
    if queries is not None and not 2 <= queries <= MOST_QUERIES:
        raise InputError(f"queries is {queries}; expected 2 to {MOST_QUERIES}, of which a few hundred are enough")
    if measure.dim != head.dim:
        raise InputError(f"the measure has dimension {measure.dim} and the head {head.dim}; expected the same")
    if mask_self and cells.sizes[0] < 2:
        raise InputError("the smallest size is 1 and self is masked, which leaves no token; start sizes at 2 or more")
    where = choose_device(device)
    reference = reference_for(measure, head, cells.sizes[-1], seed, where)
    work = _Work(reference, head, cells, mask_self, where)
    warnings = list(reference.warnings)
    if queries is None:
        queries = choose_queries(work, min(PILOT_REPLICATES, replicates))
        if queries >= min(MOST_QUERIES, cells.sizes[-1]) and queries < cells.sizes[-1]:
            warnings.append(
                f"the pilot asked for more than {MOST_QUERIES} queries; the noise of these is corrected for"
            )
    queries = min(queries, cells.sizes[-1])
    parts: list[Rows] = []
    done, interrupted = 0, False
    try:
        for chunk in work.chunks(range(replicates), queries):
            rows = work.run(chunk, queries, floor=chunk.start == 0)
            if radius is not None:
                uniform = uniform_errors(measure, head, reference, cells, chunk, radius)
                rows |= {"errors.uniform": uniform.largest, "missed": uniform.missed}
            parts.append(rows)
            done = chunk.stop
            if progress is not None:
                progress(done, replicates)
    except KeyboardInterrupt:
        if done < 2:
            raise
        interrupted = True
        warnings.append(f"interrupted: {done} of {replicates} replicates were finished")
    reached = reach(measure.covariance, head.A)
    warnings += validity.warnings(reached, cells.sizes[-1], mask_self=mask_self)
    found = _joined(parts)
    notes = [] if radius is None else [UniformErrors(found["errors.uniform"], found["missed"]).sentence()]
    errors, noise, fewer = (_under(prefix, found) for prefix in ("errors.", "noise.", "fewer."))
    spread = float(reference.covariance.trace().clamp_min(0))
    return Curve(
        sizes=cells.sizes,
        replicate_errors=errors,
        query_noise=noise,
        fewer_queries=fewer,
        controls=found["controls"],
        reference_factor=np.array([reference.factor(n) for n in cells.sizes]),
        floor=found["floor"].max(0),
        scale=(float(np.sqrt(spread + float(reference.mean.square().sum()))), float(np.sqrt(spread))),
        measure=repr(measure),
        theory=_in_theory(reached, proxy_reach(measure, head.A)),
        asymptotic={name: _asymptotic(name, measure, reached.horizon) for name in errors},
        predicted=Later(partial(_predicted, measure, head, reached, cells.sizes, mask_self)),
        mask_self=mask_self,
        queries=queries,
        seed=seed,
        device=str(where),
        interrupted=interrupted,
        seconds=time.perf_counter() - started,
        warnings=tuple(warnings),
        notes=tuple(notes),
    )


def _in_theory(of: Reach, proxy: Reach | None) -> dict[str, float]:
    """Horizons and coupling, and the rates they predict for unbounded tokens; NaN where nothing is proved."""
    laws = (rates.rate_sharp, rates.rate_sharp_output, rates.rate_rms_output, rates.rate_drawn)
    found = {"horizon": of.horizon, "horizon_one_sided": of.horizon_one_sided, "coupling": of.coupling}
    proved = math.nan if proxy is None else rates.rate_proved(proxy.coupling)
    return found | {law.__name__: law(of.horizon) for law in laws} | {"rate_proved": proved}


def _asymptotic(name: str, measure: Measure, horizon: float) -> float:
    """The rate an error tends to: the sharp ones, or 1/2 where the tokens are bounded or the error is uniform."""
    if name == "uniform" or np.isfinite(measure.radius):
        return 0.5
    return (rates.rate_rms_output if MOMENT.get(name) == 2 else rates.rate_sharp)(horizon)


def _predicted(measure: Measure, head: Head, of: Reach, sizes: Sequence[int], mask_self: bool) -> dict[str, Array]:
    """Error curves that theory predicts without sampling, for Gaussian tokens: `output`, and `mean` where it can.

    `output` is exact; `mean` follows the influence function, for centred tokens that attend themselves too, in d = 1
    and where ‖B‖_F is small (docs/theory.md). The grid behind them grows with the horizon, so none is drawn past the
    largest.
    """
    if not isinstance(measure, Gaussian) or head.query_bias.any() or of.horizon > HARDMAX_BEYOND:
        return {}
    covariance, A, V = measure.covariance, head.A, head.V
    found = {"output": curve.output_error(covariance, A, sizes, V=V, mean=measure.mean, mask_self=mask_self)}
    if mask_self or measure.mean.any() or not rates.moments_verified(of):
        return found
    mean = curve.mean_error(covariance, A, sizes, V)
    return found if mean is None else found | {"mean": mean}


def _joined(parts: Sequence[Rows]) -> Rows:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _under(prefix: str, rows: Rows) -> Rows:
    return {name.removeprefix(prefix): part for name, part in rows.items() if name.startswith(prefix)}


def choose_queries(work: _Work, replicates: int) -> int:
    """Queries per replicate so that their noise is a small share of every squared error, from a pilot.

    The pilot runs on replicates of its own (beyond 2³⁰), with few queries; noise falls like 1/queries.
    """
    largest = work.cells.sizes[-1]
    first = min(PILOT_QUERIES, largest)
    chunks = work.chunks(range(1 << 30, (1 << 30) + replicates), first)
    pilot = _joined([work.run(chunk, first, floor=False) for chunk in chunks])
    wanted = float(np.clip(PER_DIMENSION * work.head.value_dim, FEWEST_QUERIES, 2 * PILOT_QUERIES))
    for name, excess in _under("noise.", pilot).items():
        errors = pilot[f"errors.{name}"]
        squared, tiny = (errors**2).mean(0), np.finfo(float).tiny
        ratio = excess.mean(0) / np.maximum(np.maximum(squared - excess.mean(0), squared / 50), tiny)
        scatter = errors.var(0) / np.maximum(squared, tiny)
        share = np.clip(NOISE_SHARE * PLAIN_SCATTER / np.maximum(scatter, 1e-9), NOISE_SHARE, MOST_NOISE)
        wanted = max(wanted, first * float((ratio * (1 - share) / share).max()))
    return min(int(32 * np.ceil(wanted / 32)), MOST_QUERIES, largest)


@dataclass(frozen=True)
class _Work:
    """One pass over the tokens of a chunk of replicates."""

    reference: Reference
    head: Head
    cells: Cells
    mask_self: bool
    device: torch.device

    def chunks(self, replicates: range, queries: int) -> list[range]:
        """Replicates in groups whose tokens and queries fit the memory bound."""
        head, width = self.head, self.head.dim + self.head.key_dim + 2 * self.head.value_dim
        floats = (self.reference.page + 4 * queries) * width + 2 * max(head.dim, head.value_dim) ** 2
        bound = CHUNK_FLOATS * (1 if self.device.type == "cpu" else DEVICE_TIMES)
        group = max(1, bound // floats)
        return [replicates[start : start + group] for start in range(0, len(replicates), group)]

    def run(self, replicates: range, queries: int, *, floor: bool) -> Rows:
        """What these replicates give."""
        tokens, vectors = self.reference.draw(replicates, 0, queries)
        at_queries = self.reference.limits(vectors)
        limits = QuerySums.of(at_queries)
        query = self.head.queries(tokens).float()
        precise = self.head.queries(tokens[:1, :FLOOR_QUERIES])
        state = State.empty((len(replicates),), queries, self.head.value_dim, device=self.device)
        exact = State.empty((1,), precise.shape[1], self.head.value_dim, device=self.device)
        sums = TokenSums.zero(len(replicates), vectors)
        steps: list[dict[str, Tensor]] = []
        floors = np.zeros((1, len(self.cells.sizes)))
        blocks = list(self.cells.blocks(self.reference.page))
        for index, (step, start, stop) in enumerate(blocks):
            tokens, vectors = self.reference.draw(replicates, start, stop)
            sums = sums.add(vectors)
            bias = self._bias(queries, start, stop)
            state = state.merge(self._attend(query, tokens.float(), bias))
            if floor:
                seen = None if bias is None else bias[: precise.shape[1]].double()
                exact = exact.merge(self._attend(precise, tokens[:1], seen, plain_kernel))
            if index + 1 < len(blocks) and blocks[index + 1][0] == step:
                continue
            used = min(queries, self.cells.sizes[step])
            outputs, law = state.output[:, :used], (self.reference.mean, self.reference.covariance)
            known = at_queries[:, :used]
            own = limits if used == queries else QuerySums.of(known)
            found = replicate_errors(outputs, known, own, self.reference.limit_sums(sums), *law)
            steps.append({"controls": self.reference.controls(sums)})
            for kind, rows in zip(("errors", "noise", "fewer"), found, strict=True):
                steps[-1] |= {f"{kind}.{name}": row for name, row in rows.items()}
            if floor:
                same = min(exact.output.shape[1], used)
                gap = exact.output[0, :same] - state.output[0, :same]
                floors[0, step] = float(gap.square().sum(-1).mean().sqrt())
        stacked = {name: torch.stack([step[name] for step in steps], 1).cpu().numpy() for name in steps[0]}
        return {**stacked, "floor": floors}

    def _attend(self, query: Tensor, tokens: Tensor, bias: Tensor | None, kernel: Kernel | None = None) -> State:
        return state_of(query, self.head.keys(tokens), self.head.values(tokens), bias=bias, kernel=kernel)

    def _bias(self, queries: int, start: int, stop: int) -> Tensor | None:
        """−inf where a query meets itself; None for blocks without queries."""
        if not self.mask_self or start >= queries:
            return None
        same = torch.arange(queries)[:, None] == torch.arange(start, stop)[None, :]
        return torch.zeros(same.shape, dtype=torch.float32).masked_fill(same, float("-inf")).to(self.device)
