"""Forward mode in some of the arguments: the others cost nothing."""

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

Tree = Any


def active(tangents: Tree) -> Tree:
    """Tangents of a rule with ``symbolic_zeros``, with None for those that are zero.

    None is an empty pytree: what is not differentiated takes no part in a scan.
    """
    return jax.tree.map(lambda t: None if isinstance(t, SymbolicZero) else t, tangents)


def partial_jvp(fn: Callable, primals: Tree, tangents: Tree) -> tuple[Tree, Tree]:
    """``jax.jvp`` where a tangent of None stands for zero, and costs nothing.

    The tangent of the result is None if all are.
    """
    leaves, treedef = jax.tree.flatten(primals, is_leaf=lambda x: x is None)
    dots = jax.tree.leaves(tangents, is_leaf=lambda t: t is None)
    places = [k for k, dot in enumerate(dots) if dot is not None]
    if not places:
        return fn(*primals), None

    def fn_of_active(*values):
        full = list(leaves)
        for k, value in zip(places, values, strict=True):
            full[k] = value
        return fn(*jax.tree.unflatten(treedef, full))

    dots = [dots[k] for k in places]
    # Points may be stored in fewer bits than their derivatives have.
    values = [leaves[k].astype(t.dtype) for k, t in zip(places, dots, strict=True)]
    return jax.jvp(fn_of_active, values, dots)
