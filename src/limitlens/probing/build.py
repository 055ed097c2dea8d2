"""Measure layers that have seen the pool, and build the records of their heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from limitlens.arrays import to_device
from limitlens.errors import Array
from limitlens.probing.collect import Collector
from limitlens.probing.diagnostics import LayerDetail, layer_detail
from limitlens.probing.geometry import LayerGeometry, layer_geometry
from limitlens.probing.layer import LayerCurves, layer_curves
from limitlens.probing.moment_errors import MIN_SNR
from limitlens.probing.pilot import Layer
from limitlens.probing.predict_layer import TOKENS, predict_layer
from limitlens.probing.record import HeadRecord
from limitlens.probing.regimes import Thresholds, classify, resampled
from limitlens.probing.sinks import layer_sinks
from limitlens.record import to_json
from limitlens.statistics.predicted_curve import PredictedErrors
from limitlens.theory.exact_bootstrap import QUARTERS

# Fields of a head's record that are copied from the measurements of its layer.
GEOMETRY = ("horizon", "horizon_one_sided", "coupling", "mean_tilt", "score_std")
DETAIL = (
    "predicted_error", "effective_tokens", "top_weight", "entropy", "ordered_weights", "pareto_k", "local_dimension",
    "outside_support",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Measured:
    """All measurements of one layer; `special` (heads,) is the share of the pooled mass on special tokens."""

    layer: Layer
    curves: LayerCurves
    detail: LayerDetail
    geometry: LayerGeometry
    special: Array
    predictions: list[tuple[PredictedErrors, ...]]  # of each head: without its atom, and with it where there is one


def measure(collectors: Sequence[Collector], window: int) -> list[Measured]:
    """Measure layers of equal shape that have seen the pool, in windows of `window` tokens."""
    with torch.inference_mode():
        whole = Collector.joined(collectors)
        work: tuple[Callable[[], Any], ...] = (
            partial(_predictions, whole), partial(layer_curves, whole), partial(layer_detail, whole, window),
            partial(layer_geometry, whole, collectors),
        )  # fmt: skip
        predictions, curves, detail, geometries = _run_all(work, whole.key.device)
        share = torch.exp(whole.special.lse - curves.reference.lse)
        special = np.asarray(share.reshape(-1, whole.layer.query.shape[2]).mean(-1).cpu())
    shared, groups = collectors[0].layer.query.shape[:2]
    found = []
    for place, (own, geometry) in enumerate(zip(collectors, geometries, strict=True)):
        pairs = slice(place * shared, (place + 1) * shared)
        heads = slice(pairs.start * groups, pairs.stop * groups)
        parts = (curves.of(heads, pairs), detail.of(heads), geometry, special[heads], predictions[heads])
        found.append(Measured(own.layer, *parts))
    return found


def _run_all(work: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
    """Run pieces of work; on a GPU each in a CUDA stream of its own, since small ones leave most of it idle."""
    if device.type == "cpu":
        return [piece() for piece in work]
    torch.linalg.eigh(torch.eye(1, device=device))  # the first call must come from one thread
    here, streams = torch.cuda.current_stream(device), _streams(device, len(work))

    def in_stream(piece: Callable[[], Any], stream: torch.cuda.Stream) -> Any:
        stream.wait_stream(here)
        with torch.cuda.stream(stream), torch.inference_mode():
            return piece()

    with ThreadPoolExecutor(len(work)) as pool:
        found = list(pool.map(in_stream, work, streams))
    for stream in streams:
        here.wait_stream(stream)
    return found


@cache
def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """CUDA streams, the same in every call: memory freed on a stream is reused there."""
    return [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]


def _predictions(collector: Collector) -> list[tuple[PredictedErrors, ...]]:
    """Errors of each head of a layer, predicted from some of the tokens that the layer has kept."""
    assignment = collector.assignment
    slots = assignment.random_slots(TOKENS)
    some = to_device(slots, collector.key.device)
    # Replicates of single documents contain the scatter of the text, which is not added again.
    quarters = None if assignment.single else assignment.origin[slots] * QUARTERS // assignment.seen
    sizes = np.rint(assignment.filled.cumsum(1).mean(0)).tolist()
    key, value = (tokens.index_select(0, some) for tokens in (collector.key, collector.value))
    return predict_layer(collector.layer, key, value, sizes, quarters=quarters, seed=assignment.seed)


def head_records(
    measured: Measured, *, causal: bool, window: int, thresholds: Thresholds, seed: int
) -> list[HeadRecord]:
    """Build the records of a layer's query heads, in order."""
    layer, curves, detail, geometry = measured.layer, measured.curves, measured.detail, measured.geometry
    sizes = np.rint(curves.counts.mean(0))
    known = {"floor": np.full(len(sizes), detail.floor.max()), "seed": seed}
    known["finite_population_correction"] = curves.finite_population_correction
    main = curves.bare if curves.atomic is None else curves.atomic
    sinks = layer_sinks(layer, curves.reference.lse, curves.pool, sizes, window)
    # an array or a number for each head; None where it is not known
    arrays = {name: getattr(of, name) for of, names in ((geometry, GEOMETRY), (detail, DETAIL)) for name in names}
    by_head: dict[str, Any] = {name: to_json(of) if np.ndim(of) == 1 else of for name, of in arrays.items()}

    def record(head: int) -> HeadRecord:
        verdict = classify(detail.effective_tokens[head], sizes, float(detail.top_weight[head]), thresholds)
        sums = (detail.effective_sums[head], detail.top_sums[head], detail.members)
        verdict = resampled(verdict, *sums, sizes, seed, thresholds)
        own: dict[str, Any] = {name: None if of is None else of[head] for name, of in by_head.items()}
        sink = sinks[head] if sinks else None
        predicted = [{"prediction": one, "text": one.text_shifts(sizes)} for one in measured.predictions[head]]
        curve = main.curve(head, sizes, **predicted[-1], **known)
        moment_curves = {
            name: part.curve(head, sizes, min_snr=MIN_SNR, **known) for name, part in curves.others.items()
        }
        without_sink = None if curves.atomic is None else curves.bare.curve(head, sizes, **predicted[0], **known)
        return HeadRecord(
            layer=layer.index, head=head, kv_head=head // layer.query.shape[1],
            sliding_window=layer.traits.sliding_window, geometry_note=geometry.reason or None,
            **own, curve=curve, without_sink=without_sink, centred=main.centred(head, curve),
            centred_without_sink=None if without_sink is None else curves.bare.centred(head, without_sink),
            effective_tokens_growth=verdict.growth, ranks=tuple(int(rank) for rank in detail.ranks), sink=sink,
            sink_mass=sink.share_in_window if sink else None if causal else float(measured.special[head]),
            regime=verdict.regime, regime_reason=verdict.reason, regime_agreement=verdict.agreement,
            critical=detail.critical[head], moment_curves=moment_curves,
        )  # fmt: skip

    return [record(head) for head in range(len(detail.entropy))]
