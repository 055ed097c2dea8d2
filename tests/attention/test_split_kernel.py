"""The CUDA kernel against float64: on a GPU where there is one, else under Triton's interpreter."""

import math

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="the CUDA kernel needs triton, also to be interpreted")

from limitlens.attention.kernels import attend_plain, split  # noqa: E402

CLOSE = 3e-6  # relative error of outputs that float32 inputs of moderate scores must keep


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def drawn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype)


def check(query, key, value, bias=None, close: float = CLOSE) -> None:
    wide = [part.double() for part in (query, key, value)]
    exact_lse, exact = attend_plain(*wide, None if bias is None else bias.double())
    lse, output = split.attend(query, key, value, bias)
    some = torch.isfinite(exact_lse)
    assert torch.equal(torch.isfinite(lse), some)
    assert (lse[~some] == -math.inf).all()
    assert (output[~some] == 0).all()
    assert torch.allclose(lse[some], exact_lse[some], rtol=0, atol=20 * close)
    assert float((output[some] - exact[some]).norm() / exact[some].norm()) < close


@pytest.mark.parametrize(
    ("m", "n", "k", "v"), [(40, 300, 64, 64), (3, 1, 16, 16), (130, 257, 24, 40), (9, 70, 256, 96)]
)
def test_any_shape_and_its_tail(m: int, n: int, k: int, v: int) -> None:
    check(drawn(2, m, k, scale=4 / math.sqrt(k)), drawn(2, n, k), drawn(2, n, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_type_that_is_accepted(dtype: torch.dtype) -> None:
    check(drawn(2, 20, 48, scale=0.3, dtype=dtype), drawn(2, 100, 48, dtype=dtype), drawn(2, 100, 64, dtype=dtype))


def test_numbers_of_few_bits_need_fewer_products() -> None:
    """Keys and values in bfloat16 beside queries in float32, as a model of that type is probed; and one of the two."""
    query, key, value = drawn(2, 20, 48, scale=0.3), drawn(2, 100, 48), drawn(2, 100, 64)
    few = [part.bfloat16() for part in (key, value)]
    check(query, *few)
    check(query, few[0], value)
    check(query, key, few[1])


def test_queries_or_keys_that_are_shared_are_not_repeated() -> None:
    check(drawn(3, 5, 32), drawn(50, 32), drawn(50, 32))
    check(drawn(5, 32), drawn(3, 50, 32), drawn(3, 50, 32))
    check(drawn(2, 1, 5, 32), drawn(3, 50, 32), drawn(3, 50, 32))


def test_a_bias_masks_and_weighs() -> None:
    bias = drawn(2, 20, 100)
    bias[0, 3] = -math.inf
    bias[:, :, 50:] = -math.inf
    check(drawn(2, 20, 32), drawn(2, 100, 32), drawn(2, 100, 32), bias)
    check(drawn(2, 20, 32), drawn(2, 100, 32), drawn(2, 100, 32), drawn(1, 100))


def test_huge_and_tiny_numbers_neither_overflow_nor_vanish() -> None:
    check(drawn(9, 32, scale=1e6), drawn(70, 32, scale=1e-6), drawn(70, 32, scale=1e8))
    check(drawn(9, 32, scale=1e-9), drawn(70, 32), drawn(70, 32, scale=1e-9))  # all scores equal
    scores = drawn(9, 32, scale=300.0), drawn(70, 32)  # to ± 1e4: float32 rounds these to 1e-3
    check(*scores, drawn(70, 32), close=1e-3)
    assert float((scores[0] @ scores[1].T).abs().max()) > 3e3


def test_cells_of_different_lengths_in_one_launch_with_their_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "PART", 256)  # so that some are cut into parts
    query, key, value = drawn(2, 33, 64, scale=0.4), drawn(2, 900, 64), drawn(2, 900, 48)
    jobs = [(0, 0, 0, 900), (1, 1, 5, 6), (0, 0, 10, 10), (1, 1, 100, 401), (0, 1, 128, 256)]
    found = split.attend_jobs(query, key, value, torch.tensor(jobs, device=DEVICE), longest=900, peaks=True)
    for i, (q, k, start, stop) in enumerate(jobs):
        if start == stop:
            assert (found.lse[i] == -math.inf).all()
            assert (found.output[i] == 0).all()
            assert (found.where[i] == -1).all()
            continue
        scores = query[q].double() @ key[k, start:stop].double().T
        exact = scores.softmax(-1) @ value[k, start:stop].double()
        assert float((found.output[i] - exact).norm() / exact.norm()) < CLOSE
        for one, other in ((found.lse, scores.logsumexp(-1)), (found.peak, scores.amax(-1))):
            assert torch.allclose(one[i], other, rtol=0, atol=5e-5)
        assert torch.equal(found.where[i], scores.argmax(-1) + start)
    plain = split.attend_jobs(query, key, value, torch.tensor(jobs, device=DEVICE), longest=900)
    assert torch.equal(plain.lse, found.lse)
    assert torch.equal(plain.output, found.output)
    assert plain.peak is plain.where is None


def test_the_fast_precision_is_less_exact() -> None:
    query, key, value = drawn(64, 64, scale=0.5), drawn(500, 64), drawn(500, 64)
    exact = attend_plain(query.double(), key.double(), value.double())[1]
    gaps = [float((split.attend(query, key, value, precision=name)[1] - exact).norm() / exact.norm())
            for name in ("accurate", "fast")]  # fmt: skip
    assert gaps[0] < CLOSE < 1e-4 < gaps[1] < 3e-3


def test_outputs_that_were_poisoned_are_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *shape, **how: empty(*shape, **how).fill_(
            torch.nan if "dtype" not in how or how["dtype"].is_floating_point else -7
        ),
    )
    check(drawn(2, 70, 24), drawn(2, 131, 24), drawn(2, 131, 40))


def test_unsupported_inputs_are_named() -> None:
    assert split.unable(drawn(2, 3, 512), drawn(2, 3, 16)) == "heads are wider than 256 numbers"
    assert split.unable(drawn(2, 3).double(), drawn(2, 3)) == "numbers are float64"
    assert split.unable(drawn(2, 3), drawn(2, 3)) is None
    assert split.missing() is None
