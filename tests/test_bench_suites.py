"""Suites of measurements at sizes of toys: records, a table and a plot."""

import sys

import numpy as np
import pytest
from test_bench import read

import ott_shard as otts
from launch import (
    bench,
    bench_convergence,
    bench_cpu,
    bench_families,
    bench_gpu,
    bench_memory,
    bench_scaling,
    bench_tables,
)
from launch.bench_model import H200, scanned
from launch.programs import count


def run(suite, *flags, capsys):
    """(records, lines of the table)."""
    assert bench.main([f"--suite={suite}", *flags]) == 0
    captured = capsys.readouterr()
    records = read(captured.out)
    assert all(record["suite"] == suite for record in records)
    lines = captured.err.splitlines()
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    return records, lines


# ------------------------------------------------------------------------- scaling


def test_scaling(tmp_path, capsys, monkeypatch):
    """Work is divided exactly, and what is sent is as the layout says."""
    monkeypatch.setattr(bench_scaling, "_MOST_DEVICES", 4)
    picture = tmp_path / "scaling.png"
    records, lines = run("scaling", "--n=256", f"--plot={picture}", capsys=capsys)
    assert [r["devices"] for r in records] == 2 * [1, 2, 4]
    assert len(lines) == 2 + len(records)
    for record in records:
        assert record["pairs"] == pytest.approx(record["pairs_ideal"], rel=0.1)
        rows, cols = map(int, record["mesh"].split("x"))
        n = -(-record["n"] // record["devices"]) * record["devices"]
        # One of n / rows numbers along the columns, and likewise, and flags of a byte.
        sent = sum(
            2 * (k - 1) / k * (4 * n / others + 1)
            for k, others in ((cols, rows), (rows, cols))
        )
        traffic = record["iteration"]
        assert traffic["bytes_sent"] == pytest.approx(sent)
        assert traffic["all_reduces"] == 2 * (rows > 1) + 2 * (cols > 1)
        assert traffic["other_collectives"] == 0
        assert (record["gradient"]["bytes_sent"] > 0) == (record["devices"] > 1)
    strong = {r["devices"]: r for r in records if r["kind"] == "strong"}
    assert strong[4]["pairs"] * 4 == strong[1]["pairs"] == 2 * 256**2
    weak = {r["devices"]: r for r in records if r["kind"] == "weak"}
    assert weak[4]["n"] == 512 and weak[4]["pairs"] == weak[1]["pairs"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (4, 2), (4, 4)])
def test_crossover_is_where_times_are_equal(shape):
    (rows, cols), rate = shape, 1e10
    for link in bench_scaling.LINKS:
        n = bench_scaling.crossover(shape, rate, link)
        computing = 2 * n * n / (rows * cols * rate)
        # Of numbers along k devices, and of a flag along the others.
        sending = sum(
            2
            * (k - 1)
            * (4 * n / others / k / link.bytes_per_second + 2 * link.latency)
            for k, others in ((cols, rows), (rows, cols))
        )
        assert computing == pytest.approx(sending)
    assert (n > 0) == (rows * cols > 1)


PROGRAM = """
%of_a_tile (p: f32[8,4]) -> f32[8,16] {
  ROOT %d.1 = f32[8,16]{1,0} dot(%p, %q), lhs_contracting_dims={1}
}

%inner (p: (s32[])) -> (s32[]) {
  %f = f32[8,16]{1,0} fusion(%x), kind=kLoop, calls=%of_a_tile
}

%body (p: (s32[])) -> (s32[]) {
  %while.1 = (s32[]) while(%t), condition=%c, body=%inner, KNOWN5
  %r = f32[32]{0} all-reduce(%x), GROUPS, to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %while.2 = (s32[]) while(%t), condition=%c, body=%body, KNOWN3
  %g = f32[64]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
}
"""


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=mesh['rows'=4,'cols'=2] {'rows','cols'}", 8),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4], ids=([4,2]T(1,0)) {'axis_1'}", 4),
        ("replica_groups={{0},{1}}", 1),
    ],
)
def test_work_is_counted_as_often_as_loops_run(groups, devices):
    def text(inner):
        known = 'backend_config={"known_trip_count":{"n":"%s"}}'
        filled = PROGRAM.replace("KNOWN5", inner and known % inner)
        return filled.replace("KNOWN3", known % 3).replace("GROUPS", groups)

    work = count(text("5"))
    assert work.products == 3 * 5 * 8 * 16
    assert work.all_reduces == ({(devices, 128): 3} if devices > 1 else {})
    assert work.bytes_sent == 3 * 2 * (devices - 1) / devices * 128
    assert work.others == 1
    with pytest.raises(ValueError, match="unknown length"):
        count(text(""))


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%%add, %%busy}",
        "true_computation=%%busy, false_computation=%%add",
    ],
)
def test_work_of_a_branch_is_refused(branches):
    """Nobody knows whether it is done; a branch without any is no matter."""
    text = """
%%busy (p: f32[8]) -> f32[8] {
  ROOT %%r = f32[8]{0} %s(%%p), replica_groups={{0,1}}, to_apply=%%add
}

ENTRY %%main (p: f32[8]) -> f32[8] {
  ROOT %%c = f32[8]{0} conditional(%%i, %%p, %%p), BRANCHES
}
""".replace("BRANCHES", branches)
    assert count(text % "negate").all_reduces == {}
    with pytest.raises(ValueError, match="a branch, has .* all-reduce"):
        count(text % "all-reduce")


# -------------------------------------------------------------------------- memory


@pytest.fixture
def few_cases(monkeypatch):
    monkeypatch.setattr(bench_memory, "_DIMENSIONS", (2,))
    monkeypatch.setattr(bench_memory, "_COSTS", ("sqeuclidean",))


def test_memory(few_cases, capsys, monkeypatch, tmp_path):
    """Of the first device alone, and of the mesh."""
    fake = {1: 3 * 2**20, 2: 2**20}
    monkeypatch.setattr(bench_memory, "temp_bytes", lambda c, o, mesh: fake[mesh.size])
    flags = "--mesh=2x1", f"--plot={tmp_path / 'm.png'}"
    records, lines = run("memory", *flags, capsys=capsys)
    assert [r["n"] for r in records] == [50_000, 100_000] * 2
    assert [r["mesh"] for r in records] == ["1x1"] * 2 + ["2x1"] * 2
    assert [line.split()[-2] for line in lines[2:]] == ["3.0", "3.0", "1.0", "1.0"]


@pytest.mark.wide
def test_memory_of_compiled_programs(few_cases, capsys):
    flags = "--n=64", "--mesh=2x1", "--batch_size=16"
    (one, two), _ = run("memory", *flags, capsys=capsys)
    assert one["divergence_temp_bytes"] > two["divergence_temp_bytes"] > 0


def test_a_compiler_without_an_account():
    record = {"n": 4, "d": 2, "cost": "c", "mesh": "1x1", "divergence_temp_bytes": None}
    assert bench_memory.SUITE.rows(record)[0][-1] == "unknown"
    assert bench_memory.SUITE.points(record) == []


# --------------------------------------------------------------------- convergence

# It gives back potentials that solve one problem of two points, and says that it did
# not; and others that solve nothing, and says that it did.
FAKE_PEER = f"""#!{sys.executable}
import json, sys
import numpy as np
for line in sys.stdin:
    request = json.loads(line)
    right = request["variant"] == "default"
    if request["variant"] == "decay":
        print(json.dumps(dict(error="out of ideas")), flush=True)
        continue
    g = np.full(2, 0.0 if right else np.nan)
    e = np.load(request["data"])["epsilon"]
    f = np.full(2, -e * np.log(2 * (1 + np.exp(-1 / e))))
    np.savez(request["out"], f=f, g=g, n_iters=7, converged=not right, value=np.nan)
    print(json.dumps(dict(seconds=1.0, version="9")), flush=True)
"""


@pytest.fixture
def two_points(monkeypatch):
    def clouds(n):
        x = np.arange(2.0)[:, None]
        return x, x

    monkeypatch.setattr(bench_convergence, "FAMILIES", {"two": clouds})


def test_convergence(two_points, capsys, tmp_path):
    python = tmp_path / "python"
    python.write_text(FAKE_PEER)
    python.chmod(0o755)
    flags = "--epsilons=0.5", "--mesh=1x1", f"--peer_python={python}"
    plot = f"--plot={tmp_path / 'c.png'}"
    assert bench.main(["--suite=convergence", *flags, plot]) == 0
    captured = capsys.readouterr()
    first, second = read(captured.out)
    assert [r["dtype"] for r in (first, second)] == ["float32", "float64"]
    assert first["peers"]["ott"]["unavailable"] == "out of ideas"
    for record in (first, second):
        own = record["runs"]["plain"]
        assert own["converged"] and own["flag"]
        assert own["error"] <= 1.1 * record["threshold"]
        assert own["passes"] == 2 * own["n_iters"]


def test_a_flag_is_not_believed(two_points, capsys, tmp_path, monkeypatch):
    """The marginals that count are those of the potentials."""
    python = tmp_path / "python"
    python.write_text(FAKE_PEER)
    python.chmod(0o755)
    others = {"ott default": "default", "ott momentum": "momentum"}
    monkeypatch.setattr(bench_convergence, "_OTT", others)
    flags = "--epsilons=0.5", "--thresholds=1e-3", "--mesh=1x1"
    flags = *flags, f"--peer_python={python}"
    (record,), lines = run("convergence", *flags, capsys=capsys)
    right, wrong = (record["runs"][name] for name in others)
    assert right["converged"] and not right["flag"] and right["error"] < 1e-3
    assert wrong["flag"] and not wrong["converged"] and wrong["error"] is None
    cells = dict(
        zip(*(map(str.strip, lines[k].split("|")) for k in (0, 2)), strict=True)
    )
    assert cells["ott default"] == "14"
    assert cells["ott momentum"] == "not in 14, says it did"
    labels = {point.label for point in bench_convergence.SUITE.points(record)}
    assert labels == {"plain", "default", "ott default"}


def test_marginal_errors_are_those_of_the_plan(monkeypatch):
    monkeypatch.setattr(bench_convergence, "_BLOCK", 3)
    rng = np.random.default_rng(0)
    x, y, f, g = (rng.random(shape) for shape in ((7, 2), (5, 2), 7, 5))
    plan = np.exp((f[:, None] + g - ((x[:, None] - y) ** 2).sum(-1)) / 0.7)
    found = bench_convergence.marginal_errors(x, y, f, g, 0.7)
    want = [np.abs(plan.sum(1 - k) - 1 / size).sum() for k, size in enumerate((7, 5))]
    np.testing.assert_allclose(found, want)


@pytest.mark.parametrize("family", bench_families.FAMILIES)
def test_families(family):
    if bench_families.missing(family):
        pytest.skip("needs scikit-learn")
    x, y = bench_families.FAMILIES[family](50)
    again = bench_families.FAMILIES[family](50)
    assert x.shape == y.shape == (50, x.shape[1])
    assert np.isfinite(x).all() and np.isfinite(y).all()
    np.testing.assert_array_equal(x, again[0])
    assert abs(x.mean(0) - y.mean(0)).max() > 0.01 * x.std()


def test_a_family_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(bench_families.importlib.util, "find_spec", lambda name: None)
    names = [name for name, _ in bench_convergence._families(10)]
    assert names == [name for name in bench_families.FAMILIES if name != "colours"]
    assert "no colours: " in (err := capsys.readouterr().err)
    assert "ott_shard[examples]" in err and err.count("\n") == 1


# ------------------------------------------------------------------------ CPU and GPU


def one_of_each(module, monkeypatch):
    """One dimension, two tiles."""
    for name, value in {
        "_DIMENSIONS": (2,),
        "_SWEPT": (2,),
        "_TILES": (16, 32),
    }.items():
        monkeypatch.setattr(module, name, value)


def check_sweep(record):
    speeds = record["pairs_per_second"]
    rows, cols = record["tile"]
    assert speeds.keys() == {"16x16", "16x32", "32x16", "32x32", f"{rows}x{cols}"}
    assert record["of_best"] == speeds[f"{rows}x{cols}"] / max(speeds.values())
    assert speeds[record["best"]] == max(speeds.values())


@pytest.mark.slow
def test_cpu(capsys, monkeypatch, tmp_path):
    one_of_each(bench_cpu, monkeypatch)
    monkeypatch.setattr("launch.bench_cases.temp_bytes", lambda *_: 1)
    monkeypatch.setattr(bench_cpu, "_FEW", (16,))
    flags = "--n=32", "--repeats=1", "--mesh=1x1", "--peer_python="
    records, lines = run("cpu", *flags, f"--plot={tmp_path / 'c.png'}", capsys=capsys)
    one, overhead, small, tiles = records
    assert [r["measured"] for r in records] == ["pass", "overhead", "small", "tiles"]
    assert one["pass"]["seconds"] > 0 and one["peers"] == {}
    times = (overhead[name]["seconds"] for name in ("sharded", "unsharded"))
    assert overhead["ratio"] == pytest.approx(next(times) / next(times))
    assert small["n"] == 16 and small["n_iters"] > 0 and small["solve"]["seconds"] > 0
    check_sweep(tiles)
    assert len(lines) == 2 + 5 + 1 + 1 + 1


def test_the_unsharded_pass_is_the_same(monkeypatch):
    """Or the overhead would be of something else."""
    seen = {}

    def keep(programs, repeats):
        seen.update({name: program.run() for name, program in programs.items()})
        return {name: {"seconds": 1.0} for name in programs}

    monkeypatch.setattr(bench_cpu, "measured", keep)
    case = bench_cpu.Case(40, 24, 3, "sqeuclidean")
    options = bench.parse(["--repeats=1"])
    bench_cpu._overhead(case, options, otts.make_mesh(1, 1))
    np.testing.assert_allclose(seen["sharded"], seen["unsharded"], rtol=1e-6)


def test_gpu(capsys, monkeypatch, tmp_path):
    """It runs wherever jax does."""
    one_of_each(bench_gpu, monkeypatch)
    flags = "--n=32", "--repeats=1", "--mesh=2x1", f"--plot={tmp_path / 'g.png'}"
    (limits, one, two, tiles), lines = run("gpu", *flags, capsys=capsys)
    assert limits["copy"]["bytes_per_second"] > 0
    assert limits["matmul"]["flops_per_second"] == pytest.approx(
        2 * 32**3 / limits["matmul"]["seconds"]
    )
    assert limits["exp"]["exponentials_per_second"] > 0
    assert (one["mesh"], two["mesh"]) == ("1x1", "2x1")
    for record, devices in ((one, 1), (two, 2)):
        own = record["pass"]["pairs_per_second"] / devices
        assert record["of_exp"] == pytest.approx(
            own / limits["exp"]["exponentials_per_second"]
        )
        copied = record["bytes_copied_in_the_time_of_a_pair"]
        assert copied * own == pytest.approx(limits["copy"]["bytes_per_second"])
        assert record["grad"]["passes"] > 0
        model = scanned(32 * 32 // devices, 2, 4, H200, guessed=True)
        assert record["of_model_of_h200"] == pytest.approx(own * model)
    check_sweep(tiles)
    assert len(lines) == 2 + 3 + 2 * 7 + 1


def test_gpu_stops_in_time(capsys, monkeypatch, tmp_path):
    """What is left out is said, and what was measured is there."""
    picture = tmp_path / "g.png"
    one_of_each(bench_gpu, monkeypatch)
    monkeypatch.setattr(bench_gpu, "_BUDGET_SECONDS", -1.0)
    flags = "--n=32", "--repeats=1", "--mesh=1x1", f"--plot={picture}"
    assert bench.main(["--suite=gpu", *flags]) == 0
    captured = capsys.readouterr()
    (record,) = read(captured.out)
    assert record["measured"] == "limits"
    assert "no time left for: pass at d = 2 on 1 devices\n" in captured.err
    assert "no time left for: tiles at d = 2\n" in captured.err
    assert f"bench: nothing to draw: no --plot={picture}\n" in captured.err
    assert not picture.exists()


# ---------------------------------------------------------------------------- tables


def test_a_table_is_markdown():
    text = bench_tables.table(("name", "n"), [("a", "1"), ("longer", "22")])
    assert text.splitlines() == [
        "| name   | n  |",
        "| ------ | -- |",
        "| a      | 1  |",
        "| longer | 22 |",
    ]
