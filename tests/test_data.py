"""Clouds from files: what is read of them, by whom, and in what memory."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from array_files import cloud, write_deflated, write_npy

import ott_shard as otts
from launch import config, data, estimate, flags
from launch.data import Clouds
from launch.errors import Refused
from launch.formats import Sliced, Source
from launch.main import _KINDS
from launch.sources import _Checked, open_source

ROOT = Path(__file__).parent.parent


def command(line):
    return config.resolve(*flags.parse(line.split()), _KINDS)


@pytest.fixture
def spans(monkeypatch):
    """The rows that files are asked for."""
    spans, rows = [], _Checked.rows

    def counted(self, start, stop):
        spans.append((start, stop))
        return rows(self, start, stop)

    monkeypatch.setattr(_Checked, "rows", counted)
    return spans


def holes(path, shape, dtype="<f8"):
    """A file of zeros which takes no room on the disk."""
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_2_0(file, header)
        file.truncate(file.tell() + np.dtype(dtype).itemsize * int(np.prod(shape)))
    return path


@pytest.mark.parametrize("count", [1, 2])
def test_an_estimate_reads_no_rows(count, tmp_path, spans, monkeypatch):
    path = holes(tmp_path / "x.npy", (10**9, 5))
    monkeypatch.setattr(jax, "process_count", lambda: count)
    shapes = estimate._shapes(command(f"estimate --x={path} --y={path}"))
    assert shapes.x == jax.ShapeDtypeStruct((10**9, 5), "float32")
    assert not spans


def test_one_of_several_processes_opens_and_does_not_read(tmp_path, spans, monkeypatch):
    path = holes(tmp_path / "x.npy", (10**9, 5))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    clouds, inputs = data.load(command(f"solve --x={path} --y={path}"))
    assert isinstance(clouds.x, Source) and clouds.sizes == (10**9, 10**9)
    assert clouds.a is None and inputs["x"].shape == [10**9, 5]
    assert sum(stop - start for start, stop in spans) * 40 <= 2 * 2**22  # fingerprints


def test_the_demo_is_spread_like_files(monkeypatch):
    demo = command("solve --demo=discs --n=30")
    whole, _ = data.load(demo)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    clouds, _ = data.load(demo)
    monkeypatch.undo()
    placed = data.spread(clouds, otts.make_mesh(4, 2), "float32")
    np.testing.assert_array_equal(placed.x[:30], whole.x)


@pytest.mark.parametrize("block", [1, 200, 2**26])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_spread_in_blocks(block, dtype, tmp_path, spans, monkeypatch):
    """Values, padding and weights; every row is read once, in order, block by block."""
    monkeypatch.setattr(data, "_BLOCK", block)
    x, mesh, beats = cloud(203, dtype="float64"), otts.make_mesh(4, 2), []
    path, key = write_deflated(tmp_path, x)
    sources = [open_source("--x", f"{path}#{k}") for k in (key, "y")]
    with jax.enable_x64(dtype == "float64"):
        clouds = Clouds(*sources, None, Sliced(np.arange(3.0)))
        placed = data.spread(clouds, mesh, dtype, beats.append)
        assert placed.x.dtype == placed.a.dtype == dtype
        np.testing.assert_array_equal(placed.x[:203], x.astype(dtype))
        np.testing.assert_array_equal(placed.y[3:], x[[2] * 5].astype(dtype))
        uniform = np.repeat([1 / 203, 0], [203, 5]).astype(dtype)
        np.testing.assert_array_equal(placed.a, uniform)
        np.testing.assert_array_equal(placed.b, [0, 1, 2, 0, 0, 0, 0, 0])
    own = [span for span in spans if span[1] > 3]
    assert [start for start, _ in own][1:] == [stop for _, stop in own][:-1]
    assert max(stop - start for start, stop in spans) <= max(1, block // 40)
    assert len(beats) > len(spans)


@pytest.mark.parametrize("broken", [True, False])
def test_an_error_while_rows_are_read_is_told_to_all(
    broken, tmp_path, monkeypatch, capsys
):
    """By the process that reads them; this one ends too if it is another."""
    path, _ = write_npy(tmp_path, cloud())
    source, fine = open_source("--x=x.npy", str(path)), Sliced(cloud(9))
    os.truncate(path, 9000)
    told = []

    def gathered(own):
        told.append(own)
        return np.array([own, [not own[0]]])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(data.processes, "_gathered", gathered)
    with pytest.raises(Refused):
        clouds = Clouds(source if broken else fine, fine, None, None)
        data.spread(clouds, otts.make_mesh(1, 1), "float32")
    assert told == [[broken]]
    said = capsys.readouterr().err
    assert ("--x=x.npy: is not a whole .npy file" in said) == broken


MEASURED = """
import resource, sys
import jax
import numpy as np
import ott_shard as otts
from launch import data
from launch.formats import Sliced
from launch.sources import open_source

jax.config.update("jax_num_cpu_devices", 1)
mesh, one = otts.make_mesh(), Sliced(np.ones((1, 10)))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

data.spread(data.Clouds(one, one, None, None), mesh, "float32")
before = peak()
"""


@pytest.mark.parametrize("how", ["alone", "spread"])
def test_a_float64_file_in_a_float32_run(how, tmp_path):
    """400 MiB in the file: 200 in the run, a copy to the device, a block of 64."""
    path = holes(tmp_path / "x.npy", (2**20, 50))
    code = {
        "alone": "data.read('--x', sys.argv[1], 'float32')\nlimit = 200 + 64",
        "spread": "source = open_source('--x', sys.argv[1])\n"
        "clouds = data.Clouds(source, Sliced(np.ones((1, 50))), None, None)\n"
        "data.spread(clouds, mesh, 'float32')\nlimit = 2 * 200 + 64",
    }[how]
    check = "\nassert peak() - before < limit + 40, peak() - before"
    call = [sys.executable, "-c", MEASURED + code + check, str(path)]
    subprocess.run(call, check=True, cwd=ROOT, timeout=120)
