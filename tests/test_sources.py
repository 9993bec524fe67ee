"""Rows of arrays in files: their values, what is read, and fingerprints."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from array_files import (
    EXTRA,
    WRITERS,
    D,
    N,
    by_name,
    cloud,
    opened,
    sparse,
    write_csr,
    write_deflated,
    write_fortran,
    write_h5,
    write_h5ad,
    write_npy,
    write_parquet,
    write_stored,
    write_table,
    write_zarr3,
)

from launch import formats, sources
from launch.errors import BadInput
from launch.sources import fingerprint

ROOT = Path(__file__).parent.parent
SPANS = [(0, N), (0, 0), (N, N), (0, 1), (N - 1, N), (0, 300), (299, 301), (123, 987)]


@pytest.mark.parametrize("write", WRITERS, ids=by_name)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "uint8", "bool"])
@pytest.mark.parametrize("width", [(D,), ()], ids=["cloud", "weights"])
def test_rows_are_those_of_numpy(write, dtype, width, tmp_path):
    x = cloud() if width else cloud()[:, 0]
    x = (x > 0) if dtype == "bool" else np.clip(abs(x), 0, 200).astype(dtype)
    source = opened(*write(tmp_path, x))
    assert source.shape == x.shape
    assert source.dtype == x.dtype
    for start, stop in [*SPANS, *SPANS[::-1]]:  # forward and back
        rows = source.rows(start, stop)
        assert rows.dtype == x.dtype
        np.testing.assert_array_equal(rows, x[start:stop])


@pytest.mark.parametrize("dtype", [">f8", ">i4", "float16", "longdouble"])
@pytest.mark.parametrize("write", WRITERS[:5], ids=by_name)
def test_any_real_dtype_of_numpy(write, dtype, tmp_path):
    x = cloud(dtype=dtype)
    source = opened(*write(tmp_path, x))
    assert source.dtype == x.dtype
    np.testing.assert_array_equal(source.rows(5, 70), x[5:70])


def test_more_axes_and_none(tmp_path):
    x = cloud().reshape(100, 2, 5, 5)
    for write in WRITERS[:5]:
        source = opened(*write(tmp_path, x))
        np.testing.assert_array_equal(source.rows(7, 31), x[7:31])
    for shape in [(0, 3), (4, 0), (0,)]:
        for write in WRITERS[:5]:
            source = opened(*write(tmp_path, np.ones(shape)))
            assert source.shape == shape
            assert source.rows(0, shape[0]).shape == shape
            assert fingerprint(source) == 0


@pytest.mark.parametrize("span", [(-1, 3), (4, 3), (0, N + 1)])
def test_other_rows_are_a_bug_of_the_caller(span, tmp_path):
    with pytest.raises(IndexError):
        opened(*write_npy(tmp_path, cloud())).rows(*span)


def test_a_name_with_a_hash_is_a_file(tmp_path):
    x = cloud()
    np.save(tmp_path / "x#1.npy", x)
    assert sources.split(f"{tmp_path}/x#1.npy") == (f"{tmp_path}/x#1.npy", "")
    np.testing.assert_array_equal(opened(tmp_path / "x#1.npy").rows(2, 4), x[2:4])
    np.savez(tmp_path / "x#1.npz", x=x)
    np.testing.assert_array_equal(opened(tmp_path / "x#1.npz", "x").rows(2, 4), x[2:4])


def test_what_is_in_a_file_counts_and_not_its_name(tmp_path):
    x = cloud()
    for write in (write_stored, write_h5, write_parquet):
        path, key = write(tmp_path, x)
        os.rename(path, tmp_path / "data")
        np.testing.assert_array_equal(opened(tmp_path / "data", key).rows(2, 4), x[2:4])


# Hdf5, zarr and parquet


def test_anndata(tmp_path):
    x = sparse()
    h5ad = write_h5ad(tmp_path, x)
    source = opened(h5ad, "X")
    assert (source.shape, source.dtype) == (x.shape, x.dtype)
    for start, stop in SPANS:
        np.testing.assert_array_equal(source.rows(start, stop), x[start:stop])
    rows = opened(h5ad, "obsm/X_pca").rows(9, 14)
    np.testing.assert_array_equal(rows, x[9:14, :2])
    np.testing.assert_array_equal(opened(h5ad, "obs/size").rows(9, 14), x[9:14, 0])


def test_sparse_entries_at_one_place_add_up(tmp_path):
    h5py = pytest.importorskip("h5py", reason=EXTRA)
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": [2, 3]})
        group["indptr"], group["indices"] = [0, 1, 4], [2, 1, 1, 0]
        group["data"] = [1.0, 2.0, 3.0, 4.0]
    rows = opened(tmp_path / "a.h5ad", "X").rows(0, 2)
    np.testing.assert_array_equal(rows, [[0, 0, 1], [4, 5, 0]])


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("indices", 5, "not below 5"),
        ("indices", -1, "not below 5"),
        ("indptr", 10**6, "is not a whole HDF5"),
    ],
)
def test_a_broken_sparse_matrix_is_refused(tmp_path, part, value, words):
    h5py = pytest.importorskip("h5py", reason=EXTRA)
    h5ad = write_h5ad(tmp_path, sparse())
    with h5py.File(h5ad, "a") as file:
        file[f"X/{part}"][10] = value
    with pytest.raises(BadInput, match=words):
        opened(h5ad, "X").rows(0, 50)


def test_anndata_in_zarr(tmp_path):
    zarr = pytest.importorskip("zarr", reason=EXTRA)
    x = sparse()
    root = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    write_csr(root.require_group("X"), x)
    write_csr(root.require_group("layers/byc"), x, "csc_matrix")
    source = opened(tmp_path / "a.zarr", "X")
    np.testing.assert_array_equal(source.rows(123, 987), x[123:987])
    with pytest.raises(BadInput, match="csc_matrix: write it by rows"):
        opened(tmp_path / "a.zarr", "layers/byc")
    with pytest.raises(BadInput, match="arrays X, layers/byc: choose"):
        opened(tmp_path / "a.zarr")


def test_zarr_of_one_array(tmp_path):
    zarr = pytest.importorskip("zarr", reason=EXTRA)
    x = cloud()
    zarr.save_array(str(tmp_path / "one.zarr"), x)
    np.testing.assert_array_equal(opened(tmp_path / "one.zarr").rows(3, 700), x[3:700])
    with pytest.raises(BadInput, match="one array: leave #x out"):
        opened(tmp_path / "one.zarr", "x")


def test_hdf5_behind_a_block_of_another_format(tmp_path):
    h5py = pytest.importorskip("h5py", reason=EXTRA)
    with h5py.File(tmp_path / "x.mat", "w", userblock_size=512) as file:
        file["x"] = cloud()
    np.testing.assert_array_equal(opened(tmp_path / "x.mat", "x").rows(0, N), cloud())


def test_columns_of_a_table(tmp_path):
    path, columns = write_table(tmp_path)
    for key in ("i,f", "f,i", "f,half", "b,i", "b", "half", "a,b", "i,"):
        names = [key] if key in columns else key.strip(",").split(",")
        want = np.stack([columns[name] for name in names], axis=1)
        want = want[:, 0] if names == [key] else want
        source = opened(path, key)
        assert (source.shape, source.dtype) == (want.shape, want.dtype)
        for start, stop in [(0, 100), (39, 42), (40, 41), (99, 100), (3, 5)]:
            np.testing.assert_array_equal(source.rows(start, stop), want[start:stop])


def test_nulls_are_refused_where_they_are(tmp_path):
    source = opened(write_table(tmp_path)[0], "gap")
    np.testing.assert_array_equal(source.rows(0, 60), np.ones(60))
    with pytest.raises(BadInput, match=r"#gap: gap\[60:63\] has nulls: fill them"):
        source.rows(60, 63)


def test_an_index_of_pandas_is_no_column(tmp_path):
    pa = pytest.importorskip("pyarrow", reason=EXTRA)
    import pyarrow.parquet as pq

    table = pa.table({"x": [1.0, 2.0], "cell": [7.0, 8.0]})
    pandas = b'{"index_columns": ["cell"], "columns": []}'
    pq.write_table(
        table.replace_schema_metadata({"pandas": pandas}), tmp_path / "p.parquet"
    )
    assert opened(tmp_path / "p.parquet").rows(0, 2).tolist() == [[1.0], [2.0]]
    assert opened(tmp_path / "p.parquet", "cell").rows(0, 2).tolist() == [7.0, 8.0]


def test_a_table_is_decoded_once_by_who_reads_in_order(tmp_path, monkeypatch):
    source = opened(*write_parquet(tmp_path, cloud()))._source
    monkeypatch.setattr(formats, "_BATCH", 10)
    file, groups = source._file, []

    class Counting:
        def iter_batches(self, *args):
            groups.append(args[1])
            return file.iter_batches(*args)

    source._file = Counting()
    for start in range(0, N, 50):
        np.testing.assert_array_equal(
            source.rows(start, start + 50), cloud()[start : start + 50]
        )
    assert groups == [[group] for group in range(8)]
    for start in (980, 900, 905):  # back in the last group, and forward again
        np.testing.assert_array_equal(source.rows(start, N), cloud()[start:])


# What is read


@pytest.fixture
def huge(tmp_path):
    """20 GB of which the disk holds a few pages: the rest is a hole."""
    shape, path = (10**9, 5), tmp_path / "huge.npy"
    with open(path, "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(file, header)
        start = file.tell()
        file.truncate(start + 20 * 10**9)
        file.seek(start + 20 * (10**9 - 2))
        file.write(np.arange(10, dtype="<f4").tobytes())
    yield path
    path.unlink()


MEASURED = """
import resource, sys
import numpy as np
from launch.sources import fingerprint, open_source

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3

source, before = open_source("--x", sys.argv[1]), peak()
"""


def measured(text, code):
    """Run `code` in a process of its own, in which `peak() - before` is MB."""
    call = [sys.executable, "-c", MEASURED + code, text]
    subprocess.run(call, check=True, cwd=ROOT, timeout=60)


def test_the_end_of_a_huge_file(huge):
    code = """
rows = source.rows(10**9 - 2, 10**9)
assert rows.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
assert fingerprint(source) and peak() - before < 20, peak() - before
for start in range(0, 30 * 10**6, 10**6):  # 20 MB each
    source.rows(start, start + 10**6)
assert peak() - before < 60, peak() - before
assert "jax" not in sys.modules and "h5py" not in sys.modules
"""
    measured(str(huge), code)


@pytest.mark.parametrize("write", [write_npy, write_fortran, write_stored], ids=by_name)
def test_only_the_bytes_of_the_rows_are_read(write, tmp_path, monkeypatch):
    source, counts = opened(*write(tmp_path, cloud())), []
    fill = formats._fill
    monkeypatch.setattr(
        formats,
        "_fill",
        lambda stream, out: (counts.append(out.size), fill(stream, out)),
    )
    assert source.rows(10, 30).nbytes == 20 * 4 * D == sum(counts)


def test_a_compressed_archive_is_not_inflated_as_a_whole(tmp_path):
    block, path = np.random.default_rng(0).bytes(2**10) * 2**10, tmp_path / "big.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x.npy", "w") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (2**17, 2**10)}
            np.lib.format.write_array_header_1_0(file, header)
            for _ in range(128):
                file.write(block)
    code = """
rows = source.rows(2**17 - 2**10, 2**17)
assert (rows == rows[0]).all() and len(set(rows[0].tolist())) > 200
assert peak() - before < 60, peak() - before
"""
    measured(f"{path}#x", code)


def test_a_compressed_archive_is_inflated_once_by_who_reads_in_order(tmp_path):
    source = opened(*write_deflated(tmp_path, cloud()))
    stream = source._source._opened.args[0]
    seek, places = stream.seek, []
    stream.seek = lambda at: (places.append(at - stream.tell()), seek(at))
    for start in range(0, N, 50):
        source.rows(start, start + 50)
    assert min(places) >= 0


# Fingerprints


@pytest.mark.parametrize("n", [200, 300_000])
def test_fingerprints_are_of_values(n, tmp_path):
    x = cloud(n)
    want = fingerprint(opened(*write_npy(tmp_path, x)))
    for write in WRITERS[1:-1]:
        if n == 200 or write is not write_zarr3:
            try:
                assert fingerprint(opened(*write(tmp_path, x))) == want, write
            except pytest.skip.Exception:
                continue
    swapped = opened(*write_npy(tmp_path, x.astype(">f4")))
    assert fingerprint(swapped) == want
    for row in (0, n - 1):  # those in between may be in no piece
        changed = x.copy()
        changed[row, -1] += 1
        assert fingerprint(opened(*write_npy(tmp_path, changed))) != want


def test_a_fingerprint_is_of_all_of_a_small_array(tmp_path):
    x = cloud(500)
    want = fingerprint(opened(*write_npy(tmp_path, x)))
    for row in range(0, 500, 7):
        changed = x.copy()
        changed[row] *= 2
        assert fingerprint(opened(*write_npy(tmp_path, changed))) != want


@pytest.mark.parametrize(
    "shape",
    [(10**7,), (10**6, 7), (3000, 1000), (300, 50_000), (4, 10**7), (2**20, 1), (1, 1)],
    ids=str,
)
def test_a_fingerprint_reads_4_mib_of_whole_rows(shape):
    class Counted(formats.Source):
        def __init__(self):
            self.shape, self.dtype, self.spans = shape, np.dtype("f4"), []

        def rows(self, start, stop):
            assert 0 <= start < stop <= shape[0]
            self.spans.append((start, stop))
            return np.broadcast_to(np.float32(1), (stop - start, *shape[1:]))

    source = Counted()
    fingerprint(source)
    row = 4 * int(np.prod(shape[1:]))
    read = sum(stop - start for start, stop in source.spans)
    assert read * row <= max(2**22, row)
    assert read == shape[0] or read * row > 2**21 or row > 2**21
    assert source.spans[0][0] == 0
    assert source.spans == sorted(source.spans)
    if len(source.spans) > 1:
        assert source.spans[-1][1] == shape[0]
