"""A transport plan as what it is made of: matches, sparse plans, samples."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO
from jax.tree_util import register_dataclass
from jax.typing import ArrayLike

from ott_shard import _checks, matching, mesh as meshes, sampling
from ott_shard.geometry import PointCloud
from ott_shard.matching import Assignment
from ott_shard.plan_sums import PlanSums
from ott_shard.problem import Found, Problem


@register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan(PlanSums):
    """P_ij = exp((f_i + g_j - C_ij) / eps), never formed; a pytree.

    Everything is computed tile by tile on the mesh, also inside jit where not said
    otherwise.
    """

    @staticmethod
    def from_potentials(
        geom: PointCloud,
        f: ArrayLike,
        g: ArrayLike,
        a: ArrayLike | None = None,
        b: ArrayLike | None = None,
        *,
        tau_a: ArrayLike = 1.0,
        tau_b: ArrayLike = 1.0,
    ) -> "Plan":
        """The plan of potentials that are known, from a file for example.

        Args:
            geom: the clouds, their cost, epsilon and mesh.
            f: [n], as ``SinkhornOutput.f``; ignored where a is 0.
            g: [m], likewise.
            a: [n] weights of x. None: uniform.
            b: [m] weights of y. None: uniform.
            tau_a: scalar in (0, 1], of the problem that the potentials solve.
            tau_b: scalar in (0, 1].

        Returns:
            A plan; two passes. Derivatives are those at fixed f and g.

        Raises:
            ValueError, TypeError: for bad arguments.

        Example:
            >>> import jax.numpy as jnp, ott_shard as otts
            >>> geom = otts.PointCloud(jnp.eye(3), jnp.ones((2, 3)), epsilon=0.1)
            >>> out = otts.solve(geom)
            >>> plan = otts.Plan.from_potentials(geom, out.f, out.g)
            >>> round(float(plan.primal_cost), 3), round(float(out.primal_cost), 3)
            (2.0, 2.0)
        """
        a, b = geom.weights(a, 0), geom.weights(b, 1)
        geom = geom.resolve(a, b)
        taus = (
            _checks.scalar(name, tau, up_to=1.0, dtype=geom.dtype)
            for name, tau in (("tau_a", tau_a), ("tau_b", tau_b))
        )
        taus = tuple(taus)
        _checks.equal_mass(a, b, *taus)
        problem = Problem(geom.pairs, a, b, geom.schedule, *taus)
        phi = geom.potential("f", f, a, 0)
        psi = geom.potential("g", g, b, 1)
        return Plan(geom, problem, _found(problem, phi, psi))

    def argmax(self, axis: Literal[0, 1]) -> jax.Array:
        """Where the plan is largest: for each y_j an i (axis 0), for each x_i a j (1).

        ``top_k(1, axis)`` without the values.
        """
        return self.top_k(1, axis)[0][:, 0]

    def top_k(self, k: int, axis: Literal[0, 1]) -> tuple[jax.Array, jax.Array]:
        """The k largest entries of every column (axis 0) or row (axis 1) of the plan.

        Args:
            k: from 1 to the number of entries.
            axis: 0 or 1, as in `apply`.

        Returns:
            (indices, values), [m, k] for axis 0 and [n, k] for axis 1, in descending
            order, of equal entries the one of the lowest index first. Where fewer than
            k entries have mass, the index is -1 and the value 0. One pass; O(n d / rows
            + m d / cols + n k cols / rows + tile) memory on a device. Constants to
            differentiation.

        Raises:
            ValueError, TypeError: if k or axis is out of range.

        Example:
            >>> import jax.numpy as jnp, ott_shard as otts
            >>> x = jnp.asarray([[0.0], [1.0], [2.0]])
            >>> otts.solve(otts.PointCloud(x, x[::-1], epsilon=0.1)).argmax(axis=1)
            Array([2, 1, 0], dtype=int32)
        """
        _checks.choice("axis", axis, (0, 1))
        k = _checks.integer("k", k)
        if k > self.geom.shape[axis]:
            raise ValueError(
                f"k must be at most {self.geom.shape[axis]}, the number of entries for "
                f"axis={axis}, got {k}"
            )
        pairs, ends = self._reduced_over(axis)
        found = matching.top(k, pairs, *ends, self.epsilon)
        size = self.geom.shape[1 - axis]
        indices, values = (meshes.unpad(part, size) for part in found)
        return indices, values

    def to_bcoo(
        self,
        *,
        k: int | None = None,
        threshold: float | None = None,
        axis: Literal[0, 1] = 1,
    ) -> BCOO:
        """The plan as a sparse matrix of its largest entries.

        Args:
            k: keep the k largest of every row (axis 1) or column (axis 0).
            threshold: keep entries of at least this. With k, both must hold.
            axis: as in `top_k`.

        Returns:
            An [n, m] ``jax.experimental.sparse.BCOO``, of as many entries as are kept;
            inside jit, of n k (or m k) entries, some of them empty (index out of
            bounds, as is its convention). With k one pass and memory for its entries.
            With a threshold alone, not inside jit: blocks of rows of at most 16 MiB
            pass through the host, which holds the entries.

        Raises:
            ValueError, TypeError: if neither k nor threshold is given, or one is out of
                range; for a threshold alone inside jit, and if it keeps more than 2^28
                entries.

        Example:
            >>> import jax.numpy as jnp, ott_shard as otts
            >>> x = jnp.asarray([[0.0], [1.0], [2.0]])
            >>> out = otts.solve(otts.PointCloud(x, x[::-1], epsilon=0.1))
            >>> out.to_bcoo(k=1).indices.tolist()
            [[0, 2], [1, 1], [2, 0]]
        """
        if threshold is not None:
            threshold = _checks.positive("threshold", threshold)
        if k is None and threshold is not None:
            _checks.choice("axis", axis, (0, 1))
            if _checks.concrete(self.found.phi) is None:
                raise TypeError(
                    "threshold must come with k inside jit, where the number of "
                    f"entries must be known, got {threshold} alone"
                )
            return matching.above(self.rows, self.geom.shape, threshold)
        if k is None:
            raise ValueError("k or threshold must be given, got neither")
        return matching.of_top(*self.top_k(k, axis), axis, self.geom.shape, threshold)

    def assignment(self) -> Assignment:
        """A one-to-one matching made of the plan, for n = m and equal weights.

        The one of least cost among the 16 largest entries of every row and column, and
        what completes them; up to n = 2048 among all. On the host, by sparse and dense
        assignment of scipy, with the potentials as its start; not inside jit. Two
        passes, and as many again for points that are left over; of many equal points
        more (some columns are then drawn), for each halving of what is left. O(16 n)
        memory on the host.

        Returns:
            An :class:`ott_shard.Assignment`: x_i goes to y[indices[i]].

        Raises:
            ValueError, TypeError: if n and m differ, weights are not equal, or the
                plan is traced.

        Example:
            >>> import jax.numpy as jnp, ott_shard as otts
            >>> x = jnp.asarray([[0.0], [1.0], [2.0]])
            >>> otts.solve(otts.PointCloud(x, x[::-1], epsilon=0.1)).assignment()
            Assignment(indices=array([2, 1, 0], dtype=int32), cost=0.0)
        """
        return matching.assign(self._one, self.found, self.geom.shape)

    def sample(
        self,
        key: jax.Array,
        num_pairs: int,
        method: Literal["iid", "systematic"] = "iid",
    ) -> tuple[jax.Array, jax.Array]:
        """Pairs of points drawn in proportion to the plan, for training on them.

        Args:
            key: of jax.random. The same key draws the same pairs on every mesh and in
                every tile, unless rounding decides between two neighbours.
            num_pairs: how many.
            method: "iid": independent. "systematic": x_i appears num_pairs times its
                share of the mass, rounded up or down (for uniform weights and num_pairs
                = n exactly once), in ascending order; its y_j is drawn from the row.

        Returns:
            (i, j), each [num_pairs] int32, rows of x and of y, -1 if the plan has no
            mass or is not finite. Two passes over
            num_pairs x m; O(num_pairs d / rows + m d / cols + tile) memory on a device.
            Constants to differentiation.

        Raises:
            ValueError, TypeError: if num_pairs or method is out of range.

        Example:
            >>> import jax, jax.numpy as jnp, ott_shard as otts
            >>> x = jnp.asarray([[0.0], [1.0], [2.0]])
            >>> out = otts.solve(otts.PointCloud(x, x[::-1], epsilon=0.01))
            >>> out.sample(jax.random.key(0), 3, method="systematic")[1]
            Array([2, 1, 0], dtype=int32)
        """
        num_pairs = _checks.integer("num_pairs", num_pairs)
        _checks.choice("method", method, ("iid", "systematic"))
        return sampling.sample(self._one, self.found, key, num_pairs, method)

    def batches(
        self,
        key: jax.Array,
        batch_size: int,
        *,
        num_pairs: int | None = None,
        method: Literal["iid", "systematic"] = "systematic",
        process: tuple[int, int] = (0, 1),
    ) -> Iterator[tuple[jax.Array, jax.Array]]:
        """One epoch of mini-batches of pairs, in random order, for training on them.

        Args:
            key: of jax.random; another one for every epoch, such as
                ``jax.random.fold_in(key, epoch)``.
            batch_size: pairs in each batch.
            num_pairs: of the epoch, over all processes. None: n. What does not fill a
                batch for every process is left out.
            method: as in `sample`: "systematic" for each x_i as often as its weight
                demands in an epoch.
            process: (index, count): this process takes one of every `count` batches,
                and all processes together the whole epoch, if each has the solution on
                devices of its own and the same key.

        Yields:
            (i, j), each [batch_size] int32. j is drawn when a batch is asked for, by
            two passes over batch_size x m; with asynchronous dispatch that goes on
            while the batch before it is trained on. Not inside jit.

        Raises:
            ValueError, TypeError: at the call, if an argument is out of range.

        Example:
            >>> import jax, jax.numpy as jnp, ott_shard as otts
            >>> x = jnp.asarray([[0.0], [1.0], [2.0], [3.0]])
            >>> out = otts.solve(otts.PointCloud(x, x[::-1], epsilon=0.01))
            >>> pairs = list(out.batches(jax.random.key(0), 2))
            >>> sorted(int(i) for batch, _ in pairs for i in batch)
            [0, 1, 2, 3]
        """
        size = _checks.integer("batch_size", batch_size)
        num = self.geom.n if num_pairs is None else num_pairs
        num = _checks.integer("num_pairs", num)
        _checks.choice("method", method, ("iid", "systematic"))
        if not (isinstance(process, tuple | list) and len(process) == 2):
            raise TypeError(f"process must be (index, count), got {process!r}")
        index = _checks.integer("process", process[0], at_least=0)
        count = _checks.integer("process", process[1], at_least=index + 1)
        if size * count > num:
            raise ValueError(
                f"batch_size must leave a batch for each of {count} processes in an "
                f"epoch of {num} pairs, got {size}: make it smaller, or give num_pairs"
            )
        if _checks.concrete(self.found.phi) is None:
            raise TypeError("batches must not be inside jit: use sample there")
        args = self._one, self.found, key, (size, num), method, (index, count)
        return sampling.batches(*args)


@jax.jit
def _found(problem: Problem, phi: jax.Array, psi: jax.Array) -> Found:
    """With c-transforms, which are also the potentials of points without weight."""
    rows = problem.settled(problem.to_rows(psi))
    cols = problem.T.settled(problem.to_cols(phi))
    phi = jnp.where(problem.a > 0, phi, problem.tau_a * rows)
    psi = jnp.where(problem.b > 0, psi, problem.tau_b * cols)
    return Found(phi, psi, rows, cols)
