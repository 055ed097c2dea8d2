"""The keys with the largest weights: an oracle that keeps the most mass, though not always the smallest error."""

from torch import Generator, Tensor

from limitlens.errors import InputError
from limitlens.keys.sight import Choice, Sight


class Top(Choice):
    """The keys with the largest scores, for each query anew."""

    name = "top"
    words = "largest weights (oracle)"
    sees_queries = True

    def priority(self, sight: Sight, draws: int, generator: Generator) -> Tensor:
        """The scores themselves."""
        if sight.scores is None:
            raise InputError("no scores were given; 'top' is an oracle that needs those of the queries it serves")
        return sight.scores[None]
