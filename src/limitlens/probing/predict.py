"""Every head of a model foretold from a pilot alone: a few thousand tokens and a few dozen queries, nothing measured.

The pilot's tokens are taken for the law of all tokens, and the error of n of them follows exactly (`pilot_errors`).
A layer's keys and values are gone when its heads are told.
"""

import time
from collections.abc import Sequence
from itertools import count

import numpy as np
import torch
from torch import Tensor

from limitlens.errors import InputError, Progress, check_number
from limitlens.models import Captured, LoadedModel, Windows, capture
from limitlens.models.opening import FORWARD, open_windows
from limitlens.probing.collect import tokens_of
from limitlens.probing.pilot import Layer, Pilot, run_pilot
from limitlens.probing.predict_layer import foretell
from limitlens.probing.prediction import HeadPrediction, PredictedCurve, PredictedRate, Predictions
from limitlens.probing.record import ERRORS
from limitlens.sampling.cells import parse_sizes
from limitlens.sampling.workers import Workers, workers_for
from limitlens.statistics.bootstrap import ENDS
from limitlens.statistics.crossing import whole
from limitlens.statistics.error_curve import TokensFor
from limitlens.statistics.predicted_curve import Foresight
from limitlens.theory.exact_bootstrap import PARTS, QUARTERS

READ = 100_000  # tokens of the text, or all there are, among which the pilot's windows are drawn
QUERY_WINDOWS = 32  # windows that give queries, at least: intervals come from resampling them
QUERIES_A_WINDOW = 3  # at most, where the text is long enough
FEWEST = PARTS  # tokens of a pilot


def predict(
    model: str | LoadedModel,
    corpus: str = "stdlib-docs",
    *,
    tokens: int = 3072,
    queries: int = 48,
    window: int | None = None,
    special: str = "auto",
    sizes: str | Sequence[int] = "64:4096:7",
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
) -> Predictions:
    """Foretell the error curve, the rate and n(ε) of every head of a model from a few tokens: `.table`, `.document()`.

    Parameters
    ----------
    model, corpus, window, special, device : as in `limitlens.probe`
    tokens : of the pilot: so many, in random windows, stand for the whole text
    queries : queries a head, from windows of their own
    sizes : numbers of tokens n to foretell errors at, as they are or as "lo:hi:k"; they may exceed the pilot
    progress : called with (layers done, layers in all)

    >>> told = ll.predict(model, corpus=text, tokens=500, window=50, queries=8, sizes=[8, 32, 128])
    >>> len(told.table)
    36
    """
    begun = time.perf_counter()
    n = parse_sizes(sizes)
    check_number("tokens", tokens, "at least 1, such as 3072", low=1)
    check_number("queries", queries, "at least 2, such as 48", low=2)
    loaded, windows = open_windows(
        model, corpus, max(READ, 2 * tokens), window=window, special=special, device=device, fewer=True
    )
    asking, keyed, warnings = _draw(windows, corpus, tokens, queries, seed)
    with workers_for(loaded.model.device) as workers, torch.inference_mode():
        batch = max(1, FORWARD // windows.length)
        pilot = run_pilot(
            loaded, windows, asking, queries=queries, batch=batch, seed=seed, report=lambda _: None, workers=workers
        )
        positions = pilot.positions
        if len(keyed) * len(positions) < FEWEST:
            few = f"the pilot has {len(keyed) * len(positions)} tokens"
            raise InputError(f"{few}; expected at least {FEWEST}, so ask for more tokens or longer windows")
        heads = _heads(loaded, windows, keyed, pilot, n, batch, seed, workers, progress)
    if pilot.causal:  # docs/predict.md
        warnings.append("few windows say little of a decoder: 64 to 86% of its 95% intervals held what was measured")
    return Predictions(
        model=loaded.name, model_revision=loaded.revision, model_sha256=loaded.sha256,
        model_note=loaded.note or None, causal=pilot.causal, corpus=corpus, corpus_sha256=windows.sha256,
        tokens=len(keyed) * len(positions), tokens_asked=tokens, window=windows.length,
        windows={"count": windows.count, "queries": asking.tolist(), "keys": keyed.tolist()},
        pooled_positions=(positions.start, positions.stop), queries=len(pilot.queries), n=tuple(n), heads=tuple(heads),
        seed=seed, device=str(loaded.model.device), seconds=time.perf_counter() - begun, warnings=tuple(warnings),
        special=windows.around,
    )  # fmt: skip


def _draw(
    windows: Windows, corpus: str, tokens: int, queries: int, seed: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Random windows for queries and for keys, none for both, and what must be said of their number."""
    if windows.count < 2:
        raise InputError(
            f"the corpus {corpus!r} holds {windows.count} whole windows of {windows.length} tokens; expected one for "
            "queries and one for keys at least, so give more text or shorter windows"
        )
    wanted, warnings = -(-tokens // windows.length), list(windows.warnings)
    keys = min(wanted, windows.count - 1)
    asking = min(max(QUERY_WINDOWS, -(-queries // QUERIES_A_WINDOW)), windows.count - keys)
    if keys < wanted:
        short = f"the text has {windows.count} windows: {keys} of them give keys instead of the {wanted} asked for"
        warnings.append(f"{short}; more text gives more")
    if asking == 1:
        warnings.append("all queries come from one window: intervals do not say how queries of others differ")
    order = np.random.default_rng(np.random.SeedSequence([seed, 0x9107])).permutation(windows.count)
    return np.sort(order[:asking]), order[asking : asking + keys], warnings


def _heads(
    loaded: LoadedModel, windows: Windows, keyed: np.ndarray, pilot: Pilot, n: Sequence[int],
    batch: int, seed: int, workers: Workers, progress: Progress | None,
) -> list[HeadPrediction]:  # fmt: skip
    """Run the model over the windows of the keys and foretell the heads of each layer when it has seen them all."""
    positions = slice(pilot.positions.start, pilot.positions.stop)
    tokens, queries = len(keyed) * len(pilot.positions), len(pilot.queries)
    # Whole windows make up its parts, where there are enough: tokens of one are no independent witnesses.
    place = np.arange(tokens) // len(pilot.positions) if len(keyed) >= QUARTERS else np.arange(tokens)
    quarters = place * QUARTERS // (len(keyed) if len(keyed) >= QUARTERS else tokens)
    waiting: dict[int, list[tuple[Tensor, Tensor]]] = {index: [] for index in pilot.layers}
    found: list[HeadPrediction] = []
    seen, done = 0, count(1)

    def take(captured: Captured) -> None:
        parts, layer = waiting[captured.layer], pilot.layers[captured.layer]
        parts.append(tuple(tokens_of(part[:, :, positions]).float() for part in (captured.key, captured.value)))  # type: ignore[arg-type]
        if seen < len(keyed):
            return
        key, value = (torch.cat(part) for part in zip(*parts, strict=True))
        parts.clear()
        told = foretell(layer, key, value, n, queries=queries, quarters=quarters, few=True, seed=seed, workers=workers)
        found.extend(_head(layer, head, one, n) for head, one in enumerate(told))
        if progress is not None:
            progress(next(done), len(pilot.layers))

    with capture(loaded.model, take) as run_until_last_attention:
        for ids in windows.batches(batch, keyed):
            seen += len(ids)
            run_until_last_attention(input_ids=ids.to(loaded.model.device))
    return found


def _head(layer: Layer, head: int, told: tuple[Foresight, ...], n: Sequence[int]) -> HeadPrediction:
    """A head from what was foretold of its bare law and, where there is one, beside its atom."""
    bare, full = _curve(told[0], n), _curve(told[-1], n)
    rate = None
    if told[0].defined and len(n) > 1:
        slope, low, high = told[0].slope(n)
        rate = PredictedRate(slope, (low, high))
    return HeadPrediction(
        layer=layer.index, head=head, kv_head=head // layer.query.shape[1], error=full.error, low=full.low,
        high=full.high, tokens_for=full.tokens_for, rate=rate, without_sink=bare if len(told) > 1 else None,
    )  # fmt: skip


def _curve(told: Foresight, n: Sequence[int]) -> PredictedCurve:
    """The errors at sizes n and n(ε); none of both where the output is 0."""
    if not told.defined:
        nothing = np.full(len(n), np.nan)
        return PredictedCurve(nothing, nothing, nothing, {str(error): None for error in ERRORS})
    error, low, high = told.error(n)
    return PredictedCurve(error, low, high, {str(error): _tokens_for(told, error, n) for error in ERRORS})


def _tokens_for(told: Foresight, error: float, n: Sequence[int]) -> TokensFor | None:
    """n(ε) with its 95% interval; None where no foretold size is enough."""
    needed = told.crossed(error)
    ends = np.quantile(needed[1:], ENDS, method="nearest")
    middle, low, high = (whole(float(number)) for number in (needed[0], *ends))
    return None if middle is None else TokensFor(middle, (low, high), extrapolated=not n[0] <= middle <= n[-1])
