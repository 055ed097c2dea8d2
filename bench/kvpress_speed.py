"""Speed of kvpress's uniform compression, run by `bench.shrink` in an environment with kvpress 0.5.5.

`python bench/kvpress_speed.py WEIGHTS.gguf SHARE NEW ROUNDS` reads the ids of a prompt from stdin and prints JSON: the
full DynamicCache of that environment, and `SnapKVPress`, which removes all but SHARE of the keys.
`python bench/kvpress_speed.py cuda FOLDER SHARE NEW LENGTH BATCH,... WARM` does so on a GPU, in bfloat16, with random
prompts: one is read and its cache repeated to each batch.
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

cuda = sys.argv[1] == "cuda"
weights, share, new = Path(sys.argv[1 + cuda]), float(sys.argv[2 + cuda]), int(sys.argv[3 + cuda])


def now() -> float:
    """Processor time on a CPU, as in `bench.shrink`."""
    if not cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measured(model: Any, press: SnapKVPress | None, ids: torch.Tensor, batch: int, warm: int) -> dict[str, float]:
    """Read a prompt, repeat its cache to the batch, and decode `new` tokens after `warm` others."""
    cache, before = DynamicCache(), torch.cuda.memory_allocated() if cuda else 0
    with torch.inference_mode():
        started = now()
        with press(model) if press is not None else nullcontext():
            out = model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        read = now()
        token = out.logits[:, -1:].argmax(-1).repeat(batch, 1)
        del out
        if batch > 1:
            cache.batch_repeat_interleave(batch)
        size = sum(part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values))
        allocated = torch.cuda.memory_allocated() - before if cuda else size
        for step in range(warm + new):
            if step == warm:
                began = now()
            position = torch.full((1, 1), ids.shape[1] + step, device=ids.device)
            out = model(input_ids=token, past_key_values=cache, position_ids=position)
            token = out.logits[:, -1:].argmax(-1)
        taken = now() - began
    return {"prefill_seconds": read - started, "tokens_per_second": new * batch / taken, "bytes": size,
            "allocated_bytes": allocated}  # fmt: skip


presses = {"full": None, "snapkv": SnapKVPress(1 - share)}
versions = {name: version(name) for name in ("kvpress", "torch", "transformers")}
if cuda:
    model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16).eval().to("cuda")
    ids = torch.randint(model.config.vocab_size, (1, int(sys.argv[5])), device="cuda")
    for press in presses.values():
        measured(model, press, ids[:, :2048], 1, 2)
    rows = []
    for batch in map(int, sys.argv[6].split(",")):
        rows.append({"batch": batch})
        for name, press in presses.items():
            rows[-1][name] = measured(model, press, ids, batch, int(sys.argv[7]))
            torch.cuda.empty_cache()
    print(json.dumps({"versions": versions, "rows": rows}))
else:
    rounds = int(sys.argv[4])
    ids = torch.tensor(json.load(sys.stdin))
    torch.set_num_threads(1)  # as in bench.shrink
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32).eval()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in presses}
    for _ in range(rounds):
        for name, press in presses.items():
            found[name].append(measured(model, press, ids, 1, 0))
    print(json.dumps({"versions": versions} | {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()
    }))  # fmt: skip
