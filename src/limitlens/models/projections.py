"""Read the query and key projection weights of attention layers, for the module layouts that are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from limitlens.arrays import Tensor, torch

if TYPE_CHECKING:
    from limitlens.models.relay import Captured

_SEPARATE = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"), ("q", "k"))
_FUSED = "c_attn"  # GPT-2: query, key and value side by side, weights transposed


@dataclass(frozen=True, eq=False)
class Projections:
    """Weights of the projections q = Wq x + bq and k = Wk x + bk of a layer, with k consecutive rows for each head."""

    query: Tensor  # Wq, (Hq · k, d), in the model's precision
    query_bias: Tensor | None  # (Hq · k,); shifts the tilt
    key: Tensor  # Wk, (Hkv · k, d)
    key_bias: Tensor | None  # (Hkv · k,); cancels in the softmax
    rotary: bool  # queries and keys are rotated after the projection, so the weights describe scores before rotation

    def factor(self, ratios: Tensor | None) -> float | None:
        """Number c such that scores are scale · c · <Wk x', Wq x> up to rotations; None if `ratios` of norms vary."""
        if ratios is None:
            return None
        medians, spreads = ratios.T.tolist()
        return float(medians[0] * medians[1]) if max(spreads) < 100 * torch.finfo(self.key.dtype).eps else None

    def ratios(self, captured: Captured) -> Tensor | None:
        """Ratios (2, 2) of norms of captured to projected queries and keys, which tell what the layer does in between.

        A rotation keeps norms, a rescaling multiplies them by one number, a normalisation by different numbers. Row 0
        is for queries and row 1 for keys of the first window: the median ratio over heads and positions, and the
        largest relative deviation from it. None if the weights do not fit the layer.
        """
        found = []
        pairs = ((self.query, self.query_bias, captured.query[0]), (self.key, self.key_bias, captured.key[0]))
        for weight, bias, made in pairs:
            heads, length, dim = made.shape
            if captured.hidden is None or weight.shape[0] != heads * dim:
                return None
            projected = torch.nn.functional.linear(captured.hidden[0], weight, bias).view(length, heads, dim)
            ratios = made.double().norm(dim=-1) / projected.double().norm(dim=-1).T
            median = ratios.median()
            found.append(torch.stack((median, (ratios / median - 1).abs().max())))
        return torch.stack(found)


def projector(model: torch.nn.Module) -> Callable[[int], tuple[Projections | None, str]]:
    """Function from the index of a layer to its query and key projections, and a note about their limitations.

    For an unknown module layout the projections are None and the note says why.
    """
    modules = [module for module in model.modules() if query_projection(module) is not None]
    numbers = [getattr(module, "layer_idx", None) for module in modules]
    if not all(isinstance(number, int) for number in numbers):
        numbers = list(range(len(modules)))
    rotary = any("rotary" in type(part).__name__.lower() for part in model.modules())
    reason = "the projections give the geometry before the rotary embedding" if rotary else ""

    def of(layer: int) -> tuple[Projections | None, str]:
        if layer not in numbers:
            return None, (
                f"layer {layer} of {type(model).__name__} has no query and key projections among "
                f"{', '.join('/'.join(pair) for pair in _SEPARATE)} and {_FUSED}"
            )
        module = modules[numbers.index(layer)]
        pair = _separate(module)
        if pair is not None:
            query, key = ((one.weight.detach(), None if one.bias is None else one.bias.detach()) for one in pair)
            return Projections(*query, *key, rotary), reason
        weight, bias = getattr(module, _FUSED).weight.detach().T, getattr(module, _FUSED).bias.detach()
        d = weight.shape[1]
        return Projections(weight[:d], bias[:d], weight[d : 2 * d], bias[d : 2 * d], rotary), reason

    return of


def query_projection(module: torch.nn.Module) -> torch.nn.Module | None:
    """Query projection submodule of an attention module, or None if the layout of the module is not known."""
    pair = _separate(module)
    if pair is not None:
        return pair[0]
    fused: Any = getattr(module, _FUSED, None)
    # The width tells self-attention (query, key, value) from cross-attention (key, value).
    return fused if fused is not None and fused.weight.shape[1] == 3 * fused.weight.shape[0] else None


def _separate(module: torch.nn.Module) -> tuple[torch.nn.Linear, torch.nn.Linear] | None:
    """Query and key projections of a module that has a linear layer, not quantised, for each; otherwise None."""
    for names in _SEPARATE:
        query, key = (getattr(module, name, None) for name in names)
        if isinstance(query, torch.nn.Linear) and isinstance(key, torch.nn.Linear) and query.weight.is_floating_point():
            return query, key
    return None
