"""Oracle key policy that keeps the keys of largest score for each query, although no cache knows later queries."""

from torch import Generator, Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput
from limitlens.errors import InputError


class OracleTopK(KeyPolicy):
    """Keep the keys of largest score for each query; these have most weight, but not always the smallest error."""

    name = "oracle_topk"
    label = "largest weights (oracle)"
    sees_queries = True

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of a key for a query: the attention score, which only an oracle knows for later queries."""
        if inputs.scores is None:
            raise InputError(f"no scores were given; {self.name!r} is an oracle that needs the scores of later queries")
        return inputs.scores[None]
