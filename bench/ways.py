"""Implementations of attention compared in one run (time, rate, error, memory), and the cost of limitlens against size.

The comparison has 1,024 queries over 16,384 tokens in d = 64, float32; with a GPU also 16,384 queries over 65,536
tokens on it (TF32 off, wall time). `python -m bench.ways cuda` runs only the GPU part. The rate counts 4·m·n·d
operations; the error is the largest relative error of an output, against float64; memory is the peak of a process that
runs the implementation once, minus that of a process that only creates the tokens. Seconds are processor time, which
depends little on other load. KeOps and flex attention are skipped with a message if they are not installed or do not
compile.

The cost curves are those of a state over n tokens, a study of R replicates, H heads at a time, each with the exponent
over its last sizes; and of the published protocol, in which every token is a query over every token. The smallest
possible exponents are 1 in n, R and H, and 2 in n for the protocol. A study has at least two replicates, since its
standard errors come from their scatter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
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
from limitlens.report.paper import PALETTE, figure_style
from limitlens.results import save_figure

BLUE, GREY = PALETTE["blue"], PALETTE["grey"]

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
CASE = {"cpu": (1024, 16_384), "cuda": (16_384, 65_536)}  # queries and tokens
DIM = 64
BLOCK = {"cpu": 4096, "cuda": 1 << 20}  # tokens at a time, of a stream that is never held
FIGURE = Path(__file__).parents[1] / "docs" / "cost.svg"


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Dense softmax attention, softmax(q kᵀ) v."""
    return torch.softmax(query @ key.T, -1) @ value


def chunked(query: Tensor, key: Tensor, value: Tensor, chunk: int = 1024) -> Tensor:
    """Online softmax over chunks of tokens, in plain torch."""
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
    """Torch's scaled_dot_product_attention."""
    return scaled_dot_product_attention(query[None, None], key[None, None], value[None, None], scale=1.0)[0, 0]


def flex() -> Way:
    """Torch's flex_attention, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)
    return lambda query, key, value: compiled(query[None, None], key[None, None], value[None, None], scale=1.0)[0, 0]


def keops() -> Way:
    """Attention as a formula compiled by KeOps."""
    from pykeops.torch import LazyTensor

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (LazyTensor(query[:, None]) * LazyTensor(key[None])).sum(-1)
        found: Tensor = scores.sumsoftmaxweight(LazyTensor(value[None]), axis=1)
        return found

    return attend


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The state of limitlens: output and log-sum-exp, in float64."""
    return state_of(query, key, value).output


WAYS: dict[str, Callable[[], Way]] = {
    "dense torch": lambda: dense, "chunked online softmax": lambda: chunked, "torch fused": lambda: fused,
    "flex": flex, "KeOps": keops, "limitlens": lambda: ours,
}  # fmt: skip


def case(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values whose scores have the standard deviation 1."""
    torch.manual_seed(0)
    queries, tokens = CASE[device]
    query, key, value = (torch.randn(rows, DIM, device=device) for rows in (queries, tokens, tokens))
    return query / DIM**0.5, key, value


def memory(name: str, device: str) -> float:
    """Peak memory in MiB of one call, in a fresh process or on the device."""
    if device == "cuda":
        tokens = case(device)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        WAYS[name]()(*tokens)
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    work = f"WAYS[{name!r}]()(*tokens)" if name else "pass"
    code = f"import torch\nfrom bench.ways import WAYS, case\ntokens = case()\n{work}" + REPORT
    path = os.pathsep.join(path for path in sys.path if path)
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    return float(found.stdout.split()[-1])


def table(device: str = "cpu") -> dict[str, dict[str, float | str]]:
    """One row per implementation: time, rate, error and memory."""
    query, key, value = case(device)
    exact = torch.cat([dense(part.double(), key.double(), value.double()) for part in query.split(1024)])
    bare, rows = memory("", device) if device == "cpu" else 0.0, {}
    for name, make in WAYS.items():
        if name == "KeOps" and device == "cuda":
            continue
        try:
            way = make()
            found = way(query, key, value)
        except Exception as error:  # a compiler or a package that is not there, in whatever words
            rows[name] = {"why": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]}
            print(f"{name:<24} not run: {rows[name]['why']}", flush=True)
            continue
        work = lambda way=way: way(query, key, value)  # type: ignore[misc] # noqa: E731
        seconds = taken(work) if device == "cpu" else sorted(timed(lambda _, work=work: work(), 0) for _ in range(5))[2]  # type: ignore[misc]
        error = float(((found - exact).norm(dim=1) / exact.norm(dim=1)).max())
        more = memory(name, device) - bare
        rate = 4 * len(query) * len(key) * DIM / seconds / 1e9
        rows[name] = {"seconds": seconds, "gflops": rate, "error": error, "mib": more}
        print(f"{name:<24} {seconds:7.4f} s  {rate:8.1f} GF/s  error {error:.1e}  {more:6.0f} MiB more", flush=True)
    return rows


def stream(n: int, device: str) -> State:
    """State over n tokens, generated block by block, for 256 queries in d = 64."""
    generator = torch.Generator(device).manual_seed(0)
    query, state = torch.randn(256, DIM, device=device) / DIM**0.5, State.empty((), 256, DIM, device=device)
    for start in range(0, n, BLOCK[device]):
        tokens = torch.randn(min(BLOCK[device], n - start), DIM, generator=generator, device=device)
        state = state.merge(state_of(query, tokens, tokens))
    return state


def study(replicates: int, device: str) -> None:
    """A study of Gaussian tokens in d = 8, n to 4,096."""
    law = ll.Gaussian(np.zeros(8), 1.0)
    head = ll.designed_head(law, 0.5)
    ll.study(law, head, [256, 1024, 4096], replicates=replicates, queries=128, device=device)


def heads(count: int, device: str) -> None:
    """States of several heads over 8,192 tokens each, for 256 queries in d = 64."""
    query, tokens = torch.randn(count, 256, DIM, device=device), torch.randn(2, count, 8192, DIM, device=device)
    state_of(query / DIM**0.5, *tokens)


def protocol(n: int, device: str) -> None:
    """The published protocol: every token is a query over every token."""
    tokens = torch.randn(n, DIM, device=device)
    dense(tokens / DIM**0.5, tokens, tokens)


CURVES: dict[str, tuple[Callable[[int, str], object], list[int]]] = {
    "tokens": (stream, [10**5, 10**6, 10**7, 10**8]), "replicates": (study, [2, 10, 100, 1000]),
    "heads": (heads, [1, 4, 16, 64, 256]), "protocol": (protocol, [1000, 2000, 4000, 8000]),
}  # fmt: skip


def curves(device: str = "cpu") -> dict[str, dict[str, object]]:
    """Seconds for each size, and the exponent fitted to the last three sizes."""
    found = {}
    for name, (curve, sizes) in CURVES.items():
        work = partial(curve, device=device)
        for size in sizes if device == "cuda" else sizes[:1]:  # what is compiled depends on sizes
            work(size)
        seconds = [timed(work, size) for size in sizes]
        (power, level), spread = np.polyfit(np.log(sizes[-3:]), np.log(seconds[-3:]), 1, cov="unscaled")
        left = np.log(seconds[-3:]) - power * np.log(sizes[-3:]) - level
        stderr = float(np.sqrt(spread[0, 0] * np.square(left).sum()))
        found[name] = {"sizes": sizes, "seconds": seconds, "exponent": float(power), "stderr": stderr}
        told = ", ".join(f"{size:,}: {second:.3g} s" for size, second in zip(sizes, seconds, strict=True))
        print(f"{name:<11} {told}; exponent {power:.2f} ± {stderr:.2f}", flush=True)
    return found


def timed(work: Callable[[int], object], size: int) -> float:
    """Seconds of one call: processor time, or wall time if a GPU does the work."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    settle = torch.cuda.synchronize if torch.cuda.is_available() else int
    settle()
    started = clock()
    work(size)
    settle()
    return clock() - started


def draw(found: dict[str, dict[str, object]]) -> None:
    """Draw the cost curves for docs/estimators.md."""
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
        save_figure(figure, FIGURE)
        plt.close(figure)


def on(device: str) -> dict[str, object]:
    """Table of implementations and cost curves on one device."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    queries, tokens = CASE[device]
    print(f"-- {device}: {queries:,} queries over {tokens:,} tokens", flush=True)
    return {"queries": queries, "tokens": tokens, "dim": DIM, "ways": table(device), "curves": curves(device)}


def run() -> dict[str, object]:
    found = on("cpu")
    draw(found["curves"])  # type: ignore[arg-type]
    return found | ({"cuda": on("cuda")} if torch.cuda.is_available() else {})


if __name__ == "__main__":
    host = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "tf32": False}
    made = {"host": host, **on(sys.argv[1])}
    Path(os.environ.get("OUT", "."), "ways-cuda.json").write_text(json.dumps(made, indent=2) + "\n")
