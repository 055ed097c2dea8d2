"""The keys with the smallest norms: they draw most of the attention in many decoders, so a cheap guess at it."""

from torch import Generator, Tensor

from limitlens.keys.sight import Choice, Sight


class Norm(Choice):
    """Short keys first."""

    name = "norm"
    words = "smallest key norms"

    def priority(self, sight: Sight, draws: int, generator: Generator) -> Tensor:
        """Minus |k|; a sink before all others."""
        shortness = -sight.key.norm(dim=-1)[None, ..., None, :]
        shortness[..., : sight.held] = 0
        return shortness
