"""CUDA kernels of certified reads against `read_keys`: on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from limitlens.attention.certified import RULES, SINKS, WINDOW, quantised, read_keys
from limitlens.attention.subset import attend_subset

pytest.importorskip("triton", reason="the CUDA kernels need triton, also to be interpreted")

reads = pytest.importorskip("bench.certify_kernels")  # beside the benchmark, at the root of the repository

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS, SHARED, WIDTH, COUNT = 2, 4, 2, 64, 900
PROMISE = (0.15, 0.1)


def drawn(spread: float) -> tuple[Any, Any, Any]:
    """Queries whose scores have standard deviation `spread`, keys and values with a mean."""
    generator = torch.Generator().manual_seed(3)
    shape = (BATCH, SHARED, COUNT, WIDTH)
    key, noise = (torch.randn(shape, generator=generator) for _ in range(2))
    query = torch.randn(BATCH, HEADS, WIDTH, generator=generator)
    query = query * spread / query.norm(dim=-1, keepdim=True)
    return tuple(part.to(DEVICE) for part in (query, key, 0.7 + noise))


def uniforms(seed: int) -> Any:
    """The kernels' uniform numbers (pairs, COUNT), by the same hash in integers."""

    def mixed(x: Any) -> Any:
        x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
        return (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF

    starts = mixed((seed + torch.arange(BATCH * SHARED) * 0x9E3779B9) & 0xFFFFFFFF)
    x = mixed((starts[:, None] + torch.arange(COUNT)) & 0xFFFFFFFF)
    return (((x ^ (x >> 16)) >> 8) * 2.0**-24).float().to(DEVICE)


@pytest.mark.parametrize(("spread", "error"), [(1.5, 0.3), (1.5, 0.1), (0.5, 0.02)])
def test_kernels_read_the_keys_of_the_rule(spread: float, error: float) -> None:
    """Samples that pass at once are those of `read_keys`; others hold the same error."""
    query, key, value = drawn(spread)
    kept: dict[str, Any] = {}
    packed = reads.PackedKeys.of(key)
    output, count = reads.attend(query, key, value, packed, (error, 0.1), scale=1.0, seed=7, kept=kept)
    grouped = query.view(BATCH * SHARED, -1, WIDTH)
    scores = grouped @ key.flatten(0, 1).mT
    codes = torch.cat([packed.codes >> shift & 15 for shift in (0, 4, 8, 12)], -1)
    copy = ((16 + codes) * packed.step.float()[..., None, :] + packed.low.float()[..., None, :]).flatten(2, 3)[
        :, :, :COUNT
    ]
    assert ((copy - quantised(key, 4)[0]).abs() <= 1.01 * packed.step.float().max()).all()
    near = grouped @ copy.flatten(0, 1).mT
    predicted = kept["scores"].float().view(scores.shape)
    torch.testing.assert_close(predicted, near, atol=0.02 * spread, rtol=0.01)
    uniform = uniforms(7)[:, None].expand(scores.shape)
    flat = [part.reshape(-1, COUNT) for part in (scores, predicted)]
    seen = torch.ones_like(flat[0], dtype=torch.bool)
    mask, weights = read_keys(RULES["int4"], *flat, value.flatten(0, 1), seen, (error, 0.1), uniform.reshape(-1, COUNT))
    _, wanted = attend_subset(
        scores, value.flatten(0, 1), mask=mask.view(scores.shape), log_weights=weights.view(scores.shape)
    )
    _, full = attend_subset(scores, value.flatten(0, 1))
    own, wanted, full = (part.reshape(-1, WIDTH) for part in (output, wanted, full))
    number, read, whole = count.flatten().long(), mask.sum(-1), kept["whole"].bool()
    first = read < SINKS + WINDOW + 80  # one sample of about 48 keys
    assert bool((number == read)[first].all())
    torch.testing.assert_close(own[first], wanted[first], rtol=1e-3, atol=1e-3)
    assert bool(((own - full).norm(dim=-1) <= 2 * error * full.norm(dim=-1)).all())
    assert bool((number >= SINKS + WINDOW).all())
    assert bool((number[whole] == COUNT).all())
    if error > 0.2:
        assert first.any()
    if error < 0.05:
        assert whole.all()
        torch.testing.assert_close(own, full, rtol=1e-4, atol=1e-4)
    else:
        assert not whole.any()
        assert (number.float().mean() / read.float().mean()) == pytest.approx(1, abs=0.25)
