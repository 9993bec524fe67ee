"""Entropic optimal transport between point clouds too large for one device.

>>> import jax, ott_shard as otts
>>> x = jax.random.normal(jax.random.key(0), (100, 2))
>>> y = jax.random.normal(jax.random.key(1), (80, 2)) + 3
>>> def loss(x):
...     return otts.solve(otts.PointCloud(x, y, epsilon=0.5)).reg_ot_cost
>>> value, gradient = jax.value_and_grad(loss)(x)
>>> gradient.shape
(100, 2)
"""

from ott_shard import costs as costs, initializers as initializers
from ott_shard.divergence import (
    SinkhornDivergenceOutput as SinkhornDivergenceOutput,
    sinkhorn_divergence as sinkhorn_divergence,
)
from ott_shard.epsilon import Epsilon as Epsilon
from ott_shard.geometry import PointCloud as PointCloud
from ott_shard.implicit import ImplicitDiff as ImplicitDiff
from ott_shard.lbfgs import Acceleration as Acceleration
from ott_shard.linear_solve import (
    LinearSolve as LinearSolve,
    LinearStatus as LinearStatus,
)
from ott_shard.matching import Assignment as Assignment
from ott_shard.mesh import make_mesh as make_mesh
from ott_shard.plan import Plan as Plan
from ott_shard.potentials import (
    DebiasedPotentials as DebiasedPotentials,
    DualPotentials as DualPotentials,
)
from ott_shard.sinkhorn import solve as solve
from ott_shard.solution import SinkhornOutput as SinkhornOutput
from ott_shard.state import Snapshot as Snapshot
from ott_shard.status import Status as Status
from ott_shard.units import CostStatistics as CostStatistics

__version__ = "0.6.0"
