"""Chat template of an instruct model, as the tokens before and after what a user says."""

from dataclasses import dataclass
from typing import Any

from limitlens.models.catalog import LoadedModel

_PLACE = "PLACE_OF_THE_MESSAGE"


@dataclass(frozen=True)
class Chat:
    """Tokens that a chat template puts before and after a user's message; the model's answer begins after them."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def chat_of(loaded: LoadedModel) -> Chat | None:
    """Chat template of a model as tokens around one message of a user, or None if its tokenizer has no template."""
    tokenizer = loaded.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return None
    message = [{"role": "user", "content": _PLACE}]
    text: Any = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    if text.count(_PLACE) != 1:
        return None
    before, after = (tuple(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in text.split(_PLACE))
    return Chat(before, after)
