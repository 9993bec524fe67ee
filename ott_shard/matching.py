"""Matches of points: sparse plans, and one-to-one assignments."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from ott_shard import _checks, operators, sampling
from ott_shard.operators import Pairs
from ott_shard.pairwise import dot
from ott_shard.problem import Found, Problem

Shape = tuple[int, int]

_BLOCK_ENTRIES = 2**22  # dense entries on the host at a time
_MAX_ENTRIES = 2**28  # of a sparse plan
# An assignment of so many points is solved exactly.
_MAX_EXACT = 2048
# So many entries of each row and column are candidates for a match, and so many more
# of a row where most of them are taken.
_CANDIDATES, _DRAWN = 16, 4


# A pair of points that may be matched, and its reduced cost C - phi - psi.
_EDGE = np.dtype([("i", np.int32), ("j", np.int32), ("cost", np.float64)])


class Assignment(NamedTuple):
    """A one-to-one matching.

    Attributes:
        indices: [n] int32, a permutation: x_i goes to y[indices[i]].
        cost: <C, P> of the plan that it is: sum_i a_i C(x_i, y[indices[i]]).
    """

    indices: np.ndarray
    cost: float


def of_top(
    places: jax.Array,
    values: jax.Array,
    axis: Literal[0, 1],
    shape: Shape,
    threshold: float | None,
) -> BCOO:
    """A sparse matrix of what `top_k` found, without what is below the threshold."""
    low = jnp.asarray(-jnp.inf if threshold is None else threshold, values.dtype)
    entries = _entries(places, values, axis, shape, low)
    known = [_checks.concrete(part) for part in entries]
    if any(part is None for part in known):
        return BCOO(entries, shape=shape)
    entry_values, indices = [np.asarray(part) for part in known]
    kept = indices[:, 0] < shape[0]
    return _sparse(entry_values[kept], indices[kept], shape)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _entries(places, values, axis, shape, threshold):
    """(values, indices), with indices out of bounds where there is no entry."""
    keep = (places >= 0) & (values >= threshold)
    own = jnp.broadcast_to(jnp.arange(len(places))[:, None], places.shape)
    ends = (own, places) if axis == 1 else (places, own)
    ends = (jnp.where(keep, end, size) for end, size in zip(ends, shape, strict=True))
    indices = jnp.stack([end.ravel() for end in ends], axis=1).astype(jnp.int32)
    return jnp.where(keep, values, 0.0).ravel(), indices


def above(
    rows: Callable[[int, int], jax.Array], shape: Shape, threshold: float
) -> BCOO:
    """A sparse matrix of all entries of at least the threshold, by blocks of rows."""
    n, m = shape
    size, values, indices, count = min(n, max(1, _BLOCK_ENTRIES // m)), [], [], 0
    for start in range(0, n, size):
        first = min(start, n - size)  # blocks of one size are one program
        block = np.asarray(rows(first, first + size))[start - first :]
        i, j = np.nonzero(block >= threshold)
        count += len(i)
        if count > _MAX_ENTRIES:
            raise ValueError(
                f"threshold must keep at most {_MAX_ENTRIES} entries, got {threshold}, "
                f"which keeps {count} of the first {start + size} rows: raise it, or "
                "give k"
            )
        values.append(block[i, j])
        indices.append(np.stack([i + start, j], axis=1).astype(np.int32))
    return _sparse(np.concatenate(values), np.concatenate(indices), shape)


def _sparse(values: Any, indices: Any, shape: Shape) -> BCOO:
    order = np.lexsort(indices.T[::-1])
    parts = jnp.asarray(values[order]), jnp.asarray(indices[order])
    return BCOO(parts, shape=shape, indices_sorted=True, unique_indices=True)


@functools.partial(jax.jit, static_argnums=0)
def top(k: int, pairs: Pairs, potentials, weights, epsilon):
    """(places, values) of the k largest entries of each row, [n, k]."""
    places, logs = operators.largest(k, pairs, potentials, weights, epsilon)
    a = jax.lax.stop_gradient(weights[0])
    return places, a[:, None] * jnp.exp(logs)


def assign(problem: Problem, found: Found, shape: Shape) -> Assignment:
    """See :meth:`ott_shard.Plan.assignment`."""
    n, m = shape
    if n != m:
        raise ValueError(
            f"assignment must be of as many x as y, got {n} and {m}: use argmax, top_k "
            "or sample"
        )
    weights = [_checks.concrete(w) for w in (problem.a, problem.b)]
    if any(w is None for w in weights):
        raise TypeError("assignment must not be inside jit, got a traced plan")
    for name, w in zip("ab", weights, strict=True):
        w = np.asarray(w)[:n]
        if np.ptp(w) > 1e-3 * w.max():
            raise ValueError(
                f"assignment must be of equal weights, got {name} from {w.min():g} to "
                f"{w.max():g}: use argmax, top_k or sample"
            )
    indices, edges = _complete(problem, found, n)
    if len(edges):
        indices = _best(n, edges)
    return Assignment(indices, float(_cost(problem, indices)))


@jax.jit
def _cost(problem: Problem, indices: jax.Array) -> jax.Array:
    n = len(indices)
    costs = problem.pairs.costs_of(jnp.arange(n), indices)
    return dot(problem.a[:n], costs)


def _complete(problem: Problem, found: Found, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Some matching, and the edges that it was chosen among."""
    indices, edges = np.full(n, -1, np.int32), np.zeros(0, _EDGE)
    rows, cols, tied = np.arange(n), np.arange(n), False
    while (left := len(rows)) > _MAX_EXACT:
        candidates = _candidates(problem, found, rows, cols)
        if tied:
            drawn = _drawn(problem, found, rows, cols)
            candidates = np.concatenate([candidates, drawn])
        i, j = _greedy(n, candidates)
        if not len(i):
            raise _impossible(left)
        indices[i] = j
        rows, cols = np.flatnonzero(indices < 0), np.setdiff1d(cols, j)
        edges = np.concatenate([edges, candidates])
        # Of equal points all have the same largest entries.
        tied = 2 * len(rows) > left
    from scipy.optimize import linear_sum_assignment  # 20 MiB that few need

    costs = np.asarray(_reduced_costs(problem, found, rows, cols), np.float64)
    try:
        i, j = linear_sum_assignment(costs)
    except ValueError:
        raise _impossible(len(rows)) from None
    indices[rows[i]] = cols[j]
    if len(edges):  # what was matched stays possible
        i = np.arange(n, dtype=np.int32)
        own = _edges(i, indices, _reduced_of(problem, found, i, indices))
        edges = np.concatenate([edges, own])
    return indices, edges


def _impossible(left: int) -> ValueError:
    return ValueError(
        "assignment must be possible: every matching of the points that were left "
        f"over, {left}, has a forbidden pair, or potentials are not finite"
    )


def _drawn(problem: Problem, found: Found, rows, cols) -> np.ndarray:
    """Edges from each of some rows to some columns, drawn by their densities."""
    free = dataclasses.replace(problem, b=_indicator(problem, cols))
    own = found._replace(rows=free.to_rows(found.psi))
    i, edges = rows.astype(np.int32), []
    for key in jax.random.split(jax.random.key(len(rows)), _DRAWN):
        j = np.asarray(sampling.draw_columns(free, own, key, i))
        edges.append(_edges(i, j, _reduced_of(problem, found, i, j)))
    return np.concatenate(edges)


def _indicator(problem: Problem, some: np.ndarray) -> np.ndarray:
    """1 for some of the padded points of x or y, of which there are as many."""
    return np.isin(np.arange(len(problem.a)), some).astype(problem.a.dtype)


def _edges(i: Any, j: Any, costs: Any) -> np.ndarray:
    edges = np.zeros(np.size(i), _EDGE)
    edges["i"], edges["j"], edges["cost"] = (np.ravel(z) for z in (i, j, costs))
    return edges[np.isfinite(edges["cost"])]


def _candidates(problem: Problem, found: Found, rows, cols) -> np.ndarray:
    """The largest entries of P in each of some rows and columns, as edges."""
    a, b = (_indicator(problem, part) for part in (rows, cols))
    j, of_rows = _largest(problem, found, a, b)
    i, of_cols = _largest(problem.T, found.T, b, a)
    own = np.broadcast_to(np.arange(len(a))[:, None], j.shape)
    return np.concatenate([_edges(own, j, of_rows), _edges(i, own, of_cols)])


@jax.jit
def _largest(problem: Problem, found: Found, a: jax.Array, b: jax.Array):
    """(places, reduced costs) of the largest densities of each row."""
    pairs, epsilon = problem.pairs, problem.epsilon
    k = min(_CANDIDATES, len(b))
    places, logs = operators.largest(k, pairs, found[:2], (a, b), epsilon)
    return places, -epsilon * logs


def _greedy(n: int, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges i -> j without common ends, the cheapest first."""
    ends = edges[np.argsort(edges["cost"], kind="stable")]
    rows, cols, chosen = [False] * n, [False] * n, []
    for i, j in zip(ends["i"].tolist(), ends["j"].tolist(), strict=True):
        if not (rows[i] or cols[j]):
            rows[i] = cols[j] = True
            chosen.append((i, j))
    i, j = np.array(chosen, np.int32).reshape(-1, 2).T
    return i, j


def _best(n: int, edges: np.ndarray) -> np.ndarray:
    """The matching of least cost along edges, of which some make one."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    _, first = np.unique(edges["i"] * np.int64(n) + edges["j"], return_index=True)
    edges = edges[first]
    # The same for all, it changes nothing but that no cost is 0, which is no edge.
    costs = edges["cost"] - edges["cost"].min() + 1.0
    graph = csr_array((costs, (edges["i"], edges["j"])), shape=(n, n))
    return min_weight_full_bipartite_matching(graph)[1].astype(np.int32)


@jax.jit
def _reduced_of(problem: Problem, found: Found, i: jax.Array, j: jax.Array):
    """C_ij - phi_i - psi_j of some pairs, [k]."""
    return problem.pairs.costs_of(i, j) - found.phi[i] - found.psi[j]


@jax.jit
def _reduced_costs(problem: Problem, found: Found, rows: jax.Array, cols: jax.Array):
    """The same of all pairs of some rows and columns; one row at a time."""

    def row(i):
        return _reduced_of(problem, found, jnp.full_like(cols, i), cols)

    return jax.lax.map(row, rows)
