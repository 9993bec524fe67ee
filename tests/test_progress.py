"""What is told of a run on the way: lines, events, time to go; kept programs."""

import json
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import ott_shard as otts
from launch import cache, checkpoint, job, progress
from launch.main import main

DEMO = "solve --demo=discs --n=64 --epsilon_unit=mean --mesh=2x1"


def reporter(clock, log=None, **more):
    """Of a run whose fields are these."""
    fields = dict(progress_seconds=5.0, threshold=1e-3, inner_iterations=10)
    fields |= dict(min_iterations=0, max_iterations=1000) | more
    log = log or progress.Log(None)
    return progress.Reporter(SimpleNamespace(**fields), log, clock)


def snapshot(iteration, error, epsilon=0.5):
    known = dict.fromkeys(otts.Snapshot._fields)
    return otts.Snapshot(
        **known | dict(iteration=iteration, error=error, epsilon=epsilon)
    )


def test_lines_are_rate_limited(capsys):
    """Nothing for 2 seconds, then a line every 5."""
    now = 0.0
    report = reporter(lambda: now)
    for second in range(1, 14):
        now = float(second)
        report("xx", snapshot(10 * second, 0.5))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["20", "70", "120"]
    assert (
        lines[0].split()
        == (
            "xx iteration 20 marginal error 5.00e-01 epsilon 0.5 0.1 s/iteration, "
            "at most 98 s to go"
        ).split()
    )


def seconds_left(errors, epsilons=None, **more):
    """After the last of these checks, each 10 iterations and a second later."""
    now, events = 0.0, []
    report = reporter(lambda: now, lambda _, **values: events.append(values), **more)
    for k, error in enumerate(errors):
        now = k + 1.0
        report("xy", snapshot(10 * (k + 1), error, (epsilons or [1.0] * 99)[k]))
    return events[-1]["seconds_left"]


def test_time_to_go():
    """As long as the error needs at its pace; not known while epsilon comes down."""
    factor = [10.0**-k for k in range(3)]
    assert seconds_left(factor[:1]) is None
    assert seconds_left(factor) == pytest.approx(1)  # 1e-2, and one check to 1e-3
    assert seconds_left([1, 0.1, 1e-3]) == 0
    assert seconds_left([1, 0.1, 1e-3], min_iterations=50) == pytest.approx(2)
    assert seconds_left([1, 1.1]) is None
    assert seconds_left([1, 0.999], max_iterations=100) is None
    assert seconds_left(factor, [3.0, 2.0, 1.0]) is None
    assert seconds_left(factor, [2.0, 1.0, 1.0]) is None
    assert seconds_left([0.1, 1e-4], [2.0, 1.0]) is seconds_left([1e-4]) is None
    arrived = [2.0, *[1.0] * 6]
    assert seconds_left([10, *([1.0] * 4), 0.1, 0.01], arrived) == pytest.approx(2.5)
    assert seconds_left([10, *([1.0] * 4), 0.1], arrived) is None
    assert seconds_left([1, np.nan]) is None
    # An old pace is forgotten: first by 10 at a check, then by 1.1.
    errors = [1, 0.1, *(0.1 * 1.1**-k for k in range(1, 9))]
    want = np.log(errors[-1] / 1e-3) / np.log(1.1)
    assert seconds_left(errors) == pytest.approx(want)


def test_a_term_that_goes_on(capsys):
    """The pace is of the iterations since the start, not since iteration 0."""
    now = 0.0
    report = reporter(lambda: now, progress_seconds=0.0)
    now = 20.0
    report("xy", snapshot(510, 0.5))
    assert " 2 s/iteration" in capsys.readouterr().out
    now = 21.0
    report("xx", snapshot(10, 0.5))
    assert " 0.1 s/iteration" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.52, "0.52 s"), (9.7, "9.7 s"), (98, "98 s"), (600, "10 min"), (9e3, "2.5 h")],
)
def test_durations(seconds, words):
    assert progress.duration(seconds) == words


def events(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_of_a_run(tmp_path, monkeypatch):
    """Events of the start, of every check and checkpoint, and of the end."""
    log = tmp_path / "logs" / "run.jsonl"
    typed = f"{DEMO} --out={tmp_path}/run --log_json={log} --checkpoint_checks=2"
    slowly = ["--max_iterations=40", "--threshold=1e-9", "--acceleration=none"]
    assert main([*typed.split(), *slowly]) == 3
    start, *middle, end = events(log)
    record = json.loads((tmp_path / "run/result.json").read_text())
    assert (start["event"], end["event"]) == ("start", "end")
    assert start["config"]["threshold"] == 1e-9 and start["devices"] == 2
    assert {key: end[key] for key in record} == record
    assert record["temp_bytes_per_device"] > 0
    checks = [event for event in middle if event["event"] == "check"]
    assert [check["error"] for check in checks] == record["errors"]
    assert [check["iteration"] for check in checks] == [10, 20, 30, 40]
    assert {check["epsilon"] for check in checks} == {record["epsilon"]}
    kept = [event for event in middle if event["event"] == "checkpoint"]
    assert [event["iterations"] for event in kept] == [{"xy": 20}, {"xy": 40}]
    times = [event["time"] for event in events(log)]
    assert times == sorted(times)

    def write(*_):
        raise checkpoint.Interrupted("the place")

    monkeypatch.setattr(checkpoint.Keeper, "__call__", write)
    assert main(typed.split()) == 6  # events are added
    *_, check, last = events(log)
    assert (check["event"], last["event"]) == ("check", "interrupted")
    assert last["checkpoint"] == "the place"


def test_told_to_end_after_the_last_check(tmp_path, monkeypatch):
    """Before the gradient it ends; what goes on has no more iterations to make."""
    solved = checkpoint.Keeper.solved

    def told(keeper):
        signal.raise_signal(signal.SIGTERM)
        solved(keeper)

    monkeypatch.setattr(checkpoint.Keeper, "solved", told)
    assert main([*DEMO.split(), "--grad", f"--out={tmp_path}"]) == 6
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.NAME]
    (kept,) = checkpoint.read(str(tmp_path)).snapshots.values()
    monkeypatch.setattr(checkpoint.Keeper, "solved", solved)
    assert main(["resume", f"--run={tmp_path}"]) == 0
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["n_iters"] == kept.iteration and (tmp_path / "grad_x.npy").exists()


def test_a_run_that_is_refused_has_no_log(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.full((3, 2), np.nan))
    files = f"--x={tmp_path}/x.npy --y={tmp_path}/x.npy --log_json={tmp_path}/log"
    assert main(["solve", *files.split(), "--mesh=2x1"]) == 2
    assert "must be finite" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def test_results_are_safe_before_the_memory_is_asked_for(tmp_path, monkeypatch):
    def compiled(*_):
        assert json.loads((tmp_path / "result.json").read_text())["converged"]
        raise RuntimeError("the compiler ran out of memory")

    monkeypatch.setattr(job.tasks, "compiled", compiled)
    with pytest.raises(RuntimeError, match="ran out"):
        main([*DEMO.split(), f"--out={tmp_path}"])
    assert {"result.json", "f.npy", "g.npy"} <= {p.name for p in tmp_path.iterdir()}


# -------------------------------------------------------------------- kept programs


@jax.jit
def program(x):
    return x * 7 + 3


def test_programs_are_kept(tmp_path):
    """A second run adds nothing, and half a program of another process is not seen."""
    before, stamps = jax.config.jax_compilation_cache_dir, []
    for _ in range(3):
        jax.clear_caches()
        with cache.kept(str(tmp_path)):
            assert jax.config.jax_compilation_cache_dir != before
            program(np.arange(5.0))
        (folder,) = tmp_path.iterdir()
        (folder / ".half.part").unlink(missing_ok=True)
        stamps.append({p.name: p.stat().st_mtime_ns for p in folder.iterdir()})
        (folder / ".half.part").write_bytes(b"half")
    assert [name for name in stamps[0] if name.startswith("jit_program")]
    assert stamps[1] == stamps[2]
    assert stamps[0].items() <= stamps[1].items()
    assert jax.config.jax_compilation_cache_dir == before


def test_no_programs_of_a_run_that_fails(tmp_path):
    with pytest.raises(RuntimeError), cache.kept(str(tmp_path)):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    assert jax.config.jax_compilation_cache_dir is None


def test_a_full_disk_does_not_fail_a_run(tmp_path, monkeypatch, capsys):
    def mkdir(*_, **__):
        raise OSError(28, "No space left on device")

    with cache.kept(str(tmp_path)):
        monkeypatch.setattr(cache.Path, "mkdir", mkdir)
    error = capsys.readouterr().err
    assert error.startswith("ott-shard: warning: --compilation_cache=")
    assert "No space left" in error and error.count("\n") == 1
