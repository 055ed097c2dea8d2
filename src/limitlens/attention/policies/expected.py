"""Key policy that keeps keys of largest expected attention under Gaussian queries (Devoto et al. 2025)."""

from torch import Generator, Tensor

from limitlens.attention.policies.base import KeyPolicy, PolicyInput, norms

LAW = 256  # number of last queries from which the mean and covariance of later queries are estimated


class Expected(KeyPolicy):
    """Keep the keys of largest expected attention weight times value norm, as if queries were Gaussian.

    For q ~ N(μ, Σ), E e^{<q,k>} = e^{<μ,k> + <k,Σk>/2} (proved). Real queries are not Gaussian, so this is a heuristic.
    """

    name = "expected"
    label = "expected attention under the law of queries"
    needs_past = True

    def priority(self, inputs: PolicyInput, draws: int, generator: Generator) -> Tensor:
        """Priority of a key: E e^{<q,k>}, normalised over keys, averaged over query heads, times the value norm |v|."""
        query = inputs.last_queries(LAW, self.name)
        mean = query.mean(-2, keepdim=True)
        spread = (query - mean) @ inputs.key[..., None, :, :].mT  # (..., g, p, n): the covariance is never formed
        exponent = (mean @ inputs.key[..., None, :, :].mT)[..., 0, :] + spread.square().mean(-2) / 2
        return (exponent.softmax(-1).mean(-2) * norms(inputs.value))[None, ..., None, :]
