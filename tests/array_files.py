"""The same array in files of each format."""

import numpy as np
import pytest

from launch.sources import open_source

N, D = 1000, 5
EXTRA = "of the extra io"


def cloud(n=N, d=D, dtype="float32"):
    return np.random.default_rng(0).normal(size=(n, d), scale=50).astype(dtype)


def opened(path, key=""):
    text = f"{path}#{key}" if key else str(path)
    return open_source(f"--x={text}", text)


def write_npy(path, x):
    np.save(path / "x.npy", x)
    return path / "x.npy", ""


def write_fortran(path, x):
    np.save(path / "f.npy", np.asfortranarray(x))
    return path / "f.npy", ""


def write_stored(path, x):
    np.savez(path / "x.npz", y=x[:3], x=x)
    return path / "x.npz", "x"


def write_deflated(path, x):
    np.savez_compressed(path / "c.npz", y=x[:3], x=x)
    return path / "c.npz", "x"


def write_deflated_fortran(path, x):
    np.savez_compressed(path / "cf.npz", x=np.asfortranarray(x))
    return path / "cf.npz", "x"


def write_h5(path, x):
    h5py = pytest.importorskip("h5py", reason=EXTRA)
    with h5py.File(path / "x.h5", "w") as file:
        rows = (max(64, len(x) // 20), *x.shape[1:])
        file.create_dataset("group/x", data=x, chunks=rows, compression="gzip")
        file["plain"] = x
    return path / "x.h5", "group/x"


def write_zarr(path, x, zarr_format=2):
    zarr = pytest.importorskip("zarr", reason=EXTRA)
    here = str(path / f"x{zarr_format}.zarr")
    if int(zarr.__version__[0]) < 3:
        group, create = zarr.open_group(here, mode="w"), "create_dataset"
    else:
        group = zarr.open_group(here, mode="w", zarr_format=zarr_format)
        create = "create_array"
    rows = (max(64, len(x) // 20), *x.shape[1:])
    make = getattr(group.require_group("group"), create)
    make("x", shape=x.shape, chunks=rows, dtype=x.dtype)[:] = x
    return here, "group/x"


def write_zarr3(path, x):
    zarr = pytest.importorskip("zarr", minversion="3", reason=EXTRA)
    assert zarr
    return write_zarr(path, x, 3)


def write_parquet(path, x):
    pa = pytest.importorskip("pyarrow", reason=EXTRA)
    import pyarrow.parquet as pq

    columns = {f"c{i}": column for i, column in enumerate(x.reshape(len(x), -1).T)}
    pq.write_table(pa.table(columns), path / "x.parquet", row_group_size=128)
    return path / "x.parquet", "c0" if x.ndim == 1 else ""


WRITERS = [
    *(write_npy, write_fortran, write_stored, write_deflated, write_deflated_fortran),
    *(write_h5, write_zarr, write_zarr3, write_parquet),
]


def by_name(writer):
    return writer.__name__.removeprefix("write_")


def write_csr(group, x, kind="csr_matrix"):
    """As AnnData does: a matrix with entries that add up, which formats allow."""
    group.attrs["encoding-type"] = kind
    group.attrs["shape"] = list(x.shape)
    row, column = np.nonzero(x)
    parts = {
        "indptr": np.searchsorted(row, np.arange(len(x) + 1)).astype("int32"),
        "indices": column.astype("int32"),
        "data": x[row, column],
    }
    for name, part in parts.items():
        if hasattr(group, "create_array"):
            group.create_array(name, data=part, chunks=(50,))
        else:
            group.create_dataset(name, data=part, chunks=(50,))


def sparse():
    x = cloud()
    x[abs(x) < 40] = 0
    x[:3], x[-1] = 0, 0
    return x


def write_h5ad(path, x):
    """Sparse matrices by rows and by columns, a dense one, a column, words."""
    h5py = pytest.importorskip("h5py", reason=EXTRA)
    with h5py.File(path / "a.h5ad", "w") as file:
        write_csr(file.create_group("X"), x)
        write_csr(file.create_group("layers/byc"), x, "csc_matrix")
        file["obsm/X_pca"] = x[:, :2]
        file["obs/name"] = ["a", "b"]
        file["obs/size"] = x[:, 0]
        file["nothing"] = h5py.Empty("f")
    return path / "a.h5ad"


def write_table(path):
    """Columns of several kinds, in groups of which some are empty."""
    pa = pytest.importorskip("pyarrow", reason=EXTRA)
    import pyarrow.parquet as pq

    columns = {
        "i": np.arange(100, dtype="int8"),
        "f": np.linspace(0, 1, 100, dtype="float32"),
        "half": np.linspace(0, 1, 100).astype("float16"),
        "b": np.arange(100) % 3 == 0,
        "a,b": np.arange(100.0),
        "word": ["w"] * 100,
        "gap": [1.0] * 60 + [None] + [2.0] * 39,
        "when": np.arange(100).astype("M8[s]"),
        "list": [[1.0, 2.0]] * 100,
    }
    whole = pa.table(columns)
    with pq.ParquetWriter(path / "t.parquet", whole.schema) as file:
        for start, stop in [(0, 0), (0, 40), (40, 40), (40, 41), (41, 100), (0, 0)]:
            file.write_table(whole.slice(start, stop - start))
    return path / "t.parquet", columns
