"""GPU programs other than attention against the same computation in torch, on a GPU or under Triton's interpreter."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="the programs need triton, also to be interpreted")

from limitlens.attention.kernels.split import chunk_sums, put_rows  # noqa: E402


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize(("heads", "dim", "dtype"), [(2, 24, torch.float32), (1, 64, torch.bfloat16)])
def test_products_are_those_of_chunks(heads: int, dim: int, dtype: torch.dtype) -> None:
    """Also of rows that do not fill a chunk, and that lie apart."""
    rows = (5 + drawn(1100, heads, 2 * dim)).to(dtype)[..., :dim]
    shift = torch.full((heads, dim), 4.9, device=DEVICE)
    fused, expected = (
        [sum(part.sum(0, dtype=torch.float64) for part in parts) for parts in zip(*sums, strict=True)]
        for sums in (chunk_sums(rows, shift, fused=True), chunk_sums(rows, shift, fused=False))
    )
    for one, other in zip(fused, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_go_where_they_should_and_the_largest_is_known(dtype: torch.dtype, fused: bool) -> None:
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:150].to(DEVICE)
    special = torch.tensor([0, 149, 31], device=DEVICE)
    for size in (8, 24):
        store, given = torch.full((400, 3, size), 7.0, dtype=dtype, device=DEVICE), drawn(150, 3, size, dtype=dtype)
        largest = torch.zeros(3, device=DEVICE) if fused else None
        put_rows(store, given, rows, special, 350, largest)
        assert torch.equal(store[rows], given)
        assert torch.equal(store[350:353], given[special])
        others = torch.ones(400, dtype=torch.bool, device=DEVICE)
        others[rows] = others[350:353] = False
        assert (store[others] == 7).all()
        assert largest is None or torch.equal(largest, given.float().abs().amax((0, 2)))
