"""The keys with the smallest norms: they draw most of the attention in many decoders, so a cheap guess at it."""

from torch import Generator, Tensor

from limitlens.keys.sight import Choice, Sight, norms


class Norm(Choice):
    """Short keys first."""

    name = "norm"
    words = "smallest key norms"

    def priority(self, sight: Sight, draws: int, generator: Generator) -> Tensor:
        """Minus |k|."""
        return -norms(sight.key)[None, ..., None, :]
