"""Change of an encoder's mean-pooled embeddings when each query sees fewer keys, by key policy and number of keys.

`python -m bench.encoder [MODEL [TEXT [DOCUMENTS [TOKENS]]]]`: windows of TOKENS tokens are the documents. An encoder
has no cache: every query selects its keys anew, so fewer keys save arithmetic, not memory. The change is 1 − cos
between the embeddings of a document with fewer and with all keys, as a mean over documents with its standard error; 1
− cos between two different documents is given for comparison. Results are in bench/results/encoder.json; four minutes
on one busy core.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import limitlens as ll
from limitlens.attention.policies import POLICIES
from limitlens.models import LoadedModel, Windows, load, open_corpus
from limitlens.record import json_text, to_json
from limitlens.statistics.documents import paired_mean

RESULTS = Path(os.environ.get("OUT", Path(__file__).parent / "results"))
SHARES = (1 / 8, 1 / 4, 1 / 2)
TRIED = [name for name in POLICIES if name != "random"]  # its weights are the same for all keys here, and cancel


def embeddings(loaded: LoadedModel, windows: Windows) -> torch.Tensor:
    """Mean-pooled outputs of all windows, of length 1."""
    with torch.inference_mode():
        pooled = [loaded.model(ids).last_hidden_state.mean(1) for ids in windows.batches(1, range(windows.count))]
    return torch.nn.functional.normalize(torch.cat(pooled).double(), dim=-1)


def main(model: str = "minilm", text: str = "stdlib-docs", documents: int = 32, tokens: int = 256) -> None:
    loaded, began = load(model), time.perf_counter()
    windows = Windows(loaded, open_corpus(text), length=tokens, tokens=documents * tokens)
    whole = embeddings(loaded, windows)
    apart = 1 - (whole[0::2] * whole[1::2]).sum(-1)  # pairs that share no document
    found: dict[str, Any] = {"model": model, "text": Path(text).name, "documents": documents, "tokens": tokens,
                             "neighbours": paired_mean(apart.numpy()), "settings": []}  # fmt: skip
    print(f"neighbouring documents: 1 − cos {found['neighbours'].value:.4f} ± {found['neighbours'].stderr:.4f}")
    for choice in TRIED:
        for share in SHARES:
            with ll.intervene(loaded, keys=choice, count=round(share * tokens)):
                turned = np.asarray(1 - (embeddings(loaded, windows) * whole).sum(-1))
            tried = paired_mean(turned)
            found["settings"].append({"choice": choice, "share": share, "turned": tried})
            print(f"{choice}, {share:.1%} of the keys: 1 − cos {tried.value:.5f} ± {tried.stderr:.5f}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")
    (RESULTS / "encoder.json").write_text(json_text(to_json(found)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*(kind(value) for kind, value in zip((str, str, int, int), sys.argv[1:], strict=False)))
