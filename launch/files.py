"""Files that are written: whole or not at all, where they can be; strict JSON."""

import contextlib
import math
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import BadInput

_SEEN_SECONDS = 5.0


def check_folder(label: str, folder: str) -> None:
    """Refuse what cannot be a folder with new files in it; nothing is made.

    Args:
        label: how a line about it starts, such as "--out=run".
        folder: which may be there or not.

    Raises:
        BadInput: if so.
    """
    path = nearest(folder)
    if not path.is_dir():
        raise BadInput(f"{label}: {path} is a file: name a directory")
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise not_writable(label, error) from None


def nearest(folder: str) -> Path:
    """The folder itself, or the first above it that is there."""
    path = Path(folder).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def appears(path: Path) -> bool:
    """Whether a file that another process has made is seen by this one."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while not path.exists():  # a network may take a moment
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def not_writable(label: str, error: OSError, noun: str = "directory") -> BadInput:
    """What to say of a folder that files cannot be written to, or of a file."""
    reason = error.strerror or error
    return BadInput(f"{label}: not writable ({reason}): name another {noun}")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its place at `path` when it is complete."""
    # Processes of several machines may write to one folder.
    own = f"{platform.node()}.{os.getpid()}"
    part = path.with_name(f".{path.name}.{own}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def strict(value: Any) -> Any:
    """`value` with null for what JSON has no number for: NaN and infinities."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
