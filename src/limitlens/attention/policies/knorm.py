"""The keys with the smallest norms: they draw most of the attention in many decoders, so a cheap guess at it."""

from torch import Generator, Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput, norms


class Norm(KeyPolicy):
    """Short keys first."""

    name = "norm"
    words = "smallest key norms"

    def priority(self, sight: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Minus |k|."""
        return -norms(sight.key)[None, ..., None, :]
