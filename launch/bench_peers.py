"""Other libraries, each in a process of its own, by the Python of an environment.

:mod:`.bench_worker` is the other end: requests and answers are lines of JSON, arrays
are in files.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .bench_worker import PEERS

_WORKER = Path(__file__).with_name("bench_worker.py")
# Compiling counts: a C++ compiler may build a kernel for the first answer.
_ANSWER_SECONDS = 600.0
_CLOSE_SECONDS = 10.0
_TOLERANCE = 1e-3  # of the largest value, in float32
_OTT_BATCHES = (128, 256, 512, 1024, 2048, 4096)
# OTT forms slices of batch x m; those that take gigabytes are not tried.
_MAX_SLICE_ENTRIES = 2**27


class PassTask(NamedTuple):
    """A pass that a peer computes, and what it should find.

    Attributes:
        x: [n, d].
        y: [m, d].
        h: [m].
        epsilon: scalar.
        cost: "sqeuclidean" or "euclidean".
        values: [n], log sum_j exp(h_j - C_ij / epsilon).
    """

    x: np.ndarray
    y: np.ndarray
    h: np.ndarray
    epsilon: np.ndarray
    cost: str
    values: np.ndarray


class SolveTask(NamedTuple):
    """A solution for uniform weights and squared distances.

    Attributes:
        x: [n, d].
        y: [m, d].
        epsilon: in units of cost.
        unit: where an epsilon that comes down may start.
        threshold: of the marginal error.
        max_iterations: the most.
    """

    x: np.ndarray
    y: np.ndarray
    epsilon: float
    unit: float
    threshold: float
    max_iterations: int


class PeerError(Exception):
    """A peer is missing, failed, or gave no answer; the message is the reason."""


class Worker:
    """A process that answers requests; a context manager that ends it.

    Args:
        python: the Python that has the library.
        platform: where the library must compute, to compare like with like: "cpu", or
            anything else for its own choice.
    """

    def __init__(self, python: str, platform: str):
        # The folder of this file has modules of common names, which must not shadow
        # others; and a GPU may have to hold the arrays of both processes.
        environment = {
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        if platform == "cpu":
            environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        try:
            # A session of its own, to end compilers that it started with it.
            self._process = subprocess.Popen(
                [python, _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"cannot run {python}: {error.strerror}") from None

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request, see :func:`.bench_worker.answer`.

        Raises:
            PeerError: if the answer is an error, or there is none.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        alarm = threading.Timer(_ANSWER_SECONDS, self.kill)
        alarm.start()
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
        except (OSError, ValueError):
            limit = f"{_ANSWER_SECONDS:g} s"
            raise PeerError(
                f"no answer to {request['op']!r}: ended, or took over {limit}"
            ) from None
        finally:
            alarm.cancel()
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """End it at once, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class PassPeer:
    """A library that makes passes.

    Args:
        worker: a process that has it, of its own.
        name: the library.
        data: an .npz file of the arrays of a :class:`PassTask`.
        cost: of it.
    """

    def __init__(self, worker: Worker, name: str, data: Path, cost: str):
        self.worker, self._name = worker, name
        self._request: dict[str, Any] = dict(peer=name, task="pass", cost=cost)
        self._request["data"] = str(data)

    def prepare(self, want: np.ndarray, m: int) -> dict[str, Any]:
        """Compile, check the values and settle on the fastest batch.

        Args:
            want: [n], the values that the peer should give.
            m: the number of columns.

        Returns:
            "version", "max_abs_difference" and, for a peer that has batches, "batch"
            and "seconds_by_batch".

        Raises:
            PeerError: if the peer fails or its values differ.
        """
        if self._name == "keops":
            return self._check(want)
        seconds, found = {}, {}
        for batch in _OTT_BATCHES:
            if batch == _OTT_BATCHES[0] or (
                batch <= len(want) and batch * m <= _MAX_SLICE_ENTRIES
            ):
                self._request["batch"] = batch
                found = self._check(want)
                seconds[batch] = min(self.seconds(), self.seconds())
        best = min(seconds, key=lambda batch: seconds[batch])
        self._request["batch"] = best
        return {**found, "batch": best, "seconds_by_batch": seconds}

    def _check(self, want: np.ndarray) -> dict[str, Any]:
        path = Path(self._request["data"]).with_name(f"{self._name}.npz")
        version = self.worker.ask(op="values", out=str(path), **self._request)[
            "version"
        ]
        with np.load(path) as found:
            difference = float(np.abs(found["values"] - want).max())
        if not difference <= (limit := _TOLERANCE * float(np.abs(want).max())):
            raise PeerError(f"values differ by {difference:.3g}, more than {limit:.3g}")
        return {"version": version, "max_abs_difference": difference}

    def seconds(self) -> float:
        """One timed pass."""
        return self.worker.ask(op="time", **self._request)["seconds"]


class SolvePeer:
    """OTT-JAX, which solves, in a process that lives as long as `stack`."""

    def __init__(self, stack: contextlib.ExitStack, python: str, platform: str):
        self._folder = folder(stack)
        self._worker = stack.enter_context(Worker(python, platform))
        self._request: dict[str, Any] = {}

    def solve(self, task: SolveTask, variant: str) -> dict[str, Any]:
        """Solve, and compile if it has to.

        Args:
            task: what.
            variant: one of :data:`.bench_worker.OTT_VARIANTS`.

        Returns:
            "f", "g", "n_iters", "converged", "value", "seconds" and "version".

        Raises:
            PeerError: if it fails.
        """
        # The worker knows files that it has read by their names.
        number = len(list(self._folder.iterdir()))
        data, out = (self._folder / f"{number}.{end}.npz" for end in ("in", "out"))
        epsilon = task.x.dtype.type(task.epsilon)
        np.savez(data, x=task.x, y=task.y, epsilon=epsilon, unit=task.unit)
        self._request = {
            **dict(task="solve", peer="ott", data=str(data), variant=variant),
            **dict(threshold=task.threshold, max_iterations=task.max_iterations),
        }
        answer = self._worker.ask(op="values", out=str(out), **self._request)
        with np.load(out) as found:
            return answer | dict(found)

    def seconds(self) -> float:
        """The last solution once more, timed."""
        return self._worker.ask(op="time", **self._request)["seconds"]


def python_with_peers() -> str | None:
    """This Python if it has a peer, else None, and a note."""
    if any(importlib.util.find_spec(name) for name in ("ott", "pykeops")):
        return sys.executable
    print("bench: no peers here: name a --peer_python", file=sys.stderr)
    return None


def start(
    stack: contextlib.ExitStack, python: str, platform: str, task: PassTask
) -> tuple[dict[str, PassPeer], dict[str, dict[str, Any]]]:
    """The peers that `python` has, ready to be timed, and a record of each one.

    The peers end with `stack`. The record of one that is not ready says
    "unavailable", and why.
    """
    data = folder(stack) / "data.npz"
    np.savez(data, x=task.x, y=task.y, h=task.h, epsilon=task.epsilon)
    peers, records = {}, {}
    for name in PEERS:
        try:
            worker = stack.enter_context(Worker(python, platform))
            peer = PassPeer(worker, name, data, task.cost)
            records[name] = peer.prepare(task.values, len(task.y))
            peers[name] = peer
        except PeerError as error:
            records[name] = {"unavailable": str(error)}
    return peers, records


def tell_unavailable(records: dict[str, dict[str, Any]]) -> None:
    """A line on standard error for every peer that is not there."""
    for name, record in records.items():
        if reason := record.get("unavailable"):
            print(f"bench: peer {name} unavailable: {reason}", file=sys.stderr)


def folder(stack: contextlib.ExitStack) -> Path:
    """For the files between two processes; it is removed with `stack`."""
    return Path(stack.enter_context(tempfile.TemporaryDirectory()))
