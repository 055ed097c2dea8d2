"""A corpus as windows of tokens: equally long, with the special tokens the model was trained with.

The text is tokenised once, into a temporary file of 4 bytes a token that vanishes with the object: so the windows are
counted before the first forward and can be read in any order, and memory does not grow with the corpus.
"""

import hashlib
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from limitlens.arrays import Tensor, torch
from limitlens.errors import InputError
from limitlens.models.catalog import LoadedModel
from limitlens.models.corpora import Corpus

SPECIAL = ("auto", "none", "bos")  # what is put around a window: as in training, nothing, or the first token alone
_ID = np.dtype(np.int32)


class Windows:
    """Windows of `length` tokens, all full: the documents' tokens one after another, cut, special tokens put around.

    A window may hold the end of one document and the beginning of the next; what is left after the last full window is
    dropped. The special tokens are those of `special_tokens`: what the model was trained with, unless `special` asks
    for something else. Lengths and numbers of tokens include them: ⌈tokens / length⌉ windows are made, and the corpus
    is read no further. A corpus with too few tokens raises an `InputError`, unless `fewer` windows will do, and so does
    a model that cannot run windows of this length.
    """

    count: int  # how many windows
    length: int  # of how many tokens each
    special: str  # how the special tokens were chosen, of `SPECIAL`
    prefix: tuple[int, ...]  # the special tokens at the beginning and the end of each
    suffix: tuple[int, ...]
    sha256: str  # the digest of the text that was read
    warnings: list[str]  # what a user must know about them

    def __init__(
        self, loaded: LoadedModel, corpus: Corpus,
        *, length: int, tokens: int, special: str = "auto", fewer: bool = False,
    ) -> None:  # fmt: skip
        self.special = special
        self.prefix, self.suffix = special_tokens(loaded, special)
        own = length - len(self.prefix) - len(self.suffix)
        if own < 1 or tokens < 1:
            raise InputError(
                f"{tokens} tokens in windows of {length} were asked for; expected at least 1 token and windows longer "
                f"than the {length - own} special tokens of {loaded.name}"
            )
        self.length, self.count = length, -(-tokens // length)
        self.warnings = _check_positions(loaded, length) + _check_first(loaded, special, self.prefix)
        if loaded.unused:
            more = len(loaded.unused) - 1
            named = loaded.unused[0] + (f" and {more:,} more" if more else "")
            self.warnings.append(f"the file of {loaded.name} holds weights of layers that the model has not: {named}")
        table: Any = loaded.model.get_input_embeddings()
        rows = table.weight.shape[0]
        self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the object
        weakref.finalize(self, self._file.close)
        digest = hashlib.sha256()
        wanted, written = self.count * own, 0
        for document in corpus.documents():
            digest.update(document.encode())
            ids = _encode(loaded.tokenizer, document)[: wanted - written]
            if ids and max(ids) >= rows:
                given = f"the tokenizer of {loaded.name} gives the token {max(ids)} and the model knows {rows:,}"
                raise InputError(f"{given}; expected the tokenizer that the model was trained with")
            self._file.write(np.asarray(ids, dtype=_ID).tobytes())
            written += len(ids)
            if written == wanted:
                break
        if fewer:
            self.count = written // own
        elif written < wanted:
            raise InputError(
                f"the corpus {corpus.name!r} holds {written:,} tokens, enough for {written // own:,} windows "
                f"of {length}; {tokens:,} were asked for, which need {wanted:,} of them in {self.count:,} windows, "
                "so ask for fewer or give more text"
            )
        self.sha256 = digest.hexdigest()

    @property
    def tokens(self) -> int:
        """All tokens of all windows, special tokens included."""
        return self.count * self.length

    def marked(self, positions: range) -> NDArray[np.bool_]:
        """Which of these positions of a window hold special tokens."""
        ends = [*range(len(self.prefix)), *range(self.length - len(self.suffix), self.length)]
        return np.isin(positions, ends)

    @property
    def around(self) -> dict[str, Any]:
        """What stands around each window, and how it was chosen, as JSON."""
        return {"mode": self.special, "prefix": list(self.prefix), "suffix": list(self.suffix)}

    def batches(self, size: int, indices: Iterable[int] | None = None) -> Iterator[Tensor]:
        """The windows of the given indices, or all, as tensors of token ids of shape (at most size, length), int64."""
        order: Sequence[int] = range(self.count) if indices is None else list(indices)
        for start in range(0, len(order), size):
            yield torch.from_numpy(self.read(order[start : start + size]).astype(np.int64))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        """The token ids of one window, shape (length,)."""
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        row: NDArray[np.int32] = self.read([index])[0]
        return row

    def read(self, indices: Sequence[int]) -> NDArray[np.int32]:
        """The token ids of windows, (indices, length)."""
        rows = np.empty((len(indices), self.length), _ID)
        begin, end = len(self.prefix), self.length - len(self.suffix)
        rows[:, :begin], rows[:, end:] = self.prefix, self.suffix
        for row, index in zip(rows, indices, strict=True):
            self._file.seek(index * (end - begin) * _ID.itemsize)
            self._file.readinto(row[begin:end])  # type: ignore[attr-defined]
        return rows


def choose(count: int, fractions: Sequence[float], seed: int) -> tuple[NDArray[np.intp], ...]:
    """Disjoint random subsets of 0 .. count - 1, one for each fraction, each sorted and never empty.

    The same arguments always give the same subsets: `pilot, reserved = choose(windows.count, (0.05, 0.10), seed)`.
    """
    sizes = [max(1, round(fraction * count)) for fraction in fractions]
    if sum(sizes) > count:
        raise InputError(f"{count} windows are too few to set aside {sum(sizes)} of them; ask for more tokens")
    order = np.random.default_rng(seed).permutation(count)
    return tuple(np.sort(part) for part in np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1]))


def special_tokens(loaded: LoadedModel, special: str = "auto") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens put before and after every window.

    "auto": what the model was trained with, that is what its tokenizer puts around a text ([CLS] … [SEP] for BERT),
    corrected by what a GGUF file says of a first token, which is lost on the tokenizer made from it. "none": nothing.
    "bos": the first token, nothing behind.
    """
    if special not in SPECIAL:
        raise InputError(f"special is {special!r}; expected {', '.join(SPECIAL[:-1])} or {SPECIAL[-1]}")
    if special == "none":
        return (), ()
    first = first_token(loaded)
    if special == "bos":
        if first is None:
            raise InputError(f"{loaded.name} has no first token to begin with; expected special to be auto or none")
        return (first,), ()
    prefix, suffix = _put_around(loaded.tokenizer)
    if loaded.opening is not None:
        prefix = loaded.opening + (prefix[1:] if prefix[:1] == (first,) else prefix)
    return prefix, suffix


def first_token(loaded: LoadedModel) -> int | None:
    """The token that a text begins with where it begins with one, or None: the file's, the tokenizer's, its [CLS]."""
    named = (getattr(loaded.tokenizer, name, None) for name in ("bos_token_id", "cls_token_id"))
    return next((token for token in (*(loaded.opening or ()), *named) if token is not None), None)


def _put_around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a tokenizer puts before and after a text, read off a text it has dressed."""
    bare, dressed = _encode(tokenizer, "a"), list(tokenizer("a")["input_ids"])
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return tuple(dressed[:start]), tuple(dressed[start + len(bare) :])
    given = f"{type(tokenizer).__name__} changes a text when it adds special tokens"
    raise InputError(f"{given}; expected one that puts them around it")


def _encode(tokenizer: Any, text: str) -> list[int]:
    try:  # documents are longer than the model's positions, and are cut afterwards: not a word of it
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    except Exception as error:  # the library throws bare exceptions at a vocabulary that is not whole
        raise InputError(f"the tokenizer cannot read the text ({error}); expected a whole tokenizer.json") from None


def _check_positions(loaded: LoadedModel, length: int) -> list[str]:
    """Refuse what the model cannot run, and say what it was not made for."""
    rows, positions = loaded.position_rows, loaded.positions
    if rows is not None and length > rows:
        given = f"a window of {length} tokens was asked for, but {loaded.name} has learned {rows} positions"
        raise InputError(f"{given}; use windows of at most {rows}")
    if positions is not None and length > positions:
        return [
            f"windows of {length} tokens exceed the {positions} positions that {loaded.name} was made for: "
            "its heads are measured outside the lengths it knows"
        ]
    return []


def _check_first(loaded: LoadedModel, special: str, prefix: tuple[int, ...]) -> list[str]:
    """Say where windows of a causal model do not begin with its first token: it may be the sink of its heads."""
    first = first_token(loaded)
    if special != "auto" or not loaded.causal or first is None or first in prefix:
        return []
    why = "its tokenizer does not add it" if loaded.opening is None else "its file says that it is not added"
    token = loaded.tokenizer.convert_ids_to_tokens(first)
    return [
        f"{loaded.name} has a first token, {token}, but {why}: windows begin without it, and heads that park their "
        "mass on it show another sink or none; pass special='bos' if texts begin with it in use"
    ]
