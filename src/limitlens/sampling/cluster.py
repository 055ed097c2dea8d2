"""Work spread over the workers of a Ray cluster: pieces that depend on nobody, each done whole by one core or one GPU.

Results come back in the order of the pieces, so that whoever adds them up gets the same whichever worker did which. A
piece whose worker or machine died is done again elsewhere: nothing is lost but its time.
"""

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

PIECES = 8  # into which work is cut for each worker: what a dead one loses is a part of its own
AHEAD = 2  # pieces that are out for each worker: one in its hands, and the next
TRIES = 3  # workers that may die over one piece before the work is given up
KNOCK = 5.0  # seconds for a cluster to answer at all
_prepared: dict[str, Callable[[Any], Any]] = {}  # on a worker: what it works with, under its name


def spread(
    address: str, prepare: Callable[[], Callable[[Piece], Result]], pieces: Callable[[int], Iterable[Piece]],
    *, gpus: bool = True,
) -> Iterator[Result]:  # fmt: skip
    """What the function that `prepare` returns, once on each worker, makes of every piece, in order.

    `pieces` is told how many workers there are: one for each GPU of the cluster where `gpus` are wanted and there are
    any, else one for each core, with one thread. The address is that of its head, or "auto" for the one that runs here.
    """
    with connected(address) as ray:
        there = ray.cluster_resources()
        kind = "GPU" if gpus and there.get("GPU", 0) >= 1 else "CPU"
        workers = max(1, int(there.get(kind, 0)))
        # A process that has a model on its GPU is kept for the next piece, as one without is anyway.
        task = ray.remote(**{f"num_{kind.lower()}s": 1}, max_calls=0, max_retries=TRIES)(_work)
        held, out = ray.put(prepare), deque[Any]()
        try:
            for piece in pieces(workers):
                out.append(task.remote([held], piece))  # in a list it is fetched where it is needed, not each time
                if len(out) >= AHEAD * workers:
                    yield _result(ray, out.popleft(), address)
            while out:
                yield _result(ray, out.popleft(), address)
        finally:
            for awaited in out:
                ray.cancel(awaited, force=True)


def _work(held: list[Any], piece: Any) -> Any:
    """Do a piece of work, on a worker."""
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
        raise InputError(f"{given}; expected machines with this limitlens, the model and the memory it needs") from None


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module `ray`, connected; a connection that was there before is used and left."""
    if importlib.util.find_spec("ray") is None:
        raise InputError(f"the cluster {address!r} needs `pip install 'limitlens[cluster]'` first, here and there")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # no report, no warning
    import ray

    before = ray.is_initialized()
    if not before:
        try:
            _knock(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise InputError(
                f"no Ray cluster answers at {address!r} ({reason}); expected auto or the HOST:PORT of a head that "
                "`ray start --head` started"
            ) from None
    try:
        yield ray
    finally:
        if not before:
            ray.shutdown()


def _knock(address: str) -> None:
    """Refuse what is no HOST:PORT, or one where nobody answers: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not host or host.isdecimal() or not port.isdecimal() or int(port) > 65535:
            raise ValueError("which is no address")
        socket.create_connection((host, int(port)), timeout=KNOCK).close()
