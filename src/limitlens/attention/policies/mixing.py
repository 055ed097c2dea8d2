"""Keys and values mixed into fewer (Linformer): n pairs become k by a matrix E, with Ek and Ev in their place.

Softmax over the k mixed keys is another attention than over the n, so that none of these needs to converge to it.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Generator, Tensor

Mixed = tuple[Tensor, Tensor, Tensor | None]  # keys, values and what is added to their scores (..., k)
Mixing = Callable[[Tensor, Tensor, Sequence[int], Generator], Iterator[Mixed]]  # for each k that is asked for


def linformer(key: Tensor, value: Tensor, counts: Sequence[int], generator: Generator) -> Iterator[Mixed]:
    """A Gaussian matrix, entries of variance 1/k, one for all texts and heads: the projection without its training."""
    for count in counts:
        matrix = torch.randn(count, key.shape[-2], generator=generator).to(key) / count**0.5
        yield matrix @ key, matrix @ value, None


def leading(key: Tensor, value: Tensor, counts: Sequence[int], generator: Generator) -> Iterator[Mixed]:
    """The means of k groups of keys that lie together: halved along each leading direction of the keys in its turn.

    A group keeps its weight, the logarithm of its size added to its score: with k = n nothing changes.
    """
    (*heads, there, width), centred = key.shape, (key - key.mean(-2, keepdim=True)).double()
    directions = torch.linalg.eigh(centred.mT @ centred).eigenvectors.flip(-1)
    order = torch.zeros(key.shape[:-1], dtype=torch.long, device=key.device)
    for level in range((max(counts) - 1).bit_length()):
        along = (centred @ directions[..., level % width, None])[..., 0]
        order = (order * 2**level // there + along.atan() / 4).argsort(-1).argsort(-1)  # within its cell
    for count in counts:
        group = (order * count // there).flatten(0, -2)
        group = (group + count * torch.arange(len(group), device=key.device)[:, None]).flatten()  # apart for each head
        sizes = torch.bincount(group)  # none is empty
        sums = (
            part.new_zeros(len(sizes), part.shape[-1]).index_add(0, group, part.flatten(0, -2)) for part in (key, value)
        )
        keys, values = ((part / sizes[:, None]).view(*heads, count, -1) for part in sums)
        yield keys, values, sizes.view(*heads, count).to(key).log()


MIXINGS: dict[str, tuple[str, Mixing]] = {
    "linformer": ("mixed by a Gaussian matrix", linformer),
    "leading": ("means along leading directions", leading),
}
