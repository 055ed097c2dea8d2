"""Key policy that keeps keys of smallest norm, which receive most attention in many decoders (Devoto et al. 2024)."""

from torch import Generator, Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput, norms


class KNorm(KeyPolicy):
    """Keep the keys of smallest Euclidean norm."""

    name = "knorm"
    label = "smallest key norms"

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of a key: minus its norm, −|k|."""
        return -norms(inputs.key)[None, ..., None, :]
