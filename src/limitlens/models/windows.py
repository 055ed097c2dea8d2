"""Windows of tokens of equal length from a corpus, with the special tokens that the model was trained with."""

import hashlib
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from limitlens.arrays import Tensor, torch
from limitlens.attention.kernels import choose_device
from limitlens.errors import InputError
from limitlens.models.catalog import ALIASES, LoadedModel, load
from limitlens.models.corpora import BUILT_IN, Corpus, open_corpus

SPECIAL = ("auto", "none", "bos")  # special tokens of a window: as in training, none, or only the first token
FORWARD = 1 << 12  # tokens per forward pass: activations of more tokens would not stay in the CPU caches
FEWEST_RUNS = 4  # contexts, from whose scatter errors are estimated
TIMES = 8  # windows read for each window that is drawn at random
BATCH = 64  # documents tokenised at once, at most: 4 MB of a long file
WINDOW = 256  # tokens per window, unless the model has fewer positions
_ID = np.dtype(np.int32)


class Windows:
    """Windows of `length` tokens: a corpus, concatenated, tokenised into a temporary file and cut into pieces.

    ⌈tokens / length⌉ windows are made. Lengths include special tokens, which `special` chooses (`special_tokens`). A
    window may hold the end of one document and the beginning of the next. Raises an `InputError` if the corpus is too
    short, unless `fewer` windows are accepted, or if the model cannot run windows of this length.
    """

    count: int  # number of windows
    length: int  # tokens of a window
    special: str  # one of `SPECIAL`
    prefix: tuple[int, ...]  # special tokens at the beginning of each window
    suffix: tuple[int, ...]  # special tokens at the end of each window
    sha256: str  # digest of the text that was read
    warnings: list[str]  # sentences for the user
    ends: list[int]  # number of tokens of the text up to the end of each document, or piece of a file, that was read

    def __init__(
        self, loaded: LoadedModel, corpus: Corpus,
        *, length: int, tokens: int, special: str = "auto", fewer: bool = False,
    ) -> None:  # fmt: skip
        self.special = special
        self.prefix, self.suffix = special_tokens(loaded, special)
        inner = length - len(self.prefix) - len(self.suffix)  # tokens of the text in a window
        if inner < 1 or tokens < 1:
            given = f"{tokens} tokens in windows of {length} were asked for; expected at least 1 token and"
            raise InputError(f"{given} windows longer than the {length - inner} special tokens of {loaded.name}")
        self.length = length
        self.count = -(-tokens // length)
        self.warnings = _warnings(loaded, length, special, self.prefix)
        table: Any = loaded.model.get_input_embeddings()
        rows = table.weight.shape[0]
        self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the object
        weakref.finalize(self, self._file.close)
        digest = hashlib.sha256()
        wanted = self.count * inner
        written = 0
        self.ends = []
        for document, ids in _tokenised(loaded.tokenizer, corpus):
            digest.update(document.encode())
            ids = ids[: wanted - written]
            if ids and max(ids) >= rows:
                given = f"the tokenizer of {loaded.name} gives the token {max(ids)}, but the model has {rows:,} tokens"
                raise InputError(f"{given}; expected the tokenizer that the model was trained with")
            self._file.write(np.asarray(ids, dtype=_ID).tobytes())
            written += len(ids)
            self.ends.append(written)
            if written == wanted:
                break
        if fewer:
            self.count = written // inner
        elif written < wanted:
            given = f"the corpus {corpus.name!r} holds {written:,} tokens, enough for {written // inner:,} windows"
            asked = f"{tokens:,} tokens were asked for, {wanted:,} of the text in {self.count:,} windows"
            raise InputError(f"{given} of {length}; {asked}, so ask for fewer or give more text")
        self.sha256 = digest.hexdigest()

    @property
    def tokens(self) -> int:
        """Total number of tokens in all windows, special tokens included."""
        return self.count * self.length

    def marked(self, positions: range) -> NDArray[np.bool_]:
        """Boolean array that says which of the given positions in a window hold a special token."""
        ends = [*range(len(self.prefix)), *range(self.length - len(self.suffix), self.length)]
        return np.isin(positions, ends)

    @property
    def around(self) -> dict[str, Any]:
        """Special tokens of each window, for JSON: the option that chose them, and their ids before and after."""
        return {"mode": self.special, "prefix": list(self.prefix), "suffix": list(self.suffix)}

    def batches(self, size: int, indices: Iterable[int] | None = None) -> Iterator[Tensor]:
        """Yield token ids of the windows `indices` (default: all) as int64 tensors (at most `size`, length)."""
        order: Sequence[int] = range(self.count) if indices is None else list(indices)
        for start in range(0, len(order), size):
            yield torch.from_numpy(self.read(order[start : start + size]).astype(np.int64))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        """Token ids of the window with this index, shape (length,)."""
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        return self.read([index])[0]  # type: ignore[no-any-return]

    def read(self, indices: Sequence[int]) -> NDArray[np.int32]:
        """Token ids of the windows with these indices, shape (len(indices), length)."""
        rows = np.empty((len(indices), self.length), _ID)
        begin, end = len(self.prefix), self.length - len(self.suffix)
        rows[:, :begin], rows[:, end:] = self.prefix, self.suffix
        for row, index in zip(rows, indices, strict=True):
            self._file.seek(index * (end - begin) * _ID.itemsize)
            self._file.readinto(row[begin:end])  # type: ignore[attr-defined]
        return rows


def open_windows(
    model: str | LoadedModel, corpus: str, tokens: int,
    *, window: int | None, special: str, device: str, fewer: bool = False,
) -> tuple[LoadedModel, Windows]:  # fmt: skip
    """Load a model, if given by name, and cut `tokens` tokens of a corpus into windows; `fewer` allows a short text."""
    check_special(special)
    text, where = open_corpus(corpus), choose_device(device)
    loaded = load(model, device=where) if isinstance(model, str) else model
    length = loaded.window(WINDOW) if window is None else window
    return loaded, Windows(loaded, text, length=length, tokens=tokens, special=special, fewer=fewer)


def open_some(
    model: str | LoadedModel, corpus: str, count: int, length: int, *, special: str, seed: int, device: str
) -> tuple[LoadedModel, Windows, Tensor]:
    """Load a model and draw `count` random windows (count, length) from the first `TIMES` · count of a corpus."""
    known = {"window": length, "special": special, "device": device, "fewer": True}
    loaded, windows = open_windows(model, corpus, TIMES * count * length, **known)  # type: ignore[arg-type]
    if windows.count < count:
        given = f"the corpus {corpus!r} holds {windows.count:,} documents of {length:,} tokens"
        raise InputError(f"{given}; {count:,} were asked for, so ask for fewer or give more text")
    order = np.random.default_rng(np.random.SeedSequence([seed, 0x0BE9])).permutation(windows.count)
    return loaded, windows, next(windows.batches(count, order[:count]))


def draw_runs(
    windows: Windows, length: int, count: int, seed: int, warnings: list[str]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices (R, length) of consecutive windows at `count` random places, and the document (R,) where each begins.

    Runs of windows inside documents are preferred if there are `FEWEST_RUNS`; `warnings` says what was left out.
    """
    inner = windows.length - len(windows.prefix) - len(windows.suffix)
    starts, ends = np.arange(windows.count - length + 1)[::length], np.asarray(windows.ends)
    document, last = (
        np.searchsorted(ends, at * inner - end, side="right") for at, end in ((starts, 0), (starts + length, 1))
    )
    inside, n = document == last, length * windows.length
    if len(starts) < FEWEST_RUNS:
        given = f"the text holds {len(starts)} contexts of {n:,} tokens"
        raise InputError(f"{given}; expected at least {FEWEST_RUNS}, so give more text or ask for shorter contexts")
    kept = np.flatnonzero(inside) if inside.sum() >= FEWEST_RUNS else np.arange(len(starts))
    joined = f"{int((~inside).sum()):,} of {len(starts):,} contexts of {n:,} tokens join documents"
    if len(kept) < len(starts):
        whole = int((np.diff(ends, prepend=0) >= n).sum())
        warnings.append(f"{joined} and are left out; {whole:,} of {len(ends):,} documents have so many tokens")
    elif not inside.all():
        warnings.append(f"{joined}, since too few documents are as long: they are text as it was read")
    chosen = np.sort(np.random.default_rng(np.random.SeedSequence([seed, 0xC0E7])).permutation(kept)[:count])
    if len(np.unique(document[chosen])) == 1:
        warnings.append("all contexts come from one document: the part of the error between documents is not known")
    return starts[chosen][:, None] + np.arange(length), document[chosen]


def resolve_source(name: str, made: Mapping[str, Any]) -> str:
    """Name or path of the model or text of a saved result, found in the folder where the result was made (`made`)."""
    if name in ALIASES or name in BUILT_IN or "folder" not in made:
        return name
    there = Path(made["folder"], name)
    return str(there) if there.exists() else name


def choose(count: int, fractions: Sequence[float], seed: int) -> tuple[NDArray[np.intp], ...]:
    """Disjoint random subsets of 0 .. count - 1, sorted and not empty, one for each fraction of `count`."""
    sizes = [max(1, round(fraction * count)) for fraction in fractions]
    if sum(sizes) > count:
        raise InputError(f"{count} windows are too few to set aside {sum(sizes)} of them; ask for more tokens")
    order = np.random.default_rng(seed).permutation(count)
    return tuple(np.sort(part) for part in np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1]))


def check_special(special: str) -> None:
    """Raise an `InputError` unless `special`, the choice of special tokens around a text, is one of `SPECIAL`."""
    if special not in SPECIAL:
        raise InputError(f"special is {special!r}; expected {', '.join(SPECIAL[:-1])} or {SPECIAL[-1]}")


def special_tokens(loaded: LoadedModel, special: str = "auto") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of the special tokens before and after every window.

    "auto" means those that the tokenizer puts around a text ([CLS] … [SEP] for BERT), and the first token that a GGUF
    file names. "none" means none, and "bos" only the first token.
    """
    check_special(special)
    if special == "none":
        return (), ()
    first = first_token(loaded)
    if special == "bos":
        if first is None:
            raise InputError(f"{loaded.name} has no first token; expected special to be auto or none")
        return (first,), ()
    prefix, suffix = _tokenizer_special(loaded.tokenizer)
    if loaded.opening is not None:
        prefix = loaded.opening + (prefix[1:] if prefix[:1] == (first,) else prefix)
    return prefix, suffix


def first_token(loaded: LoadedModel) -> int | None:
    """Id of the token that begins a text: that of the GGUF file, else the tokenizer's bos token or [CLS], or None."""
    named = (getattr(loaded.tokenizer, name, None) for name in ("bos_token_id", "cls_token_id"))
    return next((token for token in (*(loaded.opening or ()), *named) if token is not None), None)


def _tokenizer_special(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that a tokenizer puts before and after a text, from encoding a text with and without special tokens."""
    (bare,) = _encode(tokenizer, ["a"])
    dressed = list(tokenizer("a")["input_ids"])
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return tuple(dressed[:start]), tuple(dressed[start + len(bare) :])
    given = f"{type(tokenizer).__name__} changes a text when it adds special tokens"
    raise InputError(f"{given}; expected one that puts them around it")


def _tokenised(tokenizer: Any, corpus: Corpus) -> Iterator[tuple[str, list[int]]]:
    """Yield each document with its token ids; documents are tokenised in batches that grow to `BATCH`, on all cores."""
    documents, batch = corpus.documents(), 1
    while texts := list(islice(documents, batch)):
        yield from zip(texts, _encode(tokenizer, texts), strict=True)
        batch = min(2 * batch, BATCH)


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    try:  # without the warning that a document is longer than the model's positions: it is cut later
        options = {"add_special_tokens": False, "verbose": False, "return_attention_mask": False}
        return [list(ids) for ids in tokenizer(texts, **options)["input_ids"]]
    except Exception as error:  # an incomplete vocabulary makes the library raise bare exceptions
        raise InputError(f"the tokenizer cannot read the text ({error}); expected a complete tokenizer.json") from None


def _warnings(loaded: LoadedModel, length: int, special: str, prefix: tuple[int, ...]) -> list[str]:
    """Warnings about windows of `length` tokens; raises an `InputError` if the model cannot run such windows."""
    rows, positions, first = loaded.position_rows, loaded.positions, first_token(loaded)
    found = []
    if rows is not None and length > rows:
        given = f"a window of {length} tokens was asked for, but {loaded.name} has learned {rows} positions"
        raise InputError(f"{given}; use windows of at most {rows}")
    if positions is not None and length > positions:
        found.append(
            f"windows of {length} tokens exceed the {positions} positions of {loaded.name}: "
            "its heads are measured outside the lengths that it was trained for"
        )
    if special == "auto" and loaded.causal and first is not None and first not in prefix:
        why = "its tokenizer does not add it" if loaded.opening is None else "its file says that it is not added"
        token = loaded.tokenizer.convert_ids_to_tokens(first)
        found.append(
            f"the model {loaded.name} has a first token, {token}, but {why}: windows begin without it, and heads that "
            "use it as an attention sink show another sink or none; pass special='bos' if texts begin with it"
        )
    if loaded.unused:
        more = f" and {len(loaded.unused) - 1:,} more" if loaded.unused[1:] else ""
        named = loaded.unused[0] + more
        found.append(f"the file of {loaded.name} has weights of layers that the model lacks: {named}")
    return found
