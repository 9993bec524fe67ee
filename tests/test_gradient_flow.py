"""The example: it comes near, with one program, and steps that lead up are halved."""

import itertools

import jax
import numpy as np
import pytest

import ott_shard as otts
from launch import gradient_flow as example


def compiled(caplog):
    """Names of what was compiled, while JAX logged it."""
    words = [record.getMessage().split() for record in caplog.records]
    return [word[1] for word in words if word[0] == "Compiling"]


@pytest.mark.wide
def test_one_program_for_all_epsilons(caplog):
    rng = np.random.default_rng(0)
    x, y = example.disc(203, rng), example.moons(203, rng)
    mesh = otts.make_mesh(4, 2)
    with jax.log_compiles():
        program = example.compiled_loss(203, mesh)
        epsilons, divergences, places = zip(*example.flow(program, x, y), strict=True)
    assert compiled(caplog).count("jit(loss)") == 1
    assert sorted(set(epsilons), reverse=True) == list(example.EPSILONS)
    for epsilon in example.EPSILONS:
        of_epsilon = [
            d for e, d in zip(epsilons, divergences, strict=True) if e == epsilon
        ]
        assert len(of_epsilon) == example.STEPS + 1
        assert all(b <= a for a, b in itertools.pairwise(of_epsilon))

    def divergence(x):
        options = dict(epsilon=example.EPSILONS[-1], mesh=mesh)
        options["threshold"] = example.THRESHOLD
        return float(otts.sinkhorn_divergence(x, y, **options)[0])

    np.testing.assert_allclose(divergences[-1], divergence(places[-1].x), atol=1e-6)
    assert 100 * divergences[-1] < divergence(x)


def test_steps_that_lead_up_are_halved():
    def look(x):
        return example.Place(x, float(x @ x), 5 * x)  # a fifth of a step is best

    places = itertools.islice(example.descend(look, np.ones(1)), 4)
    np.testing.assert_allclose([float(p.x[0]) for p in places], [1, 1, 1, -0.25])


@pytest.mark.slow
def test_command(tmp_path, capsys):
    assert example.main(["--n=50", f"--out={tmp_path / 'x.npy'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 program compiled")
    assert len(lines) == 3 + len(example.EPSILONS) * (example.STEPS + 1)
    assert np.load(tmp_path / "x.npy").shape == (50, 2)


@pytest.mark.slow
def test_lbfgs_has_one_program_for_all_epsilons(caplog):
    rng = np.random.default_rng(0)
    x, y = example.disc(103, rng), example.moons(103, rng)
    with jax.log_compiles():
        steps = list(example.lbfgs_flow(x, y, otts.make_mesh(4, 2)))
    assert compiled(caplog).count("jit(step)") == 1
    epsilons, divergences, _ = zip(*steps, strict=True)
    assert sorted(set(epsilons), reverse=True) == list(example.EPSILONS)
    assert len(steps) == len(example.EPSILONS) * example.STEPS
    assert 50 * divergences[-1] < divergences[0]
