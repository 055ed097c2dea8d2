"""Time of attention in one decoding layer with certified reads, selection included, against torch's fastest kernel.

`python -m bench certify_layer` needs a GPU. Keys, queries and values are those of every layer of CERTIFY_QWEN (a model
folder) at 32,768 keys of the first text of CERTIFY_TEXTS; the 64 sequences of a batch are windows of it that begin one
token later each, in memory of their own. Without the model they are random. Times are medians of CUDA graphs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench import certify_kernels as reads
from limitlens.models import capture, load

BATCH, HEADS, SHARED, KEYS, WIDTH = 64, 12, 2, int(os.environ.get("CERTIFY_KEYS", "32768")), 128
PROMISES = ((0.1, 0.1), (0.05, 0.1), (0.2, 0.05))
SEEDS, REPEATS = 4, 30
# Launches that are tried on the first layer: PART, SCAN, KEYS, SPLITS, warps of `draw`, and share to read everything.
LAUNCHES = (
    (16, 2048, 32, 4, 4, 0.6), (16, 4096, 32, 4, 8, 0.6), (16, 4096, 64, 4, 8, 0.6), (16, 1024, 32, 8, 4, 0.6),
    (16, 4096, 32, 2, 8, 0.6), (32, 4096, 32, 4, 8, 0.6), (16, 4096, 32, 4, 8, 0.2),
)  # fmt: skip
# Launches that are tried on the first layer: PART, SCAN, KEYS, SPLITS, warps of `draw`, and share to read everything.
LAUNCHES = (
    (16, 2048, 32, 4, 4, 0.6), (16, 4096, 32, 4, 8, 0.6), (16, 2048, 32, 2, 4, 0.6), (32, 2048, 32, 8, 4, 0.6),
    (16, 4096, 64, 2, 8, 0.6), (16, 2048, 32, 4, 4, 0.2),
)  # fmt: skip


def milliseconds(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median time of a piece of work as a CUDA graph."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def full_kernels(query: Any, key: Any, value: Any, scale: float) -> dict[str, Callable[[], Any]]:
    """Full attention of one token by every kernel of torch that accepts it; heads that share keys are rows."""
    rows = query.view(BATCH, SHARED, HEADS // SHARED, WIDTH)
    works: dict[str, Callable[[], Any]] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for name, q in (("rows", rows), ("heads", query[:, :, None])):

            def work(backend: Any = backend, q: Any = q) -> Any:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, key, value, scale=scale, enable_gqa=q.shape[1] != SHARED)

            try:
                work()
                works[f"{backend.name.lower()} {name}"] = work
            except RuntimeError:
                continue
    works["matmul"] = lambda: ((rows @ key.mT).float() * scale).softmax(-1).to(value.dtype) @ value
    return works


def random_layers() -> Iterator[tuple[int, Any, Any, Any, float]]:
    """Queries with scores of standard deviation 1 to 3, keys, and values with a mean."""
    for layer, spread in enumerate((1.0, 2.0, 3.0)):
        key, value = (torch.randn(BATCH, SHARED, KEYS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        query = torch.randn(BATCH, HEADS, WIDTH, device="cuda")
        query = (spread * query * (WIDTH / query.square().sum(-1, keepdim=True)) ** 0.5).bfloat16()
        yield layer, query, key, value + 0.5, WIDTH**-0.5


def model_layers(folder: str) -> Iterator[tuple[int, Any, Any, Any, float]]:
    """Queries, keys and values of all layers of a model, at the last 64 tokens of a text."""
    loaded = load(folder, head=True, device="cuda", dtype=torch.bfloat16)
    text = Path(os.environ["CERTIFY_TEXTS"].split(",")[0]).read_text()
    ids = loaded.tokenizer(text[: KEYS * 8])["input_ids"][: KEYS + BATCH - 1]
    calls: list[Any] = []
    stack: Any = loaded.model.base_model
    with torch.inference_mode(), capture(stack, calls.append) as run_until_last_attention:
        run_until_last_attention(input_ids=torch.tensor([ids], device="cuda"), use_cache=False)
    for call in calls:
        key, value = (
            torch.stack([part[0, :, b : b + KEYS] for b in range(BATCH)]).contiguous()
            for part in (call.key, call.value)
        )
        yield call.layer, call.query[0, :, -BATCH:].transpose(0, 1).contiguous(), key, value, float(call.scale)


def launched(part: int, scan: int, keys: int, splits: int, warps: int, much: float) -> float:
    """Set how the kernels are launched; the share of keys from which on a query reads everything."""
    reads.PART, reads.SCAN, reads.KEYS, reads.SPLITS = part, scan, keys, splits
    reads.DRAW["num_warps"] = warps
    return much


def tuned(query: Any, key: Any, value: Any, scale: float) -> tuple[Any, ...]:
    """The fastest of `LAUNCHES` on these tensors."""
    packed, times = reads.PackedKeys.of(key), {}
    for launch in LAUNCHES:
        try:
            much = launched(*launch)
            work = partial(reads.attend, query, key, value, packed, PROMISES[0], scale=scale, much=much)
            times[launch] = milliseconds(work, 10)
            print(f"launch {launch}: {times[launch]:.3f} ms", flush=True)
        except Exception as error:  # a launch that this GPU cannot do is left out
            print(f"launch {launch}: {type(error).__name__} {str(error)[:400]}", flush=True)
    return min(times, key=lambda launch: times[launch])


def measure(much: float, query: Any, key: Any, value: Any, scale: float) -> dict[str, Any]:
    """Times, reads and coverage of one layer."""
    works = full_kernels(query, key, value, scale)
    times = {name: milliseconds(work) for name, work in works.items()}
    best = min(times, key=lambda name: times[name])
    full = works[best]().reshape(BATCH, HEADS, WIDTH).float()
    packed = reads.PackedKeys.of(key)
    row: dict[str, Any] = {"full": times, "full_best": times[best], "fastest": best}
    for promise in PROMISES:

        def attend(seed: int = 0, promise: Any = promise) -> Any:
            return reads.attend(query, key, value, packed, promise, scale=scale, seed=seed, much=much)

        held, read, whole = [], [], []
        for seed in range(SEEDS):
            output, count = attend(seed)
            wrong = (output - full).norm(dim=-1) <= promise[0] * full.norm(dim=-1)
            everything = count == KEYS
            held.append(float((wrong | everything).float().mean()))
            read.append(float(count.float().mean()) / KEYS)
            whole.append(float(everything.float().mean()))
        ms = milliseconds(attend)
        row[f"{promise[0]:g}, {promise[1]:g}"] = {
            "milliseconds": ms, "ratio": ms / times[best], "read": statistics.mean(read),
            "whole": statistics.mean(whole), "held": statistics.mean(held),
        }  # fmt: skip
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        reads.attend(query, key, value, packed, PROMISES[0], scale=scale, much=much)
        torch.cuda.synchronize()
    named = {event.key: event.self_device_time_total / 1000 for event in profile.key_averages()}
    row["kernels"] = {
        name: named[name] for name in ("predict", "draw", "check", "read", "whole", "merge") if name in named
    }
    return row


def run() -> dict[str, Any]:
    begun = time.monotonic()
    folder = os.environ.get("CERTIFY_QWEN", "")
    layers = model_layers(folder) if folder else random_layers()
    rows: dict[str, Any] = {}
    launch: tuple[Any, ...] = ()
    for layer, query, key, value, scale in layers:
        launch = launch or tuned(query, key, value, scale)
        rows[str(layer)] = row = measure(launched(*launch), query, key, value, scale)
        own = row["0.1, 0.1"]
        kernels = ", ".join(f"{name} {value:.3f}" for name, value in row["kernels"].items())
        print(
            f"{time.monotonic() - begun:6.1f} s  layer {layer}: full {row['full_best']:.3f} ms ({row['fastest']}), "
            f"certified {own['milliseconds']:.3f} ms, ratio {own['ratio']:.2f}, reads {own['read']:.3f}, whole "
            f"{own['whole']:.3f}, held {own['held']:.3f}; {kernels}",
            flush=True,
        )
        if time.monotonic() - begun > float(os.environ.get("CERTIFY_SECONDS", "inf")):
            break
    ratios = {
        f"{promise[0]:g}, {promise[1]:g}": {
            "mean": statistics.mean(row[f"{promise[0]:g}, {promise[1]:g}"]["ratio"] for row in rows.values()),
            "total": sum(row[f"{promise[0]:g}, {promise[1]:g}"]["milliseconds"] for row in rows.values())
            / sum(row["full_best"] for row in rows.values()),
        }
        for promise in PROMISES
    }
    print(ratios, flush=True)
    shape = {"batch": BATCH, "heads": HEADS, "kv_heads": SHARED, "keys": KEYS, "width": WIDTH}
    return {
        "gpu": torch.cuda.get_device_name(),
        "model": bool(folder),
        "shape": shape,
        "ratios": ratios,
        "layers": rows,
    }
