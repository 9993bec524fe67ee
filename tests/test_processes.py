"""Jobs of several processes: how they agree, end, and go on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from array_files import EXTRA, write_h5, write_parquet, write_zarr

from launch import checkpoint, rehearsal
from launch.main import main

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sizes that no mesh divides, weights, and float64 files for a float32 run."""
    folder, rng = tmp_path_factory.mktemp("job"), np.random.default_rng(0)
    x, y = rng.normal(size=(203, 3)), rng.normal(size=(101, 3)) + 1
    a = np.arange(203.0) / np.arange(203.0).sum()
    for name, array in {"x": x, "y": y, "a": a}.items():
        np.save(folder / f"{name}.npy", array)
    write_h5(folder, x), write_parquet(folder, y), write_zarr(folder, a)
    np.save(folder / "short.npy", np.ones(5))
    np.save(folder / "nan.npy", np.full((203, 3), np.nan))
    return folder


def clean():
    foreign = ("SLURM_", "OMPI_", "JAX_", "XLA_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@contextlib.contextmanager
def begun(folder, line, patch=""):
    """A command that does not outlive the block, nor do its children.

    `patch` is run first, in its process.
    """
    start = "import sys\nfrom launch.main import main\nsys.exit(main(sys.argv[1:]))"
    how = ["-c", patch + start] if patch else ["-m", "launch"]
    with subprocess.Popen(
        [sys.executable, *how, *line.split()],
        cwd=folder,
        env=clean(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def run(folder, line, seconds=120):
    """(exit code, stdout, stderr)."""
    with begun(folder, line) as process:
        out, error = process.communicate(timeout=seconds)
    return process.returncode, out, error


def results(folder, out):
    record = json.loads((folder / out / "result.json").read_text())
    arrays = {path.stem: np.load(path) for path in (folder / out).glob("*.npy")}
    return record, arrays


JOB = "solve --epsilon=0.3 --grad"
ARRAYS = "--x=x.npy --y=y.npy --a=a.npy"
THE_SAME = "--x=x.h5#group/x --y=x.parquet --a=x2.zarr#group/x"


@pytest.fixture(scope="module")
def alone(folder):
    assert run(folder, f"{JOB} {ARRAYS} --cpu_devices=4 --out=alone")[0] == 0
    return results(folder, "alone")


@pytest.mark.parametrize(
    ("count", "devices"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_as_one_process(folder, alone, count, devices):
    """Value, potentials, gradients, histories: of 2 x 2 and 4 x 1 as of 1 x 4.

    In one process from .npy files, in several from files of other formats.
    """
    job = f"--cpu_devices={devices} --local_processes={count} --out=several{count}"
    code, out, error = run(folder, f"{JOB} {THE_SAME} {job}")
    assert code == 0, error
    assert "reg_ot_cost" in out and "converged" in out
    (want, arrays), (record, got) = alone, results(folder, f"several{count}")
    assert record["processes"] == count and record["devices"] == 4
    assert record["temp_bytes_per_device"] is None and "see ott-shard estimate" in out
    for name in ("reg_ot_cost", "n_iters", "errors", "epsilon", "grad_norm", "n", "m"):
        close(record[name], want[name])
    assert set(got) == set(arrays) == {"f", "g", "grad_x", "grad_y"}
    for name in arrays:
        close(got[name], arrays[name])
    samples(folder, f"several{count}", count, devices)
    logs = sorted(path.name for path in (folder / f"several{count}/logs").iterdir())
    assert logs == [f"rank-{k}.log" for k in range(count)]
    for k, name in enumerate(logs):
        text = (folder / f"several{count}/logs" / name).read_text()
        assert f"process {k} of {count} on " in text


def samples(folder, out, count, devices):
    """What is made of the plan is that of one process too: same pairs, same matches."""
    pairs = "sample --num_pairs=100 --seed=3"
    for use in (pairs, "match --k=2 --axis=0") if count == 2 else (pairs,):
        job = f"{use} --run=alone --cpu_devices={devices}"
        code, _, error = run(folder, f"{job} --local_processes={count} --out={out}")
        assert code == 0, error
        assert run(folder, f"{use} --run=alone --cpu_devices=4 --out=uses")[0] == 0
    for path in (folder / "uses").glob("*.npy"):
        want, got = np.load(path), np.load(folder / out / path.name)
        assert got.shape == want.shape
        close(got.ravel(), want.ravel())
        (folder / out / path.name).unlink()


def close(got, want):
    for one, other in zip(np.atleast_1d(got), np.atleast_1d(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("solve --x=nan.npy --y=y.npy", "x must be finite, got NaN or inf in row 0"),
        pytest.param(
            *("solve --x=x.npy --y=y.npy --mesh=3x1", "--mesh=3x1: needs 3 devices"),
            marks=pytest.mark.wide,
        ),
        pytest.param(
            *("solve --x=x.npy --y=y.npy --a=short.npy", "--a: must have shape (203,)"),
            marks=pytest.mark.wide,
        ),
        pytest.param(
            *("apply --run=alone --v=short.npy", "--v=short.npy: must have 203 rows"),
            marks=pytest.mark.wide,
        ),
        pytest.param(
            *("transport --run=alone --points=short.npy", "--points=short.npy: "),
            marks=pytest.mark.wide,
        ),
    ],
)
def test_bad_input_is_said_once_and_ends_all(folder, alone, flags, words):
    """Whether before numbers are read, by who reads them, or by the library in all."""
    refused(folder, flags, words)


def test_rows_that_one_process_cannot_read_end_all(folder):
    """Process 1 finds a null, which is in no piece of the fingerprint."""
    size, n = 2**16 // 24, 400_000
    column = np.ma.zeros(n)
    column[np.linspace(0, n - size, 64, dtype=int)[48] + size + 99] = np.ma.masked
    pa = pytest.importorskip("pyarrow", reason=EXTRA)
    table = pa.table([np.zeros(n), np.ones(n), pa.array(column)], ["u", "v", "w"])
    parquet = pytest.importorskip("pyarrow.parquet", reason=EXTRA)
    parquet.write_table(table, folder / "gap.parquet")
    words = "--x=gap.parquet: w[262144:327680] has nulls: fill them"
    refused(folder, "solve --x=gap.parquet --y=y.npy", words)


def refused(folder, flags, words):
    before = time.monotonic()
    job = "--cpu_devices=1 --local_processes=2 --out=refused"
    code, _, error = run(folder, f"{flags} {job}")
    assert code == 2 and words in error
    said = "".join(p.read_text() for p in (folder / "refused/logs").iterdir())
    assert said.count("ott-shard: error") == error.count("ott-shard: error") == 1
    assert "Traceback" not in said
    assert time.monotonic() - before < 60
    assert [path.name for path in (folder / "refused").iterdir()] == ["logs"]


def in_two(folder, lines, seconds=90, watchdog=60):
    """[(exit code, stdout + stderr)] of two processes that are started by hand."""
    port = rehearsal.free_port()
    common = f"--cpu_devices=1 --num_processes=2 --watchdog_seconds={watchdog} "
    common += f"--coordinator_address=localhost:{port}"
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                begun(where, f"{line} {common} --process_id={k}", patch)
            )
            for k, (where, line, patch) in enumerate(lines)
        ]
        ends = [job.communicate(timeout=seconds) for job in jobs]
        return [(job.returncode, "".join(e)) for job, e in zip(jobs, ends, strict=True)]


@pytest.mark.wide
def test_a_process_that_raises_ends_the_job(folder):
    """Its message is there, and the other ends in seconds."""
    patch = (
        "from launch import checkpoint\n"
        "def fail(*_): raise RuntimeError('the third rail')\n"
        "checkpoint.Keeper.__call__ = fail\n"
    )
    lines = [(folder, f"{LONG} --out=raised", text) for text in ("", patch)]
    before = time.monotonic()
    (code, peer), (own, said) = in_two(folder, lines)
    assert own == 1 and "process 1: RuntimeError('the third rail')" in said
    assert code == 5 and "a peer was lost" in peer
    assert time.monotonic() - before < 60
    assert not (folder / "raised" / "result.json").exists()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shapes", "processes disagree about input files"),
        ("versions", "processes disagree about versions"),
        ("missing", "--x=x.npy: no such file"),
        ("folders", "--out=other: process 1 does not see there what process 0 writes"),
    ],
)
def test_hosts_that_disagree(folder, tmp_path, what, words):
    """One line on one process, and both end with 2."""
    patch, other = "", folder
    if what == "versions":
        patch = "from launch import results\nresults.versions = lambda: {'jax': '0'}\n"
    else:
        other = tmp_path
        rng = np.random.default_rng(0)
        for name in "xy"[what == "missing" :] if what != "folders" else "":
            np.save(tmp_path / f"{name}.npy", rng.normal(size=(50, 3)))
        if what == "folders":
            for name in "xy":
                (tmp_path / f"{name}.npy").symlink_to(folder / f"{name}.npy")
    line = "solve --x=x.npy --y=y.npy --out=other"
    ends = in_two(folder, [(folder, line, ""), (other, line, patch)])
    said = "".join(text for _, text in ends)
    assert [code for code, _ in ends] == [2, 2], said
    assert said.count("ott-shard: error") == 1 and words in said
    assert "Traceback" not in said
    assert not (folder / "other").exists()
    assert not list(folder.glob(".ott-shard-*"))


LONG = "solve --x=x.npy --y=y.npy --epsilon=0.3 --inner_iterations=5 --threshold=1e-2"
LONG += " --min_iterations=600 --progress_seconds=0 --checkpoint_checks=1"
LONG += " --dtype=float64"  # steps that are learnt from earlier ones spread a rounding


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def whole(folder):
    """The run that was never interrupted."""
    assert run(folder, f"{LONG} --cpu_devices=2 --out=whole")[0] == 0
    return results(folder, "whole")


TWO = "--cpu_devices=1 --local_processes=2"
ONE = "--cpu_devices=3"


@pytest.mark.wide
@pytest.mark.parametrize(("before", "after"), [(TWO, ONE), (ONE, TWO)])
def test_interrupted_and_resumed(folder, whole, before, after):
    """SIGTERM to two processes, and on in one, or the reverse: as if never ended."""
    out = f"halted{before == TWO}"
    with begun(folder, f"{LONG} {before} --out={out}") as job:
        wait_for((folder / out / checkpoint.NAME).exists)
        job.send_signal(signal.SIGTERM)
        told, error = job.communicate(timeout=60)
    assert job.returncode == 6, error
    assert f"go on by resume --run={out}" in told
    assert not (folder / out / "result.json").exists()
    code, _, error = run(folder, f"resume --run={out} {after}")
    assert code == 0, error
    (want, arrays), (record, got) = whole, results(folder, out)
    for name in ("reg_ot_cost", "n_iters", "errors"):
        np.testing.assert_allclose(record[name], want[name], rtol=1e-3, atol=1e-6)
    for name in arrays:
        np.testing.assert_allclose(got[name], arrays[name], atol=1e-4)
    assert not (folder / out / checkpoint.NAME).exists()


def ended_by(number, folder, out):
    """What process 0 says, and after how long, if process 1 is sent a signal."""
    common = f"{LONG} --cpu_devices=1 --num_processes=2 --watchdog_seconds=15 "
    common += f"--coordinator_address=localhost:{rehearsal.free_port()} --out={out}"
    lines = [f"{common} --process_id={k}" for k in range(2)]
    with begun(folder, lines[0]) as one, begun(folder, lines[1]) as other:
        wait_for((folder / out / checkpoint.NAME).exists)
        other.send_signal(number)
        before = time.monotonic()
        _, error = one.communicate(timeout=60)
    assert one.returncode == 5, error
    return error, time.monotonic() - before


@pytest.mark.wide
def test_a_stuck_process_ends_the_others(folder):
    """Stopped, not lost: its connections are there, and nothing comes of them."""
    error, seconds = ended_by(signal.SIGSTOP, folder, "stuck")
    line = "process 0 of 2: nothing has moved for 15 s in xy, after iteration "
    assert line in error and error.count("ott-shard: error") == 1
    assert 10 < seconds < 40


@pytest.mark.wide
def test_a_use_that_is_stuck_ends(folder, alone):
    """The one that does not come to a collective, and the one that waits in it."""
    patch = "import time\nfrom launch import uses\nuses.perform = lambda *_: "
    lines = [
        (folder, "match --run=alone --k=2 --out=stuck_use", text)
        for text in ("", f"{patch}time.sleep(600)\n")
    ]
    for code, said in in_two(folder, lines, watchdog=10):
        assert code == 5
        assert "nothing has moved for 10 s in the work of match" in said
    assert not (folder / "stuck_use").exists()


@pytest.mark.wide
def test_a_killed_process_ends_the_others_and_the_job_goes_on(folder):
    """SIGKILL of one of two started by hand; resumed in two."""
    error, seconds = ended_by(signal.SIGKILL, folder, "killed")
    assert "a peer" in error and seconds < 40
    again = "resume --run=killed --cpu_devices=1 --local_processes=2"
    code, _, error = run(folder, again)
    assert code == 0, error
    assert results(folder, "killed")[0]["converged"]


# --------------------------------------------------------------------- checkpoints


def test_checkpoints_that_are_refused(folder, tmp_path, monkeypatch, capsys):
    """Truncated, foreign, of other input: one line, and it stays as it is."""
    monkeypatch.chdir(folder)
    meta = {"config": {}, "inputs": {}, "versions": {}}
    checkpoint.write(tmp_path, meta, {"xy/phi": np.zeros(3)})
    whole = (tmp_path / checkpoint.NAME).read_bytes()
    for content, words in (
        (None, "holds no checkpoint.npz"),
        (whole[: len(whole) // 2], "is not a whole checkpoint"),
        (b"", "is not a whole checkpoint"),
        (b"something else", "is not a whole checkpoint"),
        (whole, "is not a whole checkpoint"),
    ):
        path = tmp_path / checkpoint.NAME
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        assert main(["resume", f"--run={tmp_path}"]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
        assert content is None or path.read_bytes() == content
        assert [p.name for p in tmp_path.iterdir()] == [checkpoint.NAME] * bool(
            content is not None
        )
