"""What factors on the scores do to a decoder beyond its context: both axes, two texts, a frontier of fits; on a GPU.

    python3 -m bench.temper --model m.gguf --text wikipedia.txt --other biomedical.txt

fits exponents on the first documents of one text and tries every schedule on its other documents and on a text that was
never fitted. Fits and readings multiply in bfloat16 where the device is a GPU; the first document is read in float32
too, and what that changes is kept (`precision`). Documents are read one after another under all schedules, and what
is known is written after each: a run that is cut off leaves whole, paired rows. `--quick` runs all of it in a minute on
a tiny random model, whose numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limitlens.live.axes import Axes, Material, edges, joined, material, mean, read
from limitlens.live.critical import critical_exponents
from limitlens.live.fit import Fitted, Step, fit
from limitlens.live.reader import Reader
from limitlens.live.schedules import Factor, powers, schedules
from limitlens.models import LoadedModel, Windows, load, open_corpus
from limitlens.models.stretch import stretched

# name, level, weight of far use, constants: the most wanted first, for what there is no time for is left out
FITS: list[tuple[str, str, float, bool]] = [
    ("single", "model", 0.0, False),
    ("per_head", "head", 0.0, False),
    ("per_head_far_0.2", "head", 0.2, False),
    ("per_head_far_0.5", "head", 0.5, False),
    ("per_head_far_0.1", "head", 0.1, False),
    ("single_far_0.5", "model", 0.5, False),
    ("per_head_constant_far_0.2", "head", 0.2, True),
    ("per_layer_far_0.2", "layer", 0.2, False),
]
FITTED, CHECKED = 3, 1  # documents that steps read, and that end a fit
STARTED = time.perf_counter()


def say(*words: object) -> None:
    """A line of progress with the time since the start."""
    print(f"{time.perf_counter() - STARTED:7.1f} s ", *words, flush=True)


def main() -> None:
    options = parse()
    bench = Bench(options)
    bench.fit_all()
    bench.read_all()
    say("done")


class Bench:
    """One run: the model, its texts, and what is known so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = tiny() if options.quick else load(options.model, device=device, head=True)
        self.trained: int = options.trained or loaded.positions or 0
        self.to: int = options.to
        half = options.precision == "bfloat16" or (options.precision == "auto" and device == "cuda")
        self.reader = Reader(loaded, half=half)
        self.factor = self.to / self.trained
        self.texts = {name: self.documents(path) for name, path in (("fitted", options.text), ("other", options.other))}
        first = FITTED + CHECKED
        held = {"fitted": self.texts["fitted"][first:], "other": self.texts["other"]}
        self.material = {
            name: material(found[: options.documents], self.reader, self.trained, seed=100 * i)
            for i, (name, found) in enumerate(held.items())
        }
        self.schedules: dict[str, Factor | None] = {**schedules(self.trained, self.to, self.reader.dim)}
        self.axes: dict[str, dict[str, list[Axes]]] = {name: {} for name in self.material}
        self.result: dict[str, Any] = {
            "model": loaded.name,
            "trained": self.trained,
            "to": self.to,
            "stretch": options.stretch,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
            "precision_of_products": "bfloat16" if half else "float32",
            "texts": {"fitted": Path(options.text).name, "other": Path(options.other).name},
            "edges": edges(self.trained, self.to),
            "fits": {},
        }
        count = {name: len(found) for name, found in self.material.items()}
        say(f"{loaded.name}: {self.trained:,} -> {self.to:,} on {self.result['device']}, documents to read {count}")

    def documents(self, path: str) -> list[torch.Tensor]:
        """The text in documents of the whole length; those beyond the wanted number are not read."""
        wanted = FITTED + CHECKED + self.options.documents
        corpus = open_corpus(path)
        windows = Windows(self.reader.loaded, corpus, length=self.to, tokens=wanted * self.to, fewer=True)
        return [ids for batch in windows.batches(1) for ids in batch]

    def left(self) -> float:
        """Seconds left."""
        return float(self.options.seconds - (time.perf_counter() - STARTED))

    def stretching(self) -> Any:
        """The stretch within whose block everything but truncation runs."""
        return stretched(self.reader.stack, self.options.stretch, self.factor, self.trained)

    def fit_all(self) -> None:
        """Every fit that there is time for, half of it at most."""
        say("critical exponents")
        found = critical_exponents(self.reader, self.texts["fitted"][:1], self.trained)
        self.result["fits"]["critical"] = {"exponents": found.tolist()}
        self.schedules["critical"] = powers(torch.as_tensor(found), None, self.trained)
        texts = self.texts["fitted"]
        with self.stretching():
            self.check_precision()
            for name, level, far, constant in FITS:
                began = time.perf_counter()
                if self.left() < self.options.seconds / 2:
                    say(f"no time for {name}")
                    continue

                def report(step: Step, total: float, name: str = name) -> None:
                    far = "" if step.far is None else f", far {step.far:.4f}"
                    say(f"{name} step {step.number}: loss {total:.4f}, plain {step.plain:.4f}{far}")

                fitted = fit(
                    self.reader, texts[:FITTED], texts[FITTED], trained=self.trained, far=far, level=level,
                    constant=constant, steps=self.options.steps, rate=self.options.rate, report=report,
                )  # fmt: skip
                self.keep(name, fitted, time.perf_counter() - began)

    def keep(self, name: str, fitted: Fitted, seconds: float) -> None:
        """What a fit found, as a schedule and in the file."""
        exponents = torch.as_tensor(fitted.exponents)
        constants = None if fitted.constants is None else torch.as_tensor(fitted.constants)
        self.schedules[name] = powers(exponents, constants, self.trained)
        spread = np.quantile(fitted.exponents, (0.05, 0.5, 0.95))
        say(f"{name}: {len(fitted.steps)} steps in {seconds:.1f} s, exponents {np.round(spread, 3).tolist()}")
        self.result["fits"][name] = {
            "level": fitted.level,
            "far": fitted.far,
            "seconds": seconds,
            "exponents": fitted.exponents.tolist(),
            "constants": None if fitted.constants is None else fitted.constants.tolist(),
            "felt": fitted.felt.tolist(),
            "steps": [vars(step) for step in fitted.steps],
            "checks": [vars(step) for step in fitted.checks],
        }
        self.write()

    def check_precision(self) -> None:
        """One document in both precisions under YaRN's factor: how far they are apart, and what each costs."""
        found = {}
        document = self.material["fitted"][0]
        for half in {self.reader.half, False}:
            self.reader.half, was = half, self.reader.half
            began = time.perf_counter()
            try:
                with self.reader.acting(self.schedules["yarn"]):
                    found[half] = read(self.reader, document, self.trained)
            except torch.OutOfMemoryError as error:  # of the control alone: say so and go on
                say(f"no control in float32: {str(error).splitlines()[0]}")
                self.reader.half = was
                return
            say(
                f"both axes of one document in {'bfloat16' if half else 'float32'}: {time.perf_counter() - began:.1f} s"
            )
            self.reader.half = was
        apart = {
            name: float(np.abs(getattr(found[self.reader.half], name) - getattr(found[False], name)).max())
            for name in ("plain", "again", "fact")
        }
        say(f"largest difference to float32, nats: {apart}")
        self.result["precision"] = {"largest_difference_to_float32": apart}

    def read_all(self) -> None:
        """Both axes of all schedules, document by document of both texts in turn, as long as there is time."""
        took = 0.0
        for i in range(max(len(found) for found in self.material.values())):
            if self.left() < took:
                say("no time for another document")
                break
            began = time.perf_counter()
            for text, found in self.material.items():
                if i < len(found):
                    self.read_one(text, found[i])
            took = 1.1 * (time.perf_counter() - began)
            self.summarise()
            self.write()

    def read_one(self, text: str, document: Material) -> None:
        """One document under all schedules."""
        found = self.axes[text]
        with self.reader.acting(None):
            found.setdefault("truncated", []).append(read(self.reader, document, self.trained, truncated=True))
        with self.stretching():
            for name, factor in self.schedules.items():
                with self.reader.acting(factor):
                    found.setdefault(name, []).append(read(self.reader, document, self.trained))
        last = {name: axes[-1] for name, axes in found.items()}
        say(f"{text} document {len(found['yarn'])}: nats at the end | of far repeated passages")
        for name, axes in last.items():
            say(f"   {name:<26} {axes.last()[0]:.4f} | {axes.beyond(self.trained)[0]:.4f}")

    def summarise(self) -> None:
        """Means over documents, and differences to YaRN's factor on the same documents."""
        for text, found in self.axes.items():
            whole = {name: joined(axes) for name, axes in found.items()}
            yarn = whole["yarn"]
            for name, axes in whole.items():
                plain, far, fact = axes.last(), axes.beyond(self.trained), axes.beyond(self.trained, "fact")
                base = yarn.last(), yarn.beyond(self.trained), yarn.beyond(self.trained, "fact")
                nats = mean(plain)
                self.put("perplexity", text, name, {
                    "value": math.exp(nats.value), "log": nats.value, "log_stderr": nats.stderr,
                    "log_against_yarn": vars(mean(plain, base[0])), "documents": len(plain),
                })  # fmt: skip
                for axis, values, other in (("far", far, base[1]), ("fact", fact, base[2])):
                    against = vars(mean(values, other))
                    self.put(axis, text, name, {**vars(mean(values)), "against_yarn": against})
                raw = {part: getattr(axes, part).tolist() for part in vars(axes)}
                self.put("by_document", text, name, raw)
        self.result["frontier"] = [
            {
                "fit": name,
                "level": found["level"],
                "far_weight": found["far"],
                "constants": found["constants"] is not None,
            }
            | {
                text: {axis: self.result[axis][text][name] for axis in ("perplexity", "far", "fact")}
                for text in self.axes
            }
            for name, found in self.result["fits"].items()
            if "far" in found
        ]

    def put(self, *path: Any) -> None:
        """Put a value into the result under nested names."""
        *names, value = path
        here = self.result
        for name in names[:-1]:
            here = here.setdefault(name, {})
        here[names[-1]] = value

    def write(self) -> None:
        """Write what is known."""
        self.result["seconds"] = time.perf_counter() - STARTED
        path = Path(self.options.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite(self.result), indent=1, allow_nan=False)
        path.with_suffix(".partial").write_text(text + "\n")
        path.with_suffix(".partial").replace(path)


def finite(value: Any) -> Any:
    """The same without numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tiny() -> LoadedModel:
    """A random decoder of 128 positions that reads bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return LoadedModel("a tiny random decoder", model, PreTrainedTokenizerFast(tokenizer_object=backend))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or what limitlens calls a model")
    parser.add_argument("--text", required=True, help="the text that exponents are fitted on, and tried on its rest")
    parser.add_argument("--other", required=True, help="a text that is never fitted")
    parser.add_argument("--to", type=int, default=32768)
    parser.add_argument("--trained", type=int, help="the trained window; what the model says when left out")
    parser.add_argument("--stretch", default="yarn")
    parser.add_argument("--documents", type=int, default=6, help="documents of each text that are read, at most")
    parser.add_argument("--steps", type=int, default=24, help="of each fit")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=530.0, help="no new document is begun beyond")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "temper.json"))
    parser.add_argument("--quick", action="store_true", help="a tiny random model to 768 tokens")
    options = parser.parse_args()
    if options.quick:
        options.to, options.steps, options.documents = 768, 3, 2
    return options


if __name__ == "__main__":
    main()
