"""The scripts in examples/ give the same results as limitlens."""

from __future__ import annotations

import importlib.util
import json
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

import limitlens as ll
from cache_cases import language_model, text
from capture_cases import run, token_ids
from tiny_models import LAYERS, TINY

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_plain_transformers_do_the_same() -> None:
    factors = (1 + torch.arange(12.0).view(LAYERS, 4) / 10).tolist()
    budgets = [[3, 6], [8, 10], [12, 5]]
    ids, cut = token_ids(), 12
    model = TINY["llama"].model()
    with ll.intervene(model, score_scale=factors, keys="streaming", count=budgets, cut=cut):
        expected = run(model, ids)
    try:
        model = example("plain_transformers").install(TINY["llama"].model(), factors, budgets, cut)
        torch.testing.assert_close(run(model, ids), expected, rtol=1e-4, atol=1e-5)
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop("planned", None)


def test_budgets_and_policies_inside_kvpress(tmp_path: Path) -> None:
    pytest.importorskip(
        "kvpress", reason="needs kvpress, which wants transformers below 5.3: an environment of its own"
    )
    press_of, model, ids = example("kvpress_budgets").PlanPress, language_model().model, token_ids() % 29
    names = [["knorm", "knorm"], ["streaming", "recent"], ["knorm", "random_eviction"]]
    budgets = [[3, 6], [8, 10], [12, 5]]
    file = tmp_path / "kv_budgets.json"

    def behind(budgets: list[list[int]]) -> Any:
        """What the model predicts after a context of 12 tokens, and how many keys of each layer and head it lost."""
        shares = [[keys / 12 for keys in row] for row in budgets]
        file.write_text(json.dumps({"format": 3, "budgets": budgets, "shares": shares, "policies": names}))
        cache = transformers.DynamicCache()
        with torch.inference_mode():
            with press_of.from_file(file)(model):
                model(ids[:1, :12], past_key_values=cache)
            masked = [layer.self_attn.masked_key_indices for layer in model.model.layers]
            logits = [model(ids[:1, [at]], past_key_values=cache).logits for at in range(12, ids.shape[1])]
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
        return torch.cat(logits, 1), masked

    with torch.inference_mode():
        whole = model(ids[:1]).logits[:, 12:]
    kept, _ = behind([[12, 12]] * LAYERS)
    torch.testing.assert_close(kept, whole, rtol=1e-4, atol=1e-5)
    cut, masked = behind(budgets)
    dropped = [torch.bincount(heads, minlength=2).tolist() for _, heads, _ in masked]
    assert dropped == [[12 - keys for keys in row] for row in budgets]
    _, heads, places = masked[1]
    assert places[heads == 0].sort().values.tolist() == [4, 5, 6, 7]  # streaming: 4 sinks and the last 4
    assert places[heads == 1].sort().values.tolist() == [1, 2]  # recent, and the first token
    assert (cut - whole).abs().max() > 1e-3
    names[0][0] = "priority"
    with pytest.raises(ValueError, match="adds log-weights"):
        behind(budgets)


def test_layers_of_kvpress_keep_the_mean_shares_of_a_plan(tmp_path: Path) -> None:
    kvpress = pytest.importorskip("kvpress", reason="needs kvpress, in an environment of its own")
    file, cache = tmp_path / "kv_budgets.json", transformers.DynamicCache()
    file.write_text(json.dumps({"layer_shares": [0.25, 0.5, None]}))
    model, ids = language_model().model, torch.arange(40)[None] % 29
    with torch.inference_mode(), example("kvpress_budgets").layer_press(file, kvpress.KnormPress())(model):
        model(ids, past_key_values=cache)
    assert [layer.keys.shape[2] for layer in cache.layers] == [10, 20, 40]


def test_the_example_generates_with_a_compressed_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script as it stands, with a tiny model in the place of the named one."""
    import limitlens.models

    loaded = language_model()
    plan = ll.plan(loaded, text(), total=0.5, context=64, windows=(1, 1), policy="snapkv")
    (tmp_path / "prompt.txt").write_text("abcdefgh" * 16)
    arguments = ["example", "letters", str(plan.save(tmp_path / "plan")), str(tmp_path / "prompt.txt")]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(limitlens.models, "load", lambda name, head: loaded)
    example("compressed_generate")
    *_, sizes = capsys.readouterr().out.splitlines()
    assert sizes == "cache of the prompt: 0.0 MB, kept 0.0 MB"


@pytest.mark.parametrize("how", ["yarn", "linear", "ntk", "none"])
def test_plain_transformers_are_tempered(how: str, tmp_path: Path) -> None:
    from temper_cases import TO, decoder, tempered, texts

    made = tempered().exponents("per_head_far_0.5")
    replace(made, rope_scaling=how, constants=made.exponents / 2).write(tmp_path / "file.json")
    ids, model = texts(1, TO, 20), deepcopy(decoder().model)
    with ll.intervene(model, score_scale=tmp_path / "file.json"):
        expected = model(input_ids=ids).logits
    assert (model(input_ids=ids).logits - expected).abs().max() > 0.1
    try:
        found = example("temper").install(model, tmp_path / "file.json")(input_ids=ids).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop("tempered", None)
