"""Speedup of a Ray cluster with two single-threaded workers over one worker, and the rates that docs/scale.md uses.

Two clusters, of one and of two machines with one core each, run the same work alternately; a small run first lets the
workers load the model. Also measured are the parts that only the driver does: per token (reading the text, assigning
tokens to cells) and per share of work (merging the states that a worker sends).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.cluster_utils import Cluster

import limitlens as ll
from limitlens.models import Windows, load, open_corpus
from limitlens.probing import distributed as shares
from limitlens.probing.options import ProbeOptions
from limitlens.sampling.assignment import Assignment
from limitlens.sampling.cells import Cells, parse_sizes

ROUNDS = 3
WANTED = 1.6
TOKENS, SIZES, REPLICATES = 163_840, "64:1024:5", 24  # eight blocks of the pool, as many as two workers share evenly


def probe(address: str, tokens: int) -> ll.ProbeRun:
    return ll.probe("minilm", "stdlib-code", tokens, sizes=SIZES, replicates=REPLICATES, ray=address)


def timed(work: Callable[[str, int], Any], small: int, large: int, addresses: dict[str, str]) -> dict[str, Any]:
    """Seconds of the large run on each cluster, alternating, and the ratio of the medians."""
    taken: dict[str, list[float]] = {name: [] for name in addresses}
    for _ in range(ROUNDS):
        for name, address in addresses.items():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            work(address, small)
            begun = time.perf_counter()
            work(address, large)
            taken[name].append(time.perf_counter() - begun)
            ray.shutdown()
    one, two = (statistics.median(found) for found in taken.values())
    print(f"{work.__name__}: {one:.1f} s on one worker, {two:.1f} s on two, {one / two:.2f} times as fast", flush=True)
    return {"seconds": taken, "ratio": one / two, "wanted": WANTED}


def driver() -> dict[str, float]:
    """Rates of the driver: tokens per second read and assigned, seconds and bytes of one share of minilm."""
    loaded, begun = load("minilm"), time.perf_counter()
    windows = Windows(loaded, open_corpus("stdlib-code"), length=256, tokens=TOKENS)
    reading = windows.tokens / (time.perf_counter() - begun)
    block = ProbeOptions().block
    assignment = Assignment([block] * 64, Cells(parse_sizes("64:4096:7")), REPLICATES, 0)
    begun = time.perf_counter()
    for _ in assignment.assign_blocks():
        pass
    dealing = 64 * block / (time.perf_counter() - begun)
    spent, sizes = [], []

    def add(collector: Any, share: Any, slots: Any) -> None:
        begun = time.perf_counter()
        whole(collector, share, slots)
        spent.append(time.perf_counter() - begun)
        sizes.append(sum(part.nbytes for part in share.values()))

    whole, shares.add_share = shares.add_share, add
    here, shares.spread = shares.spread, lambda address, prepare, pieces, gpus: map(prepare(), pieces(1))
    try:
        probe("here", 100_000)
    finally:
        shares.add_share, shares.spread = whole, here
    layers = 6
    share = {"share_seconds": sum(spent) / len(spent) * layers, "share_bytes": sum(sizes) / len(sizes) * layers}
    return {"read_tokens_a_second": reading, "dealt_tokens_a_second": dealing, **share}


BARE = """
import time, torch
from limitlens.models import load
torch.set_num_threads(1)
loaded, ids = load("minilm"), torch.full((16, 256), 1000)
with torch.inference_mode():
    loaded.model(input_ids=ids)
    input()
    begun = time.perf_counter()
    for _ in range(8):
        loaded.model(input_ids=ids)
    print(time.perf_counter() - begun)
"""


def bare() -> float:
    """Speedup of two single-threaded processes over one for plain forward passes: the upper bound of this machine."""
    seconds = {1: [], 2: []}  # type: dict[int, list[float]]
    for count in (1, 2) * ROUNDS:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        running = [subprocess.Popen([sys.executable, "-c", BARE], **pipes) for _ in range(count)]
        time.sleep(15)  # all have loaded and wait
        for one in running:
            one.stdin.write("\n")
            one.stdin.flush()
        seconds[count].append(max(float(one.communicate()[0]) for one in running))
    ratio = 2 * statistics.median(seconds[1]) / statistics.median(seconds[2])
    print(f"bare forwards: two processes run {ratio:.2f} times as much as one", flush=True)
    return ratio


def run() -> dict[str, Any]:
    busy = os.getloadavg()[0]  # before it begins: on a busy machine a second worker finds no core, and no ratio is one
    print(f"load {busy:.1f} on {os.cpu_count()} cores", flush=True)
    possible, alone = bare(), driver()
    print({name: f"{value:.3g}" for name, value in alone.items()}, flush=True)
    head = {"num_cpus": 1, "include_dashboard": False}
    clusters = {"one": Cluster(initialize_head=True, head_node_args=head)}
    clusters["two"] = Cluster(initialize_head=True, head_node_args=head)
    try:
        clusters["two"].add_node(num_cpus=1)
        addresses = {name: cluster.address for name, cluster in clusters.items()}
        found = {"probe": timed(probe, 20_000, TOKENS, addresses)}
    finally:
        ray.shutdown()
        for cluster in clusters.values():
            cluster.shutdown()
    rate = TOKENS / statistics.median(found["probe"]["seconds"]["one"])
    return {**found, "probe_tokens_a_second": rate, "bare_ratio": possible, "driver": alone, "load_before": busy}
