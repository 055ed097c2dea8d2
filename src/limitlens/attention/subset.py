"""Attention scores with a softcap, and attention to a subset of keys with log-weights and learned sinks."""

from limitlens.arrays import Tensor, torch


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Attention scores bounded by a softcap, softcap · tanh(scores / softcap); unchanged if `softcap` is None."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def scores_of(query: Tensor, key: Tensor, softcap: float | None) -> Tensor:
    """Attention scores (..., m, n), softcapped, for keys (..., n, k) and queries (..., m, k) that include the scale."""
    return capped(query @ key.mT, softcap)


def attend_subset(
    scores: Tensor, value: Tensor, *, mask: Tensor | None = None, log_weights: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over the keys in `mask`: log-sum-exps (..., m) and outputs (..., m, v).

    With scores s (..., m, n), softcap included, log-weights w and the logit `sink` of a learned sink of value 0,

        output = Σ_{j in mask} e^{s_j + w_j} v_j / (Σ_{j in mask} e^{s_j + w_j} + e^{sink}).

    `mask` and `log_weights` broadcast to the scores, `sinks` to (..., m). Values are (..., n, v). Without keys and
    sinks the output is 0 and the log-sum-exp −∞.
    """
    if log_weights is not None:
        scores = scores + log_weights
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lowest = torch.finfo(scores.dtype).min
    if scores.shape[-1]:
        peak = scores.detach().amax(-1).clamp_min(lowest)
    else:
        peak = scores.new_full(scores.shape[:-1], lowest)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.detach().to(scores.dtype))
    weights = torch.exp(scores - peak[..., None])
    mass = weights.sum(-1)
    if sinks is not None:
        mass = mass + torch.exp(sinks.to(scores.dtype) - peak)
    output = (weights @ value) / mass.clamp_min(torch.finfo(scores.dtype).tiny)[..., None]
    return peak + mass.log(), output
