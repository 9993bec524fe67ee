"""Tasks of the command that use a finished run: apply, match, sample, transport."""

import json
import shutil
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
import reference as ref

import ott_shard as otts
from launch import data, results
from launch.main import main

N, M = 13, 21
SOLVE = (
    "solve --x=clouds.npz#x --a=clouds.npz#a --y=y.npy --b=b.npy --cost=euclidean "
    "--scale_cost=mean --epsilon=0.1 --epsilon_unit=std --tau_a=0.9 --mesh=2x4"
)


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """A folder with input, a run in `run`, and the same solution in this process."""
    folder = tmp_path_factory.mktemp("solved")
    p = ref.problem(N, M)
    np.savez(folder / "clouds.npz", x=p.x, a=p.a)
    np.save(folder / "y.npy", p.y)
    np.save(folder / "b.npy", p.b)
    rng = np.random.default_rng(0)
    for name, shape in {"u": (N, 2), "v": (M,), "new": (5, 3)}.items():
        np.save(folder / f"{name}.npy", rng.normal(size=shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*SOLVE.split(), "--out=run"]) == 0
    geom = otts.PointCloud(
        *(p.x.astype(np.float32), p.y.astype(np.float32)),
        cost_fn=otts.costs.Euclidean(),
        scale_cost="mean",
        epsilon=0.1,
        relative_epsilon="std",
        mesh=otts.make_mesh(2, 4),
    )
    return folder, otts.solve(geom, p.a, p.b, tau_a=0.9)


@pytest.fixture
def folder(solved, monkeypatch):
    """The folder of `solved`, as the working directory."""
    monkeypatch.chdir(solved[0])
    return solved[0]


@pytest.fixture
def out(solved):
    return solved[1]


@pytest.fixture
def copy(folder, tmp_path, monkeypatch):
    """A copy of the run with `x`, `a` of its own, to be spoilt; not the directory."""
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / "run" / "result.json"
    path.write_text(path.read_text().replace(str(folder), str(tmp_path / "copy")))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "copy"


def record_in(path: Path) -> dict:
    return json.loads(path.read_text())


def edit(path: Path, **changes):
    """A record with other values; without those that become None."""
    record = record_in(path) | changes
    kept = {key: value for key, value in record.items() if value is not None}
    path.write_text(json.dumps(kept | {"demo": None}))


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


# ---------------------------------------------------------------------------- tasks


def test_result_says_what_the_plan_is_made_of(folder, out):
    """Its numbers are those of float32 exactly; its files are found from anywhere."""
    record = record_in(folder / "run" / "result.json")
    assert np.float32(record["epsilon"]) == out.epsilon == record["epsilon"]
    assert record["scale_cost"] == float(out.problem.pairs.scale) != 1
    inputs = record["inputs"]
    assert record["demo"] is None
    assert inputs.keys() == {"x", "y", "a", "b"}
    assert inputs["x"]["source"] == f"{folder}/clouds.npz#x"
    assert inputs["b"]["source"] == f"{folder}/b.npy"
    assert (inputs["x"]["shape"], inputs["x"]["dtype"]) == ([N, 3], "float64")
    assert inputs["x"]["crc32"] == zlib.crc32(np.load("clouds.npz")["x"].tobytes())


def test_apply(folder, out, tmp_path, capsys):
    """Both axes, on other meshes than that of the run, which is not touched."""
    before = {path: path.read_bytes() for path in (folder / "run").iterdir()}
    arguments = f"apply --run=run --v=u.npy --mesh=4x2 --out={tmp_path}/deep/out"
    assert main(arguments.split()) == 0
    captured = capsys.readouterr()
    made = tmp_path / "deep" / "out"
    got = np.load(made / "apply.npy")
    close(got, out.apply(np.load("u.npy"), axis=0))
    assert got.dtype == np.float32
    record = record_in(made / "apply.json")
    assert (
        record.items()
        >= {
            "task": "apply",
            "run": f"{folder}/run",
            "converged": True,
            "status": "CONVERGED",
            "options": {"axis": 0, "batch_size": None, "precision": "highest"},
            "shapes": {"apply": [M, 2]},
            "dtype": "float32",
            "mesh": "4x2",
            "devices": 8,
        }.items()
    )
    assert record["inputs"]["v"]["source"] == f"{folder}/u.npy"
    assert record["seconds"] > 0
    assert record["versions"]["ott_shard"] == otts.__version__
    assert captured.err == ""
    first, *_, last = captured.out.splitlines()
    for words in (f"v [{N}, 2], axis 0", "of run (x [13, 3]", "(mesh 4x2)"):
        assert words in first
    assert last.split() == ["written", "to", str(made)]
    # From another directory, into that of the run.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        arguments = f"apply --run={folder}/run --v={folder}/v.npy --axis=1 --mesh=1x1"
        assert main([*arguments.split(), "--batch_size=4x8"]) == 0
    close(np.load("run/apply.npy"), out.apply(np.load("v.npy"), axis=1))
    assert record_in(folder / "run" / "apply.json")["options"]["batch_size"] == [4, 8]
    assert {path: path.read_bytes() for path in before} == before
    for name in ("apply.npy", "apply.json"):
        (folder / "run" / name).unlink()
    assert set((folder / "run").iterdir()) == before.keys()


@pytest.mark.parametrize("axis", [1, 0])
def test_match(axis, folder, out, tmp_path):
    flags = "--axis=0 --mesh=1x1" if axis == 0 else "--mesh=4x2"
    assert main(f"match --run=run --k=3 {flags} --out={tmp_path}".split()) == 0
    indices, values = out.top_k(3, axis)
    np.testing.assert_array_equal(np.load(tmp_path / "match_indices.npy"), indices)
    close(np.load(tmp_path / "match_values.npy"), values)
    shape = [(M, N)[axis], 3]
    record = record_in(tmp_path / "match.json")
    assert record["shapes"] == {"match_indices": shape, "match_values": shape}
    assert record["options"]["axis"] == axis


@pytest.mark.parametrize("method", ["iid", "systematic"])
def test_sample(method, folder, out, tmp_path):
    """The same key draws the same pairs, on another mesh too."""
    flags = f"--method={method} --seed=5" if method == "systematic" else ""
    arguments = f"sample --run=run --num_pairs=40 {flags} --mesh=1x1 --out={tmp_path}"
    assert main(arguments.split()) == 0
    pairs = np.load(tmp_path / "pairs.npy")
    assert (pairs.dtype, pairs.shape) == (np.int32, (40, 2))
    seed = 5 if method == "systematic" else 0
    want = out.sample(jax.random.key(seed), 40, method)
    np.testing.assert_array_equal(pairs.T, want)
    options = record_in(tmp_path / "sample.json")["options"]
    assert (options["method"], options["seed"]) == (method, seed)


@pytest.mark.parametrize("flag", ["", "--backward"])
def test_transport(flag, folder, out, tmp_path):
    arguments = f"transport --run=run --points=new.npy {flag} --mesh=4x2"
    assert main([*arguments.split(), f"--out={tmp_path}"]) == 0
    want = out.to_dual_potentials().transport(np.load("new.npy"), forward=not flag)
    close(np.load(tmp_path / "transport.npy"), want)
    assert record_in(tmp_path / "transport.json")["options"]["backward"] is bool(flag)


def test_of_a_divergence(tmp_path, monkeypatch):
    """The plan between x and y, of the demo, in float64."""
    monkeypatch.chdir(tmp_path)
    demo = "divergence --demo=discs --n=20 --epsilon_unit=mean --dtype=float64"
    assert main([*demo.split(), "--mesh=1x1", "--out=run"]) == 0
    assert main("match --run=run --k=2 --mesh=1x1".split()) == 0
    with jax.enable_x64(True):
        x, y = (np.asarray(cloud, np.float64) for cloud in ref.discs(20))
        mesh = otts.make_mesh(1, 1)
        geom = otts.PointCloud(x, y, relative_epsilon="mean", mesh=mesh)
        potentials = np.load("run/f.npy"), np.load("run/g.npy")
        want = otts.Plan.from_potentials(geom, *potentials)
        indices, values = (np.asarray(part) for part in want.top_k(2, 1))
    got = np.load("run/match_values.npy")
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, values, rtol=1e-10)
    np.testing.assert_array_equal(np.load("run/match_indices.npy"), indices)


def test_of_a_run_that_had_not_converged(copy, capsys):
    """It is used all the same."""
    edit(copy / "run/result.json", converged=False, status="MAX_ITERATIONS")
    assert main("match --run=copy/run --k=3 --mesh=4x2".split()) == 3
    error = capsys.readouterr().err
    assert error.startswith("ott-shard: warning: --run=copy/run had not converged")
    assert "MAX_ITERATIONS: max_iterations was reached" in error
    assert error.count("\n") == 1
    record = record_in(copy / "run/match.json")
    assert (record["converged"], record["status"]) == (False, "MAX_ITERATIONS")
    assert (copy / "run/match_values.npy").exists()


def test_a_run_leaves_nothing_of_uses(tmp_path):
    """They were of other potentials; a use leaves the others alone."""
    stale = "apply.json apply.npy match.json match_indices.npy match_values.npy "
    stale += "sample.json pairs.npy transport.json transport.npy grad_x.npy"
    for name in (*stale.split(), "result.json", "notes.txt"):
        (tmp_path / name).write_text("earlier")
    rows = results.Rows(np.zeros(2), 2)
    results.write(str(tmp_path), "sample", {"n": 1}, {"pairs": rows}, print)
    texts = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    changed = {name for name, text in texts.items() if text != b"earlier"}
    assert changed == {"sample.json", "pairs.npy"}
    results.write(str(tmp_path), "divergence", {"n": 1}, {"f": rows}, print)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"result.json", "f.npy", "notes.txt"}
    (tmp_path / "pairs.npy").write_text("not of a task: no record is beside it")
    results.write(str(tmp_path), "solve", {"n": 1}, {"f": rows}, print)
    assert (tmp_path / "pairs.npy").exists()


# ----------------------------------------------------------------------- bad input


def refused(arguments: str, capsys, *wanted: str):
    """One line that says all that is wanted, and exit code 2."""
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("ott-shard: error: ")
    assert error.count("\n") == 1
    for text in wanted:
        assert text in error


# What is typed after the folder of the run, and what the line must say.
ARGUMENTS = [
    ("apply --v=v.npy", "--v=v.npy: v must have shape [13]", "axis=0, got (21,)"),
    ("apply --v=u.npy --axis=1", "--v=u.npy: v must have shape [21]"),
    ("apply --v=gone.npy", "--v=gone.npy: no such file"),
    ("match --k=22", "--k=22: k must be at most 21"),
    ("match --k=14 --axis=0", "--k=14: k must be at most 13", "axis=0"),
    ("transport --points=u.npy", "--points=u.npy: points must have shape [n, 3]"),
    ("transport --points=v.npy", "--points=v.npy: points must have shape [n, d]"),
    ("match --k=2 --mesh=100x2", "--mesh=100x2", "200 devices"),
    ("match --k=2 --out=y.npy", "--out=y.npy: ", "is a file"),
    # Flags that are not of the task.
    *(
        (
            f"match --k=2 --{flag}",
            f"--{flag.partition('=')[0]} is for solve or divergence or estimate, not "
            "for match",
            "the run that is used fixes the problem",
        )
        for flag in "x=y.npy demo=discs cost=euclidean epsilon=0.1 tau_a=0.9 grad "
        "dtype=float64 threshold=1".split()
    ),
    ("match --k=2 --log_json=log", "--log_json is for solve or divergence or"),
    ("match --k=2 --v=v.npy", "--v is for apply, not for match: leave it out"),
    ("apply --v=u.npy --seed=1", "--seed is for sample, not for apply"),
    ("transport --points=new.npy --axis=1", "--axis is for apply or match, not"),
]


@pytest.mark.parametrize("case", ARGUMENTS, ids=lambda case: case[0])
def test_refused_arguments(case, folder, capsys):
    arguments, *wanted = case
    before = sorted(folder.rglob("*"))
    refused(f"{arguments} --run=run", capsys, *wanted)
    assert sorted(folder.rglob("*")) == before


def spoil_potential(run: Path):
    f = np.load(run / "f.npy")
    f[3] = np.nan
    np.save(run / "f.npy", f)


# What became of the run or its input, and what the line must say.
SPOILT = {
    "no run": (lambda p: shutil.rmtree(p / "run"), "no such directory", "--out"),
    "no record": (lambda p: (p / "run/result.json").unlink(), "holds no result.json"),
    "cut": (
        lambda p: (p / "run/result.json").write_text('{"task": "so'),
        *("its result.json is not whole JSON", "solve again"),
    ),
    "binary": (
        lambda p: (p / "run/result.json").write_bytes(bytes(range(256))),
        "its result.json is not whole JSON",
    ),
    "foreign": (
        lambda p: (p / "run/result.json").write_text('{"loss": 1}'),
        "is not of a run of solve or divergence",
    ),
    "a list": (
        lambda p: (p / "run/result.json").write_text("[1]"),
        "is not of a run of solve or divergence",
    ),
    "older": (lambda p: edit(p / "run/result.json", inputs=None), "older version"),
    "no tau": (
        lambda p: edit(p / "run/result.json", tau_a=None),
        "says nothing of tau_a",
    ),
    "odd epsilon": (
        lambda p: edit(p / "run/result.json", epsilon="small"),
        "epsilon must be a number greater than 0, got 'small'",
    ),
    "odd inputs": (
        lambda p: edit(p / "run/result.json", inputs=[1]),
        "is not as it was written",
    ),
    "no f": (lambda p: (p / "run/f.npy").unlink(), "its f.npy: no such file"),
    "half of g": (
        lambda p: (p / "run/g.npy").write_bytes((p / "run/g.npy").read_bytes()[:-9]),
        "its g.npy: is not a whole .npy",
    ),
    "another f": (
        lambda p: np.save(p / "run/f.npy", np.zeros(4)),
        "f must have shape (13,), got (4,)",
    ),
    "NaN": (lambda p: spoil_potential(p / "run"), "f must be finite"),
    "moved": (
        lambda p: (p / "y.npy").rename(p / "z.npy"),
        *("its --y=", "copy/y.npy: no such file", "or solve again"),
    ),
    "other values": (
        lambda p: np.save(p / "y.npy", ref.problem(N, M).y + 1),
        *("its --y=", "copy/y.npy has changed since the run"),
    ),
    "other dtype": (
        lambda p: np.save(p / "b.npy", np.load(p / "b.npy").astype(np.float32)),
        *("its --b=", "copy/b.npy has changed since the run"),
    ),
    "other member": (
        lambda p: np.savez(p / "clouds.npz", x=np.zeros((N, 3)), a=np.ones(N) / N),
        *("its --x=", "copy/clouds.npz#x has changed since the run"),
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_refused_run(name, copy, capsys):
    spoil, *wanted = SPOILT[name]
    spoil(copy)
    before = sorted(copy.rglob("*"))
    refused("match --run=copy/run --k=2 --mesh=2x4", capsys, "--run=copy/run", *wanted)
    assert sorted(copy.rglob("*")) == before


def test_input_is_not_replaced(copy, capsys):
    """What a task would write or remove must not be what it reads."""
    run = copy / "run"
    shutil.copy(copy / "u.npy", run / "apply.npy")
    refused("apply --run=copy/run --v=copy/run/apply.npy", capsys, "would be replaced")
    shutil.copy(copy / "y.npy", run / "transport.npy")
    (run / "transport.json").write_text("{}")
    solve = "solve --x=copy/y.npy --y=copy/run/transport.npy --out=copy/run"
    refused(solve, capsys, "--out=copy/run", "transport.npy is input")
    assert (run / "result.json").exists()


# -------------------------------------------------------------------------- parts


def test_a_changed_file_is_known(tmp_path):
    """Every byte counts up to 4 MiB; of more, see test_sources.py."""
    path = tmp_path / "x.npy"
    array = np.random.default_rng(0).normal(size=(120_000, 3))  # 2.7 MiB
    np.save(path, array)
    _, was = data.read("", str(path), "float64")
    for index in (0, 77_777, len(array) - 1):
        changed = array.copy()
        changed[index, 1] += 1e-9
        np.save(path, changed)
        assert data.read("", str(path), "float64")[1] != was
    np.save(path, array)
    assert data.read("", str(path), "float64")[1] == was
    np.save(path, array.reshape(-1, 2))
    assert data.read("", str(path), "float64")[1] != was
