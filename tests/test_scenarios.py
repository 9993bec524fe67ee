"""What users do, from end to end: cells of two time points, pairs for a flow."""

import jax
import numpy as np
import pytest

import ott_shard as otts
from launch import main as command, single_cell


@pytest.fixture(scope="module")
def cells():
    return single_cell.make_cells(600)


@pytest.fixture(scope="module")
def coupling(cells):
    return single_cell.couple(cells)


def test_fates_and_growth_are_found(cells, coupling):
    made = single_cell.GROWTH / (cells.types_before.mean(0) @ single_cell.GROWTH)
    np.testing.assert_allclose(coupling.growth, made, rtol=0.15)
    np.testing.assert_allclose(coupling.fates, single_cell.FATES, atol=0.1)
    own = cells.types_before.argmax(1)[coupling.ancestors]
    right = single_cell.FATES[own, cells.types_after.argmax(1)[:, None]] > 0
    assert coupling.ancestors.shape == (600, 10) and right.mean() > 0.99
    # Genes pushed to a cell are a mean of its ancestors'.
    assert coupling.genes.shape == (600, 500)
    assert np.all(coupling.genes >= cells.genes.min(0) - 1e-3)
    assert np.all(coupling.genes <= cells.genes.max(0) + 1e-3)
    text = single_cell.report(cells, coupling)
    assert text.splitlines()[1].startswith(f"   0{coupling.growth[0]:10.2f} (")


@pytest.mark.slow
def test_by_the_command(cells, coupling, tmp_path, capsys):
    """The same through files, a run's folder and the tasks that use it."""
    assert single_cell.main(["cells", str(tmp_path), "600"]) == 0
    for line in lines_of(single_cell.__doc__):
        task, *flags = line.replace("DIR", str(tmp_path)).split()[1:]
        assert command.main([task, *flags]) == 0
    to_types = np.load(tmp_path / "fates" / "apply.npy")
    genes = np.load(tmp_path / "genes" / "apply.npy")
    ancestors = np.load(tmp_path / "ancestors" / "match_indices.npy")
    by_command = single_cell.told(cells, to_types, genes, ancestors)
    for got, want in zip(by_command[:3], coupling[:3], strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)
    assert np.mean(ancestors == coupling.ancestors) > 0.99
    # Pairs are of types that go together, and cells move to descendants.
    i, j = np.load(tmp_path / "pairs" / "pairs.npy").T
    kinds = cells.types_before.argmax(1)[i], cells.types_after.argmax(1)[j]
    assert np.mean(single_cell.FATES[kinds] > 0) > 0.99
    moved = np.load(tmp_path / "moved" / "transport.npy")
    assert moved.shape == cells.before.shape
    low, high = cells.after.min(0) - 1e-3, cells.after.max(0) + 1e-3
    assert np.all((low <= moved) & (moved <= high))


def lines_of(text):
    """The lines of a docstring that call the command."""
    lines = text.replace("\\\n", " ").replace("\n        --", " --").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("ott-shard ")]


def test_usage(capsys):
    for argv in ([], ["cells"], ["cells", "d", "many"], ["couple", "d", "3"]):
        assert single_cell.main(argv) == 2
        assert capsys.readouterr().err.startswith("usage: ")


@pytest.mark.wide
def test_pairs_of_noise_and_digits():
    """The plan pairs them at a lower cost than chance does, each row once."""
    datasets = pytest.importorskip("sklearn.datasets", reason="of the extra examples")
    digits = (datasets.load_digits().data / 8 - 1).astype(np.float32)
    noise = np.random.default_rng(0).normal(size=digits.shape).astype(np.float32)
    options = dict(epsilon=0.02, relative_epsilon="mean", mesh=otts.make_mesh(1, 1))
    geom = otts.PointCloud(noise, digits, **options)
    out = otts.solve(geom, threshold=1e-2)
    out.raise_if_failed()

    def cost(i, j):
        return np.sum((noise[i] - digits[j]) ** 2, axis=1).mean()

    n, key = len(digits), jax.random.key(0)
    at_random = cost(np.arange(n), np.random.default_rng(1).permutation(n))
    i, j = (np.asarray(side) for side in out.sample(key, n, method="systematic"))
    np.testing.assert_array_equal(np.sort(i), np.arange(n))
    assert cost(i, j) < 0.9 * at_random
    np.testing.assert_allclose(cost(i, j), out.primal_cost, rtol=0.02)
    best = out.assignment()
    np.testing.assert_array_equal(np.sort(best.indices), np.arange(n))
    assert best.cost <= float(out.primal_cost)
    seen = []
    for i, j in out.batches(key, 256):
        seen.append(np.asarray(i))
        assert cost(seen[-1], np.asarray(j)) < 0.93 * at_random
    seen = np.concatenate(seen)
    assert len(set(seen)) == len(seen) == 7 * 256
