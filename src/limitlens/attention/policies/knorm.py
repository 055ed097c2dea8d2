"""Keys of smallest norm: in many decoders these receive most of the attention (Devoto et al. 2024)."""

from torch import Generator, Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput, norms


class KNorm(KeyPolicy):
    """Keep the keys of smallest Euclidean norm."""

    name = "knorm"
    label = "smallest key norms"

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Minus |k|."""
        return -norms(inputs.key)[None, ..., None, :]
