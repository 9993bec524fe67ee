"""Several processes of one job on this machine: --local_processes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .processes import INTERRUPTED, PEER_LOST

# What would tell a child that it is part of another job.
_FOREIGN = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "JAX_COORDINATOR", "JAX_NUM_PROCESSES")
_GRACE_SECONDS = 5.0  # for the others to end by themselves, after the first failure


def rehearse(argv: Sequence[str], count: int, logs: Path) -> int:
    """Run the command `argv` in `count` processes.

    Process 0 prints here, and every process writes DIR/rank-K.log. The first one that
    fails ends all; SIGTERM and SIGINT are passed on.

    Args:
        argv: the arguments, without --local_processes.
        count: of processes.
        logs: the folder of the logs.

    Returns:
        The exit code of the first to fail (5 if it was killed), else the highest.
    """
    logs.mkdir(parents=True, exist_ok=True)
    address = f"localhost:{free_port()}"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    children = []
    for k in range(count):
        job = [f"--coordinator_address={address}", f"--num_processes={count}"]
        command = [sys.executable, "-m", str(__package__), *argv, *job]
        children.append(_Child(k, [*command, f"--process_id={k}"], environ, logs))

    def pass_on(number, _):
        for child in children:
            child.process.send_signal(number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _wait(children)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            child.end()


class _Child:
    """One process; its output goes to its log, that of process 0 also to ours."""

    def __init__(self, rank: int, command: list[str], environ: dict, logs: Path):
        self.rank, self.log = rank, logs / f"rank-{rank}.log"
        self.process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        assert self.process.stdout is not None
        with self.log.open("wb") as file:
            for line in self.process.stdout:
                file.write(line)
                file.flush()
                text = line.decode(errors="replace")
                self.lines = [*self.lines[-19:], text]
                if self.rank == 0:
                    error = text.startswith("ott-shard: ")
                    print(text, end="", file=sys.stderr if error else sys.stdout)

    def end(self) -> None:
        """Kill it if it still runs, and finish its log."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._thread.join(timeout=5)


def _wait(children: list[_Child]) -> int:
    """Until all have ended, or the first has failed and the others had their time."""
    failed: _Child | None = None
    deadline = float("inf")
    while time.monotonic() < deadline:
        codes = [child.process.poll() for child in children]
        if all(code is not None for code in codes) and failed is None:
            bad = [child for child in children if child.process.returncode]
            failed = bad[0] if bad else None
            break
        if all(code is not None for code in codes):
            break
        ended = [c for c in children if c.process.poll() not in (None, 0)]
        if ended and failed is None:
            failed, deadline = ended[0], time.monotonic() + _GRACE_SECONDS
        time.sleep(0.05)
    if failed is None:
        return 0
    code = failed.process.returncode
    for child in children:
        child.end()
    _tell(failed, children)
    return code if code > 0 else PEER_LOST


def _tell(failed: _Child, children: list[_Child]) -> None:
    """Why the job failed, unless process 0 has said so here."""
    for child in children:
        reasons = [line for line in child.lines if line.startswith("ott-shard: error")]
        if reasons and child.rank:
            print(reasons[-1], end="", file=sys.stderr)
        if reasons:
            return
    code = failed.process.returncode
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    if code != INTERRUPTED:
        print(
            f"ott-shard: error: process {failed.rank} {how}: see {failed.log}",
            file=sys.stderr,
        )


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
