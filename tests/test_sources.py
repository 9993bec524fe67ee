"""Rows of arrays in files: the values, what is read, and what is refused."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from launch import formats, sources
from launch.errors import BadInput
from launch.sources import fingerprint, open_source

ROOT = Path(__file__).parent.parent
N, D = 1000, 5
SPANS = [(0, N), (0, 0), (N, N), (0, 1), (N - 1, N), (0, 300), (299, 301), (123, 987)]


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
    h5py = pytest.importorskip("h5py")
    with h5py.File(path / "x.h5", "w") as file:
        rows = (max(64, len(x) // 20), *x.shape[1:])
        file.create_dataset("group/x", data=x, chunks=rows, compression="gzip")
        file["plain"] = x
    return path / "x.h5", "group/x"


def write_zarr(path, x, zarr_format=2):
    zarr = pytest.importorskip("zarr")
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
    zarr = pytest.importorskip("zarr", minversion="3")
    assert zarr
    return write_zarr(path, x, 3)


def write_parquet(path, x):
    pa = pytest.importorskip("pyarrow")
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


@pytest.fixture
def sparse():
    x = cloud()
    x[abs(x) < 40] = 0
    x[:3], x[-1] = 0, 0
    return x


@pytest.fixture
def h5ad(tmp_path, sparse):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        write_csr(file.create_group("X"), sparse)
        write_csr(file.create_group("layers/byc"), sparse, "csc_matrix")
        file["obsm/X_pca"] = sparse[:, :2]
        file["obs/name"] = ["a", "b"]
        file["obs/size"] = sparse[:, 0]
        file["nothing"] = h5py.Empty("f")
    return tmp_path / "a.h5ad"


def test_anndata(h5ad, sparse):
    source = opened(h5ad, "X")
    assert (source.shape, source.dtype) == (sparse.shape, sparse.dtype)
    for start, stop in SPANS:
        np.testing.assert_array_equal(source.rows(start, stop), sparse[start:stop])
    rows = opened(h5ad, "obsm/X_pca").rows(9, 14)
    np.testing.assert_array_equal(rows, sparse[9:14, :2])
    np.testing.assert_array_equal(opened(h5ad, "obs/size").rows(9, 14), sparse[9:14, 0])


def test_sparse_entries_at_one_place_add_up(tmp_path):
    h5py = pytest.importorskip("h5py")
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
def test_a_broken_sparse_matrix_is_refused(h5ad, part, value, words):
    import h5py

    with h5py.File(h5ad, "a") as file:
        file[f"X/{part}"][10] = value
    with pytest.raises(BadInput, match=words):
        opened(h5ad, "X").rows(0, 50)


def test_anndata_in_zarr(tmp_path, sparse):
    zarr = pytest.importorskip("zarr")
    root = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    write_csr(root.require_group("X"), sparse)
    write_csr(root.require_group("layers/byc"), sparse, "csc_matrix")
    source = opened(tmp_path / "a.zarr", "X")
    np.testing.assert_array_equal(source.rows(123, 987), sparse[123:987])
    with pytest.raises(BadInput, match="csc_matrix: write it by rows"):
        opened(tmp_path / "a.zarr", "layers/byc")
    with pytest.raises(BadInput, match="arrays X, layers/byc: choose"):
        opened(tmp_path / "a.zarr")


def test_zarr_of_one_array(tmp_path):
    zarr = pytest.importorskip("zarr")
    x = cloud()
    zarr.save_array(str(tmp_path / "one.zarr"), x)
    np.testing.assert_array_equal(opened(tmp_path / "one.zarr").rows(3, 700), x[3:700])
    with pytest.raises(BadInput, match="one array: leave #x out"):
        opened(tmp_path / "one.zarr", "x")


def test_hdf5_behind_a_block_of_another_format(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.mat", "w", userblock_size=512) as file:
        file["x"] = cloud()
    np.testing.assert_array_equal(opened(tmp_path / "x.mat", "x").rows(0, N), cloud())


@pytest.fixture
def table(tmp_path):
    """Columns of several kinds, in groups of which some are empty."""
    pa = pytest.importorskip("pyarrow")
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
    with pq.ParquetWriter(tmp_path / "t.parquet", whole.schema) as file:
        for start, stop in [(0, 0), (0, 40), (40, 40), (40, 41), (41, 100), (0, 0)]:
            file.write_table(whole.slice(start, stop - start))
    return tmp_path / "t.parquet", columns


def test_columns_of_a_table(table):
    path, columns = table
    for key in ("i,f", "f,i", "f,half", "b,i", "b", "half", "a,b", "i,"):
        names = [key] if key in columns else key.strip(",").split(",")
        want = np.stack([columns[name] for name in names], axis=1)
        want = want[:, 0] if names == [key] else want
        source = opened(path, key)
        assert (source.shape, source.dtype) == (want.shape, want.dtype)
        for start, stop in [(0, 100), (39, 42), (40, 41), (99, 100), (3, 5)]:
            np.testing.assert_array_equal(source.rows(start, stop), want[start:stop])


def test_nulls_are_refused_where_they_are(table):
    source = opened(table[0], "gap")
    np.testing.assert_array_equal(source.rows(0, 60), np.ones(60))
    with pytest.raises(BadInput, match=r"#gap: gap\[60:63\] has nulls: fill them"):
        source.rows(60, 63)


def test_an_index_of_pandas_is_no_column(tmp_path):
    pa = pytest.importorskip("pyarrow")
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


# What is refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with bad files of the formats that need no library."""
    path = tmp_path_factory.mktemp("bad")
    x = cloud(12, 3)
    for name, array in {
        "x": x,
        "scalar": np.float64(3),
        "objects": np.array([{}, 1], dtype=object),
        "complex": x.astype(complex),
        "words": np.array([["a", "b"]]),
        "dates": np.zeros(3, "M8[s]"),
        "records": np.zeros(3, [("a", "f4"), ("λ", "f4")]),
    }.items():
        if name == "records":
            with pytest.warns(UserWarning, match="format 3.0"):
                np.save(path / f"{name}.npy", array)
        else:
            np.save(path / f"{name}.npy", array)
    np.savez(path / "pair.npz", x=x, y=x, o=np.array([{}]), c=x + 1j)
    np.savez(path / "many.npz", **{f"k{i}": x for i in range(30)})
    np.savez_compressed(path / "squeezed.npz", x=cloud(), f=np.asfortranarray(cloud()))
    np.savez(path / "empty.npz")
    whole, pair = ((path / name).read_bytes() for name in ("x.npy", "pair.npz"))
    (path / "cut.npy").write_bytes(whole[:-8])
    (path / "head.npy").write_bytes(whole[:50])
    (path / "lies.npy").write_bytes(whole.replace(b"(12, 3)", b"(99999999, 3)"))
    (path / "minus.npy").write_bytes(whole.replace(b"(12, 3)", b"(-2,-3)"))
    (path / "newer.npy").write_bytes(whole[:6] + b"\x09" + whole[7:])
    (path / "cut.npz").write_bytes(pair[:99])
    (path / "text.npy").write_text("1 2 3\n")
    (path / "text.csv").write_text("1 2 3\n")
    (path / "nothing.npy").write_bytes(b"")
    (path / "nothing.npz").write_bytes(b"")
    (path / "hollow.zarr").mkdir()
    os.mkfifo(path / "pipe.npy")
    os.symlink("loop.npy", path / "loop.npy")
    return path


REFUSED = [
    ("", "names no file: give a .npy file"),
    ("#x", "no such file: check the path"),
    ("gone.npy", "no such file: check the path"),
    ("gone.npz#x", "no such file: check the path"),
    ("x.npy/deep", "cannot be read (Not a directory): give a .npy file"),
    (".", "cannot be read (Is a directory): give a .npy file"),
    ("hollow.zarr", "cannot be read (Is a directory): give a .npy file"),
    ("loop.npy", "cannot be read (Too many levels"),
    ("x\0.npy", "is not a whole .npy, .npz, HDF5, zarr or parquet file"),
    ("pipe.npy", "is no file on a disk"),
    ("/dev/null", "is no file on a disk"),
    *(
        (f"{name}.npy", f"is not a whole .npy file of numbers ({words}")
        for name, words in {
            "text": "EOF: reading magic string",
            "nothing": "EOF: reading magic string",
            "cut": "it ends too early)",
            "head": "EOF",
            "lies": "it ends too early",
            "minus": "it holds float32 of shape (-2, -3))",
            "newer": "",
            "objects": "it holds object",
        }.items()
    ),
    ("text.csv", "is not a whole .npy, .npz, HDF5, zarr or parquet file"),
    ("nothing.npz", "is not a whole .npz file of numbers"),
    ("cut.npz#x", "is not a whole .npz file of numbers (File is not a zip file)"),
    ("pair.npz#o", "is not a whole .npz file of numbers (it holds object"),
    ("pair.npz#c", "must hold real numbers, got complex64: convert them"),
    ("pair.npz", "holds the arrays x, y, o, c: choose one as pair.npz#KEY"),
    ("pair.npz#z", "holds the arrays x, y, o, c: choose one as pair.npz#KEY"),
    (
        "many.npz",
        "holds the arrays k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11, "
        "k12, k13, k14, k15, k16, k17, k18, k19, ...: choose one as many.npz#KEY",
    ),
    ("empty.npz#x", "holds no arrays of numbers"),
    ("x.npy#x", "holds one array: leave #x out"),
    ("scalar.npy", "must be [n] or [n, d], got (): give"),
    ("complex.npy", "must hold real numbers, got complex128: convert them"),
    ("words.npy", "must hold real numbers, got <U1: convert them"),
    ("dates.npy", "must hold real numbers, got datetime64[s]: convert them"),
    ("records.npy", "must hold real numbers, got [('a'"),
]


def refused(text, *wanted):
    """Opening is refused in one line with certain words, in their order."""
    with pytest.raises(BadInput) as caught:
        open_source(f"--x={text}", text)
    line = str(caught.value)
    assert line.startswith(f"--x={text}: ")
    assert "\n" not in line
    rest = line.removeprefix(f"--x={text}")
    for words in wanted:
        at = rest.find(words)
        assert at >= 0, (line, words)
        rest = rest[at + len(words) :]


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=[text for text, _ in REFUSED])
def test_refused_in_one_line(text, words, folder, monkeypatch):
    monkeypatch.chdir(folder)
    refused(text, f": {words}", *([": write it"] if "is not a whole" in words else []))


def test_hdf5_refused(h5ad, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    held = "holds the arrays X, layers/byc, obs/size, obsm/X_pca: choose one as"
    for key in ("", "#gone", "#obs", "#nothing", "#/", "#obs/name/x"):
        refused(f"a.h5ad{key}", f"{held} a.h5ad#KEY")
    refused("a.h5ad#layers/byc", "is a csc_matrix: write it by rows, by adata.X.tocsr")
    refused("a.h5ad#obs/name", "must hold real numbers, got object: convert them")
    Path("text.h5").write_text("1 2 3\n")
    Path("cut.h5").write_bytes(h5ad.read_bytes()[:-1000])
    for name in ("text.h5", "cut.h5"):
        refused(
            f"{name}#X", "is not a whole HDF5 file of numbers (", "): write it anew"
        )


def test_zarr_refused(tmp_path, monkeypatch):
    path, _ = write_zarr(tmp_path, cloud())
    for key in ("", "#gone", "#group"):
        refused(f"{path}{key}", f"holds the arrays group/x: choose one as {path}#KEY")
    for chunk in (Path(path) / "group/x").rglob("*"):
        if chunk.is_file() and not chunk.name.startswith("."):
            chunk.write_bytes(b"nonsense")
    source = opened(path, "group/x")
    with pytest.raises(BadInput, match=r"group/x: is not a whole zarr folder"):
        source.rows(0, 3)
    (Path(path) / "group/x/.zarray").write_text("{")
    refused(f"{path}#group/x", "is not a whole zarr folder of numbers (")


def test_parquet_refused(table, monkeypatch):
    monkeypatch.chdir(table[0].parent)
    of = "is no column of numbers (these are i, f, half, b, a,b, gap): choose some as"
    refused("t.parquet", f"word {of}")
    for key in ("gone", "word", "when", "list"):
        refused(f"t.parquet#{key}", f"{key} {of}")
        refused(f"t.parquet#i,{key}", f"{key} {of}")
    Path("cut.parquet").write_bytes(table[0].read_bytes()[:500])
    Path("text.parquet").write_text("1 2 3\n")
    for name in ("cut.parquet", "text.parquet"):
        refused(name, "is not a whole parquet file of numbers (", "): write it anew")


@pytest.mark.parametrize(
    ("name", "head", "package"),
    [
        ("x.h5#x", b"\x89HDF\r\n\x1a\n", "h5py"),
        ("x.parquet", b"PAR1", "pyarrow"),
        ("x.zarr#x", None, "zarr"),
    ],
)
def test_a_library_that_is_not_there(name, head, package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in [module for module in sys.modules if module.startswith(package)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    path = Path(sources.split(name)[0])
    if head:
        path.write_bytes(head)
    else:
        path.mkdir()
        (path / ".zgroup").write_text('{"zarr_format": 2}')
    refused(name, f": needs {package}: pip install 'ott_shard[io]'")


def test_what_may_not_be_read(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    path, _ = write_npy(tmp_path, cloud())
    source = opened(path)
    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(BadInput, match=r"cannot be read \(Permission denied\): give"):
        opened(path)
    with pytest.raises(BadInput, match=r"cannot be read \(Permission denied\): give"):
        source.rows(0, 1)


@pytest.mark.parametrize("write", WRITERS[:4], ids=by_name)
def test_a_file_that_breaks_while_it_is_used(write, tmp_path):
    x = cloud(4000)
    path, key = write(tmp_path, x)
    source = opened(path, key)
    np.testing.assert_array_equal(source.rows(0, 9), x[:9])
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(BadInput, match=r"is not a whole .np[yz] file of numbers \("):
        source.rows(3000, 4000)
    path.unlink()
    if write is not write_deflated:  # its file is open
        with pytest.raises(BadInput, match="no such file"):
            source.rows(0, 9)


def test_an_array_that_is_another_now(tmp_path):
    source = opened(*write_npy(tmp_path, cloud()))
    for other in (cloud(5), cloud(d=2), cloud(dtype="float64")):
        source._source = formats.Sliced(other)
        with pytest.raises(BadInput, match="has changed since it was opened"):
            source.rows(0, 9)


def test_broken_chunks(tmp_path):
    path, key = write_h5(tmp_path, cloud())
    whole = bytearray(path.read_bytes())
    at = whole.find(b"\x78\x5e")  # how deflated chunks start
    at = at if at > 0 else whole.find(b"\x78\x9c")
    whole[at + 2 : at + 200] = bytes(198)
    path.write_bytes(whole)
    with pytest.raises(BadInput, match="group/x: is not a whole HDF5 file of numbers"):
        opened(path, key).rows(0, N)


def test_broken_pages(tmp_path):
    path, _ = write_parquet(tmp_path, cloud())
    whole = bytearray(path.read_bytes())
    whole[4:400] = bytes(396)
    path.write_bytes(whole)
    source = opened(path)
    for _ in range(2):
        with pytest.raises(BadInput, match="is not a whole parquet file of numbers"):
            source.rows(0, 3)
    np.testing.assert_array_equal(source.rows(500, 700), cloud()[500:700])


def test_a_broken_compressed_archive(tmp_path):
    path, _ = write_deflated(tmp_path, cloud())
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 2000] = bytes(2000)
    path.write_bytes(whole)
    with pytest.raises(BadInput, match=r"#x: is not a whole .npz file of numbers \("):
        opened(path, "x").rows(N - 10, N)


def test_a_large_compressed_archive_in_fortran_order(folder, monkeypatch):
    monkeypatch.setattr(formats, "_WHOLE", 10)
    refused(f"{folder}/squeezed.npz#f", "in Fortran order: write it by numpy.savez")


def test_errors_keep_their_cause(folder):
    with pytest.raises(BadInput) as caught:
        open_source("--x", f"{folder}/text.npy")
    assert isinstance(caught.value.__cause__, ValueError)


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
