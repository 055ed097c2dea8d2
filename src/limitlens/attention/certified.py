"""Certified reads: a query reads its heavy keys and a sample of the others, as many as a bound on its error needs.

A rule predicts all scores from little memory, reads the first and last keys, and samples every other key j with
probability π_j = min(1, c g_j), where the shares g follow the predicted weights. With w = e^score and Z = Σw,

    Γ̂ = Σ_read (w_j/π_j) v_j / Σ_read w_j/π_j,    Cov Γ̂ ≈ Σ (1/π_j − 1) u_j u_jᵀ,    u = w (v − Γ)/Z.

Key j has one uniform number U_j and is read once the level c exceeds U_j/g_j, so that larger samples contain smaller
ones. A sample that its own estimated error does not pass is enlarged. Accurate predictions bound w/g, so that a few
sampled keys estimate the variance well; uniform samples miss the few keys that make it large.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np

from limitlens.arrays import Tensor, torch
from limitlens.theory.certificates import bernstein_radius, error_quantile

SINKS, WINDOW = 4, 64  # first and last keys, which every query reads; older groups of quantised keys are complete
GROUP = 64  # keys that share the scales of a quantised copy
PAGE = 16  # keys of a page, whose bound comes from their smallest and largest coordinates
DEFENSIVE = 0.05  # share of the sample that is drawn uniformly, which bounds w/g where a prediction is far too low
FIRST, FEWEST = 0.01, 48  # expected size of the first sample: a share of the keys, and the fewest
UNSURE = 8  # sampled keys with π < 1 that a check needs, because the variance of unread keys is estimated from them
GROWTH = (1.15, 3.0)  # least and largest factor by which a sample grows if its check fails
STAGES = 8  # samples that a query may check before it reads everything
AT_ONCE = (1 << 22, 1 << 27)  # numbers of sampled values held at once, on a CPU and on another device
DIRECTIONS, DEGREES = 32, 96  # rows and columns of a table of quantiles
FREEDOM, DEGREE = math.log(512) / (DIRECTIONS - 1), math.log(1e6) / (DEGREES - 1)  # its steps in log f and log ν
MUCH = 0.6  # share of the keys from which on a query reads everything


@dataclass(frozen=True)
class ReadRule:
    """How a query selects the keys it reads: prediction of the scores, heavy keys, sampled tail and size of the sample.

    Sizes: a normal quantile for the "denominator" alone, for numerator and denominator ("both") or for the "trace" of
    the output's covariance, a weighted chi-square ("chi2"), the same with a check of each sample ("checked"), or an
    empirical Bernstein bound ("proved").
    """

    label: str
    predictor: str  # "int4", "int3", "int2" (quantised keys), "pages" (bounds) or "earlier" (queries)
    size: str = "checked"
    tail: str = "priority"  # shares g: "priority" by predicted weight, "stratified" (rounded up), "uniform"
    heavy: float = 0.0  # share of the keys, largest predictions first, that is always read

    @property
    def status(self) -> str:
        """Whether the promise is "proved" or "asymptotic", that is, without a bound on unread scores."""
        return "proved" if self.size == "proved" else "asymptotic"

    def selection_bytes(self, dim: int) -> float:
        """Bytes read to predict scores, as a share of all keys and values, which have 2 bytes a number (4 · dim)."""
        if self.predictor == "earlier":
            return 1 / (2 * dim)  # one number a key
        if self.predictor == "pages":
            return 1 / PAGE  # two bounds for each page, the size of one key and value
        return (int(self.predictor[3:]) / 8 + 4 / GROUP) / 4  # codes, and a scale and an offset for each group


RULES = {
    "denominator": ReadRule("uniform tail, CLT of the denominator", "int4", "denominator", "uniform", 0.02),
    "both": ReadRule("uniform tail, CLT of both sums", "int4", "both", "uniform", 0.02),
    "output": ReadRule("uniform tail, CLT of the output", "int4", "trace", "uniform", 0.02),
    "chi2": ReadRule("4-bit keys, no check", "int4", "chi2"),
    "int4": ReadRule("4-bit keys", "int4"),
    "int3": ReadRule("3-bit keys", "int3"),
    "int2": ReadRule("2-bit keys", "int2"),
    "strata": ReadRule("strata of 4-bit keys", "int4", tail="stratified"),
    "pages": ReadRule("bounds of pages", "pages"),
    "earlier": ReadRule("attention of earlier queries", "earlier"),
    "proved": ReadRule("bounds of 4-bit keys, empirical Bernstein", "int4", "proved"),
}


def _grouped(key: Tensor, size: int) -> Tensor:
    """Keys (..., n, k) in groups (..., groups, size, k); the last group is filled with copies of the last key."""
    *front, count, dim = key.shape
    filled = torch.cat([key, key[..., -1:, :].expand(*front, -count % size, dim)], -2)
    return filled.reshape(*front, -(-count // size), size, dim)


def quantised(key: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys (..., n, k) rounded to 2^bits levels by channel and group of keys, and the step of each number."""
    groups = _grouped(key, GROUP)
    low, high = groups.amin(-2, keepdim=True), groups.amax(-2, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
    rounded = ((groups - low) / step).round() * step + low
    rounded, step = (part.expand_as(groups).flatten(-3, -2)[..., : key.shape[-2], :] for part in (rounded, step))
    return rounded, step


@lru_cache
def quantiles(delta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logarithms of quantiles of |Γ̂ − Γ|²/Σλ by log f and log ν: to size a sample (δ), and to check it (δ/2)."""
    f, nu = np.exp(FREEDOM * np.arange(DIRECTIONS))[:, None], np.exp(DEGREE * np.arange(DEGREES))
    found = error_quantile(1.0, 1 / f + 0 * nu, delta), error_quantile(1.0, 1 / f, delta / 2, nu)
    planned, checked = (torch.from_numpy(np.log(part)).float().to(device) for part in found)
    return planned, checked


def _interpolated(table: Tensor, freedom: Tensor, degrees: Tensor) -> Tensor:
    """Quantiles of a table at effective directions f and degrees of freedom ν."""
    x = (freedom.clamp_min(1).log() / FREEDOM).clamp_max(DIRECTIONS - 1.001)
    y = (degrees.clamp_min(1).log() / DEGREE).clamp_max(DEGREES - 1.001)
    i, k = x.long(), y.long()
    x, y = x - i, y - k
    first, second = (table[i + step, k] * (1 - y) + table[i + step, k + 1] * y for step in (0, 1))
    return (first * (1 - x) + second * x).exp()


def predicted_scores(rule: ReadRule, query: Tensor, key: Tensor) -> Tensor:
    """Scores (..., m, n) of scaled queries predicted by quantised keys or page bounds; upper bounds if `proved`."""
    if rule.predictor == "pages":
        pages = _grouped(key, PAGE)
        bound = query.clamp_min(0) @ pages.amax(-2).mT + query.clamp_max(0) @ pages.amin(-2).mT
        return bound.repeat_interleave(PAGE, -1)[..., : key.shape[-2]]
    copy, step = quantised(key, int(rule.predictor[3:]))
    scores = query @ copy.mT
    return scores + query.abs() @ step.mT / 2 if rule.size == "proved" else scores


def read_keys(
    rule: ReadRule, scores: Tensor, predicted: Tensor, value: Tensor, seen: Tensor, promise: tuple[float, float],
    uniform: Tensor, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys (m, n) that queries read to keep a `promise` (ε, δ) of their output error, and log-weights of these keys.

    Uniform numbers are (m, n); scores, predicted scores and the mask `seen` are (q, n) and learned sinks (q,), of q
    queries with m/q draws each. Values are (n, v), or (h, n, v) for queries in h groups of q/h. A query whose sample
    would hold more than 60% of its keys, or that fails all checks, reads all keys with weight 1.
    """
    never = float("-inf")
    place = seen.cumsum(-1)
    count = place[:, -1]
    fixed = seen & ((place <= SINKS) | (place > count[:, None] - WINDOW))
    bound = predicted.masked_fill(~seen | fixed, never)
    if rule.heavy:
        top = bound.topk(max(1, int(rule.heavy * scores.shape[-1])), -1).indices
        fixed = (fixed | torch.zeros_like(fixed).scatter(-1, top, True)) & seen
        bound = bound.masked_fill(fixed, never)
    tail = seen & ~fixed
    share = tail / tail.sum(-1, keepdim=True).clamp_min(1)
    if rule.tail != "uniform":
        strata = bound.ceil() if rule.tail == "stratified" else bound
        share = (1 - DEFENSIVE) * torch.softmax(strata, -1).nan_to_num() + DEFENSIVE * share
    peak = scores.masked_fill(~seen, never).amax(-1, keepdim=True)
    weight = (scores - peak).exp() * seen
    exact = weight * fixed
    mass = exact.sum(-1) + (0 if sinks is None else (sinks - peak[:, 0]).exp())
    value = value if value.ndim == 3 else value[None]
    known = torch.cat([mass[:, None], (exact.view(len(value), -1, exact.shape[-1]) @ value).flatten(0, 1)], -1)
    first = torch.arange(len(scores), device=scores.device) * len(value) // len(scores) * value.shape[1]
    length, value = value.norm(dim=-1).amax(-1), value.flatten(0, 1)  # longest value of each group, and all values
    draws = len(uniform) // len(scores)
    query = torch.arange(len(uniform), device=scores.device) // draws  # of each draw
    odds = torch.where(tail[:, None], uniform.view(len(scores), draws, -1) / share[:, None], torch.inf).flatten(0, 1)
    level = (FIRST * count).clamp_min(FEWEST).to(scores.dtype)[query]
    whole = ~tail.any(-1)[query]
    lowest = share.masked_fill(~tail, torch.inf).amin(-1)
    rows = (~whole).nonzero()[:, 0]
    once = rule.size not in ("checked", "proved")
    for _ in range(1 if once else STAGES):
        if not len(rows):
            break
        held, wanted = torch.ones_like(whole[rows]), level[rows]
        drawn = odds[rows] < level[rows, None]
        for part in _batches(drawn.sum(-1), value):
            own, of = level[rows[part]], query[rows[part]]
            sample = _Sample.at(own, drawn[part], share, weight, of, known, value, first, own * lowest[of] < 1)
            if rule.size == "proved":
                ceiling, longest = (bound - peak).exp()[of], length[first[of] * len(length) // len(value)]
                held[part], wanted[part] = sample.proved(ceiling, share[of], longest, promise)
            else:
                held[part], wanted[part] = sample.estimated(rule.size, promise)
        least, most = (factor * level[rows] for factor in ((1, float("inf")) if once else GROWTH))
        level[rows] = torch.where(held, level[rows], wanted.clamp(least, most))
        rows = rows[~held]
        much = (level[rows, None] * share[query[rows]]).clamp_max(1).sum(-1) > MUCH * count[query[rows]]
        whole[rows[much]] = True
        rows = rows[~much]
    if not once:
        whole[rows] = True
    level, whole, odds = level.view(-1, draws, 1), whole.view(-1, draws, 1), odds.view(len(scores), draws, -1)
    mask = seen[:, None] & (whole | fixed[:, None] | (odds < level))
    chance = torch.where(tail[:, None] & ~whole, level * share[:, None], 1).clamp(1e-30, 1)
    return mask.flatten(0, 1), (-chance.log()).flatten(0, 1)


def _batches(count: Tensor, value: Tensor) -> list[Tensor]:
    """Indices of queries in batches, by the number of their sampled keys, of at most `AT_ONCE` numbers of values."""
    order = count.argsort()
    sizes, room = count[order].clamp_min(1).tolist(), AT_ONCE[value.device.type != "cpu"] // value.shape[-1]
    stops = [0]
    for place, size in enumerate(sizes):
        if (place + 1 - stops[-1]) * size > room and place > stops[-1]:
            stops.append(place)
    return list(order.tensor_split(stops[1:]))


@dataclass(frozen=True, eq=False)
class _Sample:
    """Sampled keys of some queries (m, b), and the outputs (m, v) estimated from them."""

    level: Tensor  # (m,): c in π = min(1, c g)
    valid: Tensor  # whether an entry is a sampled key
    sure: Tensor  # (m,): whether the sample holds all keys, or `UNSURE` of those it might have missed
    share: Tensor  # g
    chance: Tensor  # π
    weight: Tensor
    value: Tensor  # (m, b, v)
    mass: Tensor  # (m,): estimate of Z
    output: Tensor

    @classmethod
    def at(
        cls, level: Tensor, drawn: Tensor, share: Tensor, weight: Tensor, of: Tensor, known: Tensor, value: Tensor,
        first: Tensor, missed: Tensor,
    ) -> Self:  # fmt: skip
        """Sample of the keys `drawn` (m, n) for the queries `of` (m,); `missed` says whether it may miss some.

        Shares and weights are (q, n); `known` (q, ·) holds the sums over fixed keys. Values of all queries are (·, v),
        those of the keys of a query from `first` (q,) on.
        """
        count = drawn.sum(-1)
        row, key = drawn.nonzero(as_tuple=True)
        valid = torch.arange(int(count.max().clamp_min(1)), device=drawn.device) < count[:, None]
        index = torch.zeros(valid.shape, dtype=torch.long, device=drawn.device)
        index[row, torch.arange(len(row), device=drawn.device) - (count.cumsum(0) - count)[row]] = key
        share, weight = share[of[:, None], index], weight[of[:, None], index]
        chance = (level[:, None] * share).clamp(1e-30, 1)
        sure = ~missed | ((valid & (chance < 1)).sum(-1) >= UNSURE)
        scaled = torch.where(valid, weight / chance, 0)
        mass = known[of, 0] + scaled.sum(-1)
        value = value[first[of, None] + index]
        output = (known[of, 1:] + (scaled[:, None] @ value)[:, 0]) / mass[:, None]
        return cls(level, valid, sure, share, chance, weight, value, mass, output)

    def estimated(self, size: str, promise: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Whether the estimated error keeps the promise (ε, δ), and the level at which it should."""
        error, delta = promise
        weight = (self.weight / self.mass[:, None])[..., None]
        norm, missing = self.output.square().sum(-1), 1 / self.chance - 1

        def squares(influence: Tensor) -> Tensor:
            return torch.where(self.valid, influence.square().sum(-1) / self.chance, 0)

        influence = weight * (self.value - self.output[:, None])
        base = squares(weight if size == "denominator" else influence)
        if size == "both":  # (e_D + e_N)², for the relative errors of the denominator and of the numerator
            both = squares(weight), squares(weight * self.value) / norm[:, None]
            d, n = ((part * missing).sum(-1, keepdim=True).sqrt().clamp_min(1e-30) for part in both)
            base = both[0] * (1 + n / d) + both[1] * (1 + d / n)
            error, delta = error / 2, delta / 2  # |Γ̂ − Γ| ≤ 2 (e_D + e_N) |Γ|, with δ/2 for each
        terms = base * missing
        trace = terms.sum(-1)
        limit = torch.ones_like(norm) if size in ("denominator", "both") else (norm - trace).clamp_min(0.1 * norm)
        limit = error**2 * limit  # |Γ̂|² is larger than |Γ|² by the trace, on average
        if size in ("denominator", "both", "trace"):
            factor = checked = torch.as_tensor(error_quantile(1.0, 1.0, delta)).to(trace)
        else:
            root = influence * torch.where(self.valid, missing / self.chance, 0).sqrt()[..., None]
            square = (root.mT @ root).double().square().sum((-1, -2))
            freedom = trace.double().square() / square.clamp_min(1e-300)
            spread = ((1 - self.chance) * terms.square()).double().sum(-1)
            degrees = 2 * trace.double().square() / spread.clamp_min(1e-300)
            planned, table = quantiles(delta, trace.device)
            factor = checked = _interpolated(planned, freedom, degrees).to(trace)
            if size == "checked":
                # Half of δ, because a sample that underestimates its own variance is the one that passes the check.
                checked = _interpolated(table, freedom, degrees).to(trace)
        held = self.sure & (norm > 0) & (trace * checked <= limit)
        if size == "checked" and bool(held.all()):
            return held, self.level
        limit = limit / factor
        # The next level is found to 3%; a sample whose size is not checked is drawn once and to 0.1%.
        least, most = (0.0, 12.0) if size != "checked" else (math.log(GROWTH[0]), math.log(GROWTH[1]))
        low, high = self.level.log() + least, self.level.log() + most
        for _ in range(14 if size != "checked" else 5):
            middle = (low + high) / 2
            later = (middle.exp()[:, None] * self.share).clamp(1e-30, 1)
            enough = (base * (1 / later - 1)).sum(-1) <= limit
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        return held, torch.where(self.sure | (size != "checked"), high.exp(), GROWTH[1] * self.level)

    def proved(
        self, ceiling: Tensor, share: Tensor, longest: Tensor, promise: tuple[float, float]
    ) -> tuple[Tensor, Tensor]:
        """Whether the error is proved to keep the promise (ε, δ), and twice the level.

        Unread weights are at most `ceiling` (m, n), and |v − Γ| ≤ 2 · `longest` (m,). Levels do not depend on the
        sample; each has the failure probability δ / `STAGES`. Since |Γ| ≥ |Γ̂| − r, r ≤ |Γ̂| ε/(1 + ε) is enough.
        """
        error, delta = promise
        chance = (self.level[:, None] * share).clamp(1e-30, 1)
        bound = torch.where((share > 0) & (chance < 1), ceiling / chance, 0) * 2 * longest[:, None]
        terms = (2 * longest[:, None] * self.weight).square() * (1 / self.chance - 1) / self.chance
        parts = (torch.where(self.valid, terms, 0).sum(-1), bound.square().amax(-1), bound.amax(-1))
        variance, largest, longest_term = (part.double().cpu().numpy() for part in parts)
        radius = torch.as_tensor(bernstein_radius(variance, largest, longest_term, delta / STAGES)).to(self.mass)
        return radius / self.mass <= error / (1 + error) * self.output.norm(dim=-1), 2 * self.level
