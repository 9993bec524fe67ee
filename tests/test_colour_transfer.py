"""The example: what a step down the gradient does, and its arguments."""

import jax
import numpy as np
import reference as ref

import ott_shard as otts
from launch import colour_transfer


def test_points_move_to_their_barycentres():
    p = ref.problem(13, 21, zeros=False)
    x, y, *_ = p.cast(np.float32)

    @jax.jit
    @jax.value_and_grad
    def loss(x):
        geom = otts.PointCloud(x, y, epsilon=0.3, mesh=otts.make_mesh(4, 2))
        return otts.solve(geom, threshold=1e-6).reg_ot_cost

    moved = colour_transfer.moved_points(p.x, np.asarray(loss(x)[1]))
    cost, a, b = ref.sqeuclidean(p.x, p.y), np.full(13, 1 / 13), np.full(21, 1 / 21)
    plan = ref.sinkhorn(cost, a, b, 0.3, iterations=200).plan
    np.testing.assert_allclose(moved, 13 * plan @ p.y, atol=1e-4)


def test_usage(capsys):
    assert colour_transfer.main(["points"]) == 2
    assert capsys.readouterr().err.startswith("usage: ")
