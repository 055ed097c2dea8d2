"""Hook on a model's attention: every call of every attention layer, right before the softmax.

The transformers library calls one attention function, chosen by name, for all its models. Within its `with` block
`hook_attention` registers a function under a new name, which passes each call to a handler together with a function
that proceeds as the model would have done. So no code here depends on an architecture. `capture` only reads the calls,
`intervene` changes them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from limitlens.arrays import PreTrainedModel, Tensor, torch
from limitlens.errors import InputError
from limitlens.models._quiet import quiet
from limitlens.models.projections import query_projection

Output = tuple[Tensor, Tensor | None]  # of a layer (B, L, Hq, v), and its attention weights if returned
Handler = Callable[["Captured", Callable[[Tensor], Output]], Output]  # (call, function that proceeds) -> output
Runner = Callable[..., None]  # runs the model on its arguments up to its last attention layer

_PREFIX = "limitlens_"
_serial = count()
_relays: dict[str, _Relay] = {}  # relays of open blocks by their registered names
# Layer types without softmax attention: nothing can be captured there.
_WITHOUT_SOFTMAX = frozenset({"linear_attention", "mamba", "recurrent", "conv", "moe"})


@dataclass(frozen=True, eq=False)
class Captured:
    """One call of one attention layer, after rotary embedding and normalisation.

    With Hq query heads, Hkv key/value heads (query head h reads key/value head h // (Hq / Hkv)), and a(·) the softcap
    a(s) = softcap · tanh(s / softcap) or the identity, the layer's output for query i of head h is

        Σ_j e^{s_ij} v_j / (Σ_j e^{s_ij} + e^{sink_h}),    s_ij = a(scale · <q_i, k_j>) + bias_ij,

    both sums over the keys j that query i may see; the sink's term is there only when `sinks` is.
    """

    layer: int  # index of the layer in the model
    query: Tensor  # (B, Hq, L, k)
    key: Tensor  # (B, Hkv, N, k); N > L if a cache holds earlier keys
    value: Tensor  # (B, Hkv, N, v)
    scale: float  # factor of the scores, usually 1/√k
    causal: bool  # no query sees a later key
    sliding_window: int | None = None  # only keys at a smaller distance are seen; None: no limit
    softcap: float | None = None  # bound of the scores, see above
    sinks: Tensor | None = None  # learned sink logits, one per query head, (Hq,)
    mask: Tensor | None = None  # true where query i sees key j, as (B, Hq, L, N); None: only `causal`
    bias: Tensor | None = None  # added to the scores (relative positions), broadcastable to (B, Hq, L, N)
    hidden: Tensor | None = None  # input of the query projection, (B, L, d), where asked for and known
    position: Tensor | None = None  # (L,): positions of the queries; None if the rows of a batch differ
    forward: Any = None  # the caller's name of the forward that this call belongs to

    def seen(self, start: int = 0, stop: int | None = None) -> Tensor | None:
        """Whether the queries start to stop see each key, broadcastable to (B, Hq, stop − start, N); None: all do."""
        length, keys = self.query.shape[2], self.key.shape[2]
        device = self.query.device
        stop = length if stop is None else stop
        if self.mask is not None:
            return self.mask if self.mask.shape[-2] == 1 else self.mask[..., start:stop, :]
        if not self.causal:
            return None
        last = torch.arange(start, stop, device=device)[:, None] + keys - length  # the last key that each query sees
        return torch.arange(keys, device=device) <= last


@contextmanager
def hook_attention(
    model: PreTrainedModel, handle: Handler, *, inside: bool = False, hidden: bool = False
) -> Iterator[Runner]:
    """Pass every call of every attention layer of `model` to `handle` within the block.

    The block yields a function that runs the model only up to its last attention, for handlers that need no outputs.

    Calls come in the order of the layers, before the output of the layer is computed. With `hidden` they hold the
    input of the layer if its query projection is a known module. The model is restored on leaving, also after an
    error. `inside` allows an intervention around the block, which then handles the calls after this one.

    A model with a layer that does not use the library's attention interface raises an `InputError`, on entering the
    block if the library reports it, else at the end of the first forward.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(model).__name__} is an encoder with a decoder; one stack of layers is expected, "
            "so pass its encoder (model.get_encoder()) or another model"
        )
    configs = _configs(model)
    found = {id(config): config._attn_implementation for config in configs}
    around = next((_relays[name] for name in map(str, found.values()) if name in _relays), None)
    if around is not None and (around.inner or not inside):
        raise InputError(
            f"{type(model).__name__} is being captured already, or intervened in; leave that block before opening "
            "another, or open a capture inside an intervention"
        )
    chosen = found if around is None else around.chosen
    eager = "eager" in chosen.values()

    def make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        # Eager attention knows causality only from the mask, so a causal mask must not be left out.
        return sdpa_mask(*args, **kwargs | ({"allow_is_causal_skip": False} if eager else {}))

    name = f"{_PREFIX}{next(_serial)}"
    relay = _Relay(model, handle, chosen, around, inside)
    with ExitStack() as undo:
        _relays[name] = relay
        undo.callback(_relays.pop, name)
        AttentionInterface.register(name, relay.attention)
        undo.callback(AttentionInterface._global_mapping.pop, name)  # the library has no function to unregister
        AttentionMaskInterface.register(name, make_mask)
        undo.callback(AttentionMaskInterface._global_mapping.pop, name)
        undo.callback(_restore, configs, found)
        with quiet():
            model.set_attn_implementation(name)
        if model.config.get_text_config()._attn_implementation != name:
            raise InputError(_refusal(model, "its layers"))
        undo.callback(model.register_forward_pre_hook(relay.begin).remove)
        undo.callback(model.register_forward_hook(relay.end).remove)
        if hidden:
            for hook in relay.watch_inputs():
                undo.callback(hook.remove)
        yield relay.run_until_last_attention


class _LastAttentionReached(Exception):
    """The attention of the last layer was handled, and no output is needed."""


class _Forward(threading.local):
    """State of one forward, one per thread, since several threads may run forwards at the same time."""

    def __init__(self) -> None:
        self.running = False  # whether a forward runs; attention outside of one is a recomputed layer
        self.seen: set[int] = set()
        self.inputs: dict[int, Tensor] = {}
        self.name: Any = None  # what the caller passed to name it
        self.only = False  # whether the forward may stop at the last attention


class _Relay:
    """The registered attention function and the state of its block."""

    def __init__(
        self, model: PreTrainedModel, handle: Handler, chosen: dict[int, str | None], around: _Relay | None, inner: bool
    ) -> None:
        self.model = model
        self.handle = handle
        self.chosen = chosen  # attention implementations of the model by the id of their configuration
        self.around = around  # the intervention around this block
        self.inner = inner
        self.now = _Forward()
        config = model.config.get_text_config()
        types = enumerate(getattr(config, "layer_types", None) or ())
        self.softmax = set(range(config.num_hidden_layers)) - {i for i, kind in types if kind in _WITHOUT_SOFTMAX}

    def run_until_last_attention(self, *args: Any, forward: Any = None, **kwargs: Any) -> None:
        """Run the model up to its last attention."""
        self.now.only, self.now.name = True, forward
        try:
            self.model(*args, **kwargs)
        except _LastAttentionReached:
            self.now.running = False
        finally:
            self.now.only, self.now.name = False, None

    def begin(self, *_: Any) -> None:
        """Before the model's forward."""
        self.now.running = True
        self.now.seen.clear()

    def end(self, *_: Any) -> None:
        """After the model's forward: raise an error for a layer that was not captured."""
        self.now.running = False
        missing = self.softmax - self.now.seen
        if missing or not self.now.seen:
            raise InputError(_refusal(self.model, f"layers {sorted(missing)}" if missing else "its layers"))

    def watch_inputs(self) -> Iterator[Any]:
        """Hooks that keep the input of each query projection until its layer is captured."""

        def keep(key: int) -> Callable[[torch.nn.Module, tuple[Any, ...]], None]:
            return lambda _, args: self.now.inputs.__setitem__(key, args[0])

        for module in self.model.modules():
            projection = query_projection(module)
            if projection is not None:
                yield projection.register_forward_pre_hook(keep(id(module)))

    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Pass the call to the handler, together with the function that proceeds as the model would."""
        layer = self._layer(module, query, key)
        sinks, softcap, scale = kwargs.get("s_aux"), kwargs.get("softcap"), kwargs.get("scaling")
        chosen = self.chosen[id(module.config)]
        flag = kwargs.get("is_causal")
        if flag is None:
            flag = getattr(module, "is_causal", True)
        mask, bias = _split(attention_mask)
        position_bias = kwargs.get("position_bias")
        if position_bias is not None:
            bias = position_bias if bias is None else bias + position_bias
        # The mask decides what is seen; the flag counts only without a mask, which eager attention always has.
        later = 1 + key.shape[-2] - query.shape[-2]
        causal = bool(flag) and chosen != "eager" if mask is None else not bool(mask.triu(later).any())
        factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
        call = Captured(
            layer, query, key, value, factor, causal, kwargs.get("sliding_window"), softcap, sinks, mask, bias,
            hidden=self.now.inputs.pop(id(module), None), position=_position(query, key, kwargs.get("position_ids")),
            forward=self.now.name,
        )  # fmt: skip

        def proceed(query: Tensor) -> Output:
            if self.now.only and self.now.seen >= self.softmax:
                raise _LastAttentionReached
            if self.around is not None:
                return self.around.attention(module, query, key, value, attention_mask, **kwargs)
            namespace = inspect.unwrap(type(module).forward).__globals__
            mask = attention_mask
            if chosen == "eager" or softcap is not None or sinks is not None:  # torch's function supports neither
                attend = namespace["eager_attention_forward"]
                mask = _additive(mask, call)
            else:
                attend = namespace["ALL_ATTENTION_FUNCTIONS"]["sdpa"]
            return attend(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]

        return self.handle(call, proceed)

    def _layer(self, module: torch.nn.Module, query: Tensor, key: Tensor) -> int:
        """Index of the layer: the module's own, or the number of calls so far if the module has none."""
        name = type(self.model).__name__
        if query.ndim != 4 or query.shape[-2] > key.shape[-2]:
            raise InputError(
                f"{name} attends from {tuple(query.shape)} to {tuple(key.shape)}; expected (batch, heads, length, "
                "dimension) and no fewer keys than queries, so choose another model"
            )
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            if not self.now.running:
                raise InputError(f"{name} does not number its layers; expected whole forwards without checkpointing")
            layer = len(self.now.seen)
        if self.now.running and layer in self.now.seen:
            raise InputError(
                f"{name} attends more than once in layer {layer} of one forward; one self-attention a layer is "
                "expected, so choose a model without cross-attention or loops"
            )
        self.now.seen.add(layer)
        return layer


def _configs(model: torch.nn.Module) -> list[Any]:
    """All configurations that may name an attention implementation: those of the modules and nested ones."""
    found: dict[int, Any] = {}
    pending: list[Any] = [
        module.config for module in model.modules() if hasattr(getattr(module, "config", None), "sub_configs")
    ]
    while pending:
        config = pending.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            pending += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _restore(configs: list[Any], chosen: dict[int, str | None]) -> None:
    """Put back the attention implementation of every configuration."""
    for config in configs:
        # The public setter would also write the nested configurations, which have values of their own.
        config._attn_implementation_internal = chosen[id(config)]


def _refusal(model: torch.nn.Module, what: str) -> str:
    return (
        f"{type(model).__name__} computes the attention of {what} without the attention interface of transformers, "
        "which limitlens needs to read heads; choose another model or a newer version of transformers"
    )


def _split(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Visible keys (boolean) and added scores, from a boolean or an additive mask of the library."""
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    seen = mask > torch.finfo(mask.dtype).min / 2
    bias = mask.masked_fill(~seen, 0)
    return seen, bias if bool(bias.any()) else None


def _position(query: Tensor, key: Tensor, given: Tensor | None) -> Tensor | None:
    """Positions of the queries: the model's, else those of the last keys; None if the rows of the batch differ."""
    length, keys = query.shape[-2], key.shape[-2]
    if given is None or given.ndim != 2 or given.shape[1] != length:
        return torch.arange(keys - length, keys, device=query.device)
    return given[0] if len(given) == 1 or bool((given == given[0]).all()) else None


def _additive(mask: Tensor | None, call: Captured) -> Tensor | None:
    """The mask that eager attention adds to its scores: zero for visible keys, the lowest number for others."""
    if mask is None and call.causal:
        mask = call.seen()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, call.query.new_zeros(()), torch.finfo(call.query.dtype).min)
