"""What the bench is asked to measure: its flags, and what they become."""

import dataclasses
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from . import flags, kinds
from .errors import BadInput

PROGRAM = "bench"
SUITES = "cpu", "gpu", "convergence", "memory", "scaling"  # each in its bench_*.py
WITH_PEERS = None, "cpu", "convergence"
# Flags that mean something to some suites only; None stands for no suite.
_FOR = {
    "cases": (None,),
    "memory_only": (None,),
    "n": SUITES,
    "plot": SUITES,
    "epsilons": ("convergence",),
    "thresholds": ("convergence",),
    "pairs_per_second": ("scaling",),
    "peer_python": WITH_PEERS,
    "batch_size": (None, "cpu", "gpu", "memory"),
    "repeats": (None, "cpu", "gpu"),
    "mesh": (None, "cpu", "gpu", "convergence", "memory"),
}


class Case(NamedTuple):
    """Sizes of the clouds, and the cost between them."""

    n: int
    m: int
    d: int
    cost: str


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure, how often and where; fields are flags of the same name.

    Attributes:
        suite: one of SUITES; None: `cases`.
        n: points of each cloud in a suite; None: its own sizes.
        epsilons: of the convergence suite, in units of the std of the costs.
        thresholds: of it, of the marginal error.
        pairs_per_second: of one device, for the model of the scaling suite.
        peer_python: a Python that has peers; "": no peers; None: this one, if it has.
    """

    suite: str | None
    cases: tuple[Case, ...]
    n: int | None
    epsilons: tuple[float, ...]
    thresholds: tuple[float, ...]
    pairs_per_second: float
    repeats: int
    batch_size: tuple[int, ...] | None
    cpu_devices: int | None
    mesh: tuple[int, int] | None
    peer_python: str | None
    memory_only: bool
    plot: str | None
    out: str | None


def _case(text: str) -> Case:
    sizes, d, cost = text.split(":")
    n, *others = kinds.sizes(sizes)
    (m,) = others or (n,)
    if cost not in kinds.COSTS:
        raise ValueError
    return Case(n, m, int(d), cost)


_CASES = kinds.Checked(
    "n:d:cost or nxm:d:cost, such as 16384:3:sqeuclidean, with commas between cases; "
    f"a cost is {' or '.join(kinds.COSTS)}",
    lambda text: tuple(_case(part) for part in text.split(",")),
    lambda cases: all(min(case[:3]) > 0 for case in cases),
)
_NUMBERS = kinds.Checked(
    "numbers greater than 0, with commas between them",
    lambda text: tuple(kinds.POSITIVE.parse(part) for part in text.split(",")),
    lambda numbers: True,
)
FLAGS = (
    flags.Flag(
        *("suite", "cpu", kinds.one_of(*SUITES), None),
        f"one of {', '.join(SUITES)}: lines of JSON, then a table on standard error "
        "(the cases of --cases)",
    ),
    flags.Flag(
        *("cases", "4096:3:euclidean", _CASES),
        "16384:3:sqeuclidean,16384:64:sqeuclidean",
        "n:d:cost or nxm:d:cost, with commas between cases",
    ),
    flags.Flag("n", "4096", kinds.count(2), None, "points of a suite (its own sizes)"),
    flags.Flag(
        *("epsilons", "0.1,0.01", _NUMBERS, "0.1,0.01,0.001,0.0001"),
        "convergence: in units of the std of the costs",
    ),
    flags.Flag(
        *("thresholds", "0.001", _NUMBERS, "0.001,0.00001"),
        "convergence: of the marginal error; below 1e-4 in float64",
    ),
    flags.Flag(
        *("pairs_per_second", "1e11", kinds.POSITIVE, 5e10),
        "scaling: of one device, for the model of when communication counts",
    ),
    flags.Flag("repeats", "3", kinds.count(1), 7, "turns, after one to warm up"),
    flags.Flag("batch_size", "512x2048", kinds.TILE, None, "largest tile (chosen)"),
    flags.Flag("mesh", "4x2", kinds.MESH, None, "devices (all)"),
    flags.Flag(
        *("cpu_devices", "16", kinds.count(1), None),
        "use so many CPU devices; scaling counts on 1, 2, 4, ... of them",
    ),
    flags.Flag(
        *("peer_python", "PATH", kinds.TEXT, None),
        "a Python that has ott-jax or pykeops (this one); empty for no peers",
    ),
    flags.Flag("memory_only", "", kinds.SWITCH, False, "compile, but run nothing"),
    flags.Flag(
        *("plot", "FILE.png", kinds.TEXT, None),
        "also draw the numbers of a suite (pip install 'ott_shard[report]')",
    ),
    flags.Flag("out", "FILE", kinds.TEXT, None, "also append the lines to FILE"),
    flags.Flag("help", "", kinds.SWITCH, False, "print this and exit"),
)


def parse(argv: Sequence[str]) -> Options | None:
    """The options that the command line asks for; None if it asks for help.

    Raises:
        BadInput: for an unknown flag, a value that a flag cannot have, a flag that is
            not of the suite, or no Python at --peer_python.
    """
    positional, values, given = flags.parse(argv, FLAGS, PROGRAM)
    if positional:
        raise BadInput(f"unexpected argument {positional[0]!r}: flags start with --")
    if values.pop("help"):
        return None
    suite, python = values["suite"], values["peer_python"]
    for name in given:
        if suite not in _FOR.get(name, (suite,)):
            where = f"--suite={suite}" if suite else "no --suite"
            raise BadInput(f"--{name}: means nothing with {where}: leave it out")
    if python and shutil.which(python) is None:
        raise BadInput(f"--peer_python={python}: no such program: check the path")
    return Options(**values)
