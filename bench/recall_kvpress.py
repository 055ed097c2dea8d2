"""kvpress's own KVzipPress, AdaKVPress and ExpectedAttentionPress on the prompts of `python -m bench recall`.

It runs in an environment of its own, which needs kvpress 0.5.5, torch 2.13.0 and transformers 5.2, not limitlens:

    RECALL_PROMPTS=prompts.json python -m bench recall
    python bench/recall_kvpress.py MODEL.gguf prompts.json bench/results/recall.json

A press reads the context; question and answer are read in one forward pass after it, with their positions behind the
context. The scores, by prompt as in the results file, are added to it; `python -m bench.recall` computes means.
"""

from __future__ import annotations

import json
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
        model.model(input_ids=torch.tensor([context]), past_key_values=cache)
    tail = torch.tensor([[*question, *answer]])
    positions = torch.arange(len(context), len(context) + tail.shape[1])[None]
    logits = model(input_ids=tail, past_key_values=cache, position_ids=positions).logits[0]
    return logits[len(question) - 1 : -1].float().log_softmax(-1)


def main(gguf: str, prompts: str, results: str) -> None:
    with open(results, encoding="utf-8") as file:
        found = json.load(file)
    with open(prompts, encoding="utf-8") as file:
        asked = json.load(file)
    source = {"pretrained_model_name_or_path": str(Path(gguf).parent), "gguf_file": Path(gguf).name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    folder = tempfile.mkdtemp()
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model.config._name_or_path = folder  # KVzipPress loads the tokenizer from here
    began = time.perf_counter()
    names = presses(1 - float(found["options"]["SHARE"]))
    scores: dict[str, dict[str, list[list[float]]]] = {}
    for prompt in asked:
        target = torch.tensor(prompt["answer"])
        full = predictions(model, prompt, None)
        for name, press in {"kvpress, full": None, **names}.items():
            try:
                cut = full if press is None else predictions(model, prompt, press)
            except ValueError as error:  # its search for a key that no query sees may fail
                print(name, prompt["task"], error, flush=True)
                continue
            best = cut.argmax(-1)
            kl = float((full.exp() * (full - cut)).sum(-1).mean())
            same = float((best == full.argmax(-1)).float().mean())
            row = [float((best == target).all()), -float(cut.gather(-1, target[:, None]).mean()), kl, same]
            scores.setdefault(prompt["task"], {}).setdefault(name, []).append(row)
        print(f"{time.perf_counter() - began:.0f} s {prompt['task']}", flush=True)
    for task, methods in scores.items():
        found["scores"][task] |= methods
    found["kvpress"] = "0.5.5"
    with open(results, "w", encoding="utf-8") as file:
        json.dump(found, file, indent=2)
        file.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
