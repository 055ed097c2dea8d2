"""One pass over the random tokens of a study, which measures the errors of attention at every size n."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.kernels import Kernel, Precision, attend_plain, state_of
from limitlens.attention.state import State
from limitlens.errors import Array
from limitlens.experiments.reference import Reference
from limitlens.experiments.uniform import uniform_errors
from limitlens.sampling.cells import Cells
from limitlens.sampling.checkpoint import under
from limitlens.sampling.memory import room
from limitlens.sampling.streams import PAGE
from limitlens.statistics.estimators import QuerySums, TokenSums, replicate_errors

CHUNK_FLOATS = 1 << 22  # bound on the tokens, keys, values and limits held at once, in numbers
GPU_CHUNK_FACTOR = 512  # times `CHUNK_FLOATS` on a GPU, which needs many replicates to be busy: about 20 GB
FLOAT_BYTES = 10  # upper bound on the bytes for each number held, temporaries included
FLOOR_QUERIES = 4  # queries attended again in float64 to measure rounding errors
PILOT_QUERIES, PILOT_REPLICATES = 256, 16
# Lower bound on the queries: fewer save no time, and one extreme query could then dominate the error of a replicate.
QUERIES_PER_DIMENSION, FEWEST_QUERIES = 8, 128
# Target share of query noise in a squared error, and its bound where errors hardly vary between replicates.
NOISE_SHARE, MOST_NOISE = 0.06, 0.3
SCALAR_SCATTER = np.pi / 2 - 1  # squared coefficient of variation of |N(0, 1)|, the scatter of a scalar error
MOST_QUERIES = PAGE  # so that the queries of a replicate lie on its first page

# Measurements by name: those of `StudyResult.rows`, and floor (1, sizes), the rounding error (0 if not measured).
Rows: TypeAlias = dict[str, Array]


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenate the measurements, arrays by name, of several groups of replicates."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True)
class StudySetup:
    """Settings that all groups of replicates of a study share."""

    reference: Reference  # has the tokens and the head
    cells: Cells
    replicates: int
    mask_self: bool
    radius: float | None
    device: torch.device
    memory: int | None
    precision: Precision

    def chunk_size(self, queries: int) -> int:
        """Number of replicates to process at a time, so that they fit in memory."""
        head = self.reference.head
        width = head.dim + head.key_dim + 2 * head.value_dim
        floats = (self.reference.stream.page + 4 * queries) * width + 2 * max(head.dim, head.value_dim) ** 2
        bound = CHUNK_FLOATS * (1 if self.device.type == "cpu" else GPU_CHUNK_FACTOR)
        left = room(self.memory, self.device, FLOAT_BYTES * floats, "a study of one replicate at a time")
        return max(1, int(min(bound, floats + left / FLOAT_BYTES) // floats))

    def attend(self, query: Tensor, tokens: Tensor, bias: Tensor | None, kernel: Kernel | None = None) -> State:
        """Attention of the queries over one block of tokens, as a state that merges with those of other blocks."""
        keys, values = self.reference.head.keys(tokens), self.reference.head.values(tokens)
        return state_of(query, keys, values, bias=bias, kernel=kernel or self.precision)

    def bias(self, queries: int, start: int, stop: int) -> Tensor | None:
        """Score bias (queries, stop − start), −inf where a query meets its own token; None if nothing is masked."""
        if not self.mask_self or start >= queries:
            return None
        same = torch.arange(queries)[:, None] == torch.arange(start, stop)[None, :]
        return torch.zeros(same.shape, dtype=torch.float32).masked_fill(same, float("-inf")).to(self.device)


class ReplicatePass:
    """One pass over the tokens of a group of replicates, which measures the errors at every size n."""

    def __init__(self, setup: StudySetup, replicates: range, queries: int) -> None:
        self.setup, self.replicates, self.queries = setup, replicates, queries
        self.floor = replicates.start == 0  # whether to measure rounding errors, on the first replicate
        head, device = setup.reference.head, setup.device
        tokens, vectors = setup.reference.draw(replicates, 0, queries)
        self.at_queries = setup.reference.limits(vectors)
        self.limits = QuerySums.of(self.at_queries)
        self.query = head.queries(tokens).float()
        self.precise_query = head.queries(tokens[:1, :FLOOR_QUERIES])
        self.state = State.empty((len(replicates),), queries, head.value_dim, device=device)
        self.precise_state = State.empty((1,), self.precise_query.shape[1], head.value_dim, device=device)
        self.sums = TokenSums.zero(len(replicates), vectors)
        self.steps: list[dict[str, Tensor]] = []
        self.floors = np.zeros((1, len(setup.cells.sizes)))
        self.done = 0  # blocks

    def blocks(self) -> Iterator[int]:
        """Process the remaining blocks of tokens; after each block, yields its number of tokens over all replicates."""
        blocks = list(self.setup.cells.blocks(self.setup.reference.stream.page))
        for step, start, stop in blocks[self.done :]:
            self._add(start, stop)
            self.done += 1
            if self.done == len(blocks) or blocks[self.done][0] != step:
                self._measure(step)
            yield len(self.replicates) * (stop - start)

    def rows(self) -> Rows:
        """Process all remaining blocks of tokens, and return the measurements at every size n by name."""
        deque(self.blocks(), maxlen=0)
        rows = {name: torch.stack([step[name] for step in self.steps], 1).numpy() for name in self.steps[0]}
        rows["floor"] = self.floors
        setup = self.setup
        if setup.radius is not None:  # the largest error over a ball of queries
            found = uniform_errors(setup.reference, setup.cells, self.replicates, setup.radius)
            rows["errors.uniform"], rows["missed"] = found
        return rows

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by name that a checkpoint saves, to resume the pass later."""
        held = {"first": self.sums.first, "second": self.sums.second, "floors": torch.from_numpy(self.floors)}
        held |= {f"state.{name}": part for name, part in self.state.tensors().items()}
        held |= {f"exact.{name}": part for name, part in self.precise_state.tensors().items()}
        return held | {f"step{j}.{name}": part for j, step in enumerate(self.steps) for name, part in step.items()}

    def restore(self, saved: dict[str, Tensor], done: int) -> None:
        """Resume the pass from tensors that a checkpoint saved after `done` blocks."""
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])
        blocks = list(self.setup.cells.blocks(self.setup.reference.stream.page))
        self.sums = replace(self.sums, count=blocks[done - 1][2])
        self.done = done
        steps = (under(f"step{j}.", saved) for j in range(len(self.setup.cells.sizes)))
        self.steps = [step for step in steps if step]

    def _add(self, start: int, stop: int) -> None:
        """Attend to the tokens from index `start` to `stop`, and merge them into the running attention state."""
        setup = self.setup
        tokens, vectors = setup.reference.draw(self.replicates, start, stop)
        self.sums = self.sums.add(vectors)
        bias = setup.bias(self.queries, start, stop)
        self.state = self.state.merge(setup.attend(self.query, tokens.float(), bias))
        if self.floor:
            precise_bias = None if bias is None else bias[: self.precise_query.shape[1]].double()
            block = setup.attend(self.precise_query, tokens[:1], precise_bias, attend_plain)
            self.precise_state = self.precise_state.merge(block)

    def _measure(self, step: int) -> None:
        """Record the errors at the size n with index `step`, once attention has covered its n tokens."""
        reference, used = self.setup.reference, min(self.queries, self.setup.cells.sizes[step])
        at_queries = self.at_queries[:, :used]
        limits = self.limits if used == self.queries else QuerySums.of(at_queries)
        parts = replicate_errors(
            self.state.output[:, :used], at_queries, limits, reference.limit_sums(self.sums),
            reference.mean, reference.covariance,
        )  # fmt: skip
        step_rows = {"controls": reference.controls(self.sums)}
        for kind, rows in zip(("errors", "noise", "fewer"), parts, strict=True):
            step_rows |= {f"{kind}.{name}": row for name, row in rows.items()}
        self.steps.append({name: row.cpu() for name, row in step_rows.items()})
        if self.floor:
            same = min(self.precise_state.output.shape[1], used)
            gap = self.precise_state.output[0, :same] - self.state.output[0, :same]
            self.floors[0, step] = float(gap.square().sum(-1).mean().sqrt())


def choose_queries(setup: StudySetup) -> int:
    """Choose the number of queries per replicate by a short trial run, so that errors have little sampling noise."""
    largest, replicates = setup.cells.sizes[-1], min(PILOT_REPLICATES, setup.replicates)
    first = min(PILOT_QUERIES, largest)
    pilot_replicates, size = range(1 << 30, (1 << 30) + replicates), setup.chunk_size(first)
    chunks = [pilot_replicates[start : start + size] for start in range(0, replicates, size)]
    moments = replace(setup, radius=None)  # without the error over a ball, in which queries play no part
    pilot = join_rows([ReplicatePass(moments, chunk, first).rows() for chunk in chunks])
    wanted = float(np.clip(QUERIES_PER_DIMENSION * setup.reference.head.value_dim, FEWEST_QUERIES, 2 * PILOT_QUERIES))
    tiny = np.finfo(float).tiny
    for name, excess in under("noise.", pilot).items():
        errors = pilot[f"errors.{name}"]
        squared = (errors**2).mean(0)
        ratio = excess.mean(0) / np.maximum(np.maximum(squared - excess.mean(0), squared / 50), tiny)
        scatter = errors.var(0) / np.maximum(squared, tiny)
        share = np.clip(NOISE_SHARE * SCALAR_SCATTER / np.maximum(scatter, 1e-9), NOISE_SHARE, MOST_NOISE)
        wanted = max(wanted, first * float((ratio * (1 - share) / share).max()))
    return min(int(32 * np.ceil(wanted / 32)), MOST_QUERIES, largest)
