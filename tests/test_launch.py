"""The command: what it computes, writes and prints, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import reference as ref

import ott_shard as otts
from launch import data, flags, processes, results, tasks, uses
from launch.main import main

ROOT = Path(__file__).parent.parent


def read_record(out: Path) -> dict:
    """result.json, refusing what JSON has no word for."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads((out / "result.json").read_text(), parse_constant=refuse)


def read_arrays(out: Path) -> dict[str, np.ndarray]:
    return {path.stem: np.load(path) for path in out.glob("*.npy")}


def command(*args: str) -> subprocess.CompletedProcess:
    """`python -m launch` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "launch", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


# ---------------------------------------------------------------------------- tasks


def test_solve_from_files(tmp_path, capsys):
    """Every flag reaches the library, from files of other dtypes, in float64."""
    p = ref.problem(13, 21)
    np.savez(tmp_path / "x.npz", points=p.x, weights=p.a)
    np.save(tmp_path / "y.npy", p.y.astype(np.float32))
    np.save(tmp_path / "b.npy", p.b)
    out = tmp_path / "deep" / "out"
    code = main(
        f"solve --x={tmp_path}/x.npz#points --a={tmp_path}/x.npz#weights "
        f"--y={tmp_path}/y.npy --b={tmp_path}/b.npy --cost=euclidean --epsilon=0.1 "
        "--epsilon_unit=mean --tau_a=0.9 --tau_b=0.8 --mesh=2x4 --batch_size=2x3 "
        "--dtype=float64 --precision=high --threshold=1 --min_iterations=12 "
        "--acceleration=none --inner_iterations=5 --max_iterations=50 --grad "
        f"--out={out}".split()
    )
    with jax.enable_x64(True):

        def value(x, y):
            geom = otts.PointCloud(
                *(x, y),
                cost_fn=otts.costs.Euclidean(),
                epsilon=0.1,
                relative_epsilon="mean",
                mesh=otts.make_mesh(2, 4),
            )
            want = otts.solve(
                *(geom, p.a, p.b),
                tau_a=0.9,
                tau_b=0.8,
                threshold=1,
                max_iterations=50,
                min_iterations=12,
                inner_iterations=5,
                acceleration=None,
            )
            return want.reg_ot_cost, want

        both = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))
        (_, want), grads = both(p.x, p.y)
        expected = {"f": want.f, "g": want.g, "grad_x": grads[0], "grad_y": grads[1]}
        expected = {name: np.asarray(array) for name, array in expected.items()}
        primal, dual = float(want.primal_cost), float(want.dual_cost)
    assert code == 0
    arrays, record = read_arrays(out), read_record(out)
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.dtype == np.float64
        np.testing.assert_allclose(array, expected[name], rtol=1e-10, err_msg=name)
    for name, number in {
        "reg_ot_cost": float(want.reg_ot_cost),
        "primal_cost": primal,
        "dual_cost": dual,
        "epsilon": float(want.epsilon),
        "grad_norm": [np.linalg.norm(arrays[k]) for k in ("grad_x", "grad_y")],
        "errors": np.asarray(want.errors)[:3],
    }.items():
        np.testing.assert_allclose(record[name], number, rtol=1e-10, err_msg=name)
    assert (
        record.items()
        >= {
            "task": "solve",
            "converged": True,
            "status": "CONVERGED",
            "status_sentence": otts.Status.CONVERGED.sentence,
            "n_iters": 12,
            "n": 13,
            "m": 21,
            "d": 3,
            "cost": "euclidean",
            "dtype": "float64",
            "mesh": "2x4",
            "devices": 8,
            "processes": 1,
        }.items()
    )
    assert record["seconds"] > 0
    assert record["temp_bytes_per_device"] > 0
    assert record["versions"].keys() == {
        *("python", "jax", "jaxlib", "numpy", "ott_shard")
    }
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "(mesh 2x4)" in captured.out.splitlines()[0]
    for word in ("reg_ot_cost", "gradient norm", "iterations     12", "temp memory"):
        assert word in captured.out


@pytest.mark.slow
def test_cost_unit_and_schedule(tmp_path, capsys):
    p = ref.problem(13, 21)
    np.save(tmp_path / "x.npy", p.x)
    np.save(tmp_path / "y.npy", p.y)
    out = tmp_path / "out"
    code = main(
        f"solve --x={tmp_path}/x.npy --y={tmp_path}/y.npy --cost=elastic:0.5,2 "
        "--scale_cost=max_cost --epsilon=0.02 --epsilon_unit=std --epsilon_init=1 "
        f"--epsilon_decay=0.8 --mesh=4x2 --out={out}".split()
    )
    geom = otts.PointCloud(
        *(p.x.astype(np.float32), p.y.astype(np.float32)),
        cost_fn=otts.costs.Elastic(0.5, 2),
        scale_cost="max_cost",
        epsilon=otts.Epsilon(0.02, init=1.0, decay=0.8),
        relative_epsilon="std",
        mesh=otts.make_mesh(4, 2),
    )
    want, record = otts.solve(geom), read_record(out)
    assert code == 0 and bool(want.converged)
    assert "epsilon 1 down to 0.02 x std of costs" in capsys.readouterr().out
    for name in ("reg_ot_cost", "epsilon", "n_iters", "error_floor"):
        np.testing.assert_allclose(record[name], getattr(want, name), rtol=1e-6)
    np.testing.assert_allclose(record["scale_cost"], geom.scale_cost, rtol=1e-6)
    # The default epsilon has a unit, and its schedule the same one.
    arguments = f"solve --x={tmp_path}/x.npy --y={tmp_path}/y.npy --mesh=4x2 "
    assert main(f"{arguments} --epsilon_init=0.5 --out={out}".split()) == 0
    default = otts.PointCloud(geom.x, geom.y, mesh=geom.mesh)
    np.testing.assert_allclose(read_record(out)["epsilon"], default.epsilon, rtol=1e-6)


@pytest.mark.slow
def test_divergence_in_a_process(tmp_path):
    """The main job as people start it, against the library in this process."""
    out = tmp_path / "out"
    job = "divergence --demo=discs --n=50 --epsilon_unit=mean --cpu_devices=8 --grad"
    done = command(*job.split(), f"--out={out}")
    assert (done.returncode, done.stderr) == (0, "")
    x, y = ref.discs(50)

    def loss(x, y):
        mesh = otts.make_mesh(4, 2)
        return otts.sinkhorn_divergence(x, y, relative_epsilon="mean", mesh=mesh)

    both = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (value, want), (grad_x, grad_y) = both(x, y)
    arrays, record = read_arrays(out), read_record(out)
    xy = want.outputs[0]
    expected = {"f": xy.f, "g": xy.g, "grad_x": grad_x, "grad_y": grad_y}
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        np.testing.assert_allclose(
            array, expected[name], rtol=1e-4, atol=1e-4, err_msg=name
        )
    np.testing.assert_allclose(record["divergence"], value, rtol=1e-5)
    np.testing.assert_allclose(record["primal_cost"], xy.primal_cost, rtol=1e-5)
    np.testing.assert_allclose(record["epsilon"], want.epsilon, rtol=1e-5)
    assert record["terms"] == ["xy", "xx", "yy"]
    assert record["n_iters"] == [int(count) for count in want.n_iters]
    checks = [-(-count // 10) for count in record["n_iters"]]
    assert [len(errors) for errors in record["errors"]] == checks
    assert (record["mesh"], record["devices"]) == ("4x2", 8)
    assert f"divergence     {record['divergence']:.7g}" in done.stdout


def test_bad_input_in_a_process(tmp_path):
    done = command("solve", "--x=missing.npy", "--y=y.npy", f"--out={tmp_path / 'out'}")
    assert (done.returncode, done.stdout) == (2, "")
    want = "ott-shard: error: --x=missing.npy: no such file: check the path\n"
    assert done.stderr == want
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------- exit codes


@pytest.mark.wide
def test_not_converged(tmp_path, capsys):
    """Results are written all the same, and nothing of an earlier run remains."""
    for name in ("result.json", "grad_x.npy", "notes.txt"):
        (tmp_path / name).write_text("earlier")
    job = "solve --demo=discs --n=20 --max_iterations=7 --inner_iterations=5"
    more = "--threshold=1e-30 --progress_seconds=0"
    assert main([*job.split(), *more.split(), f"--out={tmp_path}"]) == 3
    record = read_record(tmp_path)
    assert (record["converged"], record["status"]) == (False, "MAX_ITERATIONS")
    assert (record["n_iters"], len(record["errors"])) == (7, 2)
    assert record["grad_norm"] is None
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"result.json", "f.npy", "g.npy", "notes.txt"}
    lines = capsys.readouterr().out.splitlines()
    progress = [line for line in lines if "marginal error" in line and "s/it" in line]
    assert [line.split()[:3] for line in progress] == [
        ["xy", "iteration", "5"],
        ["xy", "iteration", "7"],
    ]
    assert any("max_iterations was reached" in line for line in lines)


@pytest.mark.wide
def test_not_finite(tmp_path):
    """Numbers that do not exist are null in strict JSON."""
    for name in ("x", "y"):
        np.save(tmp_path / f"{name}.npy", np.full((3, 2), 1e30) * np.arange(3)[:, None])
    files = [f"--{name}={tmp_path}/{name}.npy" for name in ("x", "y")]
    assert main(["solve", *files, "--epsilon=1", f"--out={tmp_path}"]) == 3
    record = read_record(tmp_path)
    assert record["status"] == "NOT_FINITE"
    assert record["reg_ot_cost"] is None


def test_help(capsys):
    """The help names every task and flag, and its examples are accepted."""
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {task} " in text for task in [*tasks.TASKS, *uses.USES])
    values = flags.parse([]).values
    usages = [line.split()[0] for line in text.splitlines() if line[:4] == "  --"]
    assert {usage.lstrip("-").partition("=")[0] for usage in usages} == values.keys()
    examples = flags.parse(usages).values
    assert examples["mesh"] == (4, 2)
    assert examples["batch_size"] == (512, 2048)


# -------------------------------------------------------------------------- parts


def test_discs_are_those_of_the_issue():
    for cloud, want in zip(data.discs(50), ref.discs(50), strict=True):
        np.testing.assert_array_equal(cloud, want)


def test_failed_write_leaves_no_record(tmp_path, monkeypatch):
    """A full disk while the second array is written."""

    def save(file, array):
        if array.size == 2:
            raise OSError(28, "No space left on device")
        file.write(b"array")

    monkeypatch.setattr(np, "save", save)
    arrays = {k: results.Rows(np.zeros(n), n) for k, n in (("f", 1), ("g", 2))}
    with pytest.raises(results.BadInput, match="No space left"):
        results.write(str(tmp_path), "solve", {"n": 1}, arrays, print)
    assert [path.name for path in tmp_path.iterdir()] == ["f.npy"]


def spread_rows(rows, *starts):
    """An array of 6 rows of which pieces from `starts` on are here, as shards are."""
    ends = [*starts[1:], None]
    shards = [
        SimpleNamespace(index=(slice(i, j), slice(None)), replica_id=0, data=rows[i:j])
        for i, j in zip(starts, ends, strict=True)
    ]
    array = SimpleNamespace(shape=rows.shape, dtype=rows.dtype)
    array.is_fully_addressable, array.addressable_shards = False, shards
    return array


def test_rows_of_several_processes(tmp_path, monkeypatch):
    """Padding stays out; what is done is told; half a file does not stay."""
    rows, told = np.arange(12.0).reshape(6, 2), []
    array = spread_rows(rows, 0, 3)
    array.addressable_shards[0].replica_id = 1  # somebody else's
    args = str(tmp_path), "solve", {"n": 1}, {"f": results.Rows(array, 5)}
    results.write(*args, told.append)
    want = np.concatenate([np.zeros((3, 2)), rows[3:5]])
    np.testing.assert_array_equal(np.load(tmp_path / "f.npy"), want)
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "f.npy"}
    assert told.count("writing f") > 3 and told[-1] == "writing the record"
    monkeypatch.setattr(results, "_fill", raiser(OSError(28, "No space left")))
    with pytest.raises(results.BadInput, match="No space left"):
        results.write(*args, told.append)
    assert list(tmp_path.iterdir()) == []


def raiser(error):
    def fail(*_, **__):
        raise error

    return fail


def test_a_mark_that_cannot_be_left(tmp_path, monkeypatch):
    """Is refused by agreement: the others wait for it."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    helpers = processes.multihost_utils
    monkeypatch.setattr(helpers, "broadcast_one_to_all", lambda number: number)
    monkeypatch.setattr(processes, "together", lambda attempt: attempt())
    processes.check_shared("--out=run", str(tmp_path))
    monkeypatch.setattr(Path, "touch", raiser(OSError(30, "Read-only file system")))
    with pytest.raises(results.BadInput, match="--out=run: not writable .Read-only"):
        processes.check_shared("--out=run", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
