"""Files that rows cannot be read from: one line, which says how to mend it."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from array_files import (
    WRITERS,
    N,
    by_name,
    cloud,
    opened,
    sparse,
    write_deflated,
    write_h5,
    write_h5ad,
    write_npy,
    write_parquet,
    write_table,
    write_zarr,
)

from launch import formats, sources
from launch.errors import BadInput
from launch.sources import open_source


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


def test_hdf5_refused(tmp_path, monkeypatch):
    h5ad = write_h5ad(tmp_path, sparse())
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


def test_parquet_refused(tmp_path, monkeypatch):
    path, _ = write_table(tmp_path)
    monkeypatch.chdir(tmp_path)
    of = "is no column of numbers (these are i, f, half, b, a,b, gap): choose some as"
    refused("t.parquet", f"word {of}")
    for key in ("gone", "word", "when", "list"):
        refused(f"t.parquet#{key}", f"{key} {of}")
        refused(f"t.parquet#i,{key}", f"{key} {of}")
    Path("cut.parquet").write_bytes(path.read_bytes()[:500])
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
