"""The measurements: one line of JSON per case, whatever the peers do."""

import contextlib
import json
import math
import sys

import numpy as np
import pytest

import ott_shard as otts
from launch import bench, bench_cases, bench_limits, bench_options, bench_timing
from launch.bench_peers import PassTask, start

ONE_DEVICE = "--mesh=1x1 --batch_size=512x1024"

# It stands in for the Python of another environment: "ott" is right, "keops" is not.
FAKE_PEER = f"""#!{sys.executable}
import json, sys
import numpy as np
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "values":
        p = np.load(request["data"])
        z = p["h"] - ((p["x"][:, None] - p["y"]) ** 2).sum(-1) / p["epsilon"]
        top = z.max(1)
        values = top + np.log(np.exp(z - top[:, None]).sum(1))
        np.savez(request["out"], values=values + (request["peer"] == "keops"))
    answer = dict(seconds=1.0 + (request.get("batch") != 128), version="9")
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def fake_python(tmp_path):
    python = tmp_path / "python"
    python.write_text(FAKE_PEER)
    python.chmod(0o755)
    return python


@pytest.fixture
def no_memory(monkeypatch):
    """What is compiled for the account of memory; tested below."""
    monkeypatch.setattr(bench_cases, "temp_bytes", lambda *_: 1)


def read(lines):
    """Records, refusing what JSON has no word for."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in lines.splitlines()]


def check_head(record, *sizes):
    assert tuple(record[key] for key in "nmd") == sizes
    assert (record["dtype"], record["platform"]) == ("float32", "cpu")
    assert record["versions"].keys() >= {"python", "jax", "jaxlib"}
    assert len(record["load_average"]) == 3
    assert record["cpu_count"] > 0
    assert record["device_kind"]
    assert record["divergence_temp_bytes"] > 0
    assert record["tile"] == [512, 1024]
    assert record["mesh"] == "1x1"


@pytest.mark.slow
def test_a_case_with_peers(fake_python, capfd, no_memory):
    """One peer agrees and is compared with, the other is refused; the run goes on."""
    job = f"--cases=256x64:3:sqeuclidean --repeats=2 {ONE_DEVICE}"
    assert bench.main([*job.split(), f"--peer_python={fake_python}"]) == 0
    out, err = capfd.readouterr()
    (record,) = read(out)
    check_head(record, 256, 64, 3)
    own = record["pass"]["seconds"]
    ours = [
        record[name] for name in ("pass", "grad", "pass_and_grad", "exp_sum", "dot")
    ]
    for timing in (*ours, {**record["peers"]["ott"], "seconds_by_batch": 1}):
        numbers = [timing[key] for key in timing if key != "version"]
        assert all(math.isfinite(number) and number > 0 for number in numbers)
        assert timing["seconds_min"] <= timing["seconds"] <= timing["seconds_max"]
    for timing in ours[1:3]:
        assert timing["passes"] == pytest.approx(timing["seconds"] / own)
    assert ours[0]["pairs_per_second"] == pytest.approx(256 * 64 / own)
    peer = record["peers"]["ott"]
    assert (peer["batch"], peer["version"], peer["seconds"]) == (128, "9", 1.0)
    assert peer["seconds_by_batch"] == {"128": 1.0, "256": 2.0}
    assert peer["max_abs_difference"] < 1e-3
    assert peer["ratio"] == pytest.approx(1 / own)
    assert "values differ by 1" in record["peers"]["keops"]["unavailable"]
    assert err.count("\n") == 1
    assert err.startswith("bench: peer keops unavailable: values differ by 1")


@pytest.mark.wide
def test_memory_only(capsys, monkeypatch):
    """Compiled for but never solved."""
    monkeypatch.setattr("ott_shard.solve", None)
    job = f"--cases=64x41:3:sqeuclidean --memory_only {ONE_DEVICE}"
    assert bench.main(job.split()) == 0
    (record,) = read(capsys.readouterr().out)
    check_head(record, 64, 41, 3)
    assert record["cost"] == "sqeuclidean"
    assert "pass" not in record


def test_a_line_per_case(tmp_path, capsys, no_memory):
    """Lines are appended to the file as well."""
    out = tmp_path / "lines.json"
    out.write_text("earlier\n")
    job = f"--cases=64:2:sqeuclidean,50:9:euclidean {ONE_DEVICE} --out={out}"
    assert bench.main([*job.split(), "--memory_only"]) == 0
    captured = capsys.readouterr()
    assert out.read_text() == "earlier\n" + captured.out
    assert captured.err == ""
    first, second = read(captured.out)
    check_head(first, 64, 64, 2)
    check_head(second, 50, 50, 9)
    assert second["cost"] == "euclidean"


@pytest.mark.parametrize("sizes", [(64, 40), (1, 1)])
def test_limits_go_through_all_pairs(sizes, monkeypatch):
    """On several devices and tiles, and on fewer points than devices."""
    monkeypatch.setattr(bench_limits, "_TILE", 8)
    case, mesh = bench_options.Case(*sizes, 3, "euclidean"), otts.make_mesh(2, 1)
    x, y = bench_limits._tiles(case, mesh)
    assert x[..., 0].size == max(sizes[0], mesh.size)
    assert len(x.sharding.device_set) == mesh.size
    flat = y.reshape(-1, 3)
    want = np.exp(x[..., :1] + flat[:, 0]).sum(-1)
    sums = bench_limits._scanned(bench_limits._exponentials)(x[..., 0], y[..., 0])
    np.testing.assert_allclose(sums, want, rtol=1e-5)
    products = bench_limits._scanned(bench_limits._products)(x, y.swapaxes(1, 2))
    np.testing.assert_allclose(products, (x @ flat.T).sum(-1), rtol=1e-4, atol=1e-4)


def test_a_peer_that_ends_while_measured(fake_python):
    """It becomes unavailable, and the others still take their turns."""
    points = np.zeros((2, 1), np.float32)
    h = np.zeros(2, np.float32)
    values = np.full(2, np.log(2), np.float32)
    task = PassTask(points, points, h, np.float32(1), "sqeuclidean", values)
    with contextlib.ExitStack() as stack:
        peers, records = start(stack, str(fake_python), "cpu", task)
        assert peers.keys() == {"ott"}
        fake_python.unlink()
        peers["ott"].worker.kill()
        timers = {"ott": peers["ott"].seconds, "own": lambda: 1.0}
        samples = bench_timing.take_turns(timers, 2, records)
    assert samples == {"own": [1.0, 1.0]}
    assert "no answer to 'time'" in records["ott"]["unavailable"]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--cases=64:3", "--cases=64:3: must be n:d:cost"),
        ("--cases=64:3:manhattan", "sqeuclidean or euclidean"),
        ("--cases=0:3:euclidean", "must be n:d:cost"),
        ("--cases=1x2x3:3:euclidean", "must be n:d:cost"),
        ("--repeats=0", "--repeats=0: must be an integer from 1"),
        ("--mesh=100x2", "200 devices"),
        ("--cpu_devices=3", "new process"),
        ("--peer_python=/gone", "--peer_python=/gone: no such program"),
        ("--out=gone/lines.json", "--out=gone/lines.json: not writable"),
        ("--speed=1", "'speed'"),
        ("64", "unexpected argument '64'"),
        ("--suite=tpu", "--suite=tpu: must be one of cpu, gpu"),
        ("--suite=gpu --cases=64:3:euclidean", "--cases: means nothing with --suite="),
        ("--n=64", "--n: means nothing with no --suite"),
        ("--suite=cpu --epsilons=0.1", "--epsilons: means nothing with --suite=cpu"),
        ("--suite=convergence --epsilons=1,0", "--epsilons=1,0: must be numbers"),
        ("--suite=scaling --plot=gone/a.png", "--plot=gone/a.png: not writable"),
        ("--suite=scaling --plot=a.pdf", "--plot=a.pdf: must end in .png"),
    ],
)
def test_refused_in_one_line(flags, wanted, capsys):
    assert bench.main(flags.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bench: error: ")
    assert captured.err.count("\n") == 1
    assert wanted in captured.err


def test_a_plot_needs_matplotlib(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench.main(["--suite=scaling", "--plot=a.png"]) == 2
    assert "pip install 'ott_shard[report]'" in capsys.readouterr().err


def test_help(capsys):
    assert bench.main(["--help"]) == 0
    text = capsys.readouterr().out
    names = "cases", "mesh", "memory_only", "suite", "plot"
    assert all(f"\n  --{name}" in text for name in names)
