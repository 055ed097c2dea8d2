"""Nats (negative log-likelihood) of each token of a long text under a language model, with bounded memory."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from limitlens.arrays import Tensor, torch
from limitlens.attention.subset import capped
from limitlens.errors import InputError
from limitlens.models import LoadedModel, intervene
from limitlens.models.exponents import Factor

ROWS = 2048  # tokens whose logits are held at once
STRIDE = 8  # a truncated context moves by 1/8 of the window at a time


class Reader:
    """A decoder that computes the nats (negative log-likelihood) of each token of a text; `half` means bfloat16."""

    def __init__(self, loaded: LoadedModel, *, half: bool = False) -> None:
        model: Any = loaded.model
        if not loaded.causal or model.get_output_embeddings() is None:
            raise InputError(f"{loaded.name} is no decoder with its language-model head; expected a causal model")
        config = model.config.get_text_config()
        self.name = loaded.name
        self.stack: Any = model.base_model
        self.project: Any = model.get_output_embeddings()
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.device = model.device
        self.half = False
        ids = torch.arange(8, device=self.device) % config.vocab_size
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        expected = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        if not torch.allclose(self.nll(ids), expected, rtol=1e-3, atol=1e-3):  # for example, it scales its logits
            raise InputError(f"{self.name} changes its logits in a way that is not known; choose another model")
        self.half = half

    def nll(self, ids: Tensor) -> Tensor:
        """Nats (negative log-likelihood) of tokens 1 .. n − 1 of a text (n,), each given all tokens before it."""
        with torch.no_grad():
            return self.losses(ids)

    def truncated(self, ids: Tensor, window: int) -> Tensor:
        """Nats of tokens 1 .. n − 1 of a text (n,), each given only the last tokens, 7/8 to all of `window`."""
        step = max(window // STRIDE, 1)
        nats = [self.nll(ids[:window])]
        for start in range(window, len(ids), step):
            stop = min(start + step, len(ids))
            nats.append(self.nll(ids[stop - window : stop])[start - stop :])
        return torch.cat(nats)

    def logits(self, states: Tensor) -> Tensor:
        """Logits (n, vocabulary) in float32 of hidden states (n, d) after the last layer."""
        return capped(self.project(states).float(), self.softcap)

    def losses(self, ids: Tensor, start: int = 1) -> Tensor:
        """Differentiable nats (negative log-likelihood) of tokens start .. n − 1 of a text (n,), in bounded memory."""
        from torch.utils.checkpoint import checkpoint

        def part(states: Tensor, wanted: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(self.logits(states), wanted, reduction="none")

        ids = ids.to(self.device)
        found = []
        with torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext():
            hidden = self.stack(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            for begin in range(start, len(ids), ROWS):
                end = min(begin + ROWS, len(ids))
                rows = hidden[begin - 1 : end - 1], ids[begin:end]
                found.append(checkpoint(part, *rows, use_reentrant=False) if hidden.requires_grad else part(*rows))
        return torch.cat(found)

    @contextmanager
    def acting(self, factor: Factor | None) -> Iterator[None]:
        """Multiply attention scores by a factor within the block (None: by 1), without n × n matrices in memory."""
        import transformers.integrations.sdpa_attention as home

        before = home.use_gqa_in_sdpa
        home.use_gqa_in_sdpa = lambda *args, **kwargs: False  # torch's grouped kernel holds n × n matrices in float32
        try:
            with nullcontext() if factor is None else intervene(self.stack, score_scale=factor):
                yield
        finally:
            home.use_gqa_in_sdpa = before

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Use gradient checkpointing within the block: gradients recompute one layer at a time, to save memory."""
        if not self.stack.supports_gradient_checkpointing:
            raise InputError(f"{self.name} cannot compute its layers again for gradients; expected one that can")
        self.stack.gradient_checkpointing_enable({"use_reentrant": False})
        layers = [module for module in self.stack.modules() if getattr(module, "gradient_checkpointing", False)]
        before = [layer.training for layer in layers]
        try:
            for layer in layers:
                layer.training = True  # of the layer, not of its submodules: dropout stays off
            yield
        finally:
            for layer, was in zip(layers, before, strict=True):
                layer.training = was
            self.stack.gradient_checkpointing_disable()
