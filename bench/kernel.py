"""The kernel against this machine's float32 matrix product, in the same run: d = 64, 2,048 queries.

Floor: attention of m queries over n tokens is two matrix products, 4·m·n·d operations. The ceiling is what a large product of
torch reaches, 2·2048³ operations on matrices that stay in cache. The exponentials come on top and are counted as nothing.
"""  # noqa: E501

from __future__ import annotations

import torch

from bench.timing import alternate, taken
from limitlens.attention.kernels import cpu


def run() -> dict[str, object]:
    torch.manual_seed(0)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    query = torch.randn(2048, 64) / 8
    rows = {}
    for n in (4096, 8192, 16384):
        key, value = torch.randn(n, 64), torch.randn(n, 64)
        times = alternate(
            15,
            product=lambda: a @ b,
            kernel=lambda key=key, value=value: cpu.attend(query, key, value),  # type: ignore[misc]
        )
        product, kernel = 2 * 2048**3 / times["product"], 4 * 2048 * n * 64 / times["kernel"]
        share = kernel / product
        rows[n] = {"product_gflops": product / 1e9, "kernel_gflops": kernel / 1e9, "ratio": share}
        print(f"n = {n:6d}: product {product / 1e9:6.1f} GF/s, kernel {kernel / 1e9:6.1f} GF/s, ratio {share:.2f}")
    return {"queries": 2048, "dim": 64, "by_tokens": rows, "wanted": 0.8, "cells": cells()}


def cells() -> dict[str, dict[int, float]]:
    """The rate over cells of few tokens as a share of that over 4,096, for heads as a probe has them."""
    found = {}
    for heads, queries, dim in ((12, 256, 32), (3, 768, 64)):
        query = torch.randn(heads, queries, dim) / dim**0.5
        lengths = (64, 128, 256, 512, 4096)
        tokens = {n: torch.randn(2, heads, n, dim) for n in lengths}
        times = {n: taken(lambda of=tokens[n], query=query: cpu.attend(query, *of), 40, min) for n in lengths}  # type: ignore[misc]
        rates = {n: n / times[n] for n in lengths}
        name = f"{heads} heads, {queries} queries, d = {dim}"
        found[name] = {n: rates[n] / rates[lengths[-1]] for n in lengths}
        print(f"{name}: {', '.join(f'{n} tokens {share:.2f}' for n, share in found[name].items())}")
    return found
