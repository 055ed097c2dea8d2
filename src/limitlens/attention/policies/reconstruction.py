"""Key policy that keeps the keys that a model reads while it repeats its context (scores of KVzip, Kim et al. 2025)."""

from torch import Generator, Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput
from limitlens.errors import InputError


class Reconstruction(KeyPolicy):
    """Keep the keys that receive the largest attention weight while the model repeats the context (a heuristic).

    The weights come from a second pass over the context, `limitlens.cache.reconstruction.repeat_attention`.
    """

    name = "reconstruction"
    label = "attention while repeating the context"
    needs_repeat = True

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of a key: the largest attention weight that it receives from a token of the repeated context."""
        if inputs.repeat_attention is None:
            given = "no attention weights of a repeated context were given"
            raise InputError(f"{given}; {self.name!r} ranks keys by them, so cut the cache after a second pass")
        return inputs.repeat_attention[None, ..., None, :]
