"""The same log-sum-exp pass by other libraries, in a process of its own.

This file is both ends of a pipe. Imported, it gives :class:`Peer`, which sends
requests. Run as a script by the Python of another environment, it is the worker that
answers them, and imports neither ott_shard nor anything beside it: that environment
has versions of its own. A request and its answer are one line of JSON each. The worker
waits for a line while it has none, so that it takes no time from what is measured
between two requests.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Compiling counts: a C++ compiler may build a kernel for the first answer.
_ANSWER_SECONDS = 600.0
_CLOSE_SECONDS = 10.0
_TOLERANCE = 1e-3  # of the largest value, in float32
_OTT_BATCHES = (128, 256, 512, 1024, 2048, 4096)
# OTT forms slices of batch x m; those that take gigabytes are not tried.
_MAX_SLICE_ENTRIES = 2**27


class PeerTask(NamedTuple):
    """What a peer computes, and should find.

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


class PeerError(Exception):
    """A peer is missing, failed, or gave no answer; the message is the reason."""


class Peer:
    """A worker process that runs one library; a context manager that ends it.

    Args:
        python: the Python that has the library.
        platform: where the library must compute, to compare like with like: "cpu", or
            anything else for its own choice.
        fixed: what all requests have in common.
    """

    def __init__(self, python: str, platform: str, fixed: dict[str, Any]):
        # The folder of this file has modules of common names, which must not shadow
        # others; and a GPU may have to hold the arrays of both processes.
        environment = {
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        if platform == "cpu":
            environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self._fixed = fixed
        self._batch: int | None = None
        try:
            # A session of its own, to end compilers that it started with it.
            self._process = subprocess.Popen(
                [python, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"cannot run {python}: {error.strerror}") from None

    def ask(self, op: str, out: str | None = None) -> dict[str, Any]:
        """The answer to a request.

        Args:
            op: "values" to write values, "time" for one timed pass.
            out: where "values" go, an .npy file.

        Raises:
            PeerError: if the answer is an error, or there is none.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        request = {**self._fixed, "op": op, "batch": self._batch, "out": out}
        alarm = threading.Timer(_ANSWER_SECONDS, self._kill)
        alarm.start()
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
        except (OSError, ValueError):
            raise PeerError(
                f"no answer to {op!r}: ended, or took over {_ANSWER_SECONDS:g} s"
            ) from None
        finally:
            alarm.cancel()
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def prepare(self, want: np.ndarray, m: int, folder: Path) -> dict[str, Any]:
        """Compile, check the values and settle on the fastest batch.

        Args:
            want: [n], the values that the peer should give.
            m: the number of columns.
            folder: for files on the way.

        Returns:
            "version", "max_abs_difference" and, for a peer that has batches, "batch"
            and "seconds_by_batch".

        Raises:
            PeerError: if the peer fails or its values differ.
        """
        if self._fixed["peer"] == "keops":
            return self._check(want, folder)
        seconds, found = {}, {}
        for batch in _OTT_BATCHES:
            if batch == _OTT_BATCHES[0] or (
                batch <= len(want) and batch * m <= _MAX_SLICE_ENTRIES
            ):
                self._batch = batch
                found = self._check(want, folder)
                seconds[batch] = min(self.seconds(), self.seconds())
        self._batch = min(seconds, key=lambda batch: seconds[batch])
        return {**found, "batch": self._batch, "seconds_by_batch": seconds}

    def _check(self, want: np.ndarray, folder: Path) -> dict[str, Any]:
        path = folder / "values.npy"
        version = self.ask("values", out=str(path))["version"]
        difference = float(np.abs(np.load(path) - want).max())
        if not difference <= (limit := _TOLERANCE * float(np.abs(want).max())):
            raise PeerError(f"values differ by {difference:.3g}, more than {limit:.3g}")
        return {"version": version, "max_abs_difference": difference}

    def seconds(self) -> float:
        """One timed pass."""
        return self.ask("time")["seconds"]

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def python_with_peers() -> str | None:
    """This Python if it has a peer, else None, and a note."""
    if any(importlib.util.find_spec(name) for name in ("ott", "pykeops")):
        return sys.executable
    print("bench: no peers here: name a --peer_python", file=sys.stderr)
    return None


def start(
    stack: contextlib.ExitStack, python: str, platform: str, task: PeerTask
) -> tuple[dict[str, Peer], dict[str, dict[str, Any]]]:
    """The peers that `python` has, ready to be timed, and a record of each one.

    The peers end with `stack`. The record of one that is not ready says
    "unavailable", and why.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    data = folder / "data.npz"
    np.savez(data, x=task.x, y=task.y, h=task.h, epsilon=task.epsilon)
    peers, records = {}, {}
    for name in PEERS:
        fixed = {"peer": name, "data": str(data), "cost": task.cost}
        try:
            peer = stack.enter_context(Peer(python, platform, fixed))
            records[name] = peer.prepare(task.values, len(task.y), folder)
            peers[name] = peer
        except PeerError as error:
            records[name] = {"unavailable": str(error)}
    return peers, records


# --------------------------------------------------------------------- the worker

# A pass returns log sum_j exp(h_j - C_ij / epsilon), [n].
Pass = Callable[[], np.ndarray]


def _ott(data: dict[str, np.ndarray], cost: str, batch: int) -> Pass:
    """OTT-JAX in online mode."""
    import jax
    import jax.numpy as jnp
    from ott.geometry import (  # pyright: ignore[reportMissingImports] (optional)
        costs,
        pointcloud,
    )

    cost_fn = {"sqeuclidean": costs.SqEuclidean, "euclidean": costs.Euclidean}[cost]()

    @jax.jit
    def lse(x, y, f, g, epsilon):
        geom = pointcloud.PointCloud(
            x, y, cost_fn=cost_fn, epsilon=epsilon, batch_size=batch
        )
        return geom.apply_lse_kernel(f, g, epsilon, axis=1)[0]

    epsilon = data["epsilon"]
    f, g = np.zeros_like(data["x"][:, 0]), data["h"] * epsilon
    operands = [jnp.asarray(array) for array in (data["x"], data["y"], f, g, epsilon)]

    def run():
        # Full float32 products, as in ott_shard; on CPU they always are.
        with jax.default_matmul_precision("highest"):
            return np.asarray(lse(*operands)) / epsilon

    return run


def _keops(data: dict[str, np.ndarray], cost: str, _: None) -> Pass:
    """KeOps; epsilon goes into the points, which saves it one operation per pair."""
    from pykeops.numpy import LazyTensor  # pyright: ignore[reportMissingImports] (optional)

    square = cost == "sqeuclidean"
    unit = np.sqrt(data["epsilon"]) if square else data["epsilon"]
    x, y, h = data["x"] / unit, data["y"] / unit, data["h"]

    def run():
        x_i, y_j = LazyTensor(x[:, None, :]), LazyTensor(y[None, :, :])
        costs = x_i.sqdist(y_j) if square else x_i.sqdist(y_j).sqrt()
        h_j = LazyTensor(h[None, :, None])
        return (h_j - costs).logsumexp(dim=1)[:, 0]

    return run


# How to make a pass, and the distribution that it is of.
PEERS = {"ott": (_ott, "ott-jax"), "keops": (_keops, "pykeops")}


@functools.cache
def _pass(peer: str, path: str, cost: str, batch: int | None) -> Pass:
    make, _ = PEERS[peer]
    with np.load(path) as archive:
        data = dict(archive)
    return make(data, cost, batch)


def _answer(
    op: str, peer: str, data: str, cost: str, batch: int | None, out: str | None
) -> dict[str, Any]:
    """Run one pass, which is the first one, and compiles, if "values" are asked for.

    Args:
        op: "values" or "time".
        peer: one of PEERS.
        data: an .npz file of x [n, d], y [m, d], h [m] and epsilon.
        cost: "sqeuclidean" or "euclidean".
        batch: rows of a slice, for OTT.
        out: where "values" go, an .npy file.
    """
    run = _pass(peer, data, cost, batch)
    begun = time.perf_counter()
    values = run()
    seconds = time.perf_counter() - begun
    if op == "values":
        assert out is not None
        np.save(out, values)
    return {"seconds": seconds, "version": importlib.metadata.version(PEERS[peer][1])}


def _serve() -> None:
    # Compilers and libraries print; only answers may go where answers go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = _answer(**json.loads(line))
        except (Exception, SystemExit) as error:
            sentence = " ".join(str(error).split())[:300]
            answer = {"error": f"{type(error).__name__}: {sentence}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
