"""Exponent at which each head's critical score factor grows with the number of keys, within the trained window.

A row of scores over n keys has the critical inverse temperature β_n of `statistics.gap_counting`, where its largest
weight is one fifth (after Hayase and Karakida, arXiv 2605.12697). The rows belong to queries in the second half of the
window over nested random samples of the keys that they see, without the first token, which may be a sink. γ is the
slope of ln β_n in ln n, the median over rows. A heuristic: real keys do not follow one local power law.
"""

from collections.abc import Sequence

import numpy as np

from limitlens.arrays import Tensor, torch
from limitlens.attention.scores import scores_of
from limitlens.errors import Array
from limitlens.interventions.reader import Reader
from limitlens.models import Captured, capture
from limitlens.statistics.gap_counting import critical_rows

QUERIES = 12  # of a document
SIZES = 4  # nested samples of each row, each half of the next


def critical_exponents(reader: Reader, documents: Sequence[Tensor], trained: int, seed: int = 0) -> Array:
    """γ (layers, heads) from the first `trained` tokens of some documents."""
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xC817]))
    least = trained // 2
    positions = np.sort(generator.choice(np.arange(least, trained), min(QUERIES, trained - least), replace=False))
    samples = [1 + generator.permutation(int(p))[: least - 1] for p in positions]  # of the keys 1 .. p
    sizes = [(least - 1) >> step for step in reversed(range(SIZES))]
    x = np.log(sizes) - np.log(sizes).mean()
    slopes: dict[int, list[Array]] = {}

    def take(call: Captured) -> None:
        query = call.query[0][:, torch.as_tensor(positions, device=call.query.device)].float() * call.scale
        keys = call.key[0].float().repeat_interleave(len(query) // call.key.shape[1], 0)
        rows = scores_of(query, keys, call.softcap).cpu().double().numpy()  # (heads, queries, keys)
        sampled = np.stack([rows[:, i, kept] for i, kept in enumerate(samples)], 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(critical_rows(sampled, sizes))
            slopes.setdefault(call.layer, []).append(np.tensordot(x, logs, 1) / np.square(x).sum())

    for ids in documents:
        with torch.no_grad(), reader.acting(None), capture(reader.stack, take):
            reader.hidden(ids[:trained])
    medians = []
    for layer in range(reader.layers):
        rows = np.concatenate(slopes[layer], 1)
        medians.append([float(np.median(row[np.isfinite(row)])) if np.isfinite(row).any() else 0.0 for row in rows])
    return np.array(medians)
