"""Generate text with a quarter of the KV cache: plan once, then two lines in plain transformers.

limitlens plan smollm2 --total 0.25 --context 1024 --out runs/plan
python examples/compressed_generate.py smollm2 runs/plan README.md
"""

import sys
from pathlib import Path

import limitlens as ll
from limitlens.models import load

name, plan, file = sys.argv[1:]
loaded = load(name, head=True)  # for a model of your own: AutoModelForCausalLM.from_pretrained(folder)
model, tokenizer = loaded.model, loaded.tokenizer
inputs = tokenizer(Path(file).read_text(encoding="utf-8"), return_tensors="pt", truncation=True, max_length=2048)
with ll.apply(loaded, plan) as applied:
    output = model.generate(**inputs, max_new_tokens=50, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
print(f"cache of the prompt: {applied.full_bytes / 1e6:.1f} MB, kept {applied.kept_bytes / 1e6:.1f} MB")
