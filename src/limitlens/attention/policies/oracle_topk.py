"""The keys with the largest weights: an oracle that keeps the most mass, though not always the smallest error."""

from torch import Generator, Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput
from limitlens.errors import InputError


class Top(KeyPolicy):
    """The keys with the largest scores, for each query anew."""

    name = "top"
    words = "largest weights (oracle)"
    sees_queries = True

    def priority(self, sight: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """The scores themselves."""
        if sight.scores is None:
            raise InputError("no scores were given; 'top' is an oracle that needs those of the queries it serves")
        return sight.scores[None]
