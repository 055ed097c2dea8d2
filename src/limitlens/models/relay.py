"""The one door to a model's attention: every call of every layer as it enters the softmax.

The transformers library sends the attention of its models through one function, chosen by name. `through` registers a
function of its own under a name of its own, for as long as its `with` block lasts: it reads the call, hands it to a
handler, and goes on to the function that the model would have used when the handler says so. So no code here knows any
architecture. `capture` is the handler that only looks, `intervene` the one that changes what a layer attends to.
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

Output = tuple[Tensor, Tensor | None]  # of a layer, (B, L, Hq, v), and its weights where the model gives them
Handler = Callable[["Captured", Callable[[Tensor], Output]], Output]  # told a call, and how to go on with a query
Runner = Callable[..., None]  # runs the model on its arguments up to its last attention layer

_PREFIX = "limitlens_"
_serial = count()
_relays: dict[str, _Relay] = {}  # those whose blocks are open, by their names in the library
# The layer types of a configuration that hold no softmax attention: nothing can be captured there, nothing is missing.
_WITHOUT_SOFTMAX = frozenset({"linear_attention", "mamba", "recurrent", "conv", "moe"})


@dataclass(frozen=True, eq=False)
class Captured:
    """One call of one attention layer, after rotary embedding and normalisation.

    With Hq query heads, Hkv key/value heads (query head h reads key/value head h // (Hq / Hkv)), and a(·) the softcap
    a(s) = softcap · tanh(s / softcap) or the identity, the layer's output for query i of head h is

        Σ_j e^{s_ij} v_j / (Σ_j e^{s_ij} + e^{sink_h}),    s_ij = a(scale · <q_i, k_j>) + bias_ij,

    both sums over the keys j that query i may see; the sink's term is there only when `sinks` is.
    """

    layer: int  # the layer's index in the model
    query: Tensor  # shapes (B, Hq, L, k), (B, Hkv, N, k) and (B, Hkv, N, v); N > L where a cache holds earlier keys
    key: Tensor
    value: Tensor
    scale: float  # the factor of the scores, most often 1/√k
    causal: bool  # no query sees a key after itself
    sliding_window: int | None = None  # keys at a distance below this are seen; None when all of the window is
    softcap: float | None = None  # the bound of the scores, see above
    sinks: Tensor | None = None  # learned logits, one per query head, shape (Hq,)
    mask: Tensor | None = None  # true where query i sees key j, like (B, Hq, L, N); None: `causal` alone says it
    bias: Tensor | None = None  # what the model adds to the scores (relative positions), broadcastable to (B, Hq, L, N)
    hidden: Tensor | None = None  # what the query projection reads, (B, L, d), where it was asked for and can be had
    position: Tensor | None = None  # (L,): where the queries stand in the text; None where the rows of a batch differ
    forward: Any = None  # what the caller passed as `forward` to name the forward that this call belongs to

    def seen(self, start: int = 0, stop: int | None = None) -> Tensor | None:
        """True where a query of rows start to stop sees a key, broadcastable to (B, Hq, stop − start, N); None: all."""
        (length, there), device = (self.query.shape[2], self.key.shape[2]), self.query.device
        stop = length if stop is None else stop
        if self.mask is not None:
            return self.mask if self.mask.shape[-2] == 1 else self.mask[..., start:stop, :]
        if not self.causal:
            return None
        last = torch.arange(start, stop, device=device)[:, None] + there - length  # the last key that each row sees
        return torch.arange(there, device=device) <= last


@contextmanager
def hook_attention(
    model: PreTrainedModel, handle: Handler, *, inside: bool = False, hidden: bool = False
) -> Iterator[Runner]:
    """Hand every call of every attention layer of `model` to `handle` within the block.

    The block is given a function that runs the model where only these calls are wanted: it breaks off when the last
    layer would go on, so that nothing is computed which no call can show.

    The calls come in the order of the layers, before the layer's output is computed; with `hidden` they hold the
    layer's input where its query projection is a known module. The model is put back as it was on leaving, whatever
    happened. `inside` allows an intervention around the block: what goes on from here goes through it.

    A model of which some layer does not go through the library's attention interface raises an `InputError`: on
    entering the block where the library says so, else when the first forward ends.
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
        # Eager attention reads causality off the mask alone, so there it may not be left out for being causal.
        return sdpa_mask(*args, **kwargs | ({"allow_is_causal_skip": False} if eager else {}))

    name = f"{_PREFIX}{next(_serial)}"
    relay = _Relay(model, handle, chosen, around, inside)
    with ExitStack() as undo:
        _relays[name] = relay
        undo.callback(_relays.pop, name)
        AttentionInterface.register(name, relay.attention)
        undo.callback(AttentionInterface._global_mapping.pop, name)  # the library offers no way to unregister
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


class _Seen(Exception):
    """The last layer was seen."""


class _Forward(threading.local):
    """What one forward must remember: forwards of several threads may run side by side."""

    def __init__(self) -> None:
        self.running = False  # a forward of the model; attention outside one is a layer that is computed again
        self.seen: set[int] = set()
        self.inputs: dict[int, Tensor] = {}
        self.name: Any = None  # what the caller passed to name it
        self.only = False  # the calls are wanted, and not what the model makes of them


class _Relay:
    """The attention function that is registered."""

    def __init__(
        self, model: PreTrainedModel, handle: Handler, chosen: dict[int, str | None], around: _Relay | None, inner: bool
    ) -> None:
        self.model, self.handle, self.chosen, self.around, self.inner = model, handle, chosen, around, inner
        self.now = _Forward()
        config = model.config.get_text_config()
        types = enumerate(getattr(config, "layer_types", None) or ())
        self.softmax = set(range(config.num_hidden_layers)) - {i for i, kind in types if kind in _WITHOUT_SOFTMAX}

    def run_until_last_attention(self, *args: Any, forward: Any = None, **kwargs: Any) -> None:
        """Run the model as far as its last attention."""
        self.now.only, self.now.name = True, forward
        try:
            self.model(*args, **kwargs)
        except _Seen:
            self.now.running = False
        finally:
            self.now.only, self.now.name = False, None

    def begin(self, *_: Any) -> None:
        """Before the model's forward."""
        self.now.running = True
        self.now.seen.clear()

    def end(self, *_: Any) -> None:
        """After the model's forward: a layer that was not captured is an error, never a gap in the results."""
        self.now.running = False
        missing = self.softmax - self.now.seen
        if missing or not self.now.seen:
            raise InputError(_refusal(self.model, f"layers {sorted(missing)}" if missing else "its layers"))

    def watch_inputs(self) -> Iterator[Any]:
        """Hooks that keep what each query projection reads until its layer is captured."""

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
        """Read the call and hand it over, together with how the model would have gone on."""
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
        # A mask says what is seen; only one that was left out, which eager mode never does, leaves it to the flag.
        later = 1 + key.shape[-2] - query.shape[-2]
        causal = bool(flag) and chosen != "eager" if mask is None else not bool(mask.triu(later).any())
        factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
        sliding_window, hidden = kwargs.get("sliding_window"), self.now.inputs.pop(id(module), None)
        place = _position(query, key, kwargs.get("position_ids"))
        seen = Captured(
            layer,
            query,
            key,
            value,
            factor,
            causal,
            sliding_window,
            softcap,
            sinks,
            mask,
            bias,
            hidden,
            place,
            self.now.name,
        )

        def go_on(query: Tensor) -> Output:
            if self.now.only and self.now.seen >= self.softmax:
                raise _Seen
            if self.around is not None:
                return self.around.attention(module, query, key, value, attention_mask, **kwargs)
            namespace, seeing = inspect.unwrap(type(module).forward).__globals__, attention_mask
            if chosen == "eager" or softcap is not None or sinks is not None:  # torch's own function knows neither
                attend = namespace["eager_attention_forward"]
                seeing = _additive(seeing, seen)
            else:
                attend = namespace["ALL_ATTENTION_FUNCTIONS"]["sdpa"]
            return attend(module, query, key, value, seeing, **kwargs)  # type: ignore[no-any-return]

        return self.handle(seen, go_on)

    def _layer(self, module: torch.nn.Module, query: Tensor, key: Tensor) -> int:
        """The index of the layer now called: its own, or for modules that do not know it the number of calls so far."""
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
    """Every configuration that may name an attention implementation: the modules' own and those nested in them."""
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
    for config in configs:
        # The public setter also writes nested configurations, each of which has its own value to go back to.
        config._attn_implementation_internal = chosen[id(config)]


def _refusal(model: torch.nn.Module, what: str) -> str:
    return (
        f"{type(model).__name__} computes the attention of {what} without the attention interface of transformers, "
        "through which alone heads can be read; choose another model or a newer version of transformers"
    )


def _split(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What may be seen (boolean) and what is added to the scores, from a mask in either of the library's two forms."""
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    seen = mask > torch.finfo(mask.dtype).min / 2
    bias = mask.masked_fill(~seen, 0)
    return seen, bias if bool(bias.any()) else None


def _position(query: Tensor, key: Tensor, given: Tensor | None) -> Tensor | None:
    """Where queries stand: as the model says, else the last of the keys; None where rows of the batch differ."""
    length, there = query.shape[-2], key.shape[-2]
    if given is None or given.ndim != 2 or given.shape[1] != length:
        return torch.arange(there - length, there, device=query.device)
    return given[0] if len(given) == 1 or bool((given == given[0]).all()) else None


def _additive(mask: Tensor | None, call: Captured) -> Tensor | None:
    """The mask as eager attention adds it to its scores: zero where a key is seen, the lowest number elsewhere."""
    if mask is None and call.causal:
        mask = call.seen()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, call.query.new_zeros(()), torch.finfo(call.query.dtype).min)
