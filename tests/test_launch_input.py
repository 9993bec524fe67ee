"""Bad input of the command: one clear line, exit code 2, nothing written."""

import sys

import numpy as np
import pytest
from array_files import sparse, write_h5, write_h5ad, write_table

from launch.main import main

FILES = "--x=x.npy --y=y.npy"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with good and bad files."""
    path = tmp_path_factory.mktemp("input")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)), rng.normal(size=(9, 3))
    hole, huge = x.copy(), x.copy()
    hole[7, 1], huge[7, 1] = np.nan, 1e300
    negative = np.full(12, 0.1)
    negative[4] = -0.1
    for name, array in {
        "x": x,
        "y": y,
        "y2d": y[:, :2],
        "line": x[:, 0],
        "scalar": np.float64(3),
        "empty": x[:0],
        "hole": hole,
        "huge": huge,
        "objects": np.array([{}, 1]),
        "complex": x.astype(complex),
        "words": np.array([["a", "b"]]),
        "ones": np.ones(12),
        "negative": negative,
        "zeros": np.zeros(12),
        "short": np.ones(3) / 3,
    }.items():
        np.save(path / f"{name}.npy", array)
    np.savez(path / "pair.npz", x=x, y=y)
    whole = (path / "x.npy").read_bytes()
    (path / "cut.npy").write_bytes(whole[:-8])
    (path / "head.npy").write_bytes(whole[:50])
    (path / "cut.npz").write_bytes((path / "pair.npz").read_bytes()[:99])
    (path / "text.npy").write_text("1 2 3\n")
    write_h5ad(path, sparse())
    write_table(path)
    for name in ("nothing.npy", "nothing.h5", "nothing.parquet"):
        (path / name).write_bytes(b"")
    (path / "hollow.zarr").mkdir()
    return path


def solve(flag: str) -> str:
    return f"solve {FILES} {flag}"


# What is typed, and what the line must name: the flag, the value, a way out.
CASES = [
    ("", "no task", "solve or divergence"),
    ("sovle", "'sovle'", "choose solve or divergence"),
    (solve("y.npy"), "unexpected argument 'y.npy'", "start with --"),
    ("solve", "--x is missing", "--demo=discs"),
    ("solve --x=x.npy", "--y is missing", "--y=y.npy"),
    (solve("--demo=discs"), "--x=x.npy", "--demo=discs makes", "leave one"),
    (solve("--n=5"), "--n=5", "--demo=discs"),
    (solve("--speed=1"), "'speed'", "--help"),
    (solve("--epsilom=1"), "'epsilom'", "epsilon"),
    (solve("--epsilon"), "Missing value", "--epsilon"),
    # files
    ("solve --x=gone.npy --y=y.npy", "--x=gone.npy", "no such file", "check the path"),
    ("solve --x=x.npy --y=gone.npz#y", "--y=gone.npz#y", "no such file"),
    ("solve --x=. --y=y.npy", "--x=.", "directory", "give a .npy"),
    *(
        (f"solve --x={name} --y=y.npy", f"--x={name}: is not a whole", "numpy.save")
        for name in "text.npy nothing.npy cut.npy head.npy cut.npz objects.npy".split()
    ),
    ("solve --x=pair.npz --y=y.npy", "--x=pair.npz", "x, y", "pair.npz#KEY"),
    ("solve --x=pair.npz#z --y=y.npy", "--x=pair.npz#z", "arrays x, y"),
    ("solve --x=x.npy#x --y=y.npy", "--x=x.npy#x", "leave #x out"),
    (solve("--a=gone.npy"), "--a=gone.npy", "no such file"),
    *(
        (f"{task} --x=a.h5ad{key} --y=y.npy", f"--x=a.h5ad{key}: ", words, way_out)
        for task, key, words, way_out in (
            ("solve", "", "the arrays X, layers/byc, obs/size", "a.h5ad#KEY"),
            ("estimate", "#obs", "the arrays X, layers/byc, obs/size", "a.h5ad#KEY"),
            ("solve", "#gone", "the arrays X, layers/byc, obs/size", "a.h5ad#KEY"),
            ("solve", "#layers/byc", "is a csc_matrix", "adata.X.tocsr()"),
            ("estimate", "#obs/name", "must hold real numbers", "convert them"),
            ("solve", "#obs/size", "[n, d], got (1000,)", "[:, None]"),
        )
    ),
    ("solve --x=t.parquet --y=y.npy", "word is no column of numbers", "t.parquet#A,B"),
    (solve("--a=t.parquet#gap"), "--a=t.parquet#gap", "gap[41:100] has nulls", "fill"),
    ("solve --x=nothing.h5#x --y=y.npy", "is not a whole HDF5 file", "write it anew"),
    ("estimate --x=nothing.parquet --y=y.npy", "whole parquet file", "write it anew"),
    ("solve --x=hollow.zarr#x --y=y.npy", "--x=hollow.zarr#x", "Is a directory"),
    (
        "solve --x=pair.npz#x --y=y.npy --log_json=pair.npz",
        *("--log_json=pair.npz: is input of the run", "name another file"),
    ),
    # clouds
    ("solve --x=line.npy --y=y.npy", "--x=line.npy", "[n, d], got (12,)", "[:, None]"),
    ("solve --x=scalar.npy --y=y.npy", "--x=scalar.npy", "[n, d], got ()"),
    ("solve --x=empty.npy --y=y.npy", "--x=empty.npy", "at least one point"),
    ("solve --x=x.npy --y=hole.npy", "--y=hole.npy", "NaN", "row 7", "remove"),
    ("solve --x=huge.npy --y=y.npy", "--x=huge.npy", "inf in row 7"),
    ("solve --x=complex.npy --y=y.npy", "--x=complex.npy", "complex128", "convert"),
    ("solve --x=words.npy --y=y.npy", "--x=words.npy", "real numbers", "convert"),
    ("solve --x=x.npy --y=y2d.npy", "--x=x.npy --y=y2d.npy", "got 3 and 2"),
    # weights
    (solve("--a=negative.npy"), "--a=negative.npy", "negative", "index 4", "clip"),
    (solve("--a=zeros.npy"), "--a=zeros.npy", "all zero"),
    (solve("--b=short.npy"), "--b=short.npy", "shape (9,)", "got (3,)"),
    (solve("--a=ones.npy"), "--a=ones.npy", "same total mass", "got 12 and 1", "tau_a"),
    # numbers
    *(
        (solve(f"--{flag}"), f"--{flag}: must be", form)
        for flag, form in {
            "epsilon=0": "a number greater than 0",
            "epsilon=-1": "a number greater than 0",
            "epsilon=nan": "a number greater than 0",
            "epsilon=inf": "a number greater than 0",
            "epsilon=small": "a number greater than 0",
            "epsilon_unit=max": "one of absolute, mean, std",
            "threshold=0": "a number greater than 0",
            "max_iterations=0": "an integer from 1",
            "max_iterations=1.5": "an integer from 1",
            "max_iterations=9999999999": "an integer from 1 to 2147483647",
            "min_iterations=-1": "an integer from 0",
            "inner_iterations=0": "an integer from 1",
            "tau_a=0": "greater than 0 and at most 1",
            "tau_b=1.01": "greater than 0 and at most 1",
            "cost=manhattan": "one of sqeuclidean, euclidean",
            "cost=euclidean:2": "one of sqeuclidean, euclidean",
            "cost=elastic:1": "such as pnormp:1.5, elastic:0.5,1",
            "cost=pnormp:": "such as pnormp:1.5, elastic:0.5,1",
            "cost=pnormp:two": "such as pnormp:1.5, elastic:0.5,1",
            "scale_cost=0": "a number greater than 0 or one of mean",
            "scale_cost=median": "a number greater than 0 or one of mean",
            "epsilon_init=0": "a number greater than 0",
            "epsilon_decay=1": "greater than 0 and at most 0.9999",
            "dtype=float16": "one of float32, float64",
            "precision=low": "one of default, high, highest",
            "grad=perhaps": "true or false",
            "cpu_devices=0": "an integer from 1",
            "progress_seconds=-1": "a number, at least 0",
            "mesh=4": "rows x cols, such as 4x2",
            "mesh=4x": "rows x cols, such as 4x2",
            "mesh=0x2": "rows x cols, such as 4x2",
            "batch_size=0": "such as 1024 or 512x2048",
            "batch_size=1x2x3": "such as 1024 or 512x2048",
        }.items()
    ),
    (solve("--cost=pnormp:0.5"), "--cost=pnormp:0.5: p must be", "from 1 up"),
    (solve("--cost=pnormp:nan"), "--cost=pnormp:nan: p must be", "from 1 up"),
    (solve("--cost=arccos:3"), "--cost=arccos:3: n must be one of (0, 1, 2)"),
    (solve("--epsilon_init=0.01"), "--epsilon_init=0.01: init must be at least"),
    (
        solve("--cost=euclidean --scale_cost=max_norm"),
        "--scale_cost=max_norm",
        "must be a number or one of",
    ),
    ("solve --demo=discs --n=0", "--n=0", "an integer from 1"),
    ("solve --demo=rings", "--demo=rings", "one of discs"),
    (solve("--min_iterations=3000"), "--min_iterations=3000", "max_iterations = 2000"),
    # devices
    (solve("--mesh=100x2"), "--mesh=100x2", "200 devices", "--cpu_devices=200"),
    (solve("--cpu_devices=3"), "--cpu_devices=3", "already", "new process"),
    # output
    *(
        (solve(f"--{name}="), f"--{name}=", "name a path, or leave the flag out")
        for name in ("out", "log_json", "compilation_cache")
    ),
    (solve("--log_json=x.npy"), "--log_json=x.npy", "is input", "name another file"),
    (solve("--log_json=/"), "--log_json=/", "is a folder", "name a file"),
    (solve("--log_json=x.npy/deep"), "--log_json=x.npy/deep", "is a file"),
    (solve("--compilation_cache=x.npy"), "--compilation_cache=x.npy", "is a file"),
    (solve("--out=x.npy"), "--out=x.npy", "is a file", "name a directory"),
    (solve("--out=x.npy/deep"), "--out=x.npy/deep", "is a file"),
    # a second task
    ("divergence --x=hole.npy --y=y.npy", "--x=hole.npy", "NaN", "row 7"),
    (f"divergence {FILES} --grad --b=ones.npy", "--b=ones.npy", "shape (9,)"),
    # uses of a run (more in test_launch_plan.py, which has one)
    (
        solve("--run=run"),
        "--run is for apply or match or sample or transport or report or resume, not",
    ),
    (solve("--v=x.npy"), "--v is for apply, not for solve: leave it out"),
    (f"divergence {FILES} --k=5", "--k is for match, not for divergence"),
    (f"divergence {FILES} --backward", "--backward is for transport, not for"),
    ("apply --v=x.npy", "--run is missing", "apply needs it"),
    ("apply --run=.", "--v is missing", "apply needs it"),
    ("match --run=.", "--k is missing"),
    ("sample --run=.", "--num_pairs is missing"),
    ("transport --run=.", "--points is missing"),
    ("match --run=. --k=2 more", "unexpected argument 'more'"),
    ("match --run=gone --k=2", "--run=gone: no such directory", "the --out of a run"),
    ("match --run=x.npy --k=2", "--run=x.npy: no such directory"),
    ("match --run=. --k=2", "--run=.: holds no result.json"),
    *(
        (f"{task} --run=. --{flag}", f"--{flag}: must be", form)
        for task, flag, form in (
            ("match", "k=0", "an integer from 1"),
            ("match", "axis=2", "0 or 1"),
            ("apply", "axis=both", "0 or 1"),
            ("sample", "num_pairs=0", "an integer from 1 to 2147483647"),
            ("sample", "method=best", "one of iid, systematic"),
            ("sample", "seed=-1", "an integer from 0 to 2147483647"),
            ("transport", "backward=perhaps", "true or false"),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] or "nothing" for case in CASES])
def test_refused_in_one_line(case, folder, monkeypatch, capsys):
    typed, *wanted = case
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    out = [] if "--out" in typed else ["--out=out/deep"]
    assert main([*out, *typed.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ott-shard: error: ")
    assert error.count("\n") == 1
    assert error.endswith("\n")
    for text in wanted:
        assert text in error
    assert sorted(folder.iterdir()) == before


def test_a_library_that_is_not_there(tmp_path, monkeypatch, capsys):
    path, key = write_h5(tmp_path, np.ones((99, 2)))
    monkeypatch.setitem(sys.modules, "h5py", None)
    for task in ("solve", "divergence", "estimate"):
        x = f"--x={path}#{key}"
        assert main([task, x, f"--y={path}#{key}", f"--out={tmp_path}/out"]) == 2
        error = capsys.readouterr().err
        assert f"{x}: needs h5py: pip install 'ott_shard[io]'\n" in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_unwritable_directory_is_refused_before_computing(folder, monkeypatch, capsys):
    def full(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    monkeypatch.chdir(folder)
    assert main([*solve("--out=out").split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--out=out: not writable (Read-only file system)" in captured.err


def test_other_errors_are_not_bad_input(folder, monkeypatch):
    """A ValueError that is not about a flag is a bug, and keeps its traceback."""

    def broken(*_, **__):
        raise ValueError("shapes do not match")

    monkeypatch.setattr("ott_shard.solve", broken)
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="shapes do not match"):
        main(solve("").split())
