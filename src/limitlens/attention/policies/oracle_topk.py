"""Oracle policy that keeps the keys of largest weight for each query: most weight, but not always the least error."""

from torch import Generator, Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput
from limitlens.errors import InputError


class OracleTopK(KeyPolicy):
    """Keep the keys of largest score, chosen separately for each query."""

    name = "oracle_topk"
    label = "largest weights (oracle)"
    sees_queries = True

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of a key for a query: the attention score, which only an oracle knows for later queries."""
        if inputs.scores is None:
            raise InputError(f"no scores were given; {self.name!r} is an oracle that needs the scores of later queries")
        return inputs.scores[None]
