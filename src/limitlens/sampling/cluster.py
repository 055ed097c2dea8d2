"""Run independent pieces of work on a Ray cluster, one core or GPU each; a piece whose worker dies is repeated."""

import importlib.util
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from limitlens.errors import InputError

Piece = TypeVar("Piece")
Result = TypeVar("Result")

PIECES = 8  # per worker: a worker that dies loses only a part of its work
AHEAD = 2  # pieces submitted per worker: the running one and the next
TRIES = 3  # retries of a piece whose worker died, before the run fails
KNOCK = 5.0  # seconds to wait for the first answer of a cluster
_prepared: dict[str, Callable[[Any], Any]] = {}  # on a worker: the prepared function, by the id of its Ray object


def spread(
    address: str, prepare: Callable[[], Callable[[Piece], Result]], pieces: Callable[[int], Iterable[Piece]],
    *, gpus: bool = True,
) -> Iterator[Result]:  # fmt: skip
    """Apply a function to pieces of work on the workers of a Ray cluster, and yield the results in order.

    `prepare` returns the function, and is called once on each worker. `pieces` returns the pieces for a given number of
    workers: one per GPU if `gpus` is set and there are any, else one per core. `address` "auto" means this machine.
    """
    with connected(address) as ray:
        there = ray.cluster_resources()
        kind = "GPU" if gpus and there.get("GPU", 0) >= 1 else "CPU"
        workers = max(1, int(there.get(kind, 0)))
        # max_calls=0 keeps a process with its model on the GPU for the next piece.
        task = ray.remote(**{f"num_{kind.lower()}s": 1}, max_calls=0, max_retries=TRIES)(_work)
        held, out = ray.put(prepare), deque[Any]()
        try:
            for piece in pieces(workers):
                out.append(task.remote([held], piece))  # inside a list the object is fetched only when needed
                if len(out) >= AHEAD * workers:
                    yield _result(ray, out.popleft(), address)
            while out:
                yield _result(ray, out.popleft(), address)
        finally:
            for awaited in out:
                ray.cancel(awaited, force=True)


def _work(held: list[Any], piece: Any) -> Any:
    """Compute one piece on a worker; `held` is a list with the Ray reference of `prepare`."""
    import ray

    name = held[0].hex()
    if name not in _prepared:
        torch.set_num_threads(1)
        _prepared.clear()
        _prepared[name] = ray.get(held[0])()
    return _prepared[name](piece)


def _result(ray: Any, awaited: Any, address: str) -> Any:
    try:
        return ray.get(awaited)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", error)
        if isinstance(cause, InputError):
            raise InputError(str(cause)) from None
        reason = (str(cause).strip().splitlines() or [""])[0].rstrip(".")
        given = f"a worker of the Ray cluster at {address!r} failed ({type(cause).__name__}: {reason})"
        expected = "machines with this version of limitlens, the model and enough memory"
        raise InputError(f"{given}; expected {expected}") from None


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Context manager that connects to a Ray cluster and gives the module `ray`; an existing connection stays open."""
    if importlib.util.find_spec("ray") is None:
        raise InputError(f"the cluster {address!r} needs Ray; run `pip install 'limitlens[cluster]'` on all machines")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # no reports
    import ray

    before = ray.is_initialized()
    if not before:
        try:
            _knock(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            expected = "auto or the HOST:PORT of a head that `ray start --head` started"
            raise InputError(f"no Ray cluster answers at {address!r} ({reason}); expected {expected}") from None
    try:
        yield ray
    finally:
        if not before:
            ray.shutdown()


def _knock(address: str) -> None:
    """Raise an error if the address is not HOST:PORT or no machine answers there; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not host or host.isdecimal() or not port.isdecimal() or int(port) > 65535:
            raise ValueError("not an address")
        socket.create_connection((host, int(port)), timeout=KNOCK).close()
