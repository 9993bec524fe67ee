"""The processes of a job: how they find each other, agree, and end together."""

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from .errors import BadInput, Refused, complain
from .files import appears, nearest, not_writable

PEER_LOST, INTERRUPTED = 5, 6
# What JAX and its transports say when another process is gone.
_OF_PEERS = ("gloo", "nccl", "connection", "unavailable", "coordination", "heartbeat")
_ENVIRONMENT = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}


_Made = TypeVar("_Made")
Beat = Callable[[str], None]


class Wanted(NamedTuple):
    """What flags say of processes; None where they say nothing."""

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None


class Start(NamedTuple):
    """How a process joins its job.

    Attributes:
        wanted: addresses and numbers, where they are not left to `method`.
        method: how JAX finds the others: "deactivate", or the name of a cluster.
        why: where this was read, for people.
    """

    wanted: Wanted
    method: str
    why: str


def choose(wanted: Wanted, environ: Mapping[str, str]) -> Start | None:
    """How to start: flags beat the environment, which beats the cluster's own.

    Returns:
        None for a process that is alone.

    Raises:
        BadInput: if flags or variables say only part of it.
    """
    flags = {k: v for k, v in wanted._asdict().items() if k in _ENVIRONMENT and v}
    flags |= {"process_id": 0} if wanted.process_id == 0 else {}
    given = {name: environ[v] for name, v in _ENVIRONMENT.items() if v in environ}
    if flags or len(given) == len(_ENVIRONMENT):
        return _by_hand(wanted, flags, given)
    for method, found in (
        ("slurm", _of_slurm(environ)),
        ("ompi", _of_open_mpi(environ)),
        ("k8s", _of_kubernetes(environ)),
    ):
        if found:
            ids = wanted.local_device_ids
            if ids is None and method == "slurm":
                ids, reason = _slurm_devices(environ)
                found += reason
            return Start(Wanted(local_device_ids=ids), method, found)
    return None


def _by_hand(wanted: Wanted, flags: dict, given: dict) -> Start:
    values, sources = dict(given) | flags, []
    for name, variable in _ENVIRONMENT.items():
        if name not in values:
            raise BadInput(
                f"--{name} is missing: a job of several processes needs "
                "--coordinator_address=HOST:PORT, --num_processes and --process_id"
            )
        sources.append(f"--{name}" if name in flags else variable)
    numbers = {}
    for name in ("num_processes", "process_id"):
        if not str(values[name]).isdecimal():
            raise BadInput(f"{_ENVIRONMENT[name]}={values[name]}: must be a number")
        numbers[name] = int(values[name])
    count, index = numbers["num_processes"], numbers["process_id"]
    if index >= count:
        raise BadInput(
            f"--process_id={index}: must be less than --num_processes={count}: they "
            "count from 0"
        )
    host, _, port = str(values["coordinator_address"]).rpartition(":")
    if not (host and port.isdecimal()):
        raise BadInput(
            f"--coordinator_address={values['coordinator_address']}: must be "
            "HOST:PORT, of the machine of process 0"
        )
    by_hand = Wanted(f"{host}:{port}", count, index, wanted.local_device_ids)
    return Start(by_hand, "deactivate", "by " + ", ".join(sources))


def _of_slurm(environ: Mapping[str, str]) -> str:
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
    tasks = environ.get("SLURM_NTASKS", "1")
    if tasks in ("", "1") or not all(name in environ for name in needed):
        return ""
    return f"task {environ['SLURM_PROCID']} of {tasks} of SLURM"


def _of_open_mpi(environ: Mapping[str, str]) -> str:
    size = environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if size == "1" or "OMPI_MCA_orte_hnp_uri" not in environ:
        return ""
    return f"rank {environ.get('OMPI_COMM_WORLD_RANK')} of {size} of Open MPI"


def _of_kubernetes(environ: Mapping[str, str]) -> str:
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return ""
    index = environ.get("JOB_COMPLETION_INDEX", "")
    return f"pod {index} of an indexed Kubernetes job" if index else ""


def _slurm_devices(environ: Mapping[str, str]) -> tuple[tuple[int, ...] | None, str]:
    """Which GPUs a task has: JAX by itself would take one, whatever its share is."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([device for device in visible.split(",") if device])
    else:
        count = int(environ.get("SLURM_GPUS_ON_NODE", "0") or 0)
    tasks = environ.get("SLURM_NTASKS_PER_NODE") or _tasks_here(environ)
    if count == 0:
        return None, ""
    if tasks == "1":
        return tuple(range(count)), f", one task on its node: all {count} GPUs of it"
    if count == 1:
        return (0,), ", which sees one GPU"
    return None, f", GPU {environ.get('SLURM_LOCALID')} of its node"


def _tasks_here(environ: Mapping[str, str]) -> str:
    """Tasks on a node, from "4(x2)" if all nodes have as many."""
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")
    return counts[0].partition("(")[0] if len(counts) == 1 else ""


def begin(start: Start, timeout: int) -> str:
    """Join the job; before anything is computed.

    Returns:
        A line that says as what.

    Raises:
        BadInput: if the job does not come together in time.
    """
    address, count, index, ids = start.wanted
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            ids if ids is None else list(ids),
            cluster_detection_method=start.method,
            initialization_timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise BadInput(
            f"processes did not come together ({start.why}) within {timeout} s: start "
            f"all of them, at one address that all can reach: {reason}"
        ) from None
    devices = jax.local_devices()
    return (
        f"process {jax.process_index()} of {jax.process_count()} on "
        f"{socket.gethostname()}: {start.why}; {len(devices)} x "
        f"{devices[0].device_kind}, of {jax.device_count()} devices"
    )


def together(
    attempt: Callable[[], _Made],
    facts: Callable[[_Made], Mapping[str, str]] = lambda _: {},
) -> _Made:
    """What `attempt` returns, if it does so in every process and all mean the same.

    All processes call it. Where one refuses its input it says so, and all end: also if
    it does between two calls, since the others come to the second one.

    Args:
        attempt: what may refuse its input; it may call this function too.
        facts: what must be the same everywhere of what was returned, by what it is.

    Raises:
        BadInput: in a process that is alone.
        Refused: in all of several.
    """
    if jax.process_count() == 1:
        return attempt()
    try:
        made = attempt()
    except BadInput as error:
        if _first_refusal(True) == jax.process_index():
            complain("error", str(error))
        raise Refused from None
    if _first_refusal(False) is not None:
        raise Refused
    _compare(facts(made))
    return made


def _first_refusal(own: bool) -> int | None:
    """The first process that refuses, if one does; all ask."""
    refusing = np.flatnonzero(_gathered([own]))
    return int(refusing[0]) if len(refusing) else None


def _compare(facts: Mapping[str, str]) -> None:
    if not facts:
        return
    every = _gathered([zlib.crc32(text.encode()) for text in facts.values()])
    for column, (name, text) in enumerate(facts.items()):
        apart = np.flatnonzero(every[:, column] != every[0, column])
        if len(apart):
            if jax.process_index() == 0:
                complain(
                    "error",
                    f"processes disagree about {name}: process 0 has {text!r}, process "
                    f"{apart[0]} another: start all with the same files and packages",
                )
            raise Refused


def _gathered(own: Sequence[int]) -> np.ndarray:
    """[processes, numbers], those of each process."""
    return np.asarray(multihost_utils.process_allgather(np.asarray(own, np.uint32)))


def check_shared(label: str, folder: str) -> None:
    """Refuse a folder that is not the same one for all processes, which all ask.

    Raises:
        Refused: if it is not.
    """
    if jax.process_count() == 1:
        return
    number = multihost_utils.broadcast_one_to_all(np.uint32(secrets.randbits(32)))
    mark = nearest(folder) / f".ott-shard-{int(number):08x}"

    def leave() -> None:
        try:
            if jax.process_index() == 0:
                mark.touch()
        except OSError as error:
            raise not_writable(label, error) from None

    def look() -> None:
        if not appears(mark):
            raise BadInput(
                f"{label}: process {jax.process_index()} does not see there what "
                "process 0 writes: name a directory that all of them share"
            )

    try:
        together(leave)
        together(look)
    finally:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # the others would wait
                mark.unlink()


def of_peers(error: BaseException) -> bool:
    """Whether an error means that another process is gone."""
    text = str(error).lower()
    known = isinstance(error, jax.errors.JaxRuntimeError)
    return jax.process_count() > 1 and known and any(w in text for w in _OF_PEERS)


class Watchdog:
    """Ends this process if nothing moves: a collective waits for ever for a peer."""

    def __init__(self, seconds: float):
        self._seconds, self._doing = seconds, "start-up"
        self._last = time.monotonic()
        thread = threading.Thread(target=self._watch, daemon=True)
        if seconds > 0 and jax.process_count() > 1:
            thread.start()

    def beat(self, doing: str) -> None:
        """Say that something has moved, and what comes next."""
        self._doing, self._last = doing, time.monotonic()

    def _watch(self) -> None:
        while time.monotonic() - self._last < self._seconds:
            time.sleep(min(1.0, self._seconds / 10))
        give_up(
            f"process {jax.process_index()} of {jax.process_count()}: nothing has "
            f"moved for {self._seconds:g} s in {self._doing}: a peer is lost or stuck, "
            "or --watchdog_seconds is too short",
            PEER_LOST,
        )


def give_up(message: str, code: int) -> None:
    """Leave at once: a regular end would wait for the others."""
    print(f"ott-shard: error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def on_host(x: jax.Array | np.ndarray) -> np.ndarray:
    """All of `x`, on every process; all of them must ask for it."""
    if isinstance(x, np.ndarray) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def any_of(flags: Sequence[bool]) -> list[bool]:
    """For each flag whether it is raised on any process; all must ask."""
    if jax.process_count() == 1:
        return list(flags)
    every = multihost_utils.process_allgather(np.asarray(flags, np.uint8))
    return [bool(np.any(every[:, k])) for k in range(len(flags))]
