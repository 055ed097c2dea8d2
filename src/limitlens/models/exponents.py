"""Score exponents: fitted factors on the attention scores of each head, for contexts longer than in training.

Scores of head h for a query at position p (from 1) are multiplied by e^{c_h} s^{γ_h}, where s = max(p/n₀, 1) and n₀ is
the trained window.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from limitlens.arrays import PreTrainedModel, Tensor, torch
from limitlens.errors import Array, InputError
from limitlens.record import from_json, json_text, text_writer, write_files

Factor: TypeAlias = Callable[[int, Tensor], Tensor]  # (layer, positions of the queries) -> (heads, queries)


@dataclass(frozen=True, eq=False)
class Exponents:
    """Fitted factors e^{c_h} max(p/n₀, 1)^{γ_h} on the scores of head h at position p, and their origin (JSON file)."""

    model: str  # name of the model when the exponents were fitted
    identity: Mapping[str, Any]  # properties of the model, as `identity()` returns them
    trained: int  # n₀, length of the trained window
    to: int  # context length for which the exponents were fitted
    rope_scaling: str  # one of `rope_scaling.ROPE_SCALINGS`
    text: str  # text on which the exponents were fitted
    level: str  # whether each "head", each "layer" or the whole "model" has one exponent
    retrieval_weight: float  # weight of retrieval in the loss of the fit
    exponents: Array  # (layers, heads)
    constants: Array | None  # (layers, heads): logarithms of constant factors

    def factor(self) -> Factor:
        """Function (layer, query positions) -> factors (heads, queries) on the scores, for `intervene`."""
        constants = None if self.constants is None else torch.as_tensor(self.constants)
        return powers(torch.as_tensor(self.exponents), constants, self.trained)

    def write(self, path: Path) -> None:
        """Write the score exponents and their origin to a JSON file at `path`."""
        write_files({path: text_writer(json_text(self, indent=1))})


def powers(exponents: Tensor, constants: Tensor | None, trained: int) -> Factor:
    """Function (layer, query positions) -> factors e^{c_h} max(p/n₀, 1)^{γ_h} (heads, queries) on attention scores.

    `exponents` γ and `constants` c are (layers, heads), `trained` is n₀. The factors are differentiable in γ and c.
    """

    def factor(layer: int, position: Tensor) -> Tensor:
        log = ((position.float() + 1) / trained).clamp(min=1).log()
        exponent = exponents[layer].to(log)[:, None] * log
        return (exponent if constants is None else exponent + constants[layer].to(log)[:, None]).exp()

    return factor


def identity(model: PreTrainedModel) -> dict[str, Any]:
    """Properties by which a file of score exponents recognises its model; a fine-tuned model has those of its base."""
    config = model.config.get_text_config()
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings")
    return {"model_type": config.model_type, **{name: getattr(config, name, None) for name in names}}


def read_exponents(path: str | Path, model: PreTrainedModel) -> Exponents:
    """Read score exponents from a file; raises an `InputError` if they were fitted for another model."""
    try:
        found: Exponents = from_json(Exponents, json.loads(Path(path).read_text(encoding="utf-8")))
        shape = found.identity["num_hidden_layers"], found.identity["num_attention_heads"]
        tables = [table for table in (found.exponents, found.constants) if table is not None]
        whole = all(table.shape == shape and np.isfinite(table).all() for table in tables) and found.trained > 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        given = f"{str(path)!r} holds no exponents ({type(error).__name__}: {error})"
        raise InputError(f"{given}; expected a JSON file written by `limitlens temper --out FOLDER`") from None
    if not whole:
        raise InputError(f"{str(path)!r} is damaged; expected finite exponents for {shape} layers and heads")
    own = identity(model)
    if dict(found.identity) != own:
        fitted = found.identity
        other = [f"{name}: {fitted.get(name, 'not given')} in the file, {own[name]} in this model"
                 for name in own if fitted.get(name) != own[name]]  # fmt: skip
        given = f"the exponents in {str(path)!r} were fitted to another model ({'; '.join(other)})"
        raise InputError(f"{given}; fit them to this model with `limitlens temper`, or give a file that was")
    return found
