"""Scores before the softmax, and the bound that some models put on them."""

from limitlens.arrays import Tensor, torch


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores bounded by softcap · tanh(scores / softcap), or as they are."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def scores_of(query: Tensor, key: Tensor, softcap: float | None) -> Tensor:
    """Scores (..., m, n) of queries (..., m, k), scale included, and keys (..., n, k)."""
    return capped(query @ key.mT, softcap)
