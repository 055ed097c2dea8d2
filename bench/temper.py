"""Benchmark of score factors for a decoder beyond its context: two axes, two texts, seven fits; for a GPU.

    python3 -m bench.temper --model m.gguf --text wikipedia.txt --other biomedical.txt
    python3 -m bench.temper --look      # print the results in bench/results/temper.json
    python3 -m bench.temper --draw      # draw them: docs/temper-*.svg

The first command runs `limitlens.temper` with seven fits (the committed results also hold one per layer, of version
0.1). Products are in bfloat16 on a GPU; one document is also read in float32, and the difference is recorded
(`precision`). Results are written after each fit and document. `--quick` runs everything on a tiny random model, whose
numbers mean nothing. `--look --run DIR` correlates the exponents with the numbers of a probe of the same model.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limitlens.interventions.planting import edges, plant_all, read_axes
from limitlens.interventions.reader import Reader
from limitlens.interventions.temper import AXES, YARN, Temper, label, temper
from limitlens.interventions.temper_fit import FitOptions
from limitlens.models import LoadedModel, Windows, load, open_corpus
from limitlens.models.rope_scaling import rope_scaled
from limitlens.record import from_json, json_text
from limitlens.statistics.documents import paired_mean
from limitlens.theory.schedules import yarn_scale

HERE = Path(__file__).parent
# the most important first, since a run may be ended early
FITS = [
    FitOptions("model"), FitOptions("head"), FitOptions("head", 0.2), FitOptions("head", 0.5), FitOptions("head", 0.1),
    FitOptions("model", 0.5), FitOptions("head", 0.2, constant=True),
]  # fmt: skip
STARTED = time.perf_counter()


def say(*words: object) -> None:
    """A line of progress with the time since the start."""
    print(f"{time.perf_counter() - STARTED:7.1f} s ", *words, flush=True)


def main() -> None:
    options = parse()
    if options.look or options.draw:
        found = kept(options.out)
        (draw if options.draw else show)(found)
        if options.run:
            regress(found, options.run)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = tiny() if options.quick else load(options.model, device=device, head=True)
    about = {"versions": versions(), "precision": precision(loaded, options) if device == "cuda" else None}

    def write(made: Temper) -> None:
        path = Path(options.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".partial").write_text(json_text(about | made.document(), indent=1) + "\n")
        path.with_suffix(".partial").replace(path)

    made = temper(
        loaded, options.to, options.text, options.other, rope_scaling=options.rope_scaling, fits=FITS,
        documents=options.documents, steps=options.steps, rate=options.rate, keep=write,
        progress=lambda done, total: say(f"{done:.2f} of {total:.0f} fits and rounds of documents"),
    )  # fmt: skip
    write(made)
    say("done")


def versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}


def precision(loaded: LoadedModel, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Largest difference between bfloat16 and float32 on one document under YaRN's factor."""
    trained, to = loaded.positions or 0, options.to
    windows = Windows(loaded, open_corpus(options.text), length=to, tokens=2 * to, fewer=True)
    found = {}
    for half in (True, False):
        reader = Reader(loaded, half=half)
        document = plant_all([ids for batch in windows.batches(1) for ids in batch], trained)[0]
        scale = torch.as_tensor(yarn_scale(np.maximum(np.arange(1, to + 1), trained), trained), device=reader.device)
        acting = reader.acting(lambda layer, position, scale=scale: scale[position])
        with rope_scaled(reader.stack, options.rope_scaling, to / trained, trained), acting:
            found[half] = read_axes(reader, document, trained)
    apart = {
        name: float(np.abs(getattr(found[True], name) - getattr(found[False], name)).max())
        for name in ("plain", "again")
    }
    say(f"largest difference to float32, nats: {apart}")
    return {"largest_difference_to_float32": apart}


def kept(path: str) -> Temper:
    """The result in the file."""
    found: Temper = from_json(Temper, json.loads(Path(path).read_text(encoding="utf-8")))
    return found


def show(found: Temper) -> None:
    """Print both axes, differences to both readings of YaRN's factor, and correlations of the exponents."""
    from scipy.stats import spearmanr

    print(found)
    print("\nDifferences on the same documents: ln perplexity, far passages")
    for text in found.by_document:
        for name in (*found.fits, "truncated"):
            for rule in YARN:
                each = [found.estimate(text, name, axis, rule) for axis in AXES]
                told = "  ".join(f"{one.value:+.4f} ± {one.stderr:.4f}" for one in each)
                won = " both beyond 95%" if found.beats(name, rule, text) else ""
                print(f"  {found.texts[text]:<22} {label(name):<36} less {label(rule):<28} {told}{won}")
    print("\nNats less YaRN's factor on the same documents: plain text by position, repeated passages by distance")
    for text, axes in found.by_document.items():
        for name in ("truncated", "per_head", *found.winners):
            for part, x in (("plain", edges(found.trained, found.to)[1:]), ("again", axes["yarn"].distance.mean(0))):
                apart = [paired_mean(column) for column in (getattr(axes[name], part) - getattr(axes["yarn"], part)).T]
                told = ", ".join(
                    f"{at:,.0f}: {one.value:+.3f} ± {one.stderr:.3f}" for at, one in zip(x, apart, strict=True)
                )
                print(f"  {found.texts[text]:<22} {label(name):<32} {part:<6} {told}")
    print("\nRank correlations of exponents over heads (weighed by what the loss feels of each, in brackets)")
    low, high = found.fits["per_head"], found.fits["per_head_far_0.5"]
    for name, one in (("plain", low), ("far 0.5", high)):
        count = np.sum(one.felt**2) ** 2 / np.sum(one.felt**4)
        print(f"  weighed by what the fit {name} feels, {one.felt.size} heads count as {count:.0f}")
    free = found.fits["per_head_constant_far_0.2"]
    layer = np.indices(low.exponents.shape)[0]
    measured = {
        "layer": layer, "what the plain fit feels": low.felt,
        "what the far fit feels": high.felt, "γ of the plain fit": low.exponents, "γ of far 0.5": high.exponents,
        "constants of far 0.2": free.constants,
    }  # fmt: skip
    for label_, one in (("γ of the plain fit", low), ("γ of far 0.5", high), ("γ with constants, far 0.2", free)):
        for name, values in measured.items():
            if name != label_:
                rank = spearmanr(one.exponents.ravel(), np.ravel(values)).statistic
                print(f"  {label_:<26} and {name:<26} {rank:+.3f} ({weighed(one.exponents, values, one.felt):+.3f})")
    difference = high.exponents - low.exponents
    rank = spearmanr(difference.ravel(), layer.ravel()).statistic
    print(f"  {'far less plain':<26} and {'layer':<26} {rank:+.3f} ({weighed(difference, layer, high.felt):+.3f})")


def weighed(x: Any, y: Any, weight: Any) -> float:
    """Rank correlation with the squared weights of the heads."""
    from scipy.stats import rankdata

    ranks, w = [rankdata(np.ravel(part)) for part in (x, y)], np.ravel(weight) ** 2
    return float(np.cov(*ranks, aweights=w)[0, 1] / np.sqrt(np.prod([np.cov(one, aweights=w) for one in ranks])))


def regress(found: Temper, run: str) -> None:
    """Rank correlations of the exponents with every number of a probe per head, against shuffled heads."""
    import limitlens as ll

    table = ll.load(run).heads.select_dtypes("number")  # type: ignore[attr-defined]
    place = table["layer"].to_numpy(int), table["head"].to_numpy(int)
    known = table.drop(columns=["layer", "head", "kv_head"]).dropna(axis="columns", thresh=len(table) // 2)
    known = known.loc[:, known.nunique() > 1].fillna(known.median())
    ranks = known.rank().to_numpy()
    low, high = found.fits["per_head"], found.fits["per_head_far_0.5"]
    wanted = {"plain": (low.exponents, low.felt), "far": (high.exponents, high.felt)}
    wanted["far less plain"] = (high.exponents - low.exponents, high.felt)
    generator = np.random.default_rng(0)
    print(f"\nRank correlations of the exponents with {ranks.shape[1]} numbers that the probe knows of each head")
    for name, (gamma, felt) in wanted.items():
        for way, weight in (("each head alike", np.ones(len(ranks))), ("weighed", felt[place] ** 2)):

            def largest(order: Any, gamma: Any = gamma, weight: Any = weight) -> Any:
                """Correlations where heads `order` stand in the places of the probe's, weights going with them."""
                w, own = weight[order] / weight.sum(), gamma[place].argsort().argsort()[order].astype(float)
                centred, own = ranks - w @ ranks, own - w @ own
                return (w * own) @ centred / np.sqrt((w @ own**2) * (w @ centred**2))

            each = largest(np.arange(len(ranks)))
            chance = [np.abs(largest(generator.permutation(len(ranks)))).max() for _ in range(1000)]
            best = np.argsort(-np.abs(each))[:3]
            told = ", ".join(f"{known.columns[i]} {each[i]:+.3f}" for i in best)
            limit, p = np.quantile(chance, 0.95), np.mean(np.array(chance) >= np.abs(each).max())
            print(f"  {name:<15} {way:<16} {told}; 95% of the largest by chance below {limit:.3f}, p {p:.3f}")


def draw(found: Temper) -> None:
    """Draw the figures of docs/results/long-context.md."""
    from limitlens.results import plot

    docs = HERE.parent / "docs"
    titles = [f"γ of {label(name)}" for name in ("per_head", "per_head_constant_far_0.2")]
    pictures = {
        "temper-frontier": [found.frontier(text) for text in found.by_document],
        "temper-map": [figure for figure in found.maps() if figure.title in titles],
    }
    for name, figures in pictures.items():
        plot(figures, docs / f"{name}.svg")
        print(docs / f"{name}.svg")


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
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or another name of a model")
    parser.add_argument("--text", default="stdlib-docs", help="text to fit on; its other documents are held out")
    parser.add_argument("--other", default="stdlib-code", help="second held-out text")
    parser.add_argument("--to", type=int, default=32768)
    parser.add_argument("--rope-scaling", default="yarn")
    parser.add_argument("--documents", type=int, default=6, help="held-out documents of each text, at most")
    parser.add_argument("--steps", type=int, default=24, help="gradient steps of each fit")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--out", default=str(HERE / "results" / "temper.json"))
    parser.add_argument("--quick", action="store_true", help="a tiny random model to 768 tokens")
    parser.add_argument("--look", action="store_true", help="print the results in the file")
    parser.add_argument("--draw", action="store_true", help="draw the figures of the documentation")
    parser.add_argument("--run", help="with --look: the folder of a probe of the same model")
    options = parser.parse_args()
    if options.quick:
        options.to, options.steps, options.documents = 768, 3, 2
    return options


if __name__ == "__main__":
    main()
