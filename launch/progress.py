"""What is told of a run while it goes on: lines for people, and lines of JSON."""

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ott_shard as otts

from .config import Config
from .errors import BadInput
from .files import check_folder, not_writable, strict
from .sources import split

# Short runs print no progress.
_FIRST_LINE_SECONDS = 2.0
# The pace of convergence is that between this check and the last one.
_CHECKS = 6


class Check(NamedTuple):
    """One check of a solution."""

    term: str
    iteration: int
    error: float
    epsilon: float
    seconds_per_iteration: float
    seconds_left: float | None


class Log:
    """A file to which every event is added as a line of JSON; or none.

    The first event is written with the second: what is refused leaves no file.
    """

    def __init__(self, path: str | None):
        self._path, self._waiting, self._count = path, "", 0

    def __call__(self, event: str, **values: Any) -> None:
        """Add an event."""
        if self._path is None:
            return
        line = strict({"event": event, "time": time.time()} | values)
        self._waiting += json.dumps(line) + "\n"
        self._count += 1
        if self._count > 1:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(self._waiting)
            self._waiting = ""


def check_log(path: str | None, others: Iterable[str | None]) -> None:
    """Refuse a log that is a folder, or one of the `others`, before it is begun.

    Raises:
        BadInput: if so.
    """
    if path is None:
        return
    label = f"--log_json={path}"
    if Path(path).is_dir():
        raise BadInput(f"{label}: is a folder: name a file")
    if Path(path).resolve() in {Path(split(o)[0]).resolve() for o in others if o}:
        raise BadInput(f"{label}: is input of the run: name another file")
    check_folder(label, str(Path(path).parent))
    try:
        if Path(path).exists():
            open(path, "a").close()
    except OSError as error:
        raise not_writable(label, error, "file") from None


class Reporter:
    """Called at every check of a run, in one process: prints a line now and then.

    Args:
        config: of the run.
        log: gets every check.
        clock: seconds.
    """

    def __init__(
        self, config: Config, log: Log, clock: Callable[[], float] = time.monotonic
    ):
        self._config, self._log, self._clock = config, log, clock
        self._last = now = clock()
        self._next = now + min(config.progress_seconds, _FIRST_LINE_SECONDS)
        self._term, self._seen = "", []

    def __call__(self, term: str, now: otts.Snapshot) -> None:
        """One check of a term."""
        check = self._check(term, int(now.iteration), float(now.error), now.epsilon)
        self._log("check", **check._asdict())
        if self._last >= self._next:
            self._next = self._last + self._config.progress_seconds
            print(self._line(check), flush=True)

    def _check(self, term: str, iteration: int, error: float, epsilon: Any) -> Check:
        before, self._last = self._last, self._clock()
        if term != self._term:
            self._term, self._seen = term, []
        begun = self._seen[-1][0] if self._seen else self._first(iteration)
        self._seen = [*self._seen[1 - _CHECKS :], (iteration, error, float(epsilon))]
        pace = (self._last - before) / max(1, iteration - begun)
        left = _iterations_left(self._seen, self._config)
        seconds_left = None if left is None else left * pace
        return Check(term, iteration, error, float(epsilon), pace, seconds_left)

    def _first(self, iteration: int) -> int:
        """Where a term began, which may have gone on from a checkpoint."""
        inner = self._config.inner_iterations
        return (iteration - 1) // inner * inner

    def _line(self, check: Check) -> str:
        left = check.seconds_left
        if left is not None:
            end = f"about {duration(left)} to go"
        else:
            most = self._config.max_iterations - check.iteration
            end = f"at most {duration(most * check.seconds_per_iteration)} to go"
        return (
            f"  {check.term}  iteration {check.iteration}  "
            f"marginal error {check.error:.2e}  epsilon {check.epsilon:.3g}  "
            f"{check.seconds_per_iteration:.2g} s/iteration, {end}"
        )


def _iterations_left(
    seen: list[tuple[int, float, float]], config: Config
) -> float | None:
    """As many as the error needs at its pace of the last checks; None: unknown.

    While epsilon comes down the error is of another problem than the threshold.
    """
    iteration, error, _ = seen[-1]
    least = max(0, config.min_iterations - iteration)
    most = config.max_iterations - iteration
    if len(seen) < 2 or len({epsilon for *_, epsilon in seen}) > 1:
        return None
    if error <= config.threshold:
        return least
    same = [(i, e) for i, e, _ in seen if 0 < e < math.inf]
    if len(same) < 2 or not same[0][1] > error:
        return None
    (begun, larger), _ = same[0], same[-1]
    pace = math.log(larger / error) / (iteration - begun)
    needed = math.log(error / config.threshold) / pace
    return None if needed > most else max(least, needed)


def duration(seconds: float) -> str:
    """Of two digits or so."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
