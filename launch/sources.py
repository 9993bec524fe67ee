"""Arrays in files larger than memory, of which only the rows asked for are read.

The formats are .npy, .npz, HDF5 (also .h5ad), zarr and parquet. The libraries of the
last three are optional (pip install 'ott_shard[io]'), and imported when needed.
"""

import contextlib
import math
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import formats
from .errors import BadInput
from .formats import REAL, Source

# A fingerprint is of so many pieces of so many bytes: all of an array of up to 4 MiB.
_PIECES, _PIECE = 64, 2**16


def open_source(label: str, text: str) -> Source:
    """The array in a file; of its numbers none are read yet.

    Args:
        label: how a line about it starts, such as "--x=clouds.npy".
        text: the path as typed: file.npy, archive.npz#key, file.h5#group/dataset (or
            file.h5ad#X, a CSR matrix of AnnData), folder.zarr#array, file.parquet, or
            file.parquet#a,b for two of its columns; #a is an array [n], and #a, with
            the comma [n, 1].

    Raises:
        BadInput: if there is no array of real numbers, in one line.
    """
    with _one_line(label, _ANY):
        path, key = split(text)
        form = _form_of(path)
    with _one_line(label, form):
        return _Checked(label, form, form.open(path, key))


def split(text: str) -> tuple[str, str]:
    """(path, key) of archive.npz#key; the key of a plain file is empty."""
    path, _, key = text.rpartition("#")
    return (text, "") if not path or Path(text).exists() else (path, key)


def fingerprint(source: Source) -> int:
    """A checksum by which an array is known again, in whatever format it is kept.

    The CRC-32 of all rows if these have up to 4 MiB, else of 64 evenly spaced pieces of
    whole rows, which have so much together (fewer, where a row is longer than a piece).

    Raises:
        BadInput: as `Source.rows`.
    """
    n, *width = source.shape
    row = max(1, source.dtype.itemsize * math.prod(width))
    size = max(1, _PIECE // row)
    count = min(_PIECES, max(1, _PIECES * _PIECE // (size * row)))
    whole = n <= count * size
    starts = range(0, n, size) if whole else np.linspace(0, n - size, count, dtype=int)
    checksum, order = 0, source.dtype.newbyteorder("<")
    for start in map(int, starts):
        rows = source.rows(start, min(start + size, n))
        checksum = zlib.crc32(np.ascontiguousarray(rows, order).data, checksum)
    return checksum


class _Form(NamedTuple):
    """A format: its name, how to mend a broken file, and how to know and open one."""

    name: str
    remedy: str
    starts: tuple[bytes, ...]
    ends: tuple[str, ...]  # of the names of files
    open: Callable[[str, str], Source]  # from path and key


def _form_of(path: str) -> _Form:
    """The format by what is in a file, or by its name if that says nothing."""
    if not path:
        raise BadInput(f"names no file: give {_WANTED}")
    folder = os.path.isdir(path)
    if folder and {"zarr.json", ".zarray", ".zgroup"} & set(os.listdir(path)):
        return _ZARR
    if os.path.exists(path) and not (folder or os.path.isfile(path)):
        raise BadInput(f"is no file on a disk, to be read in parts: give {_WANTED}")
    with open(path, "rb") as file:
        head = file.read(2**12)
    for form in _FILES:
        # What others put before HDF5 has a power of two of bytes, as in .mat files.
        starts = (0, 512, 1024, 2048) if form is _HDF5 else (0,)
        if any(head.startswith(form.starts, start) for start in starts):
            return form
    return next((form for form in _FILES if path.lower().endswith(form.ends)), _ANY)


@contextlib.contextmanager
def _one_line(label: str, form: _Form) -> Iterator[None]:
    """Whatever goes wrong with a file, as one line about `label`."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{label}: {error}") from None
    except MemoryError:
        raise
    except FileNotFoundError:
        raise BadInput(f"{label}: no such file: check the path") from None
    except Exception as error:  # the libraries raise anything when a file is broken
        if isinstance(error, OSError) and error.errno:
            line = f"cannot be read ({error.strerror or error}): give {_WANTED}"
        else:
            reason = " ".join(str(error).split())[:200] or "it ends too early"
            line = f"is not a whole {form.name} of numbers ({reason}): {form.remedy}"
        raise BadInput(f"{label}: {line}") from error


class _Checked(Source):
    """A source of real numbers, whose errors are one line about `label`."""

    def __init__(self, label: str, form: _Form, source: Source):
        self.shape, self.dtype = source.shape, source.dtype
        self._label, self._form, self._source = label, form, source
        if self.dtype.kind not in REAL:
            raise BadInput(f"must hold real numbers, got {self.dtype}: convert them")
        if not self.shape:
            raise BadInput("must be [n] or [n, d], got (): give an array with rows")

    def rows(self, start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= self.shape[0]:
            raise IndexError(f"rows {start} to {stop} of {self.shape[0]}")
        shape = (stop - start, *self.shape[1:])
        if 0 in shape:
            return np.empty(shape, self.dtype)
        with _one_line(self._label, self._form):
            rows = self._source.rows(int(start), int(stop))
            if (rows.shape, rows.dtype) != (shape, self.dtype):
                raise ValueError("it has changed since it was opened")
        return rows


_WANTED = "a .npy file, or archive.npz#key, file.h5#key, folder.zarr#key, file.parquet"
_ANEW, _SAVE = "write it anew", "write it by numpy.save, without objects"
_ZIP, _HDF = (b"PK\x03\x04", b"PK\x05\x06"), (b"\x89HDF\r\n\x1a\n",)
_NPY = _Form(".npy file", _SAVE, (b"\x93NUMPY",), (".npy",), formats.open_npy)
_NPZ = _Form(".npz file", "write it by numpy.savez", _ZIP, (".npz",), formats.open_npz)
_HDF5 = _Form("HDF5 file", _ANEW, _HDF, (".h5", ".hdf5", ".h5ad"), formats.open_hdf5)
_PARQUET = _Form("parquet file", _ANEW, (b"PAR1",), (".parquet",), formats.open_parquet)
_ZARR = _Form("zarr folder", _ANEW, (), (".zarr",), formats.open_zarr)
_ANY = _Form(".npy, .npz, HDF5, zarr or parquet file", _SAVE, (), (), formats.open_npy)
_FILES = (_NPY, _NPZ, _HDF5, _PARQUET)
