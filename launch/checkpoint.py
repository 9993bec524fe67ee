"""Snapshots of a run in a file, from which it goes on if it ended too early."""

import io
import json
import signal
import threading
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import ott_shard as otts
from ott_shard.state import CLOUD

from .errors import BadInput
from .files import replacing
from .processes import Beat, any_of, on_host
from .progress import Log
from .saved import contents

NAME = "checkpoint.npz"
_FORMAT = 3
_META = "meta"


class Interrupted(Exception):
    """The run was told to end, and has kept where it was."""


class Kept(NamedTuple):
    """What is in a checkpoint.

    Attributes:
        meta: what the run is: its flags, inputs and versions.
        snapshots: the last of each term.
    """

    meta: dict[str, Any]
    snapshots: dict[str, otts.Snapshot]


class Keeper:
    """Called at every check of a run: keeps a checkpoint now and then, and at SIGTERM.

    All processes call it; one writes.
    """

    def __init__(
        self,
        folder: Path | None,
        meta: dict[str, Any],
        *,
        seconds: float,
        checks: int | None,
        known: Mapping[str, otts.Snapshot],
        sizes: tuple[int, int],
        beat: Beat,
        log: Log,
    ):
        self._sizes = sizes
        self._folder, self._meta, self._log = folder, meta, log
        self._beat = beat
        self._seconds, self._checks = seconds, checks
        self._snapshots = dict(known)
        self._last, self._count, self._stop = time.monotonic(), 0, False
        self._before = None
        if folder is not None and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._told)

    def _told(self, *_) -> None:
        self._stop = True

    def close(self) -> None:
        """From here on SIGTERM is what it was before."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def __call__(self, term: str, now: otts.Snapshot) -> None:
        """One check of a term.

        Raises:
            Interrupted: if a process was told to end; then a checkpoint is written.
        """
        self._beat(f"{term}, after iteration {int(now.iteration)}")
        self._count += 1
        due = time.monotonic() - self._last >= self._seconds
        due |= self._checks is not None and self._count % self._checks == 0
        # The last one of a term is kept too: the next term goes on from there.
        self._snapshots[term] = now
        self._keep(due and jax.process_index() == 0)

    def solved(self) -> None:
        """All terms are, and gradients come, which may take long and are not checked.

        Raises:
            Interrupted: as at a check.
        """
        self._beat("the gradient")
        self._keep(False)

    def _keep(self, due: bool) -> None:
        stop, due = any_of([self._stop, due])
        if self._folder is None:
            return
        if stop or due:
            self._write()
            self._last = time.monotonic()
        if stop:
            raise Interrupted(str(self._folder / NAME))

    def _write(self) -> None:
        assert self._folder is not None
        arrays = {}
        for term, snapshot in self._snapshots.items():
            own = resized(term, snapshot._make(map(on_host, snapshot)), self._sizes)
            arrays |= {f"{term}/{name}": v for name, v in own._asdict().items()}
        if jax.process_index() == 0:
            write(self._folder, self._meta, arrays)
            iterations = {k: int(s.iteration) for k, s in self._snapshots.items()}
            self._log("checkpoint", iterations=iterations)


def resized(
    term: str, snapshot: otts.Snapshot, sizes: tuple[int, int]
) -> otts.Snapshot:
    """What a term has for each point, with or without padding, for these clouds."""
    ends = {}
    for name, i in CLOUD.items():
        size, rows = sizes["xy".index(term[i])], np.asarray(getattr(snapshot, name))
        missing = [(0, max(0, size - len(rows)))] + [(0, 0)] * (rows.ndim - 1)
        ends[name] = np.pad(rows[:size], missing)
    return snapshot._replace(**ends)


def write(folder: Path, meta: dict[str, Any], arrays: Mapping[str, Any]) -> None:
    """Write a checkpoint, whole or not at all; it takes the place of the last one."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": _FORMAT, **meta})
    with replacing(folder / NAME) as file:
        np.savez(file, **{_META: np.asarray(text)}, **arrays)


def read(folder: str) -> Kept:
    """The checkpoint in a folder.

    Raises:
        BadInput: if there is none, or none that is whole and of this program.
    """
    raw = contents(folder, NAME, "that kept one")
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        meta = json.loads(str(arrays.pop(_META)))
        if meta.pop("format") != _FORMAT:
            raise refused(folder, "is of another version")
        return Kept(meta, _snapshots(arrays))
    except (ValueError, KeyError, EOFError, OSError, TypeError, zipfile.BadZipFile):
        raise refused(folder, "is not a whole checkpoint of ott-shard") from None


def _snapshots(arrays: Mapping[str, np.ndarray]) -> dict[str, otts.Snapshot]:
    terms = dict.fromkeys(name.partition("/")[0] for name in arrays)
    return {
        term: otts.Snapshot._make(arrays[f"{term}/{f}"] for f in otts.Snapshot._fields)
        for term in terms
    }


def remove(folder: str) -> None:
    """The run has ended: its results take the place of its checkpoint."""
    if jax.process_index() == 0:
        (Path(folder) / NAME).unlink(missing_ok=True)


def refused(folder: str, reason: str) -> BadInput:
    """Why a checkpoint is not gone on from."""
    return BadInput(
        f"--run={folder}: its {NAME} {reason}: it is left as it is; solve again"
    )
