"""The tasks devices, estimate and report; --require, and devices that are left idle."""

import json
import re
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import reference as ref

from launch import devices, estimate, flags, pictures, results, tasks
from launch.config import Estimate
from launch.main import main

DEMO = "--demo=discs --n=203 --epsilon_unit=mean"


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """A folder with input, and a run in `run`."""
    folder = tmp_path_factory.mktemp("more")
    p = ref.problem(13, 21)
    for name, array in {
        **{"x": p.x, "y": p.y, "b": p.b, "flat": p.x[:, :2]},
        **{"words": np.array([["a", "b"]]), "number": np.float64(3)},
    }.items():
        np.save(folder / f"{name}.npy", array)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = f"solve {DEMO} --grad --mesh=4x2 --out=run"
        assert main(run.split()) == 0
    return folder


@pytest.fixture
def folder(solved, monkeypatch):
    """The folder of `solved`, as the working directory."""
    monkeypatch.chdir(solved)
    return solved


def read(path) -> dict:
    return json.loads(path.read_text())


def refused(typed: str, capsys, *wanted: str):
    """One line that says all that is wanted, and exit code 2."""
    assert main(typed.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ott-shard: error: ")
    assert captured.err.count("\n") == 1
    for text in wanted:
        assert text in captured.err


# -------------------------------------------------------------------------- devices


def test_devices(capsys):
    assert main(["devices"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    first, second, third, *rest, last = captured.out.splitlines()
    assert first.split() == ["backend", "cpu"]
    assert second.split() == ["process", "0", "of", "1"]
    assert third.split()[1:] == "8 here, 8 in all".split()
    assert [line.split()[0] for line in rest] == [f"cpu:{k}" for k in range(8)]
    assert last.split()[:2] == ["mesh", "4x2:"]


def test_devices_say_what_memory_they_have(monkeypatch, capsys):
    class Gpu:
        platform, id, device_kind = "gpu", 0, "NVIDIA X"

        def memory_stats(self):
            return {"bytes_limit": 60 * 2**30}

    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu()])
    assert main(["devices", "--mesh=8x1"]) == 0
    assert "gpu:0        NVIDIA X, 60.0 GiB for JAX" in capsys.readouterr().out


@pytest.mark.parametrize(
    "task", [f"solve {DEMO}", "devices", f"estimate {DEMO}", "match --run=run --k=2"]
)
def test_require(task, folder, capsys):
    before = sorted(folder.rglob("*"))
    wanted = ("--require=gpu: JAX computes on cpu", "ott_shard[cuda13]")
    refused(f"{task} --require=gpu", capsys, *wanted, "CUDA_VISIBLE_DEVICES empty")
    assert sorted(folder.rglob("*")) == before


def test_require_without_any_backend(monkeypatch, capsys):
    def none():
        raise RuntimeError("Unable to initialize backend 'cuda'\nat all")

    monkeypatch.setattr(jax, "default_backend", none)
    refused("devices --require=cpu", capsys, "Unable to initialize backend 'cuda':")
    devices.require(None)


def test_what_is_required_is_there(capsys):
    assert main(["devices", "--require=cpu"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "typed", ["devices", "match --run=run --k=2", "solve --x=x.npy --y=flat.npy"]
)
def test_idle_devices_are_told(typed, folder, tmp_path, capsys):
    """One line, before anything is computed, or refused."""
    out = [] if typed == "devices" else [f"--out={tmp_path}"]
    code = main([*typed.split(), "--mesh=2x1", *out])
    warning, *errors = capsys.readouterr().err.splitlines()
    assert warning == "ott-shard: warning: mesh 2x1 leaves 6 of 8 devices idle"
    assert len(errors) == (code == 2) == typed.startswith("solve")


# ------------------------------------------------------------------------- estimate


@pytest.mark.parametrize("typed", ["8", "2.5", "80GB", "80GiB", "1.5MB", "3KiB"])
def test_bytes(typed):
    number, unit = re.fullmatch(r"([\d.]+)(.*)", typed).groups()
    factors = {"": 1, "GB": 1e9, "GiB": 2**30, "MB": 1e6, "KiB": 1024}
    parsed = flags.parse([f"--memory={typed}"]).values["memory"]
    assert parsed == int(float(number) * factors[unit])


def test_estimate_is_what_a_run_records(folder, capsys):
    """Of a problem that was solved, by the same program."""
    typed = f"estimate {DEMO} --grad --mesh=4x2 --memory=1GiB --max_iterations=50"
    before = {path: path.read_bytes() for path in (folder / "run").iterdir()}
    assert main([*typed.split(), "--out=run"]) == 0
    record, run = read(folder / "run/estimate.json"), read(folder / "run/result.json")
    (folder / "run/estimate.json").unlink()
    assert {path: path.read_bytes() for path in (folder / "run").iterdir()} == before
    assert record["temp_bytes_per_device"] == run["temp_bytes_per_device"] > 0
    assert record["backward"]["temp_bytes"] == run["temp_bytes_per_device"]
    for name in ("n", "m", "d", "mesh", "devices", "dtype", "cost", "demo"):
        assert record[name] == run[name]
    assert (record["task"], record["of"]) == ("estimate", "solve")
    assert record["bytes_per_device"] == max(
        sum(record[name].values()) for name in ("forward", "backward")
    )
    assert (record["memory"], record["fits"], record["would_fit"]) == (
        2**30,
        True,
        None,
    )
    # Padded to 208: 52 rows by 104 columns on a device; x, y and their weights.
    assert record["tile"] == [52, 104]
    assert record["forward"]["argument_bytes"] == 4 * 3 * (52 + 104)
    # Maxima and sums of the rows, along the columns of the mesh, and the reverse.
    assert sorted(record["all_reduces"]["xy"]) == [208, 208, 416, 416]
    pace = record["seconds_per_iteration"]["xy"]
    assert record["seconds"] == pytest.approx(50 * pace)
    text = capsys.readouterr().out
    for words in (
        *("estimate of solve: x [203, 2]", "(mesh 4x2)", "tile           52x104"),
        *("per device, of 1.00 GiB: fits", "2 x 208 B + 2 x 416 B all-reduces"),
        "for 50 iterations",
    ):
        assert words in text


def test_estimate_of_files(folder, capsys):
    """Another number type and task, on one device: nothing travels."""
    typed = "estimate --x=x.npy --y=y.npy --b=b.npy --dtype=float64 --cost=euclidean"
    assert main([*typed.split(), "--mesh=1x1", "--batch_size=8", "--out=est"]) == 0
    record = read(folder / "est/estimate.json")
    assert [path.name for path in (folder / "est").iterdir()] == ["estimate.json"]
    assert record["forward"]["argument_bytes"] == 8 * (13 + 21) * 4
    assert (record["tile"], record["all_reduces"]) == ([8, 8], {"xy": []})
    assert (record["memory"], record["fits"]) == (None, None)
    assert record["backward"] is None
    assert record["inputs"]["b"] == str(folder / "b.npy")
    text = capsys.readouterr().out
    assert "of unknown: nobody knows if it fits" in text
    assert "no all-reduces" in text


def test_what_does_not_fit(tmp_path, capsys):
    typed = "estimate --demo=discs --n=2000 --mesh=1x1 --epsilon=1 --batch_size=128"
    assert main([*typed.split(), "--memory=100KB", f"--out={tmp_path}"]) == 4
    record = read(tmp_path / "estimate.json")
    assert record["fits"] is False and record["memory"] == 100_000
    text = capsys.readouterr().out
    assert "of 97.66 KiB: does not fit" in text
    assert f"would fit      {record['would_fit']}" in text
    assert "--batch_size=128" in record["would_fit"]


def test_what_would_fit():
    """The largest tile that was seen to fit; else, about, a larger mesh."""
    sizes, needed = (2000, 2000, 3), {1024: 900, 512: 500, 256: 400, 128: 350}

    def said(limit):
        return estimate._would_fit(devices.make_mesh((2, 1)), sizes, needed, limit)

    assert said(500) == "a smaller tile, --batch_size=512"
    assert said(380) == "a smaller tile, --batch_size=128"
    # From 1,000 rows and 2,000 columns to half as many together: 500 and 1,000.
    assert said(175) == "about 8 devices, --mesh=4x2 --batch_size=128"
    assert said(300) == "about 4 devices, --mesh=2x2 --batch_size=128"
    assert said(1) == "fewer points: not even 65536 devices would do"


def test_smaller_tiles_are_tried(monkeypatch):
    config, mesh, sizes = (
        of_demo("--n=2000"),
        devices.make_mesh((1, 1)),
        (2000, 2000, 2),
    )
    monkeypatch.setattr(
        estimate,
        "_memory",
        lambda config, *_: estimate.Memory(1, 2, config.batch_size[0] ** 2),
    )
    found = estimate._smaller_tiles(config, mesh, sizes, [512, 300])
    assert found == {256: 256**2 + 3, 128: 128**2 + 3}


def of_demo(more: str) -> Estimate:
    typed = f"--demo=discs --epsilon_unit=mean {more}"
    return Estimate.of("estimate", flags.parse(typed.split()).values)


def test_terms_of_a_divergence():
    """Of a cloud with itself there is one pass, unless the marginals differ."""
    mesh = devices.make_mesh((4, 2))
    config = of_demo("--n=208 --task=divergence")
    shapes = tasks.shapes(mesh, (208, 208, 2), "float32")
    problems = estimate._posed(config, mesh, shapes)
    assert list(problems) == ["xy", "xx", "yy"]
    assert estimate._all_reduces(config, "xx", problems["xx"]) == [416, 416]
    paces = estimate._time(config, problems)["seconds_per_iteration"]
    assert paces["xy"] == pytest.approx(2 * paces["xx"])
    config = of_demo("--n=208 --task=divergence --tau_a=0.5")
    paces = estimate._time(config, problems)["seconds_per_iteration"]
    assert paces["xy"] == pytest.approx(paces["xx"])


def test_estimate_holds_no_clouds(monkeypatch):
    """No machine could hold these."""
    config, mesh = of_demo("--n=1000000000"), devices.make_mesh((4, 2))
    monkeypatch.setattr(estimate, "_seconds_of_update", lambda *_: 1.0)
    record = estimate.measure(config, mesh, estimate._shapes(config))
    assert record["forward"]["argument_bytes"] == 4 * 3 * (250_000_000 + 500_000_000)
    # So large, passes are made with guesses: flags of a byte tell how good they were.
    assert sorted(record["all_reduces"]["xy"]) == [1, 1, 10**9, 2 * 10**9]


# --------------------------------------------------------------------------- report


def test_report(folder, tmp_path, capsys):
    assert main(["report", "--run=run", "--mesh=4x2", f"--out={tmp_path}"]) == 0
    names = ["convergence.png", "clouds.png"]
    for name in names:
        assert is_picture((tmp_path / name).read_bytes())
    record = read(tmp_path / "report.json")
    assert (record["files"], record["shapes"]) == (names, {})
    assert (record["task"], record["run"]) == ("report", f"{folder}/run")
    assert {path.name for path in tmp_path.iterdir()} == {*names, "report.json"}
    text = capsys.readouterr().out
    assert text.startswith("report: of run (x [203, 2]")
    assert "pictures       convergence.png, clouds.png" in text
    assert "matplotlib.pyplot" not in sys.modules


def is_picture(png: bytes) -> bool:
    return png.startswith(b"\x89PNG\r\n\x1a\n") and len(png) > 5000


@pytest.mark.parametrize("d", [1, 2, 5])
def test_clouds_of_any_dimension(d):
    """Also with a point that the plan sends nowhere; the same every time."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 40, d)) + 1e4
    weights = np.r_[np.zeros(3), np.ones(40)]  # the last are of padding
    plan = SimpleNamespace(
        geom=SimpleNamespace(x=x, y=y),
        problem=SimpleNamespace(a=weights, b=weights),
        to_dual_potentials=lambda: SimpleNamespace(transport=moved),
    )

    def moved(points):
        return np.where(points[:, :1] > points[:, :1].min(), points + 1, np.nan)

    png = pictures.clouds(plan)
    assert is_picture(png)
    assert pictures.clouds(plan) == png


def test_convergence_of_several_terms():
    """In a logarithm, also of a run that never came to a number."""
    record = {
        **{"task": "divergence", "status": "NOT_FINITE", "threshold": 1e-3},
        **{"terms": ["xy", "xx"], "n_iters": [20, 10], "errors": [[1, 0.1], [None]]},
    }
    assert is_picture(pictures.convergence(record))


def test_a_later_run_removes_pictures(tmp_path):
    for name in ("report.json", "clouds.png", "convergence.png", "other.png"):
        (tmp_path / name).write_text("earlier")
    results.write(
        str(tmp_path), "solve", {"n": 1}, {"f": results.Rows(np.zeros(2), 2)}, print
    )
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"result.json", "f.npy", "other.png"}


def test_segments_lead_to_where_the_plan_sends_points(folder, tmp_path, monkeypatch):
    """They are of the run's own plan, as transport computes it."""
    drawn = []
    monkeypatch.setattr(pictures, "_fill_clouds", lambda *args: drawn.append(args))
    assert main(["report", "--run=run", "--mesh=4x2", f"--out={tmp_path}"]) == 0
    ((_, points, (starts, ends), labels),) = drawn
    x, y = ref.discs(203)
    assert [cloud.shape for cloud in points] == [(203, 2), (203, 2)]
    np.testing.assert_array_equal(np.sort(points[1], 0), np.sort(y, 0))
    np.testing.assert_array_equal(np.sort(starts, 0), np.sort(x, 0))
    np.save(tmp_path / "starts.npy", starts)
    typed = f"transport --run=run --points={tmp_path}/starts.npy --out={tmp_path}"
    assert main([*typed.split(), "--mesh=4x2"]) == 0
    np.testing.assert_allclose(ends, np.load(tmp_path / "transport.npy"), rtol=1e-6)
    assert labels == ("coordinate 1", "coordinate 2")


def test_histories():
    """Iterations of the checks, the last of which may be early; no logarithm of 0."""
    record = {"n_iters": 7, "inner_iterations": 5, "errors": [0.5, None]}
    ((term, iterations, errors),) = pictures.histories(record)
    assert (term, list(iterations)) == ("xy", [5, 7])
    np.testing.assert_array_equal(errors, [0.5, np.nan])
    older = {"terms": ["xy", "xx"], "n_iters": [20, 3], "errors": [[1, 0.1], [0.0]]}
    (_, iterations, _), (term, short, errors) = pictures.histories(older)
    assert (list(iterations), term, list(short)) == ([10, 20], "xx", [3])
    assert np.isnan(errors).all()


def test_principal_components():
    """Two directions of the most variance, of both clouds together, with one sign."""
    rng = np.random.default_rng(0)
    base = np.linalg.qr(rng.normal(size=(6, 6)))[0][:2]
    plane = rng.normal(size=(2, 50, 2)) * [3, 1]
    x, y = plane @ base + 100
    ((flat_x, ends), (flat_y, _), labels) = pictures.flat((x, x[:3]), (y, y[:3]))
    np.testing.assert_array_equal(ends, flat_x[:3])
    np.testing.assert_allclose(
        np.linalg.norm(flat_x - flat_y, axis=1), np.linalg.norm(x - y, axis=1)
    )
    assert labels[0].startswith("component 1 (") and "component 2" in labels[1]


def test_without_matplotlib(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    before = sorted(folder.rglob("*"))
    wanted = "needs matplotlib: pip install 'ott_shard[report]'"
    refused("report --run=run", capsys, f"report: {wanted}")
    assert sorted(folder.rglob("*")) == before


# -------------------------------------------------------------------------- refusals

REFUSED = [
    ("devices --out=d", "--out is for solve", "not for devices: leave it out"),
    ("devices --epsilon=1", "or estimate, not for devices: leave it out"),
    ("devices --mesh=100x2", "--mesh=100x2: needs 200 devices"),
    ("devices --require=fpga", "--require=fpga: must be one of cpu, gpu, tpu"),
    (f"solve {DEMO} --memory=1GB", "--memory is for estimate, not for solve"),
    ("estimate", "--x is missing"),
    (f"estimate {DEMO} --task=match", "--task=match: must be one of solve, divergence"),
    *(
        (f"estimate {DEMO} --memory={size}", f"--memory={size}: must be bytes, such as")
        for size in ("much", "0", "-1GB", "1.2.3GB", "80gib")
    ),
    ("estimate --x=gone.npy --y=y.npy", "--x=gone.npy: no such file"),
    ("estimate --x=b.npy --y=y.npy", "--x=b.npy: x must have shape [n, d], got (21,)"),
    ("estimate --x=words.npy --y=y.npy", "--x=words.npy: must hold real numbers"),
    (
        "estimate --x=number.npy --y=y.npy",
        "--x=number.npy: must be [n] or [n, d], got ()",
    ),
    ("estimate --x=x.npy --y=flat.npy", "--x=x.npy --y=flat.npy:", "got 3 and 2"),
    ("estimate --x=x.npy --y=y.npy --a=b.npy", "--a=b.npy: a must have shape (13,)"),
    (f"estimate {DEMO} --min_iterations=3000", "--min_iterations=3000", "at most"),
    (f"estimate {DEMO} --cost=pnormp:0.5", "--cost=pnormp:0.5: p must be"),
    (f"estimate {DEMO} --out=x.npy", "--out=x.npy", "is a file"),
    ("report", "--run is missing: report needs it"),
    ("report --run=gone", "--run=gone: no such directory"),
    ("report --run=run --k=2", "--k is for match, not for report"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_refused(case, folder, capsys):
    typed, *wanted = case
    before = sorted(folder.rglob("*"))
    refused(typed, capsys, *wanted)
    assert sorted(folder.rglob("*")) == before
