"""Low-rank attention (Linformer): mixes n keys and values into k, which need not converge to attention over n keys."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Generator, Tensor

Mixed = tuple[Tensor, Tensor, Tensor | None]  # keys, values, and numbers to add to the scores (..., k)
Mixing = Callable[[Tensor, Tensor, Sequence[int], Generator], Iterator[Mixed]]  # one result for each k in the sequence


def linformer(key: Tensor, value: Tensor, counts: Sequence[int], generator: Generator) -> Iterator[Mixed]:
    """Mix keys and values (..., n, ·) into k, for each k in `counts`, by a random N(0, 1/k) matrix (k, n)."""
    for count in counts:
        matrix = torch.randn(count, key.shape[-2], generator=generator).to(key) / count**0.5
        yield matrix @ key, matrix @ value, None


def leading(key: Tensor, value: Tensor, counts: Sequence[int], generator: Generator) -> Iterator[Mixed]:
    """Replace k groups of close keys, for each k in `counts`, by their mean keys and mean values.

    Groups are halved along one principal direction of the keys after another. The logarithm of a group's size is added
    to the score of its mean key, so that nothing changes for k = n.
    """
    *heads, length, width = key.shape
    centred = (key - key.mean(-2, keepdim=True)).double()
    directions = torch.linalg.eigh(centred.mT @ centred).eigenvectors.flip(-1)
    order = torch.zeros(key.shape[:-1], dtype=torch.long, device=key.device)
    for level in range((max(counts) - 1).bit_length()):
        along = (centred @ directions[..., level % width, None])[..., 0]
        order = (order * 2**level // length + along.atan() / 4).argsort(-1).argsort(-1)  # within its group so far
    for count in counts:
        group = (order * count // length).flatten(0, -2)
        group = (group + count * torch.arange(len(group), device=key.device)[:, None]).flatten()  # separate per head
        sizes = torch.bincount(group)  # no group is empty
        sums = (
            part.new_zeros(len(sizes), part.shape[-1]).index_add(0, group, part.flatten(0, -2)) for part in (key, value)
        )
        keys, values = ((part / sizes[:, None]).view(*heads, count, -1) for part in sums)
        yield keys, values, sizes.view(*heads, count).to(key).log()


MIXINGS: dict[str, tuple[str, Mixing]] = {
    "linformer": ("mixed by a Gaussian matrix", linformer),
    "leading": ("means along leading directions", leading),
}
