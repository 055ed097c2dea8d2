"""Rate of the attention kernel relative to a float32 matrix product on the same machine: d = 64, 2,048 queries.

Attention of m queries over n tokens needs two matrix products, 4·m·n·d operations; exponentials are not counted. The
reference is torch's rate for a product of 2·2048³ operations, whose matrices stay in cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from bench.timing import alternate, taken
from limitlens.attention.kernels import attend_cpu

ROUNDS = 20  # of all lengths in turn


def run() -> dict[str, object]:
    torch.manual_seed(0)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    query = torch.randn(2048, 64) / 8
    rows = {}
    for n in (4096, 8192, 16384):
        key, value = torch.randn(n, 64), torch.randn(n, 64)
        times = alternate(
            15,
            time.process_time,  # of all processors: on a busy machine it tells much the same
            product=lambda: a @ b,
            kernel=lambda key=key, value=value: attend_cpu(query, key, value),  # type: ignore[misc]
        )
        product, kernel = 2 * 2048**3 / times["product"], 4 * 2048 * n * 64 / times["kernel"]
        share = kernel / product
        rows[n] = {"product_gflops": product / 1e9, "kernel_gflops": kernel / 1e9, "ratio": share}
        print(f"n = {n:6d}: product {product / 1e9:6.1f} GF/s, kernel {kernel / 1e9:6.1f} GF/s, ratio {share:.2f}")
    return {"queries": 2048, "dim": 64, "by_tokens": rows, "wanted": 0.8, "cells": cells()}


def cells() -> dict[str, dict[int, dict[str, float]]]:
    """Rates over short cells, absolute and relative to cells of 4,096 tokens, for the head shapes of a probe.

    Processor seconds on one thread: the minimum over many alternating calls, so that load affects all lengths alike.
    `bare` is the fused kernel without the overhead of the call. `together` is 8 cells of one length in one call with
    common queries.
    """
    fused, found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, {}
    lengths, threads = (4096, 64, 128, 256, 512), torch.get_num_threads()
    torch.set_num_threads(1)
    for heads, queries, dim in ((12, 256, 32), (12, 256, 64), (3, 768, 64)):
        query = torch.randn(heads, queries, dim) / dim**0.5
        works: dict[tuple[str, int], Callable[[], object]] = {}
        for n in lengths:
            key, value = torch.randn(2, heads, n, dim)
            works["cell", n] = partial(attend_cpu, query, key, value)
            works["bare", n] = partial(fused, query[None], key[None], value[None], 0.0, False, scale=1.0)
            if n < lengths[0]:
                works["together", n] = partial(attend_cpu, query, *torch.randn(2, 8, heads, n, dim))
        times = dict.fromkeys(works, float("inf"))
        for _ in range(ROUNDS):
            for name, work in works.items():
                calls = max(1, 4096 // name[1] // (8 if name[0] == "together" else 1))
                times[name] = min(times[name], taken(work, calls, min))
        rate = {name: 4e-9 * heads * queries * name[1] * dim / least for name, least in times.items()}
        rows = {}
        for n in lengths:
            shares = {what: rate[what, n] / rate["cell", lengths[0]] for what in ("cell", "bare")}
            if n < lengths[0]:
                shares["together"] = 8 * rate["together", n] / rate["cell", lengths[0]]
            rows[n] = {"gflops": rate["cell", n], **shares}
        name = f"{heads} heads, {queries} queries, d = {dim}"
        found[name] = rows
        told = (f"{n} tokens {row['gflops']:.1f} GF/s, {row['cell']:.2f}" for n, row in rows.items())
        print(f"{name}: {'; '.join(told)}", flush=True)
        print(
            "  "
            + "; ".join(
                f"{n}: {row['bare']:.2f} bare, {row.get('together', 1):.2f} together" for n, row in rows.items()
            )
        )
    torch.set_num_threads(threads)
    return found
