"""Hook into the attention of any transformers model, called with queries, keys and values before the softmax.

The transformers library calls one attention function, chosen by name, for nearly all its models. `hook_attention`
registers a function under a new name, so no code here depends on an architecture. Modules with attention code of their
own are called through `limitlens.models.readers`. `capture` reads the calls, `intervene` changes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

from limitlens.arrays import PreTrainedModel, Tensor, torch
from limitlens.errors import InputError
from limitlens.models.catalog import quiet
from limitlens.models.projections import query_projection
from limitlens.models.readers import NEEDED, READERS, read_modules, unread_classes
from limitlens.models.rope_scaling import rotary_frequencies

Output = tuple[Tensor, Tensor | None]  # output of a layer (B, L, Hq, v), and its attention weights if returned
Handler = Callable[["Captured", Callable[[Tensor], Output]], Output]  # (call, function that proceeds) -> output
Runner = Callable[..., None]  # runs the model on its arguments up to its last attention layer

# Layer types without softmax attention: nothing can be captured there.
_WITHOUT_SOFTMAX = frozenset({"linear_attention", "mamba", "recurrent", "conv", "moe"})


@dataclass(frozen=True, eq=False)
class Captured:
    """Input of one attention layer in one forward pass: queries, keys, values and masks, after rotary embedding.

    With a(s) = softcap · tanh(s / softcap), or s without softcap, the layer's output for query i of head h is

        Σ_j e^{s_ij} v_j / (Σ_j e^{s_ij} + e^{sink_h}),    s_ij = a(scale · <q_i, k_j>) + bias_ij.

    The sums are over the keys j that query i sees. The term e^{sink_h} exists only if `sinks` is given. Query head h
    reads key/value head h // (Hq / Hkv).
    """

    layer: int  # index of the layer in the model
    query: Tensor  # (B, Hq, L, k)
    key: Tensor  # (B, Hkv, N, k); N > L if a cache holds earlier keys
    value: Tensor  # (B, Hkv, N, v)
    scale: float  # factor of the scores, usually 1/√k
    causal: bool  # whether no query sees a later key
    sliding_window: int | None = None  # queries see only keys at a smaller distance than this; None: no limit
    softcap: float | None = None  # bound of the scores, as in a(·) above
    sinks: Tensor | None = None  # learned sink logits, one per query head, (Hq,)
    mask: Tensor | None = None  # true where query i sees key j, as (B, Hq, L, N); None: only `causal`
    bias: Tensor | None = None  # added to the scores (relative positions), broadcastable to (B, Hq, L, N)
    hidden: Tensor | None = None  # input of the query projection, (B, L, d), if requested and known
    position: Tensor | None = None  # (L,): positions of the queries; None if the rows of a batch differ
    forward: Any = None  # label that the caller gave to this forward pass
    frequencies: Tensor | None = None  # (r,): rotary angles per token of the dimensions (i, i + r), where known; L > 1

    def slides(self, context: int) -> bool:
        """Whether the layer's sliding window is so short that its cache does not hold all of `context` tokens."""
        return self.sliding_window is not None and self.sliding_window <= context  # a cache holds window − 1 tokens

    def seen(self, start: int = 0, stop: int | None = None) -> Tensor | None:
        """Mask of keys that queries `start` to `stop` see, broadcastable to (B, Hq, stop − start, N); None: all."""
        length, keys = self.query.shape[2], self.key.shape[2]
        device = self.query.device
        if self.mask is not None:
            return self.mask if self.mask.shape[-2] == 1 else self.mask[..., start:stop, :]
        if not self.causal:
            return None
        last = torch.arange(length, device=device)[start:stop, None] + keys - length  # last key that each query sees
        return torch.arange(keys, device=device) <= last


def capture(
    model: PreTrainedModel, on_attention: Callable[[Captured], None], *, hidden: bool = False
) -> AbstractContextManager[Runner]:
    """Call `on_attention` with the input of every attention layer in each forward pass of `model` within the block.

    `with capture(model, take) as run:` also gives a function. `run(input_ids=ids)` runs the model without outputs and
    stops at the last attention. Outputs of the model do not change, and it is restored on leaving the block, also after
    an error. Inside an `intervene` block the changed queries are captured.
    """

    def handle(call: Captured, proceed: Callable[[Tensor], Output]) -> Output:
        on_attention(call)
        return proceed(call.query)

    return hook_attention(model, handle, inside=True, hidden=hidden)


@contextmanager
def hook_attention(
    model: PreTrainedModel, handle: Handler, inside: bool = False, hidden: bool = False
) -> Iterator[Runner]:
    """Replace the attention of `model` within the block: `handle(input, proceed)` returns the output of every layer.

    `proceed(query)` computes the model's own output. The block yields a function that runs the model only up to its
    last attention. `hidden` adds the layer's input to `Captured`, if its query projection is known. `inside` allows
    the block inside an `intervene` block. The model is restored on leaving. A layer that neither uses the attention
    interface of transformers nor has a reader raises an `InputError`, on entry or after the first forward pass.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if getattr(model.config, "is_encoder_decoder", False):
        given = f"{type(model).__name__} is an encoder with a decoder"
        raise InputError(f"{given}; expected one stack of layers, such as its encoder (model.get_encoder())")
    configs = _configs(model)
    found = {id(config): config._attn_implementation for config in configs}
    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    owners = (getattr(functions.get(str(name)), "__self__", None) for name in found.values())
    around = next((owner for owner in owners if isinstance(owner, _Relay)), None)  # the block around this one
    if around is not None and (around.inner or not inside):
        given = f"{type(model).__name__} is already inside a `with` block that captures it or intervenes in it"
        raise InputError(f"{given}; leave that block first, or open a capture inside an intervention")
    chosen = found if around is None else around.chosen
    eager = "eager" in chosen.values()

    def make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        # Eager attention knows causality only from the mask, so a causal mask must not be left out.
        return sdpa_mask(*args, **kwargs | ({"allow_is_causal_skip": False} if eager else {}))

    relay = _Relay(model, handle, chosen, around, inside)
    name = f"limitlens_{id(relay)}"
    with ExitStack() as undo:
        AttentionInterface.register(name, relay.attention)
        undo.callback(functions.pop, name)  # the library has no function to unregister
        AttentionMaskInterface.register(name, make_mask)
        undo.callback(masks.pop, name)
        for config in configs:
            # The public setter would also write the nested configurations, which have values of their own.
            undo.callback(setattr, config, "_attn_implementation_internal", found[id(config)])
        with quiet():
            model.set_attn_implementation(name)
        for module, reader in read_modules(model).items():
            undo.callback(_set_forward, module, module.__dict__.get("forward"))
            _set_forward(module, partial(reader.forward, module, relay.attention))
            model.config._attn_implementation_internal = name  # makes the mask; the library sets no name here
        if model.config.get_text_config()._attn_implementation != name:
            raise InputError(_refusal(model, "its layers"))
        undo.callback(model.register_forward_pre_hook(relay.begin).remove)
        undo.callback(model.register_forward_hook(relay.end).remove)
        for module in model.modules() if hidden else ():
            if (projection := query_projection(module)) is not None:
                undo.callback(projection.register_forward_pre_hook(relay.keep_input(id(module))).remove)
        yield relay.run_until_last_attention


class _LastAttentionReached(Exception):
    """Raised to stop a forward pass at the last attention, if no output is needed."""


@dataclass(eq=False)
class _Forward:
    """State of one running forward pass of the model."""

    name: Any = None  # name that the caller gave to the forward pass
    only: bool = False  # whether the forward pass may stop at the last attention
    seen: set[int] = field(default_factory=set)  # layers whose attention was handled
    inputs: dict[int, Tensor] = field(default_factory=dict)  # inputs of query projections by the id of their module
    known: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)  # by id of a tensor: what was read from it

    def once(self, given: Tensor, read: Callable[[], Any]) -> Any:
        """What `read` finds in a tensor that layers share; on a GPU each reading waits for the device."""
        if id(given) not in self.known:
            self.known[id(given)] = given, read()
        return self.known[id(given)][1]


@dataclass(eq=False)
class _Relay:
    """The attention function registered by `hook_attention`, and the state of the `with` block."""

    model: PreTrainedModel
    handle: Handler
    chosen: dict[int, str | None]  # attention implementations of the model by the id of their configuration
    around: _Relay | None  # the intervention around this block
    inner: bool  # whether the block may be inside an intervention
    forwards: dict[int, _Forward] = field(default_factory=dict)  # running forward passes by thread identifier

    def __post_init__(self) -> None:
        config = self.model.config.get_text_config()
        types = enumerate(getattr(config, "layer_types", None) or ())
        self.softmax = set(range(config.num_hidden_layers)) - {i for i, kind in types if kind in _WITHOUT_SOFTMAX}

    def run_until_last_attention(self, *args: Any, forward: Any = None, **kwargs: Any) -> None:
        """Run the model up to the attention of its last layer; `forward` is a label stored in `Captured.forward`."""
        self.forwards[get_ident()] = _Forward(forward, only=True)
        try:
            self.model(*args, **kwargs)
        except _LastAttentionReached:
            pass
        finally:
            self.forwards.pop(get_ident(), None)

    def begin(self, *_: Any) -> None:
        """Hook before a forward pass of the model: start its state and drop that of a pass that failed."""
        running = self.forwards.get(get_ident())
        if running is None or not running.only:
            self.forwards[get_ident()] = _Forward()

    def end(self, *_: Any) -> None:
        """Hook after a forward pass of the model: raise an `InputError` if an attention layer was not captured."""
        seen = self.forwards.pop(get_ident()).seen
        missing = self.softmax - seen
        if missing or not seen:
            raise InputError(_refusal(self.model, f"layers {sorted(missing)}" if missing else "its layers"))

    def keep_input(self, key: int) -> Callable[[torch.nn.Module, tuple[Any, ...]], None]:
        """Hook that stores the input of a query projection; `key` is the id of its attention module."""
        return lambda _, args: self.forwards.get(get_ident(), _Forward()).inputs.__setitem__(key, args[0])

    def attention(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None = None, **kwargs: Any,
    ) -> Output:  # fmt: skip
        """Pass a layer's attention call to the handler, with a function that computes the model's own output."""
        running = self.forwards.get(get_ident())  # None while `backward` computes a layer again
        forward = running or _Forward()
        layer = self._layer(module, query, key, running)
        sinks, softcap, scale = kwargs.get("s_aux"), kwargs.get("softcap"), kwargs.get("scaling")
        chosen = self.chosen[id(getattr(module, "config", self.model.config))]
        flag = kwargs.get("is_causal")
        flag = getattr(module, "is_causal", True) if flag is None else flag
        mask, bias = _split(attention_mask)
        if (position_bias := kwargs.get("position_bias")) is not None:
            bias = position_bias if bias is None else bias + position_bias
        # The mask decides what is seen; the flag counts only without a mask, which eager attention always has.
        later = 1 + key.shape[-2] - query.shape[-2]
        causal = bool(flag) and chosen != "eager"
        if attention_mask is not None and mask is not None:
            causal = forward.once(attention_mask, lambda: not bool(mask.triu(later).any()))
        factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
        position = _position(query, key, kwargs.get("position_ids"), forward)
        call = Captured(
            layer, query, key, value, factor, causal, kwargs.get("sliding_window"), softcap, sinks, mask, bias,
            hidden=forward.inputs.pop(id(module), None), position=position, forward=forward.name,
            frequencies=rotary_frequencies(self.model, layer) if query.shape[2] > 1 else None,
        )  # fmt: skip

        def proceed(query: Tensor) -> Output:
            if forward.only and forward.seen >= self.softmax:
                raise _LastAttentionReached
            if self.around is not None:
                return self.around.attention(module, query, key, value, attention_mask, **kwargs)
            mask = attention_mask
            if (reader := READERS.get(type(module).__name__)) is not None:
                return reader.attend(module, query, key, value, _additive(mask, call), **kwargs)
            namespace = inspect.unwrap(type(module).forward).__globals__
            if chosen == "eager" or softcap is not None or sinks is not None:  # torch's function supports neither
                attend = namespace["eager_attention_forward"]
                mask = _additive(mask, call)
            else:
                attend = namespace["ALL_ATTENTION_FUNCTIONS"]["sdpa"]
            return attend(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]

        return self.handle(call, proceed)

    def _layer(self, module: torch.nn.Module, query: Tensor, key: Tensor, forward: _Forward | None) -> int:
        """Index of the layer of an attention module: its `layer_idx`, or the number of layers handled so far."""
        name = type(self.model).__name__
        if query.ndim != 4 or query.shape[-2] > key.shape[-2]:
            given = f"{name} attends from {tuple(query.shape)} to {tuple(key.shape)}"
            raise InputError(f"{given}; expected (batch, heads, length, dimension), and as many keys or more")
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            if forward is None:
                raise InputError(f"{name} does not number its layers; expected whole forwards without checkpointing")
            layer = len(forward.seen)
        if forward is not None:
            if layer in forward.seen:
                given = f"{name} attends more than once in layer {layer} of one forward"
                raise InputError(f"{given}; expected one self-attention per layer, without cross-attention or loops")
            forward.seen.add(layer)
        return layer


def _configs(model: torch.nn.Module) -> list[Any]:
    """All configurations of a model and its modules, nested ones too, that may name an attention implementation."""
    found: dict[int, Any] = {}
    configs = (getattr(module, "config", None) for module in model.modules())
    pending: list[Any] = [config for config in configs if hasattr(config, "sub_configs")]
    while pending:
        config = pending.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            pending += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _set_forward(module: torch.nn.Module, forward: Callable[..., Any] | None) -> None:
    """Let calls of one module run `forward`, or the method of its class if None."""
    module.__dict__.pop("forward", None) if forward is None else module.__dict__.update(forward=forward)


def _refusal(model: torch.nn.Module, what: str) -> str:
    unread = unread_classes(model)
    reader = f", or add a reader of {unread[0]} to limitlens.models.READERS, which needs {NEEDED}" if unread else ""
    return (
        f"{type(model).__name__} computes the attention of {what} without the attention interface of transformers"
        f"{f' (in {unread[0]})' if unread else ''}, which limitlens needs to read heads; choose another model or a "
        f"newer version of transformers{reader}"
    )


def _split(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Boolean mask of visible keys, and bias added to the scores, from a boolean or additive attention mask."""
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    seen = mask > torch.finfo(mask.dtype).min / 2
    bias = mask.masked_fill(~seen, 0)
    return seen, bias if bool(bias.any()) else None


def _position(query: Tensor, key: Tensor, given: Tensor | None, forward: _Forward) -> Tensor | None:
    """Positions (L,) of the queries: `given` by the model, else those of the last keys; None if batch rows differ."""
    length, keys = query.shape[-2], key.shape[-2]
    if given is None or given.ndim != 2 or given.shape[1] != length:
        return torch.arange(keys - length, keys, device=query.device)
    same = len(given) == 1 or forward.once(given, lambda: bool((given == given[0]).all()))
    return given[0] if same else None


def _additive(mask: Tensor | None, call: Captured) -> Tensor | None:
    """Mask that eager attention adds to the scores: 0 for visible keys, the lowest number for hidden keys."""
    if mask is None and call.causal:
        mask = call.seen()
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, call.query.new_zeros(()), torch.finfo(call.query.dtype).min)
