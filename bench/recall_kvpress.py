"""kvpress's own KVzipPress, AdaKVPress and ExpectedAttentionPress on the prompts of `python -m bench recall`.

It runs in an environment of its own, which needs kvpress 0.5.5, torch and transformers 5.2, not limitlens:

    RECALL_PROMPTS=prompts.json python -m bench recall
    python bench/recall_kvpress.py MODEL.gguf prompts.json bench/results/recall.json
    RECALL_TASKS=needle8:40,text:40,needle1:24 python -m bench.recall_gpu prompts 4096 prompts.json
    python bench/recall_kvpress.py MODEL_FOLDER prompts.json kvpress.json 0.25     # on a GPU in bfloat16

A press reads the context; question and answer are read in one forward pass after it, with their positions behind the
context. The scores, by prompt as in the results file, are added to it; `python -m bench.recall` computes means.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache


def presses(ratio: float) -> dict[str, Any]:
    """The presses by name, each of which evicts `ratio` of the cache."""
    return {
        "kvpress KVzipPress": kvpress.KVzipPress(compression_ratio=ratio),
        "kvpress AdaKVPress(SnapKVPress)": kvpress.AdaKVPress(kvpress.SnapKVPress(compression_ratio=ratio)),
        "kvpress AdaKVPress(ExpectedAttentionPress)": kvpress.AdaKVPress(
            kvpress.ExpectedAttentionPress(compression_ratio=ratio)
        ),
        "kvpress ExpectedAttentionPress": kvpress.ExpectedAttentionPress(compression_ratio=ratio),
    }


@torch.no_grad()
def predictions(model: Any, prompt: dict[str, Any], press: Any) -> torch.Tensor:
    """Log-probabilities for the tokens of the answer, with the cache that a press leaves (None: the full cache)."""
    context, question, answer = (prompt[name] for name in ("context", "question", "answer"))
    cache = DynamicCache()
    with nullcontext() if press is None else press(model):
        model.model(input_ids=torch.tensor([context], device=model.device), past_key_values=cache)
    tail = torch.tensor([[*question, *answer]], device=model.device)
    positions = torch.arange(len(context), len(context) + tail.shape[1], device=model.device)[None]
    logits: torch.Tensor = model(input_ids=tail, past_key_values=cache, position_ids=positions).logits[0]
    return logits[len(question) - 1 : -1].float().log_softmax(-1)


def loaded(source: str) -> Any:
    """Model from a GGUF file in float32, or from a folder, which on a GPU is bfloat16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path, folder = Path(source), source
    options: dict[str, Any] = {"pretrained_model_name_or_path": source}
    if path.suffix == ".gguf":
        options = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        folder = tempfile.mkdtemp()
        AutoTokenizer.from_pretrained(**options).save_pretrained(folder)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(**options, dtype=dtype)
    model = model.to(device).eval()
    model.config._name_or_path = folder  # KVzipPress loads the tokenizer from here
    return model


def main(source: str, prompts: str, results: str, share: str | None = None) -> None:
    """Without `share` the scores are added to the results file, otherwise they are written alone."""
    found: dict[str, Any] = {"options": {"SHARE": share}, "scores": {}}
    if share is None:
        found = json.loads(Path(results).read_text())
    asked = json.loads(Path(prompts).read_text())
    model = loaded(source)
    began = time.perf_counter()
    names = presses(1 - float(found["options"]["SHARE"]))
    scores: dict[str, dict[str, list[list[float]]]] = {}
    for prompt in asked:
        if time.perf_counter() - began > float(os.environ.get("RECALL_SECONDS", "1e9")):
            break
        target = torch.tensor(prompt["answer"], device=model.device)
        full = predictions(model, prompt, None)
        for name, press in {"kvpress, full": None, **names}.items():
            row = [float("nan")] * 4
            try:
                cut = full if press is None else predictions(model, prompt, press)
                best = cut.argmax(-1)
                kl = float((full.exp() * (full - cut)).sum(-1).mean())
                same = float((best == full.argmax(-1)).float().mean())
                row = [float((best == target).all()), -float(cut.gather(-1, target[:, None]).mean()), kl, same]
            except ValueError as error:  # its search for a key that no query sees may fail
                print(name, prompt["task"], error, flush=True)
                if share is None:
                    continue
            scores.setdefault(prompt["task"], {}).setdefault(name, []).append(row)
        documents = [one.get("document") for one in asked if one["task"] == prompt["task"]]
        print(f"{time.perf_counter() - began:.0f} s {prompt['task']}", flush=True)
        for task, methods in scores.items():
            found["scores"].setdefault(task, {}).update(methods)
        if share is not None:
            found.setdefault("documents", {})[prompt["task"]] = documents
            Path(results).write_text(json.dumps(found))
    found["kvpress"] = "0.5.5"
    Path(results).write_text(json.dumps(found, indent=2 if share is None else None) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
