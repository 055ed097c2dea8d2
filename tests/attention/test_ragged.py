"""Attention over rows of different lengths against float64: on the CPU, and the CUDA program, interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from limitlens.attention.kernels import ragged
from limitlens.attention.ragged import ROOM, RaggedRows
from limitlens.attention.subset import attend_subset, capped

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEPT = (5, 300, 0, 41, 41, 130)  # three heads of two sequences
GROUPS, WIDTH, WIDE = 3, 24, 20


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def filled(dtype: torch.dtype = torch.float32, *, weighted: bool = False, positions: bool = False) -> RaggedRows:
    total = sum(KEPT)
    weight = 0.7 * drawn(total) if weighted else None
    position = torch.cat([torch.arange(kept, device=DEVICE) for kept in KEPT]).int() if positions else None
    return RaggedRows(drawn(total, WIDTH, dtype=dtype), drawn(total, WIDE, dtype=dtype), KEPT, 2, weight, position)


def append(rows: RaggedRows, count: int, position: int = 300) -> None:
    dtype = rows.key.dtype
    rows.append(drawn(2, 3, count, WIDTH, dtype=dtype), drawn(2, 3, count, WIDE, dtype=dtype), position)


def exact(
    rows: RaggedRows, query: Tensor, scale: float, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """The same attention in float64, row by row."""
    batch, length = query.shape[0], query.shape[2]
    output = query.new_zeros(*query.shape[:3], WIDE, dtype=torch.float64)
    for row, kept in enumerate(rows.kept):
        head, b = divmod(row, batch)
        inside = slice(rows.starts[row], rows.starts[row] + kept + rows.new)
        heads = slice(head * GROUPS, (head + 1) * GROUPS)
        scores = capped(scale * (query[b, heads].double() @ rows.key[inside].double().T), softcap)
        total = scores.shape[-1]
        seen = torch.ones(length, total, dtype=torch.bool, device=DEVICE).tril(total - length)
        weight = None if rows.log_weight is None else rows.log_weight[inside].double()
        own = None if sinks is None else sinks[heads, None].double()
        value = rows.value[inside].double()
        output[b, heads] = attend_subset(scores, value, mask=seen, log_weights=weight, sinks=own)[1]
    return output


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize(
    ("weighted", "softcap", "sunk"), [(False, None, False), (True, None, True), (True, 2.0, False), (False, 2.0, True)]
)
def test_rows_of_different_lengths(weighted: bool, softcap: float | None, sunk: bool, length: int) -> None:
    rows, query = filled(weighted=weighted), drawn(2, 3 * GROUPS, length, WIDTH)
    sinks = drawn(3 * GROUPS) if sunk else None
    for _ in range(3):
        append(rows, length)
    found = rows.attend(query, scale=0.4, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(found.double(), exact(rows, query, 0.4, softcap, sinks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 30])
@pytest.mark.parametrize(
    ("weighted", "softcap", "sunk"), [(False, None, False), (True, None, True), (True, 2.0, False)]
)
def test_the_cuda_programs(
    dtype: torch.dtype, length: int, weighted: bool, softcap: float | None, sunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are appended and read by CUDA programs, in several parts of keys and several blocks of queries."""
    pytest.importorskip("triton", reason="the CUDA programs need triton, also to be interpreted")
    monkeypatch.setattr(ragged, "able", lambda *args: True)
    rows = filled(dtype, weighted=weighted)
    query = drawn(2, length, 3 * GROUPS, WIDTH, dtype=dtype).transpose(1, 2)
    append(rows, length)
    append(rows, length)
    assert len(rows._parts(GROUPS * length).row) > len(KEPT)  # so that parts are merged
    sinks = drawn(3 * GROUPS) if sunk else None
    found = rows.attend(query, scale=0.4, softcap=softcap, sinks=sinks)
    assert found.dtype == dtype
    close = 1e-5 if dtype == torch.float32 else 1e-2
    wanted = exact(rows, query, 0.4, softcap, sinks)
    torch.testing.assert_close(found.double(), wanted, rtol=close, atol=close)


def test_the_cuda_programs_hide_masked_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the CUDA programs need triton, also to be interpreted")
    rows, query = filled(), drawn(2, 3 * GROUPS, 3, WIDTH)
    append(rows, 4)
    seen = torch.rand(2, 3, 4, device=DEVICE) < 0.5
    wanted = rows.attend(query, scale=0.4, seen=seen) if DEVICE == "cpu" else None
    monkeypatch.setattr(ragged, "able", lambda *args: wanted is not None)
    found = rows.attend(query, scale=0.4, seen=seen)
    if wanted is None:
        monkeypatch.undo()
        wanted = rows.attend(query, scale=0.4, seen=seen)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_rows_grow_in_blocks_and_keep_their_entries() -> None:
    rows, small = filled(weighted=True), filled(weighted=True).bytes
    assert rows.bytes == small == sum(KEPT) * 4 * (WIDTH + WIDE + 1)  # nothing is unused before the first new token
    sizes = set()
    for _ in range(ROOM + 1):
        append(rows, 1)
        sizes.add(rows.bytes)
    entry = 4 * (WIDTH + WIDE + 1) * len(KEPT)
    assert sizes == {small + ROOM * entry, small + 2 * ROOM * entry}
    query = drawn(2, 3 * GROUPS, 1, WIDTH)
    torch.testing.assert_close(rows.attend(query, scale=0.4).double(), exact(rows, query, 0.4), rtol=1e-5, atol=1e-5)


def test_old_buffers_stay_if_there_is_no_memory_for_new_ones() -> None:
    rows = filled()
    before = rows.key, rows.value, rows.starts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", lambda parts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            append(rows, 1)
    assert (rows.key, rows.value, rows.starts) == before
    assert (rows.new, rows.room) == (0, 0)


def test_masked_new_tokens_and_entries_beyond_a_window_are_not_seen() -> None:
    """Hidden entries change no output, whatever their keys are."""
    rows, query = filled(positions=True), drawn(2, 3 * GROUPS, 2, WIDTH)
    append(rows, 2, 300)
    append(rows, 2, 302)
    seen = torch.ones(2, 2, rows.new, dtype=torch.bool, device=DEVICE)
    seen[0, :, 0] = False  # the first new token of the first sequence is padding
    found = rows.attend(query, scale=0.4, seen=seen, window=100)
    assert rows.position is not None
    for row in range(6):
        inside = slice(rows.starts[row], rows.starts[row + 1])
        old = rows.position[inside] <= 302 - 100  # for both queries
        rows.key[inside][old] = 50.0
        if row % 2 == 0:
            rows.key[rows.starts[row] + KEPT[row]] = 50.0
    changed = rows.attend(query, scale=0.4, seen=seen, window=100)
    torch.testing.assert_close(changed, found, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(rows.attend(query, scale=0.4, seen=seen, window=400), found)
    assert not torch.allclose(rows.attend(query, scale=0.4, window=100), found)
