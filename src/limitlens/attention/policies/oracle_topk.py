"""Keys of largest weight for each query: an oracle, which keeps the most mass but not always the smallest error."""

from torch import Generator, Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput
from limitlens.errors import InputError


class OracleTopK(KeyPolicy):
    """Keep the keys of largest score, chosen separately for each query."""

    name = "oracle_topk"
    label = "largest weights (oracle)"
    sees_queries = True

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """The scores."""
        if inputs.scores is None:
            raise InputError(f"no scores were given; {self.name!r} is an oracle that needs the scores of later queries")
        return inputs.scores[None]
