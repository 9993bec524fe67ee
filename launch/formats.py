"""Arrays in files of each format, of which rows are read when they are asked for.

h5py, zarr and pyarrow are optional (pip install 'ott_shard[io]'), and imported when a
file of theirs is opened. What they raise for a broken file is left to who opens it.
"""

import abc
import bisect
import contextlib
import functools
import importlib
import math
import os
import re
import struct
import weakref
import zipfile
from collections.abc import Callable, Collection
from typing import IO, Any

import numpy as np

from .errors import BadInput

REAL = "fiub"  # kinds of dtypes
_BLOCK = 2**24  # bytes that are read at once, where a copy is made on the way
_BATCH = 2**16  # rows that are decoded at once, of a format by columns
_WHOLE = 2**28  # bytes of what is read whole, where rows are all over the file
_NUMBERS = re.compile(r"bool|halffloat|float|double|u?int\d+")  # types of columns
_SPARSE = "csr_matrix", "csc_matrix"  # as AnnData calls them


class Source(abc.ABC):
    """An array in a file, of which rows are read when they are asked for.

    Attributes:
        shape: of the whole array: [n] or [n, d].
        dtype: of its numbers, as they are in the file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @abc.abstractmethod
    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows `start` up to `stop`, in the dtype of the file; no others are kept.

        Raises:
            BadInput: if the file is broken there, or is no longer what it was.
        """


class Sliced(Source):
    """Anything of which slices are NumPy arrays."""

    def __init__(self, array: Any):
        self._array = array
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """As they are sliced."""
        return np.asarray(self._array[start:stop])


class _Npy(Source):
    """A .npy file in `size` bytes, from `base`, of what `opened` gives.

    It is read and not mapped: what was read of a map counts as memory of the process
    for as long as the map is there.
    """

    def __init__(self, opened: Callable[[], Any], base: int, size: int):
        self._opened = opened
        with opened() as stream:
            stream.seek(base)
            self.shape, self.by_columns, self.dtype = _header(stream)
            self._offset = stream.tell()
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        if self._offset + self.nbytes > base + size:
            raise EOFError

    def rows(self, start: int, stop: int) -> np.ndarray:
        n, *width = self.shape
        # In C order the rows are one run of bytes, in Fortran order one in each column.
        across = math.prod(width)
        runs, step = (across, 1) if self.by_columns else (1, across)
        out = np.empty((runs, (stop - start) * step), self.dtype)
        with self._opened() as stream:
            for run in range(runs):
                at = (run * n + start) * step * self.dtype.itemsize
                stream.seek(self._offset + at)
                _fill(stream, out[run].view(np.uint8))
        shape = (stop - start, *width)
        return out.reshape(shape[::-1]).T if self.by_columns else out.reshape(shape)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether in Fortran order, and dtype."""
    form = np.lib.format
    one = form.read_magic(stream) == (1, 0)
    read = form.read_array_header_1_0 if one else form.read_array_header_2_0
    shape, by_columns, dtype = read(stream)
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"it holds {dtype} of shape {shape}")
    return shape, by_columns, dtype


def _fill(stream: Any, memory: np.ndarray) -> None:
    """All of `memory`, in blocks: an archive makes a copy of what it is asked for."""
    at = 0
    while at < memory.size:
        count = stream.readinto(memory[at : at + _BLOCK])
        if not count:
            raise EOFError
        at += count


def open_npy(path: str, key: str) -> Source:
    """The array in a .npy file."""
    if key:
        raise BadInput(f"holds one array: leave #{key} out")
    return _Npy(lambda: open(path, "rb", buffering=0), 0, os.path.getsize(path))


def open_npz(path: str, key: str) -> Source:
    """The array `key` of an archive, which may be compressed."""
    with zipfile.ZipFile(path) as archive:
        names = [name[:-4] for name in archive.namelist() if name.endswith(".npy")]
        if key not in names:
            raise _none_at(path, names)
        member = archive.getinfo(f"{key}.npy")
        stream = archive.open(member)  # which outlives the archive
    # To go forward, as reading in order does, is to inflate what comes next, once.
    opened = functools.partial(contextlib.nullcontext, stream)
    weakref.finalize(opened, stream.close)
    if member.compress_type == zipfile.ZIP_STORED:
        with open(path, "rb") as file:  # the bytes come after a header with two names
            file.seek(member.header_offset + 26)
            base = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        return _Npy(lambda: open(path, "rb", buffering=0), base, member.file_size)
    source = _Npy(opened, 0, member.file_size)
    if not source.by_columns:
        return source
    if source.nbytes > _WHOLE:
        raise BadInput("is compressed in Fortran order: write it by numpy.savez")
    return Sliced(source.rows(0, source.shape[0]))


def open_hdf5(path: str, key: str) -> Source:
    """A dataset, or a CSR matrix of AnnData."""
    return _within(path, key, _library("h5py").File(path, "r"))


def open_zarr(path: str, key: str) -> Source:
    """An array of a folder, or a CSR matrix of AnnData."""
    return _within(path, key, _library("zarr").open(path, mode="r"))


def _within(path: str, key: str, root: Any) -> Source:
    """The array or the sparse matrix at `key` in a group of h5py or of zarr."""
    if hasattr(root, "shape"):
        if key:
            raise BadInput(f"holds one array: leave #{key} out")
        return Sliced(root)
    node = root.get(key) if key else None
    if getattr(node, "shape", None) is not None:  # that of an empty dataset is None
        return Sliced(node)
    encoding = _encoding(node)
    if encoding == "csr_matrix":
        return _Csr(node)
    if encoding == "csc_matrix":
        raise BadInput(f"{key} is a csc_matrix: write it by rows, by adata.X.tocsr()")
    raise _none_at(path, _arrays(root))


def _encoding(node: Any) -> str:
    return str(node.attrs.get("encoding-type", "")) if hasattr(node, "attrs") else ""


def _arrays(root: Any) -> list[str]:
    """The names of arrays of numbers and of sparse matrices, in all groups."""
    nodes: dict[str, Any] = {}
    if hasattr(root, "members"):  # zarr 3
        nodes.update(root.members(max_depth=None))
    else:
        root.visititems(nodes.__setitem__)
    names = {name for name, node in nodes.items() if _encoding(node) in _SPARSE}
    for name, node in nodes.items():
        if name.rpartition("/")[0] not in names and getattr(node, "shape", None):
            names |= {name} if np.dtype(node.dtype).kind in REAL else set()
    return sorted(names)


class _Csr(Source):
    """A sparse matrix by rows, as AnnData keeps it; its rows come dense."""

    def __init__(self, group: Any):
        self._group = group
        n, width = self.shape = tuple(int(size) for size in group.attrs["shape"])
        self.dtype = np.dtype(group["data"].dtype)
        if min(n, width) < 0 or group["indptr"].shape != (n + 1,):
            raise ValueError(f"its indptr is not that of shape {self.shape}")

    def rows(self, start: int, stop: int) -> np.ndarray:
        width = self.shape[1]
        ends = self._group["indptr"][start : stop + 1].astype(np.int64)
        entries = slice(int(ends[0]), int(ends[-1]))
        columns = self._group["indices"][entries].astype(np.int64)
        if columns.size and not 0 <= columns.min() <= columns.max() < width:
            raise ValueError(f"an index is not below {width}")
        out = np.zeros((stop - start, width), self.dtype)
        places = np.repeat(np.arange(stop - start) * width, np.diff(ends)) + columns
        np.add.at(out.reshape(-1), places, self._group["data"][entries])
        return out


def open_parquet(path: str, key: str) -> Source:
    """The columns `key`, or all of them."""
    return _Parquet(path, key)


class _Parquet(Source):
    """Columns of a parquet file, decoded a batch of rows after the other."""

    def __init__(self, path: str, key: str):
        self._file = _library("pyarrow", ".parquet").ParquetFile(path)
        schema, metadata = self._file.schema_arrow, self._file.metadata
        self._names = _columns(path, key, schema)
        types = [schema.field(name).type.to_pandas_dtype() for name in self._names]
        self.dtype = np.result_type(*types)
        width = () if self._names == [key] else (len(types),)
        self.shape = (metadata.num_rows, *width)
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        self._starts = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
        self._group, self._first = -1, 0
        self._batch: Any = ()

    def rows(self, start: int, stop: int) -> np.ndarray:
        out = np.empty((stop - start, len(self._names)), self.dtype)
        at = start
        while at < stop:
            self._decode(at)
            part = self._batch.slice(at - self._first, stop - at)
            end = at + len(part)
            for column, name in enumerate(self._names):
                if part.column(name).null_count:
                    raise BadInput(f"{name}[{at}:{end}] has nulls: fill them")
                values = part.column(name).to_numpy(zero_copy_only=False)
                out[at - start : end - start, column] = values
            at = end
        return out.reshape(-1, *self.shape[1:])

    def _decode(self, row: int) -> None:
        """Bring the batch that holds a row, from where the last one is if it can be."""
        group = bisect.bisect_right(self._starts, row) - 1
        if group != self._group or row < self._first:
            self._group, self._first, self._batch = group, self._starts[group], ()
            self._batches = self._file.iter_batches(_BATCH, [group], self._names)
        while row >= self._first + len(self._batch):
            self._first += len(self._batch)
            self._batch = next(self._batches)


def _columns(path: str, key: str, schema: Any) -> list[str]:
    """The names of the columns that `key` says: all but an index of pandas if none."""
    names, index = schema.names, (schema.pandas_metadata or {}).get("index_columns", [])
    fit = [field.name for field in schema if _NUMBERS.fullmatch(str(field.type))]
    chosen = [key] if key in names else [name for name in key.split(",") if name]
    chosen = chosen or [name for name in names if name not in index]
    bad = next((name for name in chosen if name not in fit), "")
    if bad or not chosen:
        what = f"{bad or 'nothing'} is no column of numbers"
        held = _listed(fit) or "none"
        raise BadInput(f"{what} (these are {held}): choose some as {path}#A,B")
    return chosen


def _library(name: str, module: str = "") -> Any:
    try:
        return importlib.import_module(name + module)
    except ModuleNotFoundError:
        raise BadInput(f"needs {name}: pip install 'ott_shard[io]'") from None


def _listed(names: Collection[str]) -> str:
    return ", ".join(list(names)[:20]) + (", ..." if len(names) > 20 else "")


def _none_at(path: str, names: Collection[str]) -> BadInput:
    """What to say of a key that is missing, or names nothing."""
    if not names:
        return BadInput("holds no arrays of numbers: write it anew")
    return BadInput(f"holds the arrays {_listed(names)}: choose one as {path}#KEY")
