"""Speed of kvpress's uniform compression, run by `bench.shrink` in an environment with kvpress 0.5.5.

`python bench/kvpress_speed.py WEIGHTS.gguf SHARE NEW ROUNDS` reads the ids of a prompt from stdin and prints JSON: the
full DynamicCache of that environment, and `SnapKVPress`, which removes all but SHARE of the keys.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from kvpress import SnapKVPress
from transformers import AutoModelForCausalLM, DynamicCache

weights, share, new, rounds = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
ids = torch.tensor(json.load(sys.stdin))
torch.set_num_threads(1)  # as in bench.shrink; seconds are processor time
model: Any = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32).eval()
presses = {"full": None, "snapkv": SnapKVPress(1 - share)}
found: dict[str, list[dict[str, float]]] = {name: [] for name in presses}
for _ in range(rounds):
    for name, press in presses.items():
        cache = DynamicCache()
        with torch.inference_mode():
            started = time.process_time()
            with press(model) if press is not None else nullcontext():
                out = model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            read = time.process_time()
            size = sum(
                part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values)
            )
            for step in range(new):
                position = torch.tensor([[ids.shape[1] + step]])
                token = out.logits[:, -1:].argmax(-1)
                out = model(input_ids=token, past_key_values=cache, position_ids=position)
            ended = time.process_time()
        found[name].append(
            {"prefill_seconds": read - started, "tokens_per_second": new / (ended - read), "bytes": size}
        )
print(json.dumps({
    "versions": {name: version(name) for name in ("kvpress", "torch", "transformers")},
    **{name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()},
}))  # fmt: skip
