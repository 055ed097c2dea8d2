"""Recall of a 1.5B model with a cut cache on one GPU, in stages that several processes share.

    python -m bench.recall_gpu run CONTEXT I/N                plans, then scores of prompts, by N processes at once
    python -m bench.recall_gpu ask CONTEXT I/N                scores of the I-th of every N prompts with these plans
    python -m bench.recall_gpu time CONTEXT[,CONTEXT]         seconds of each method's prefill; runs alone
    python -m bench.recall_gpu heads TOKENS                   heads that recall, and a probe of the model
    python -m bench.recall_gpu gather FILE                    everything in the folder as one JSON file
    python -m bench.recall_gpu report FILE RESULTS [SECONDS]  means, paired differences and shares, without a model

RECALL_SECONDS bounds each stage: what is finished by then is kept. Other variables: `OPTIONS`. Prompts come alternately
from the texts of RECALL_TEXTS (each window of a text is used once a task), plans from RECALL_CORPUS.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import limitlens as ll
from bench.recall import compared
from limitlens.attention.policies import SHARED, Selection, duo, keep
from limitlens.attention.policies.base import held_first
from limitlens.cache import budgets
from limitlens.cache.cut import BEHIND, CutCurves, cut_windows, window_order
from limitlens.cache.cut import SHARES as SIZES
from limitlens.cache.reading import ReadPrompt, read_prompt
from limitlens.cache.recall import TwoAxes, text_costs
from limitlens.cache.reconstruction import repeat_attention
from limitlens.cache.tasks import SOLVED, TEXT, prompts_of
from limitlens.models import LoadedModel, Windows, load, open_corpus
from limitlens.models.chat import chat_of
from limitlens.models.intervene import PolicyHook, kv_shape
from limitlens.statistics.documents import paired_mean

OPTIONS = {
    "MODEL": "qwen", "DTYPE": "bfloat16", "FOLDER": "runs/recall-gpu", "SECONDS": "1e9",
    "CORPUS": "stdlib-docs", "TEXTS": "stdlib-docs", "WINDOWS": "8",  # on which plans are fitted
    "SHARES": "0.25,0.125", "SWEEP": "0.15,0.2,0.3,0.4,0.5",
    "TASKS": "needle8:200,text:200,needle1:60,hop:60,repeat:60,words:60", "SWEPT": "40",  # prompts of the other shares
    "KVPRESS": "needle8:24,text:24,needle1:12", "PROMPTS": "",  # prompts for kvpress, and their file
    "FIT": "1e9", "WAIT": "1e9",  # seconds after which no fit begins, and others are no longer waited for
    # Plans for recall of each process, in this order.
    "JOBS0": "best:both:0.25,best:strong:0.25", "JOBS1": "reconstruction:both:0.25,reconstruction:both:0.125",
    "JOBS2": "expected:both:0.25,expected:both:0.125", "JOBS3": "best:both:0.125,best:both:0.2,best:both:0.3",
    "CALIBRATION": "24",  # prompts on which recall is fitted, at most
    "METHODS": "",  # parts of names of methods; empty: all
    "FEWER": "both,strong,kvzip,adakv,duo,streaming,only,random",  # the same on tasks but those of `MAIN`
    "FOLLOW": "4",  # windows from which keys are divided by the prompt, for plans with reconstruction scores; 0: none
}  # fmt: skip
MEASURED = ("streaming", "expected", "reconstruction")  # key policies of plans
UNIFORM = ("expected", "reconstruction", "snapkv", "streaming")
GOALS: dict[str, Mapping[str, float]] = {
    "text": {"text": 1.0}, "both": {"text": 1.0, "recall": 1.0},
    "strong": {"text": 1.0, "recall": 10.0}, "recall": {"text": 0.0, "recall": 1.0},
}  # fmt: skip
MAIN = ("needle8", TEXT)
ENOUGH, MOST = 0.95, 0.05  # recall as a share of the full cache's, and KL on text, of the smallest share
SEED = 0
SCORES = ("accuracy", "nll", "kl", "agreement")
BEGAN = time.perf_counter()


def option(name: str) -> str:
    return os.environ.get(f"RECALL_{name}", OPTIONS[name])


def say(text: str) -> None:
    print(f"{time.perf_counter() - BEGAN:.1f} s: {text}", flush=True)


def late() -> bool:
    return time.perf_counter() - BEGAN > float(option("SECONDS"))


def write(name: str, document: Any) -> None:
    """Write a document in the folder, whole or not at all."""
    folder = Path(option("FOLDER"))
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{name}.{os.getpid()}"
    part.write_text(json.dumps(document))
    part.replace(folder / name)


def model() -> LoadedModel:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load(option("MODEL"), head=True, dtype=getattr(torch, option("DTYPE")), device=device)
    chat = chat_of(loaded)
    around = None if chat is None else [loaded.tokenizer.decode(list(part)) for part in (chat.before, chat.after)]
    say(f"{loaded.name} on {loaded.model.device} in {loaded.model.dtype}, chat template {around}")
    return loaded


def unpacked(text: str) -> str:
    """A text file, or the texts in a zip archive as one file."""
    if not text.endswith(".zip"):
        return text
    whole = Path(tempfile.gettempdir()) / f"{Path(text).stem}.txt"
    if not whole.exists():
        with zipfile.ZipFile(text) as archive:
            names = sorted(name for name in archive.namelist() if name.endswith((".txt", ".csv")))
            texts = [archive.read(name).decode(errors="replace") for name in names]
        part = whole.with_suffix(f".{os.getpid()}")
        part.write_text("\n\n".join(texts))
        part.replace(whole)
    return str(whole)


def shares() -> list[float]:
    return [float(share) for part in ("SHARES", "SWEEP") for share in option(part).split(",") if share]


@dataclass(frozen=True)
class Fitted:
    """Budgets and policies [layer][kv_head] of a plan for one share of a context, with how they were fitted."""

    context: int
    policy: str
    goal: str
    share: float
    budgets: list[list[int]]
    policies: list[list[str]]
    seconds: float
    recall: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """Name of the method in tables."""
        return f"{self.policy}:{self.goal}:{self.share:g}"

    def counts(self, length: int) -> list[list[int]]:
        """Budgets for a prompt of another length, at the same shares."""
        return [[min(length, round(n * length / self.context)) for n in row] for row in self.budgets]


def costs_on_text(axes: TwoAxes, part: int, parts: int) -> None:
    """Directional costs on text of all policies, of which each process measures some windows."""
    own = range(part, len(axes.rows), parts)
    context, sizes = axes.curves.context, axes.curves.sizes
    costs = []
    for row in own:
        (prompt,) = prompts_of(axes.loaded, axes.windows, axes.rows[row], (TEXT,), context, SEED)
        costs.append(text_costs(read_prompt(axes.loaded, prompt, SEED), MEASURED, sizes, SEED).tolist())
        say(f"costs on text of window {row}")
    write(f"costs-{part}.json", costs)
    path = Path(option("FOLDER"))
    while len(list(path.glob("costs-*.json"))) < parts and time.perf_counter() - BEGAN < float(option("WAIT")):
        time.sleep(0.5)
    every = [one for name in sorted(path.glob("costs-*.json")) for one in json.loads(name.read_text())]
    mean = np.mean(every, 0)
    say(f"costs on text of {len(every)} windows")
    axes.text[MEASURED] = mean
    for k, name in enumerate(MEASURED):
        axes.text[name,] = mean[[k]]


def fit(loaded: LoadedModel, context: int, part: int, parts: int) -> None:
    """Fit the plans of one process; plans for text alone are free and made by the first."""
    windows = cut_windows(loaded, unpacked(option("CORPUS")), "auto", context)
    rows = window_order(windows, SEED)[: int(option("WINDOWS"))]
    sizes = tuple(sorted({round(share * context) for share in SIZES}))
    layers, heads = kv_shape(loaded.model)
    nothing = np.zeros((1, len(MEASURED), layers, heads, len(sizes)))  # the fits read sizes, layers and policies
    curves = CutCurves(MEASURED, sizes, nothing, nothing[:, 0, ..., 0], heads, tuple(range(layers)))

    def stop() -> bool:
        return time.perf_counter() - BEGAN > float(option("FIT"))

    axes = TwoAxes(loaded, windows, rows, curves, {"text": 1.0}, SEED, stop=stop)
    costs_on_text(axes, part, parts)

    def make(policy: str, goal: str, share: float) -> None:
        begun = time.perf_counter()
        candidates = [k for k, name in enumerate(MEASURED) if policy in ("best", name)]
        axes.weights = GOALS[goal]
        chosen, keys, recall = axes.fit(np.array(candidates), round(share * context * layers * heads))
        names = [[MEASURED[place] for place in row] for row in chosen]
        made = Fitted(context, policy, goal, share, keys.tolist(), names, round(time.perf_counter() - begun, 2),
                      None if recall is None else dict(vars(recall)))  # fmt: skip
        write(f"plan-{made.name}.json", vars(made))
        say(f"{made.name}: {made.seconds} s {made.recall}")

    for policy in ("best", "reconstruction", "expected") if part == 0 else ():
        for share in shares():
            make(policy, "text", share)
    if part == 0:
        streaming = axes.text["streaming",][0]
        for share in shares():
            lost = budgets.at_keys(streaming, sizes, round(duo.WINDOW * context)) - streaming[..., -1]
            keys = duo.whole_heads(lost, context, round(share * context * layers * heads))
            made = Fitted(context, "duo", "text", share, keys.tolist(), [["streaming"] * heads] * layers, 0.0)
            write(f"plan-{made.name}.json", vars(made))
    reads, families = axes.calibrated
    say(f"{len(reads)} calibration prompts, accuracy {families}")
    axes.calibrated = reads[: int(option("CALIBRATION"))], families
    for job in option(f"JOBS{part}").split(","):
        if stop():
            break
        policy, goal, share = job.split(":")
        make(policy, goal, float(share))


def plans(context: int) -> dict[str, Fitted]:
    """Plans by name, policy:goal:share; for another context they give their shares ("scaled")."""
    found = {}
    for path in sorted(Path(option("FOLDER")).glob("plan-*.json")):
        made = Fitted(**json.loads(path.read_text()))
        found[made.name if made.context == context else f"scaled:{made.name}"] = made
    return found


def typical_scores(loaded: LoadedModel, made: Mapping[str, Fitted], context: int) -> dict[str, torch.Tensor]:
    """Logarithms (layers, kv heads) of the reconstruction score of the last key that a plan keeps, by name of the plan.

    Means over windows of the calibration text. Plans with other policies are left out.
    """
    windows = cut_windows(loaded, unpacked(option("CORPUS")), "auto", context)
    rows = window_order(windows, SEED)[: int(option("FOLLOW"))]
    made = {name: plan for name, plan in made.items()
            if name.startswith(("reconstruction:text", "reconstruction:both", "reconstruction:strong"))}  # fmt: skip
    found: dict[str, list[torch.Tensor]] = {name: [] for name in made}
    for row in rows:
        (prompt,) = prompts_of(loaded, windows, row, (TEXT,), context, SEED)
        logs = torch.stack(read_prompt(loaded, prompt, SEED).repeat).log().sort(-1, descending=True).values
        for name, plan in made.items():
            last = torch.tensor(plan.budgets, device=logs.device).clamp(1, context) - 1
            found[name].append(logs.gather(-1, last[..., None])[..., 0])
    return {name: torch.stack(parts).mean(0) for name, parts in found.items() if parts}


def follow(read: ReadPrompt, plan: Fitted, typical: torch.Tensor) -> PolicyHook:
    """Cut with the plan's number of keys in all, divided by the prompt: scores over the plan's typical scores.

    A head keeps more keys than planned where the prompt gives its keys larger scores than the calibration text did.
    """
    counts = torch.tensor(plan.budgets, device=typical.device)
    logs = torch.stack(read.repeat).log() - typical[..., None]
    logs = held_first(logs, 1).masked_fill((counts >= 0.95 * read.context)[..., None], float("inf"))
    masks = keep(logs.flatten(), int(counts.sum())).view_as(logs)
    hook = PolicyHook("recent", 0, read.context, SEED, kv_shape(read.loaded.model))
    hook.selected = {layer: Selection(mask[None, :, None]) for layer, mask in enumerate(masks)}
    return hook


def hooks_of(
    read: ReadPrompt, made: Mapping[str, Fitted], ablated: Mapping[str, Any], typical: Mapping[str, torch.Tensor],
    task: str, swept: bool,
) -> dict[str, Any]:  # fmt: skip
    """Cuts by the name of the method and its share: plans, shared and uniform baselines, and ablations of heads.

    "follow" divides a plan's keys by the prompt. A plan of another context gives its shares ("scaled").
    """
    wanted = [float(share) for share in option("SHARES").split(",")]
    makers: dict[str, Callable[[], Any]] = {}
    for share in shares():
        own = {name: plan for name, plan in made.items() if name.endswith(f":{share:g}")}
        if not own or not (swept or share in wanted):
            continue
        for name, plan in own.items():
            makers[name] = partial(read.cut, plan.policies, plan.counts(read.context))
            if name in typical and share in wanted:
                makers[f"follow:{name}"] = partial(follow, read, plan, typical[name])
        whole = round(share * read.context * int(np.prod(kv_shape(read.loaded.model))))
        for rule in SHARED:
            makers[f"{rule}:{share:g}"] = partial(read.shared, rule, whole)
        for name in UNIFORM if share in wanted else ("streaming",):
            makers[f"{name}:uniform:{share:g}"] = partial(read.cut, name, round(share * read.context))
    for name, heads in ablated.items():
        shape = np.shape(next(iter(made.values())).budgets)
        counts = np.full(shape, read.context)
        for layer, head in heads:
            counts[layer, head] = read.context // 16
        makers[name] = partial(read.cut, "streaming", counts)
    parts = [part for part in option("METHODS" if task in MAIN else "FEWER").split(",") if part]
    return {name: make() for name, make in makers.items() if not parts or any(part in name for part in parts)}


def ablations(made: Mapping[str, Fitted]) -> dict[str, list[tuple[int, int]]]:
    """Heads that a plan keeps for recall, and as many random heads three times, by name."""
    found: dict[str, list[tuple[int, int]]] = {}
    share = option("SHARES").split(",")[0]
    rng = np.random.default_rng(SEED)
    for policy, goal in itertools.product(("reconstruction", "best"), ("both", "strong")):
        with_recall, without = (made.get(f"{policy}:{one}:{share}") for one in (goal, "text"))
        if with_recall is None or without is None:
            continue
        more, fewer = np.array(with_recall.budgets), np.array(without.budgets)
        places = np.argwhere((more >= 2 * fewer) & (more >= with_recall.context / 8)).tolist()
        heads = [(layer, head) for layer, head in places]
        if heads:
            found[f"only heads kept for {policy} {goal} cut"] = heads
            others = [place for place in np.ndindex(more.shape) if place not in heads]
            for draw in range(3):
                chosen = rng.permutation(len(others))[: len(heads)]
                found[f"as many random heads as for {policy} {goal} cut, draw {draw}"] = [others[k] for k in chosen]
    return found


def rows_of(loaded: LoadedModel, context: int, most: int) -> list[tuple[Windows, int, str]]:
    """Windows of the test texts in a random order, alternately from each text while it lasts."""
    texts = []
    for text in map(unpacked, option("TEXTS").split(",")):
        length = context + BEHIND
        windows = Windows(loaded, open_corpus(text), length=length, tokens=most * length, fewer=True)
        say(f"{text}: {windows.count} windows")
        texts.append([(windows, row, Path(text).stem) for row in window_order(windows, SEED)])
    found: list[tuple[Windows, int, str]] = []
    for place in range(max(map(len, texts))):
        found += [rows[place] for rows in texts if place < len(rows)]
    return found[:most]


def tasks_of(name: str) -> dict[str, int]:
    """Numbers of prompts by task, from an option."""
    return {task: int(count) for task, count in (pair.split(":") for pair in option(name).split(","))}


def jobs(tasks: Mapping[str, int], part: str) -> Iterator[tuple[int, str]]:
    """(document, task) of one part, in an order in which all tasks proceed at once."""
    own, parts = map(int, part.split("/"))
    every = [(document, task) for task, count in tasks.items() for document in range(own, count, parts)]
    yield from sorted(every, key=lambda job: job[0] / tasks[job[1]])


def scores_of(read: ReadPrompt, hooks_for: Callable[[ReadPrompt], dict[str, Any]]) -> dict[str, list[float]]:
    """Scores of the full cache and of every cut, in the order of `SCORES`."""
    hooks = hooks_for(read)
    predicted = read.predict_each([None, *hooks.values()])
    full = next(predicted)
    found = {"full": read.prompt.score(full, full)}
    found |= {name: read.prompt.score(one, full) for name, one in zip(hooks, predicted, strict=True)}
    return {name: [round(values[key], 6) for key in SCORES] for name, values in found.items()}


def wait_for_plans(parts: int) -> None:
    """Wait until every process has tried its fits."""
    while len(list(Path(option("FOLDER")).glob("done-*.json"))) < parts:
        if time.perf_counter() - BEGAN > float(option("WAIT")):
            say("waited long enough for plans")
            break
        time.sleep(0.5)


def ask(loaded: LoadedModel, context: int, part: str) -> None:
    """Score the answers to one part of the prompts with every method."""
    made = plans(context)
    ablated = ablations(made)
    typical = typical_scores(loaded, made, context) if option("FOLLOW") != "0" else {}
    say(f"plans {list(made)}, ablations {ablated}")
    tasks = tasks_of("TASKS")
    rows = rows_of(loaded, context, max(tasks.values()))
    name = f"ask-{context}-{part.replace('/', '-')}.json"
    found: list[dict[str, Any]] = []

    def hooks_for(document: int, task: str) -> Callable[[ReadPrompt], dict[str, Any]]:
        swept = document < int(option("SWEPT")) and task in MAIN
        return lambda read: hooks_of(read, made, ablated, typical, task, swept)

    for done, (document, task) in enumerate(jobs(tasks, part)):
        if late():
            say("out of time")
            break
        if document >= len(rows):
            continue
        windows, row, text = rows[document]
        (prompt,) = prompts_of(loaded, windows, row, (task,), context, SEED + 1)
        begun = time.perf_counter()
        try:
            scores = scores_of(read_prompt(loaded, prompt, SEED), hooks_for(document, task))
        except Exception as error:  # out of memory beside other programs: the prompt is left out
            say(f"{document} {task} failed: {error!r}")
            torch.cuda.empty_cache()
            continue
        found.append({"document": document, "text": text, "row": row, "task": task, "scores": scores})
        if task == "needle8" and not done:
            say(f"end of the context: {loaded.tokenizer.decode(list(prompt.context[-30:]))!r}")
            say(f"question: {loaded.tokenizer.decode(list(prompt.question))!r}")
            say(f"answer: {loaded.tokenizer.decode(list(prompt.answer))!r}")
        if done % 10 == 0:
            seconds = time.perf_counter() - begun
            say(f"{document} {task}: full {scores['full']}; {len(scores)} methods in {seconds:.2f} s")
            write(name, found)
    write(name, found)
    say(f"{len(found)} prompts")


def write_prompts(loaded: LoadedModel, context: int, path: str) -> None:
    """Write the first prompts of some tasks as tokens, for `bench/recall_kvpress.py`."""
    tasks = tasks_of("KVPRESS")
    rows = rows_of(loaded, context, max(tasks_of("TASKS").values()))
    found = []
    for document, task in jobs(tasks, "0/1"):
        windows, row, _ = rows[document]
        (prompt,) = prompts_of(loaded, windows, row, (task,), context, SEED + 1)
        found.append({"document": document} | vars(prompt))
    Path(path).write_text(json.dumps(found))
    say(f"{len(found)} prompts for kvpress")


def run(context: int, part: int, parts: int) -> None:
    """Fit plans in all processes, then score prompts in all but the last, which writes prompts for kvpress."""
    loaded = model()
    try:
        fit(loaded, context, part, parts)
    except Exception as error:  # the other processes go on
        say(f"fit failed: {error!r}")
        torch.cuda.empty_cache()
    write(f"done-{part}.json", part)
    if part < parts - 1:
        wait_for_plans(parts)
        ask(loaded, context, f"{part}/{parts - 1}")
    elif option("PROMPTS"):
        write_prompts(loaded, context, option("PROMPTS"))


def seconds_of(work: Callable[[], Any], repeats: int = 3) -> float:
    """Median seconds of some work on the device, after one run."""
    found = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return float(np.median(found[1:]))


def timed(contexts: Sequence[int]) -> None:
    """Seconds of a prefill, and of what each method adds to it."""
    loaded = model()
    found = {}
    for context in contexts:
        (windows, row, _), *_ = rows_of(loaded, context, 4)
        (prompt,) = prompts_of(loaded, windows, row, ("text",), context, SEED)
        ids = torch.tensor([prompt.context], device=loaded.model.device)

        @torch.inference_mode()
        def prefill(ids: torch.Tensor = ids) -> Any:
            return loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

        cache = prefill()
        own = {"prefill": seconds_of(prefill)}
        own["repeat_attention"] = seconds_of(lambda: repeat_attention(loaded, cache, ids))  # noqa: B023
        read = read_prompt(loaded, prompt, SEED)
        read.repeat  # noqa: B018
        own["read"] = seconds_of(lambda: read_prompt(loaded, prompt, SEED))  # noqa: B023
        quarter = context // 4
        for name in UNIFORM:
            own[f"select: {name}"] = seconds_of(lambda: read.cut(name, quarter))  # noqa: B023
        for name in SHARED:
            total = quarter * len(read.calls) * read.calls[0].key.shape[1]
            own[f"select: {name}"] = seconds_of(lambda: read.shared(name, total))  # noqa: B023
        for count in (1, 16):
            hooks = [read.cut("streaming", quarter)] * count
            own[f"predict {count}"] = seconds_of(lambda: list(read.predict_each(hooks)))  # noqa: B023
        found[context] = own
        say(f"{context}: {own}")
        write("time.json", found)


def heads(tokens: int) -> None:
    """Compare heads that recall with all others in a probe of the model on the calibration text."""
    loaded = model()
    found = ablations(plans(4096))
    write("heads.json", {"heads": found, "tokens": tokens})
    run = ll.probe(loaded, unpacked(option("CORPUS")), tokens, seed=SEED, memory=20 << 30)
    say("probe")
    kv = 1 + max(record.kv_head for record in run.records)
    rows = {
        name: compared([list(head) for head in places], run, kv) for name, places in found.items() if "only" in name
    }
    records = [[record.layer, record.head, record.regime.value if record.regime else None, record.horizon,
                record.score_std, record.effective_tokens[-1], record.sink_mass] for record in run.records]  # fmt: skip
    write("heads.json", {"heads": found, "probe": rows, "tokens": tokens, "kv_heads": kv, "records": records})
    say(json.dumps(rows))


def gather(path: str) -> None:
    """Everything that the stages wrote, as one file."""
    parts = {part.name: json.loads(part.read_text()) for part in sorted(Path(option("FOLDER")).glob("[!.]*.json"))}
    parts["options"] = {name: option(name) for name in OPTIONS}
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.write_text(json.dumps(parts))
    part.replace(target)


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means and standard errors of every method on each task, with paired differences from the full cache and kvzip.

    Every prompt has a text of its own, so prompts are independent.
    """
    found: dict[str, Any] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row["scores"] for row in rows if row["task"] == task]
        whole = np.array([row["full"][0] for row in own])
        methods: dict[str, Any] = {}
        for name in dict.fromkeys(name for row in own for name in row):
            both = [row for row in own if name in row]
            values = np.array([row[name] for row in both])
            result: dict[str, Any] = {"prompts": len(both)}
            result |= {key: estimate(values[:, k]) for k, key in enumerate(SCORES) if task != TEXT or k}
            share = name.rsplit(":", 1)[-1]
            for other in ("full", f"kvzip:{share}"):
                pairs = [(row[name], row[other]) for row in both if other in row]
                if pairs and other != name:
                    first, second = np.array(pairs).transpose(1, 0, 2)
                    label = other.split(":")[0]
                    result[f"kl_minus_{label}"] = estimate(first[:, 2], second[:, 2])
                    if task != TEXT:
                        result[f"accuracy_minus_{label}"] = estimate(first[:, 0], second[:, 0])
            methods[name] = result
        solved = None if task == TEXT else bool(whole.mean() >= SOLVED)
        found[task] = {"solved_with_the_full_cache": solved, "methods": methods}
    return found


def estimate(values: Any, baseline: Any = None) -> list[float]:
    mean = paired_mean(values, baseline)
    return [round(mean.value, 6), round(mean.stderr, 6)]


def with_kvpress(rows: Sequence[dict[str, Any]], kvpress: Mapping[str, Any]) -> None:
    """Add the scores of kvpress's own presses to the rows of the same prompts."""
    own = {(row["document"], row["task"]): row["scores"] for row in rows}
    share = kvpress["options"]["SHARE"]
    for task, methods in kvpress["scores"].items():
        for name, scores in methods.items():
            for document, values in zip(kvpress["documents"][task], scores, strict=False):
                if (document, task) in own and np.isfinite(values).all():
                    own[document, task][f"{name}:{share}"] = values


def by_share(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy on needle8 beside that of the full cache, and KL on text, by method and share, on the same prompts.

    The smallest share of a method is the first from which on recall is at least `ENOUGH` and KL at most `MOST`.
    """
    swept = {task: [row["scores"] for row in rows if row["task"] == task and row["document"] < int(option("SWEPT"))]
             for task in MAIN}  # fmt: skip
    found: dict[str, Any] = {}
    for name in swept["needle8"][0] if swept["needle8"] and swept[TEXT] else ():
        method, _, share = name.rpartition(":")
        if not method or any(name not in row for part in swept.values() for row in part):
            continue
        right = np.array([[row[name][0], row["full"][0]] for row in swept["needle8"]])
        row = {"accuracy": estimate(right[:, 0]), "accuracy_minus_full": estimate(right[:, 0], right[:, 1]),
               "of_full": round(right[:, 0].mean() / max(right[:, 1].mean(), 1e-9), 4),
               "needle8_kl": estimate(np.array([row[name][2] for row in swept["needle8"]])),
               "text_kl": estimate(np.array([row[name][2] for row in swept[TEXT]]))}  # fmt: skip
        found.setdefault(method, {"full": round(right[:, 1].mean(), 4), "shares": {}})["shares"][share] = row
    for method in found.values():
        shares = sorted(method["shares"], key=float, reverse=True)
        enough = [share for share in shares if method["shares"][share]["of_full"] >= ENOUGH
                  and method["shares"][share]["text_kl"][0] <= MOST]  # fmt: skip
        first = next((k for k, share in enumerate(shares) if share not in enough), len(shares))
        method["smallest"] = float(shares[first - 1]) if first else None
    return found


def report(path: str, results: str, *timed: str) -> None:
    """Summaries of the gathered scores by context, all texts together and each by itself."""
    parts = json.loads(Path(path).read_text())
    found: dict[str, Any] = {"command": "python -m bench.recall_gpu", "options": parts.pop("options")}
    rows: dict[str, list[Any]] = {}
    for name, part in parts.items():
        if name.startswith("ask-"):
            rows.setdefault(name.split("-")[1], []).extend(part)
    for context, own in rows.items():
        own.sort(key=lambda row: (row["document"], row["task"]))
        if context == "4096" and "kvpress.json" in parts:
            with_kvpress(own, parts["kvpress.json"])
        texts = dict.fromkeys(row["text"] for row in own)
        by_text = {text: summary([row for row in own if row["text"] == text and row["task"] in MAIN]) for text in texts}
        found[context] = {"tasks": summary(own), "by_share": by_share(own), "by_text": by_text}
    found["plans"] = [part for name, part in parts.items() if name.startswith("plan-")]
    if "heads.json" in parts:
        found["heads"] = {key: value for key, value in parts["heads.json"].items() if key != "records"}
    for other in timed:
        found["seconds"] = json.loads(Path(other).read_text())
    Path(results).write_text(json.dumps(found, indent=1) + "\n")


def main(stage: str, *given: str) -> None:
    part, parts = map(int, given[1].split("/")) if stage in ("run", "ask") else (0, 1)
    if stage == "run":
        run(int(given[0]), part, parts)
    elif stage == "ask":
        ask(model(), int(given[0]), given[1])
    elif stage == "time":
        timed([int(one) for one in given[0].split(",")])
    elif stage == "heads":
        heads(int(given[0]))
    elif stage == "gather":
        gather(given[0])
    else:
        report(*given)


if __name__ == "__main__":
    main(*sys.argv[1:])
