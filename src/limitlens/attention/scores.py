"""Attention scores before the softmax, with the soft cap that some models apply."""

from limitlens.arrays import Tensor, torch


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores softcap · tanh(scores / softcap), or unchanged if `softcap` is None."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def scores_of(query: Tensor, key: Tensor, softcap: float | None) -> Tensor:
    """Scores (..., m, n) of queries (..., m, k), scale included, and keys (..., n, k)."""
    return capped(query @ key.mT, softcap)
