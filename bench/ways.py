"""Ways to the same attention on the CPU in one run: time, rate, error and memory; and how the cost of limitlens grows.

The case: 1,024 queries over 16,384 tokens in d = 64, float32. The rate counts 4·m·n·d operations; the error is the
largest relative one of an output, against float64; memory is the peak of a process that does it once, over that of one
that has only made the tokens. Seconds are of the processor, so that a busy machine tells the same. KeOps and flex are
left out with a sentence where they are not installed or cannot be compiled.

The cost curves: a state over n tokens, a study of R replicates, H heads at a time, each with the exponent of its last
sizes; and the published protocol, every token a query over every token. Floors: n, R, H to the power 1, and n².
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import limitlens as ll
from bench.peaks import REPORT
from bench.timing import taken
from limitlens.attention.kernels import state_of
from limitlens.attention.state import State
from limitlens.report.style import BLUE, GREY, figure_style, saved

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
QUERIES, TOKENS, DIM = 1024, 16_384, 64
BLOCK = 4096  # tokens at a time, of a stream that is never held
FIGURE = Path(__file__).parents[1] / "docs" / "cost.svg"


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As it is written in books."""
    return torch.softmax(query @ key.T, -1) @ value


def chunked(query: Tensor, key: Tensor, value: Tensor, chunk: int = 1024) -> Tensor:
    """Online softmax over chunks of tokens, in torch."""
    top, mass = query.new_full((len(query), 1), -torch.inf), query.new_zeros(len(query), 1)
    total = query.new_zeros(len(query), value.shape[1])
    for start in range(0, len(key), chunk):
        scores = query @ key[start : start + chunk].T
        peak = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, shrunk = torch.exp(scores - peak), torch.exp(top - peak)
        total, mass, top = (
            total * shrunk + weights @ value[start : start + chunk],
            mass * shrunk + weights.sum(-1, True),
            peak,
        )
    return total / mass


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Torch's own."""
    return scaled_dot_product_attention(query[None, None], key[None, None], value[None, None], scale=1.0)[0, 0]


def flex() -> Way:
    """Torch's flexible attention, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)
    return lambda query, key, value: compiled(query[None, None], key[None, None], value[None, None], scale=1.0)[0, 0]


def keops() -> Way:
    """KeOps, which compiles the formula."""
    from pykeops.torch import LazyTensor

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (LazyTensor(query[:, None]) * LazyTensor(key[None])).sum(-1)
        found: Tensor = scores.sumsoftmaxweight(LazyTensor(value[None]), axis=1)
        return found

    return attend


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A state, with its log-sum-exp, in float64."""
    return state_of(query, key, value).output


WAYS: dict[str, Callable[[], Way]] = {
    "dense torch": lambda: dense, "chunked online softmax": lambda: chunked, "torch fused": lambda: fused,
    "flex": flex, "KeOps": keops, "limitlens": lambda: ours,
}  # fmt: skip


def case() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; scores of deviation 1."""
    torch.manual_seed(0)
    return torch.randn(QUERIES, DIM) / DIM**0.5, torch.randn(TOKENS, DIM), torch.randn(TOKENS, DIM)


def memory(name: str) -> float:
    """Peak memory in MiB of a fresh process that does it once."""
    code = f"import torch\nfrom bench.ways import WAYS, case\ntokens = case()\n{name}" + REPORT
    path = os.pathsep.join(path for path in sys.path if path)
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    return float(found.stdout.split()[-1])


def table() -> dict[str, dict[str, float | str]]:
    """The row of every way."""
    query, key, value = case()
    exact = dense(query.double(), key.double(), value.double())
    bare, rows = memory("pass"), {}
    for name, make in WAYS.items():
        try:
            way = make()
            found = way(query, key, value)
        except Exception as error:  # a compiler or a package that is not there, in whatever words
            rows[name] = {"why": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]}
            print(f"{name:<24} not run: {rows[name]['why']}", flush=True)
            continue
        seconds = taken(lambda way=way: way(query, key, value))  # type: ignore[misc]
        error = float(((found - exact).norm(dim=1) / exact.norm(dim=1)).max())
        more = memory(f"WAYS[{name!r}]()(*tokens)") - bare
        rate = 4 * QUERIES * TOKENS * DIM / seconds / 1e9
        rows[name] = {"seconds": seconds, "gflops": rate, "error": error, "mib": more}
        print(f"{name:<24} {seconds:7.3f} s  {rate:6.1f} GF/s  error {error:.1e}  {more:6.0f} MiB more", flush=True)
    return rows


def stream(n: int) -> State:
    """A state over n tokens that are drawn as they are needed, 256 queries in d = 64."""
    query, generator = torch.randn(256, DIM) / DIM**0.5, torch.Generator().manual_seed(0)
    state = State.empty((), 256, DIM)
    for start in range(0, n, BLOCK):
        tokens = torch.randn(min(BLOCK, n - start), DIM, generator=generator)
        state = state.merge(state_of(query, tokens, tokens))
    return state


def study(replicates: int) -> None:
    """A study of Gaussian tokens in d = 8, n to 4,096."""
    law = ll.Gaussian(np.zeros(8), 1.0)
    head = ll.designed_head(law, 0.5)
    ll.study(law, head, [256, 1024, 4096], replicates=replicates, queries=128)


def heads(count: int) -> None:
    """A state of so many heads over 8,192 tokens each, 256 queries in d = 64."""
    state_of(torch.randn(count, 256, DIM) / DIM**0.5, *torch.randn(2, count, 8192, DIM))


def protocol(n: int) -> None:
    """Every token a query over every token."""
    tokens = torch.randn(n, DIM)
    dense(tokens / DIM**0.5, tokens, tokens)


CURVES: dict[str, tuple[Callable[[int], object], list[int]]] = {
    "tokens": (stream, [10**5, 10**6, 10**7]), "replicates": (study, [2, 10, 100, 1000]),
    "heads": (heads, [1, 4, 16, 64]), "protocol": (protocol, [1000, 2000, 4000, 8000]),
}  # fmt: skip


def curves() -> dict[str, dict[str, object]]:
    """Processor seconds over each size, and the exponent of the last three."""
    found = {}
    for name, (work, sizes) in CURVES.items():
        work(sizes[0])
        seconds = [timed(work, size) for size in sizes]
        (power, level), spread = np.polyfit(np.log(sizes[-3:]), np.log(seconds[-3:]), 1, cov="unscaled")
        left = np.log(seconds[-3:]) - power * np.log(sizes[-3:]) - level
        stderr = float(np.sqrt(spread[0, 0] * np.square(left).sum()))
        found[name] = {"sizes": sizes, "seconds": seconds, "exponent": float(power), "stderr": stderr}
        told = ", ".join(f"{size:,}: {second:.3g} s" for size, second in zip(sizes, seconds, strict=True))
        print(f"{name:<11} {told}; exponent {power:.2f} ± {stderr:.2f}", flush=True)
    return found


def timed(work: Callable[[int], object], size: int) -> float:
    """Processor seconds of one call."""
    started = time.process_time()
    work(size)
    return time.process_time() - started


def draw(found: dict[str, dict[str, object]]) -> None:
    """The cost curves, for the docs."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    with figure_style():
        figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.6), sharey=True)
        for ax, name in zip(axes, ("tokens", "replicates", "heads"), strict=True):
            of = found[name]
            ax.loglog(of["sizes"], of["seconds"], "o-", color=BLUE)
            ax.set_title(f"{name} to the {of['exponent']:.2f}")
            ax.set_xlabel(name)
            ax.xaxis.set_minor_formatter(NullFormatter())
        of = found["protocol"]
        axes[0].loglog(of["sizes"], of["seconds"], "s--", color=GREY)
        axes[0].text(of["sizes"][0], 1.0, f"every token\na query: {of['exponent']:.2f}", color=GREY, fontsize=8)  # type: ignore[index]
        axes[0].set_ylabel("processor seconds")
        saved(figure, FIGURE)
        plt.close(figure)


def run() -> dict[str, object]:
    rows, found = table(), curves()
    draw(found)
    return {"queries": QUERIES, "tokens": TOKENS, "dim": DIM, "ways": rows, "curves": found}
