"""Compressed KV cache on a GPU: bytes, sequences that fit, tokens a second, and one layer's decoding attention.

`python -m bench.shrink_gpu MODEL PLAN [LENGTH [BATCH,...]]` adds the key `gpu` to `bench/results/shrink.json`; MODEL is
an alias, a folder or a hub id, and PLAN a folder, where a plan for a quarter of the cache at 4,096 tokens is made if
there is none. SECONDS=200 stops between parts; KVPRESS=/folder is on the path of the process that measures kvpress.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import limitlens as ll
from limitlens.attention.ragged import RaggedRows
from limitlens.cache.compressed import budgets_for, layer_bytes
from limitlens.cache.plan import Plan
from limitlens.cache.reconstruction import repeat_attention
from limitlens.models import LoadedModel, load
from limitlens.models.intervene import kv_shape
from limitlens.record import read_run

RESULTS = Path(os.environ.get("OUT", Path(__file__).parent / "results")) / "shrink.json"
SHARE = 0.25
SHORT = 4096  # tokens for which the plan is made
WARM = 2  # new tokens before timing: the first makes room for others
NEW = 32  # new tokens that are timed
GROUP = 4  # sequences that are read at a time
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
STARTED = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


def now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def microseconds(work: Callable[[], Any], rounds: int = 20) -> float:
    """Median time on the device of one call, after a warm-up."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    found = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(1e3 * begin.elapsed_time(end))
    return statistics.median(found)


@contextmanager
def freed() -> Iterator[int]:
    """Bytes that are allocated before the block; what is left in caches of the allocator is given back before it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield torch.cuda.memory_allocated()


def prompts(loaded: LoadedModel, batch: int, length: int) -> Tensor:
    """Random token ids (batch, length): time and memory do not depend on the text."""
    size = loaded.model.config.get_text_config().vocab_size
    return torch.randint(size, (batch, length), device=loaded.model.device)


def graphed(work: Callable[[], Any]) -> Callable[[], Any]:
    """Function that replays the launches of `work` as a CUDA graph, without the time that Python takes between them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def attention(heads: int, groups: int, width: int, length: int, batch: int, counts: dict[str, list[int]]) -> Any:
    """One layer's decoding attention: torch's kernels on the full cache, and the programs for rows of these `counts`.

    Grouped: the query heads that share their keys are given to torch as if they were tokens of one head.
    """

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, width, device="cuda", dtype=torch.bfloat16)

    query, key, value = drawn(batch, heads * groups, 1), drawn(batch, heads, length), drawn(batch, heads, length)
    grouped = query.view(batch, heads, groups, width)
    full = {}
    for name, backend in BACKENDS.items():
        if name == "math" and batch > 16:
            continue
        for how, call in (("enable_gqa", lambda: sdpa(query, key, value, enable_gqa=True)),
                          ("grouped", lambda: sdpa(grouped, key, value))):  # fmt: skip
            try:
                with sdpa_kernel(backend):
                    full[f"{name} {how}"] = microseconds(call)
            except RuntimeError:  # this backend does not support the call
                continue
    small, launches = {}, {}
    for name, kept in counts.items():
        per_row = tuple(count for count in kept for _ in range(batch))
        rows = RaggedRows(drawn(sum(per_row)), drawn(sum(per_row)), per_row, batch)
        rows.append(drawn(batch, heads, 1), drawn(batch, heads, 1), length)
        call = partial(rows.attend, query, scale=width**-0.5)
        launches[name], small[name] = microseconds(call), microseconds(graphed(call))
    best = min(full, key=full.__getitem__)
    return {
        "batch": batch, "length": length, "full_microseconds": full, "fastest": best, "ragged_microseconds": small,
        "ragged_from_python_microseconds": launches,
        "of_full": {name: taken / full[best] for name, taken in small.items()},
        "floor_microseconds": {name: sum(kept) * batch * 4 * width / 4.3e6 for name, kept in counts.items()},
    }  # fmt: skip


def shapes(loaded: LoadedModel) -> tuple[int, int, int]:
    """Key/value heads, query heads of each, and width of a head."""
    config, heads = loaded.model.config.get_text_config(), kv_shape(loaded.model)[1]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, config.num_attention_heads // heads, width


def layer_counts(plan: Plan, length: int) -> dict[str, list[int]]:
    """Entries of the heads of one layer, for two total shares: even, and as uneven as a middle layer of the plan."""
    shares = sorted(plan.shares, key=lambda row: max(row) / max(sum(row), 1e-9))[len(plan.shares) // 2]
    heads, found = len(shares), {}
    for share in (SHARE, 2 * SHARE):
        found[f"{share:.0%} even"] = [round(share * length)] * heads
        scaled = [min(1.0, part * share * heads / sum(shares)) for part in shares]
        scaled[0] += share * heads - sum(scaled) if heads == 2 and scaled[0] < 1 else 0.0
        found[f"{share:.0%} as planned"] = [round(part * length) for part in scaled]
    return found


def decode(model: Any, cache: Any, last: Tensor, new: int = NEW) -> dict[str, float]:
    """Greedy decoding of `new` tokens after a warm-up: tokens a second, and seconds of the first token."""
    began = now()
    token = last
    for step in range(WARM + new):
        if step == 1:
            first = now() - began
        if step == WARM:
            started = now()
        out = model(input_ids=token, past_key_values=cache)
        token = out.logits[:, -1:].argmax(-1)
    taken = now() - started
    return {"tokens_per_second": new * len(last) / taken, "step_seconds": taken / new, "first_step_seconds": first}


def launches(model: Any, cache: Any, token: Tensor) -> dict[str, float]:
    """Kernel launches of one decoding step, and its time with and without waiting for the device."""
    model(input_ids=token, past_key_values=cache)
    times = []
    for _ in range(5):
        began = now()
        model(input_ids=token, past_key_values=cache)
        issued = time.perf_counter() - began
        times.append((issued, now() - began))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as seen:
        model(input_ids=token, past_key_values=cache)
        torch.cuda.synchronize()
    kernels = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(
        event.device_time_total if hasattr(event, "device_time_total") else event.cuda_time_total for event in kernels
    )
    middle = statistics.median
    return {"kernels": len(kernels), "kernel_seconds": 1e-6 * busy, "issue_seconds": middle(row[0] for row in times),
            "step_seconds": middle(row[1] for row in times)}  # fmt: skip


def row(loaded: LoadedModel, plan: Plan, batch: int, length: int, kind: str) -> dict[str, Any]:
    """Bytes, prefill and decoding of a batch: up to 16 prompts are read in groups, and repeated to larger batches."""
    model: Any = loaded.model
    read = (batch if batch <= 4 * GROUP else GROUP) if kind == "compressed" else 1
    ids, found = prompts(loaded, read, length), {}
    planned = batch * sum(
        sum(part) * size for part, size in zip(budgets_for(plan, length), plan.entry_bytes, strict=True)
    )
    block: Any = ll.apply(loaded, plan, prefill_batch=GROUP, force=True) if kind == "compressed" else nullcontext()
    with torch.inference_mode(), freed() as before, block:
        began = now()
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        found["prefill_seconds"], found["prompts_read"] = now() - began, read
        found["prefill_peak_bytes"] = torch.cuda.max_memory_allocated() - before
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        del out
        if batch > read:
            cache.batch_repeat_interleave(batch // read)
            token = token.repeat_interleave(batch // read, 0)
        gc.collect()
        found["bytes"] = sum(map(layer_bytes, cache.layers))
        found["allocated_bytes"] = torch.cuda.memory_allocated() - before
        if kind == "compressed":
            found |= {"plan_bytes": planned, "allocated_of_plan": found["allocated_bytes"] / planned}
        found |= decode(model, cache, token)
        gc.collect()
        found["allocated_bytes_after"] = torch.cuda.memory_allocated() - before
        if kind == "compressed":
            found["allocated_after_of_plan"] = found["allocated_bytes_after"] / planned
        if batch != 16:
            found |= {"launches": launches(model, cache, token)}
        del cache
    return found


def fitting(loaded: LoadedModel, plan: Plan, length: int, kind: str, start: int, tries: int = 12) -> dict[str, Any]:
    """Largest number of sequences that decode beside the weights, from `start` on downwards in steps of 2%."""
    model: Any = loaded.model
    count, failed = start, []
    for _ in range(tries):
        block: Any = ll.apply(loaded, plan, force=True) if kind == "compressed" else nullcontext()
        cache = None
        with torch.inference_mode(), freed() as before, block:
            try:
                out = model(input_ids=prompts(loaded, 1, length), use_cache=True, logits_to_keep=1)
                cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1).repeat(count, 1)
                del out
                cache.batch_repeat_interleave(count)
                found = decode(model, cache, token, 4)
                held = sum(map(layer_bytes, cache.layers))
                del cache
                peak = torch.cuda.max_memory_allocated()
                return {
                    "sequences": count,
                    "too_many": failed,
                    "bytes": held,
                    "peak_bytes": peak,
                    "weights": before,
                } | found
            except torch.OutOfMemoryError:
                failed.append(count)
                cache = out = None  # noqa: F841
        say(f"  {count} sequences do not fit")
        count = min(count - 1, int(count * 0.98))
    return {"sequences": 0, "too_many": failed}


def prefill(loaded: LoadedModel, plan: Plan, length: int, rounds: int = 4) -> dict[str, float]:
    """Seconds to read a prompt without and with eviction, in alternating rounds after a warm-up."""
    ids, rows = prompts(loaded, 1, length), []
    for _ in range(rounds + 1):
        taken = []
        for block in (nullcontext(), ll.apply(loaded, plan, force=True)):
            with torch.inference_mode(), block as applied:
                began = now()
                loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1)
                taken.append(now() - began)
        rows.append((*taken, applied.seconds))
    full, compressed, evicting = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    return {"length": length, "full_seconds": full, "compressed_seconds": compressed, "eviction_seconds": evicting,
            "eviction_of_prefill": evicting / full, "added_to_prefill": compressed / full - 1}  # fmt: skip


def second_pass(loaded: LoadedModel, length: int) -> dict[str, float]:
    """Seconds to read a prompt, and to let the model repeat it for the policy `reconstruction`."""
    ids, model = prompts(loaded, 1, length), loaded.model
    rows = []
    with torch.inference_mode():
        for _ in range(3):
            began = now()
            cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
            read = now()
            repeat_attention(loaded, cache, ids)
            rows.append((read - began, now() - read))
            del cache
    first, second = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    return {"length": length, "prefill_seconds": first, "second_pass_seconds": second, "of_prefill": second / first}


def kvpress(model: str, length: int, batches: str) -> Any:
    """Uniform compression by kvpress in a process of its own, with transformers 5.2 from the folder KVPRESS."""
    script = str(Path(__file__).with_name("kvpress_speed.py"))
    command = [sys.executable, script, "cuda", model, str(SHARE), str(NEW), str(length), batches, str(WARM)]
    path = os.environ["KVPRESS"]
    answer = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    if answer.returncode:
        return {"failed": answer.stderr[-2000:]}
    return json.loads(answer.stdout.splitlines()[-1])


def planned(loaded: LoadedModel, folder: str) -> Plan:
    """The plan in a folder, made there before if there is none."""
    if not (Path(folder) / "run.json").is_file():
        began = time.perf_counter()
        ll.plan(loaded, os.environ.get("CORPUS"), total=SHARE, context=SHORT, windows=(2, 1)).save(folder)
        say(f"plan: {time.perf_counter() - began:.1f} s")
    return read_run(folder).result(Plan)  # type: ignore[no-any-return]


def measure(
    loaded: LoadedModel, plan: Plan, length: int, batches: list[int], write: Callable[[Any], None], model: str
) -> Any:
    """All parts in turn; `write` receives the results after each, and parts after the time SECONDS are left out."""
    budget = float(os.environ.get("SECONDS", "1e9"))
    heads, groups, width = shapes(loaded)
    found: dict[str, Any] = {
        "model": model, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "length": length,
        "share": plan.total.share, "command": "python -m bench.shrink_gpu MODEL PLAN " + " ".join(sys.argv[3:]),
        "attention": [], "prefill": [], "rows": [], "second_pass": [], "left_out": [],
    }  # fmt: skip

    def part(name: str, work: Callable[[], Any], into: str | None = None) -> None:
        if time.perf_counter() - STARTED > budget:
            found["left_out"].append(name)
            return
        try:
            made = work()
        except Exception as error:  # the other parts are still measured
            made = {"failed": f"{type(error).__name__}: {error}"[:500]}
        say(f"{name}: {json.dumps(made)}")
        found[into].append(made) if into else found.__setitem__(name, made)
        gc.collect()
        torch.cuda.empty_cache()
        write(found)

    def both(batch: int) -> dict[str, Any]:
        return {"batch": batch} | {kind: row(loaded, plan, batch, length, kind) for kind in ("compressed", "full")}

    def fit() -> dict[str, Any]:
        free = torch.cuda.mem_get_info()[0]
        one = (
            sum(sum(part) * size for part, size in zip(plan.own_cache, plan.entry_bytes, strict=True))
            * length
            // plan.context
        )
        full = fitting(loaded, plan, length, "full", int(free / one))
        small = fitting(loaded, plan, length, "compressed", int(free / one / plan.total.share))
        return {"full": full, "compressed": small, "times": small["sequences"] / max(full["sequences"], 1)}

    row(loaded, plan, 1, min(length, 2048), "compressed")  # compiles the programs
    row(loaded, plan, 1, min(length, 2048), "full")
    for batch in batches:
        counts = layer_counts(plan, length)
        part(f"attention {batch}", lambda b=batch, c=counts: attention(heads, groups, width, length, b, c), "attention")
    for n in (SHORT, length):
        part(f"prefill {n}", lambda n=n: prefill(loaded, plan, n), "prefill")
    for batch in batches:
        part(f"batch {batch}", lambda b=batch: both(b), "rows")
    part("fit", fit)
    for n in (SHORT, length):
        part(f"second pass {n}", lambda n=n: second_pass(loaded, n), "second_pass")
    if "KVPRESS" in os.environ:
        loaded.model.to("cpu")  # leaves the memory to the other process
        torch.cuda.empty_cache()
        part("kvpress", lambda: kvpress(model, length, ",".join(map(str, batches))))
    return found


def main(model: str, folder: str, length: int = 32_768, batches: str = "1,16,64") -> None:
    loaded = load(model, device="cuda", dtype=torch.bfloat16, head=True)
    say("model loaded")
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    plan = planned(loaded, folder)
    say(f"plan of {plan.total.share:.3f} of the cache")

    def write(found: Any) -> None:
        RESULTS.write_text(json.dumps(kept | {"gpu": found}, indent=2) + "\n")

    measure(loaded, plan, length, [int(value) for value in batches.split(",")], write, Path(model).name)


if __name__ == "__main__":
    name, folder, *rest = sys.argv[1:]
    main(name, folder, *(kind(value) for kind, value in zip((int, str), rest, strict=False)))  # type: ignore[arg-type]
