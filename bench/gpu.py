"""Speed on one GPU: the kernel against library kernels, a probe against its bare forward, a study against the CPU.

`python -m bench.gpu MODEL TEXT [kernel] [probe=TOKENS,...] [bf16=TOKENS] [wide=TOKENS] [wide_bf16=TOKENS]
[study=CPU_SECONDS] [far=N] [same]`:
MODEL is a folder or alias, TEXT a file; its windows are repeated up to TOKENS tokens, which suffices for timing.
Results are added to those in bench/results/gpu.json. TF32 is off throughout.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import limitlens as ll
from limitlens.arrays import to_device
from limitlens.attention.kernels import split
from limitlens.models import LoadedModel, Windows, load
from limitlens.models.windows import open_windows
from limitlens.probing.probe import _Work
from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.checkpoint import Checkpoint
from limitlens.sampling.workers import workers_for

RESULTS = Path(os.environ.get("OUT", Path(__file__).parent / "results")) / "gpu.json"
HEADS, QUERIES, KEYS, WIDTH = 12, 4096, 262_144, 64  # the case of the kernel
CELL = 512  # keys of a cell, for the same keys in cells
READ = 250_000  # tokens read from the text; its windows are repeated
SAMPLE = 256  # queries a head that are checked in float64


def median(work: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of some work on the device, after one warm-up run."""
    work()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def kernel() -> dict[str, Any]:
    """Rates of kernels, counting 4·m·n·d operations for each of them, and their errors against float64."""
    torch.manual_seed(0)
    query = 2 * torch.randn(HEADS, QUERIES, WIDTH, device="cuda") / math.sqrt(WIDTH)
    key, value = (torch.randn(HEADS, KEYS, WIDTH, device="cuda") for _ in range(2))
    exact = torch.stack(
        [
            (q[:SAMPLE].double() @ k.double().T).softmax(-1) @ v.double()
            for q, k, v in zip(query, key, value, strict=True)
        ]
    )
    flops = 4 * HEADS * QUERIES * KEYS * WIDTH

    def rate(name: str, work: Callable[[], Tensor]) -> dict[str, float]:
        found = work()[:, :SAMPLE].double()
        error = float((found - exact).norm() / exact.norm())
        del found
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        seconds = median(work)
        peak = (torch.cuda.max_memory_allocated() - held) / 2**30
        print(f"{name}: {flops / seconds / 1e12:.1f} TFLOP/s, error {error:.1e}, {peak:.2f} GiB", flush=True)
        return {"tflops": flops / seconds / 1e12, "error": error, "gib": peak}

    def library(which: Any, *rows: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(which):
            return torch.nn.functional.scaled_dot_product_attention(*(row[None] for row in rows), scale=1.0)[0]

    backend, half = torch.nn.attention.SDPBackend, [part.bfloat16() for part in (query, key, value)]
    cells = torch.arange(0, KEYS, CELL, device="cuda")
    each = torch.arange(HEADS, device="cuda").repeat_interleave(len(cells))
    jobs = torch.stack((each, each, cells.repeat(HEADS), cells.repeat(HEADS) + CELL), 1)

    def in_cells() -> Tensor:
        few = slice(0, QUERIES // 16)  # as a probe has them, and so that all outputs of all cells fit
        found = split.attend_jobs(query[:, few].contiguous(), key, value, jobs, longest=CELL)
        lse, output = found.lse.view(HEADS, len(cells), -1), found.output.view(HEADS, len(cells), -1, WIDTH)
        return (lse.softmax(1)[..., None] * output).sum(1)

    own = split.halves(query, split.LOG2E), split.halves(key), split.halves(value)
    whole = torch.tensor([[h, h, 0, KEYS] for h in range(HEADS)], device="cuda")

    def launch() -> float:
        """Rate of the kernel launch, without preparing its inputs."""
        from triton.testing import do_bench

        once = functools.partial(split._launch, *own, _parts(whole), QUERIES, None, KEYS // split.PART, 0, 3)
        return flops / do_bench(once, warmup=20, rep=120, return_mode="median") / 1e9

    cold = {"tflops": launch()}
    rows = {
        "halves made before": cold,
        "accurate": rate("limitlens, accurate", lambda: split.attend(query, key, value)[1]),
        "fast": rate("limitlens, fast", lambda: split.attend(query, key, value, precision="fast")[1]),
        "library float32": rate("torch, memory-efficient, float32",
                                lambda: library(backend.EFFICIENT_ATTENTION, query, key, value)),
        "library bf16": rate("torch, flash, bfloat16", lambda: library(backend.FLASH_ATTENTION, *half)),
        "chunked float32": rate("torch, online softmax by chunks, float32", lambda: _chunked(query, key, value)),
    }  # fmt: skip
    error = float((in_cells()[:, :SAMPLE] - exact).norm() / exact.norm())
    few = [split.halves(query[:, : QUERIES // 16].contiguous(), split.LOG2E), *own[1:]]
    short = median(lambda: split._launch(*few, jobs, QUERIES // 16, None, 1, 0, 3, short=True))
    rows["halves made before, hot"] = {"tflops": launch()}
    rows["cells"] = {"tflops": flops / 16 / short / 1e12, "error": error, "length": CELL, "queries": QUERIES // 16}
    print({name: rows[name] for name in ("halves made before", "halves made before, hot", "cells")}, flush=True)
    best = max(rows[name]["tflops"] for name in ("library float32", "chunked float32"))
    found = {"tflops": rows["accurate"]["tflops"], "error": rows["accurate"]["error"], "best_library_tflops": best}
    return found | {"case": [HEADS, QUERIES, KEYS, WIDTH], "rows": rows}


def _parts(work: Tensor) -> Tensor:
    start = work[:, None, 2:3] + torch.arange(0, KEYS, split.PART, device="cuda")[None, :, None]
    return torch.cat((work[:, None, :2].expand(-1, start.shape[1], -1), start, start + split.PART), -1).flatten(0, 1)


def _chunked(query: Tensor, key: Tensor, value: Tensor, chunk: int = 8192) -> Tensor:
    """Online softmax with float32 matrix products: the baseline without a fused kernel."""
    peak = query.new_full(query.shape[:-1], -math.inf)
    mass, moment = torch.zeros_like(peak), torch.zeros_like(query)
    for start in range(0, key.shape[1], chunk):
        scores = query @ key[:, start : start + chunk].mT
        higher = torch.maximum(peak, scores.amax(-1))
        weights = torch.exp_(scores.sub_(higher[..., None]))
        old = torch.exp(peak - higher)
        mass = mass * old + weights.sum(-1)
        moment = moment * old[..., None] + weights @ value[:, start : start + chunk]
        peak = higher
    return moment / mass[..., None]


def probe(loaded: LoadedModel, text: str, tokens: int, sizes: str = "64:16384:9") -> dict[str, Any]:
    """Time of a probe relative to plain forwards of the same windows in the same batches, without reading the text.

    The text is read once, up to `READ` tokens, and its windows are repeated up to the number of tokens.
    """
    device = loaded.model.device
    once = open_windows(loaded, text, min(READ, tokens), window=256, special="auto", device=device.type, fewer=True)[1]
    windows = copy.copy(once)
    windows.count = tokens // once.length
    windows.batches = lambda size, rows: once.batches(size, np.asarray(rows) % once.count)  # type: ignore[method-assign]
    own = {"replicates": 24, "queries": 256, "score_scale": 1.0, "seed": 0, "batch": None, "memory": None}
    own["sampling"] = "pooled"

    def work(some: Windows = windows) -> _Work:
        return _Work(loaded, some, Cells(parse_sizes(sizes)), **own, progress=None, workers=workers, spread=None)

    def bare() -> float:
        used = np.concatenate((made.split.pilot, made.pool.indices))
        _wait(device)
        begun = time.perf_counter()
        with torch.inference_mode():
            for ids in windows.batches(made.pool.per_forward, used):
                loaded.model(input_ids=to_device(ids.numpy(), device))
        _wait(device)
        return time.perf_counter() - begun

    with workers_for(device) as workers:
        few = copy.copy(windows)
        few.count = min(windows.count, READ * 4 // once.length)
        for _ in range(2 if few.count == windows.count else 1):  # the first ones compile
            made = work(few)
            made.run(Checkpoint())
            made.result(0.0, text, tokens)
        made = work()
        forwards, seconds = [bare()], []
        for _ in range(3 if few.count == windows.count else 1):
            made, begun = work(), time.perf_counter()
            made.run(Checkpoint())
            _wait(device)
            streamed = time.perf_counter() - begun
            made.result(begun, text, tokens)
            seconds.append((time.perf_counter() - begun, streamed))
            forwards += [bare()] if few.count == windows.count else []
    around, (whole, streamed) = statistics.median(forwards), sorted(seconds)[len(seconds) // 2]
    found = {
        "tokens": tokens, "sizes": sizes, "forward_seconds": forwards, "probe_seconds": whole,
        "streamed_seconds": streamed, "ratio": whole / around, "stream_ratio": streamed / around,
    }  # fmt: skip
    print(f"probe of {tokens:,} tokens: {found}", flush=True)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def wide_encoder(like: LoadedModel) -> LoadedModel:
    """A BERT of 12 layers and width 768 with random weights and the tokenizer of another model."""
    from dataclasses import replace

    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=like.model.config.vocab_size, attn_implementation="sdpa")
    model = BertModel(config, add_pooling_layer=False).eval().cuda()
    return replace(like, model=model, name="bert of 12 layers, random")


def study(cpu: float | None = None) -> dict[str, Any]:
    """Time of one scale of `gaussian-horizon`: 4,096 queries, d = 50, 200 replicates; also relative to CPU seconds."""
    law, sizes = ll.Gaussian(np.zeros(50), 0.1 * np.eye(50)), "1000:30000:12"
    head = ll.designed_head(law, 1.0)

    def once(device: str, replicates: int) -> float:
        begun = time.perf_counter()
        ll.study(law, head, sizes, replicates=replicates, queries=4096, device=device)
        return time.perf_counter() - begun

    once("cuda", 4)
    here = statistics.median(once("cuda", 200) for _ in range(3))
    found = {"gpu_seconds": here, "cpu_seconds": cpu, "speedup": None if cpu is None else cpu / here}
    print(f"study: {found}", flush=True)
    return found


def far(most: int = 10**9) -> dict[str, Any]:
    """Time of a study of n tokens in d = 64, 256 queries, 50 replicates; scores have the standard deviation 2."""
    law = ll.Gaussian(np.zeros(64), 0.1 * np.eye(64))
    begun = time.perf_counter()
    sizes = [n for n in (10**6, 10**7, 10**8) if n < most] + [most]
    curve = ll.study(law, ll.designed_head(law, 0.25), sizes, replicates=50, queries=256, device="cuda", yes=True)
    seconds = time.perf_counter() - begun
    rates = {name: curve.rate(name) for name in ("mean", "output")}
    found = {"seconds": seconds, "sizes": sizes, "replicates": 50, "floor": float(curve.floor.max())}
    found |= {
        name: {"error": curve.errors[name].error.tolist(), "rate": [r.slope, r.stderr]} for name, r in rates.items()
    }
    print(f"far: {found}", flush=True)
    return found


def same(loaded: LoadedModel, text: str) -> dict[str, Any]:
    """Check that runs on the GPU are reproducible bit for bit: repeated, and interrupted and resumed."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from kill_cases import told

    law = ll.Gaussian(np.zeros(16), 1.0)
    head = ll.designed_head(law, 1.0)
    jobs: dict[str, Callable[..., Any]] = {
        "probe": lambda **own: ll.probe(loaded, text, 60_000, sizes="64:1024:5", batch=8, **own),
        "study": lambda **own: ll.study(law, head, "1000:1000000:4", replicates=16, device="cuda", **own),
    }
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        expected = told(job())
        ends, kept = [told(job()) == expected], 0
        for share in (0.3, 0.8):
            with tempfile.TemporaryDirectory() as folder:

                def broken(done: int, total: int, share: float = share) -> None:
                    if done > share * total:
                        raise RuntimeError("broken off")

                with contextlib.suppress(RuntimeError):
                    job(checkpoint=ll.Checkpoint(folder, every=1), progress=broken)
                kept += Path(folder, "checkpoint.safetensors").exists()
                ends.append(told(job(checkpoint=ll.Checkpoint(folder, every=1, resume=True))) == expected)
        found[name] = {"twice": ends[0], "broken_off": len(ends) - 1, "checkpoints": kept, "same": sum(ends[1:])}
        print(f"same numbers, {name}: {found[name]}", flush=True)
    return found


def main(model: str, text: str, *parts: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    kept["host"] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "tf32": False}
    for part in parts:
        name, _, given = part.partition("=")
        if name == "kernel":
            kept["kernel"] = kernel()
        elif name == "study":
            kept["study"] = study(float(given) if given else None)
        elif name == "far":
            kept["far"] = far(int(float(given or 1e9)))
        else:
            loaded = load(model, device=torch.device("cuda"))
            loaded.model.float()
            if name == "same":
                kept["same"] = same(loaded, text)
                given = ""
            if name.startswith("wide"):
                loaded = wide_encoder(loaded)
            if name.endswith("bf16"):
                loaded.model.bfloat16()
            for tokens in map(int, filter(None, given.split(","))):
                label = f"ratio_{tokens // 10**6}m"
                found = probe(loaded, text, tokens)
                where = kept.setdefault(name, {})
                where |= {label: found["ratio"], f"{label}_streamed": found["stream_ratio"], f"{label}_run": found}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
