"""Read the context of a prompt once, then predict its answer with the whole cache and with any cut of it."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from limitlens.attention.policies import SHARED, Selection, get_policy
from limitlens.attention.policies.base import held_first
from limitlens.attention.policies.expected import LAW
from limitlens.cache.reconstruction import repeat_attention
from limitlens.cache.tasks import Prompt
from limitlens.models import Captured, LoadedModel, capture
from limitlens.models.intervene import Change, PolicyHook, attend, intervene, kv_shape, policy_input
from limitlens.models.relay import Output, hook_attention
from limitlens.sampling.streams import generator_for

TOGETHER = 6 << 30  # bytes of copies of the cache with which several cuts are predicted at once
BATCHED = ("cuda",)  # devices on which they are

Names = str | Sequence[Sequence[str]]  # one key policy, or one for each [layer][kv_head]


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """A prompt whose context a model has read: its cache, and what key policies need to cut it."""

    loaded: LoadedModel
    prompt: Prompt
    seed: int  # of policies that draw keys at random
    cache: Any
    calls: Sequence[Captured]  # attention inputs of the context, with the last queries only

    @cached_property
    def _ranks(self) -> dict[tuple[str, int], Tensor]:
        return {}

    @cached_property
    def repeat(self) -> list[Tensor]:
        """Attention to cached keys while the model repeats the context, by `repeat_attention` when first needed."""
        return repeat_attention(self.loaded, self.cache, torch.tensor(self.prompt.context))

    @cached_property
    def full(self) -> Tensor:
        """Log-probabilities (question + answer, vocabulary) after each token, with the full cache."""
        return self.predict()

    def kl(self, hook: PolicyHook) -> float:
        """KL divergence KL(full ‖ cut) of the answer, nats a token, with the cut `hook`."""
        return self.prompt.score(self.predict(hook), self.full)["kl"]

    def copy(self) -> Any:
        """Copy of the cache, because a layer with a sliding window could not be cropped to the context again."""
        return deepcopy(self.cache)

    def repeat_of(self, policies: Sequence[str], layer: int) -> Tensor | None:
        """Attention weights of a layer while the context is repeated, if one of the `policies` needs them."""
        return self.repeat[layer] if any(get_policy(name).needs_repeat for name in policies) else None

    @property
    def context(self) -> int:
        """Number of tokens of the context, after which the cache is cut."""
        return len(self.prompt.context)

    def predict(self, hook: Change | None = None) -> Tensor:
        """Log-probabilities (question + answer, vocabulary) after each token, with the full cache or a cut."""
        model = self.loaded.model
        ids = torch.tensor([self.prompt.question + self.prompt.answer], device=model.device)
        with torch.inference_mode(), intervene(model, keys=hook or "all"):
            output: Any = model(input_ids=ids, past_key_values=self.copy())
        return output.logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]

    def predict_each(self, hooks: Sequence[PolicyHook | None]) -> Iterator[Tensor]:
        """Yield the predictions of `predict` for every cut (None: the full cache); a GPU predicts many in one batch."""
        for logits in self._logits(hooks):
            yield from (row.float().log_softmax(-1) for row in logits)

    def kl_each(self, hooks: Sequence[PolicyHook | None]) -> list[float]:
        """KL divergence of the answer, nats a token, for every cut, as `kl`."""
        own, found = self.prompt.own, list[float]()
        full = self.full[own].float()
        for logits in self._logits(hooks):
            log_p = logits[:, own].float().log_softmax(-1)
            found += (full.exp() * (full - log_p)).sum(-1).mean(-1).tolist()
        return found

    def _logits(self, hooks: Sequence[PolicyHook | None]) -> Iterator[Tensor]:
        """Yield logits, up to a constant, (cuts, question + answer, vocabulary) of some of the cuts after others."""
        held = sum(call.key.nbytes + call.value.nbytes for call in self.calls)
        size = TOGETHER // held if self.loaded.model.device.type in BATCHED else 1
        if size <= 1:
            yield from (self.predict(hook)[None] for hook in hooks)
            return
        ids = torch.tensor([self.prompt.question + self.prompt.answer], device=self.loaded.model.device)
        plain = not any(call.sliding_window or call.softcap or call.sinks is not None or call.bias is not None
                        for call in self.calls)  # fmt: skip
        for start in range(0, len(hooks), size):
            part = hooks[start : start + size]
            joined = self._joined(part)
            fast = plain and not any(kept.log_weights is not None for kept in joined.selected.values())

            def act(call: Captured, go_on: Callable[[Tensor], Output], joined: PolicyHook = joined,
                    fast: bool = fast) -> Output:  # fmt: skip
                output = _attend_kept(call, joined.selected[call.layer].mask) if fast else _attend(joined(call))
                return output.transpose(1, 2).contiguous(), None

            cache = self.copy()
            cache.batch_repeat_interleave(len(part))
            # A mask of one entry keeps the model from making one; `_attend_kept` needs none.
            known: dict[str, Any] = {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)} if fast else {}
            with torch.inference_mode(), hook_attention(self.loaded.model, act):
                output: Any = self.loaded.model(input_ids=ids.repeat(len(part), 1), past_key_values=cache, **known)
            yield output.logits

    def _joined(self, hooks: Sequence[PolicyHook | None]) -> PolicyHook:
        """One hook for a batch, whose rows are cut by the `hooks`."""
        joined = PolicyHook("recent", 0, self.context, self.seed, kv_shape(self.loaded.model))
        for call in self.calls:
            if call.slides(self.context):
                continue
            whole = torch.ones(1, call.key.shape[1], 1, self.context, dtype=torch.bool, device=call.key.device)
            parts = [Selection(whole) if hook is None else hook.selected[call.layer] for hook in hooks]
            mask = torch.cat([part.mask.expand(whole.shape) for part in parts])
            weights = None
            if any(part.log_weights is not None for part in parts):
                weights = torch.cat([torch.zeros_like(whole, dtype=torch.float32) if part.log_weights is None
                                     else part.log_weights.expand(whole.shape) for part in parts])  # fmt: skip
            joined.selected[call.layer] = Selection(mask, weights)
        return joined

    def ranks(self, name: str, call: Captured) -> Tensor:
        """Ranks (kv_heads, n) of a layer's keys by a key policy that draws nothing, from 0 for the first to be kept."""
        if (name, call.layer) not in self._ranks:
            policy, end = get_policy(name), torch.full((1,), self.context, device=call.key.device)
            repeat = self.repeat_of([name], call.layer)
            inputs = policy_input(call, self.context, end, past=call.query, repeat=repeat)
            priority = policy.priority(inputs, 1, generator_for(self.seed, call.layer, self.context))
            priority = held_first(priority, inputs.held).expand(1, *call.key.shape[:2], 1, self.context)[0, 0, :, 0]
            order = priority.argsort(-1, descending=True)
            place = torch.arange(self.context, device=order.device).expand(order.shape)
            self._ranks[name, call.layer] = torch.empty_like(order).scatter_(-1, order, place)
        return self._ranks[name, call.layer]

    def cut(self, names: Names, counts: Any, base: PolicyHook | None = None, layer: int | None = None) -> PolicyHook:
        """Cut that keeps `counts` keys by key policies `names`, in all layers or with `base` in one `layer` only."""
        layers, heads = shape = kv_shape(self.loaded.model)
        hook = PolicyHook(names, counts, self.context, self.seed, shape)
        drawn = any(policy.sampled or policy.unbiased or policy.sees_queries for policy in hook.known.values())
        if drawn and any(policy.needs_repeat for policy in hook.known.values()):
            hook.repeat = self.repeat
        if base is not None:
            hook.selected = dict(base.selected)
        limits = hook.counts.expand(shape).to(self.loaded.model.device)[..., None]
        rows = [[names] * heads] * layers if isinstance(names, str) else names
        for call in self.calls:
            if base is not None and call.layer != layer:
                continue
            if drawn:
                hook(call)
            elif not call.slides(self.context):
                row = rows[call.layer]
                ranks = [self.ranks(name, call) for name in row]
                one = ranks[0] if len(set(row)) == 1 else torch.stack([part[k] for k, part in enumerate(ranks)])
                hook.selected[call.layer] = Selection((one < limits[call.layer])[None, :, None])
        return hook

    def shared(self, name: str, total: int) -> PolicyHook:
        """Cut that keeps `total` keys of all heads together, by the rule `name` in `SHARED`."""
        rule = SHARED[name]
        policy = get_policy(rule.policy)
        calls = [call for call in self.calls if not call.slides(self.context)]
        priorities = []
        for call in calls:
            end = torch.full((1,), self.context, device=call.key.device)
            repeat = self.repeat_of([policy.name], call.layer)
            inputs = policy_input(call, self.context, end, past=call.query, repeat=repeat)
            priorities.append(
                policy.priority(inputs, 1, generator_for(self.seed, call.layer, self.context))[0, 0, :, 0]
            )
        hook = PolicyHook("recent", 0, self.context, self.seed, kv_shape(self.loaded.model))
        masks = rule.masks(priorities, total)
        hook.selected = {call.layer: Selection(mask[None, :, None]) for call, mask in zip(calls, masks, strict=True)}
        return hook


def _attend(call: Captured) -> Tensor:
    """Outputs (B, Hq, L, v) of a layer; the query heads of a key/value head are read as one head with more queries."""
    batch, heads, length, total = *call.query.shape[:3], call.key.shape[2]
    if call.mask is None or any(one is not None for one in (call.bias, call.softcap, call.sinks)):
        return attend(call, batch * heads * length * total)
    mask, query = (part.reshape(batch, call.key.shape[1], -1, part.shape[-1])
                   for part in (call.mask.expand(batch, heads, length, total), call.query))  # fmt: skip
    output = scaled_dot_product_attention(query, call.key, call.value, attn_mask=mask, scale=call.scale)
    return output.view(batch, heads, length, -1)


def _attend_kept(call: Captured, kept: Tensor) -> Tensor:
    """Outputs (B, Hq, L, v) of the last tokens, which see each other and `kept` (B, Hkv, 1, n) of the first n keys."""
    batch, kv_heads, length = *kept.shape[:2], call.query.shape[2]
    own = torch.ones(length, length, dtype=torch.bool, device=kept.device).tril()
    parts = (kept.expand(-1, -1, length, -1), own.expand(batch, kv_heads, -1, -1))
    mask = torch.cat(parts, -1).repeat(1, 1, call.query.shape[1] // kv_heads, 1)
    query = call.query.reshape(batch, kv_heads, -1, call.query.shape[-1])
    output = scaled_dot_product_attention(query, call.key, call.value, attn_mask=mask, scale=call.scale)
    return output.view(*call.query.shape[:3], -1)


def read_prompt(loaded: LoadedModel, prompt: Prompt, seed: int) -> ReadPrompt:
    """Read the context of a prompt into a cache, and keep what key policies need to cut it."""
    ids = torch.tensor([prompt.context], device=loaded.model.device)
    calls: list[Captured] = []

    def take(call: Captured) -> None:
        assert call.position is not None
        calls.append(replace(call, query=call.query[:, :, -LAW:].clone(), position=call.position[-LAW:]))

    with torch.inference_mode(), capture(loaded.model, take):
        output: Any = loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return ReadPrompt(loaded, prompt, seed, output.past_key_values, calls)
