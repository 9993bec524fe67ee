"""The flags of the command: names, defaults and wording, in one place."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from . import kinds
from .errors import BadInput

PROGRAM = "ott-shard"


class Flag(NamedTuple):
    """A flag, with an example of its value and what holds without it."""

    name: str
    example: str
    parser: flags.ArgumentParser
    default: Any
    text: str


_OF_PROBLEMS = (
    Flag(
        *("x", "x.npy", kinds.TEXT, None),
        "points [n, d]: a .npy file, archive.npz#key, file.h5#key, "
        "cells.h5ad#obsm/X_pca, folder.zarr#key, file.parquet or file.parquet#u,v "
        "(columns); all but the first two need pip install 'ott_shard[io]'",
    ),
    Flag("y", "y.npy", kinds.TEXT, None, "points [m, d], likewise"),
    Flag("a", "a.npy", kinds.TEXT, None, "weights [n] of x, likewise (1 / n each)"),
    Flag("b", "b.npy", kinds.TEXT, None, "weights [m] of y, likewise (1 / m each)"),
    Flag(
        *("demo", "discs", kinds.one_of("discs"), None),
        "instead of x and y: n points each in two discs of radius 5 and 10",
    ),
    Flag("n", "10000", kinds.count(1), None, "points per cloud of the demo (10000)"),
    Flag(
        *("cost", "pnormp:1.5", kinds.COST, "sqeuclidean"),
        "sqeuclidean (|x - y|^2), euclidean, pnormp:P, sqpnorm:P, elastic:L1,L2, "
        "cosine, negdotproduct or arccos:N, as in ott_shard.costs",
    ),
    Flag(
        *("scale_cost", "mean", kinds.SCALE, 1.0),
        f"costs are divided by this number, or by their {', '.join(kinds.UNITS)}",
    ),
    Flag(
        *("epsilon", "0.05", kinds.POSITIVE, None),
        "regularisation (0.05 x the std of all costs, or of the unit named next)",
    ),
    Flag(
        *("epsilon_unit", "mean", kinds.one_of("absolute", "mean", "std"), "absolute"),
        "epsilon is absolute, or a multiple of the mean or std of all costs",
    ),
    Flag(
        *("epsilon_init", "1", kinds.POSITIVE, None),
        "epsilon comes down from this, in the same unit (it is constant)",
    ),
    Flag(
        *("epsilon_decay", "0.9", kinds.DECAY, 0.9),
        "by this factor at every iteration, if it comes down",
    ),
    Flag("tau_a", "0.9", kinds.TAU, 1.0, "marginal of x: 1 exact, below 1 relaxed"),
    Flag("tau_b", "0.9", kinds.TAU, 1.0, "marginal of y, likewise"),
    Flag(
        *("threshold", "1e-4", kinds.POSITIVE, 1e-3),
        "converged when the L1 error of the marginal is at most this",
    ),
    Flag("max_iterations", "500", kinds.count(1), 2000, "never more iterations"),
    Flag("min_iterations", "20", kinds.count(0), 0, "never fewer iterations"),
    Flag(
        *("inner_iterations", "5", kinds.count(1), 10),
        "iterations between two records of the error",
    ),
    Flag(
        *("acceleration", "none", kinds.one_of("lbfgs", "none"), "lbfgs"),
        "none: only Sinkhorn's own iterations, at the epsilon that is given",
    ),
    Flag("grad", "", kinds.SWITCH, False, "also the gradient with respect to x and y"),
    Flag(
        "dtype", "float64", kinds.one_of("float32", "float64"), "float32", "of all work"
    ),
)
_OF_ESTIMATES = (
    Flag(
        *("task", "divergence", kinds.one_of("solve", "divergence"), "solve"),
        "what is to be estimated",
    ),
    Flag(
        *("memory", "80GiB", kinds.BYTES, None),
        "of one device (what the device says, if it does)",
    ),
)
_OF_USES = (
    Flag("run", "DIR", kinds.TEXT, None, "the --out of a run of solve or divergence"),
    Flag(
        *("v", "v.npy", kinds.TEXT, None),
        "apply: numbers [n] or [n, k] (axis 0), [m] or [m, k] (axis 1)",
    ),
    Flag("k", "10", kinds.count(1), None, "match: so many entries for every point"),
    Flag(
        *("axis", "1", kinds.AXIS, None),
        "apply: 0 for P^T v, 1 for P v (0); match: 0 for the entries of every y, 1 of "
        "every x (1)",
    ),
    Flag("num_pairs", "1000", kinds.count(1), None, "sample: so many pairs"),
    Flag(
        *("method", "systematic", kinds.one_of("iid", "systematic"), "iid"),
        "sample: independent pairs, or every x as often as its mass says",
    ),
    Flag("seed", "1", kinds.count(0), 0, "sample: of the random numbers"),
    Flag("points", "new.npy", kinds.TEXT, None, "transport: new points of x [n', d]"),
    Flag("backward", "", kinds.SWITCH, False, "transport: new points of y, to x"),
)
_OF_PROCESSES = (
    Flag(
        *("coordinator_address", "node0:1234", kinds.TEXT, None),
        "several processes: where process 0 is to be reached (by SLURM, Open MPI or "
        "Kubernetes, where one of these started them)",
    ),
    Flag("num_processes", "4", kinds.count(1), None, "several processes: how many"),
    Flag(
        "process_id", "0", kinds.count(0), None, "several processes: which one this is"
    ),
    Flag(
        *("local_device_ids", "0,1", kinds.IDS, None),
        "the devices of this process (all, or what the cluster gives it)",
    ),
    Flag(
        *("local_processes", "2", kinds.count(1), None),
        "start so many processes on this machine, to rehearse a job of several",
    ),
    Flag(
        "start_seconds", "60", kinds.count(1), 300, "for all processes to come together"
    ),
    Flag(
        *("watchdog_seconds", "60", kinds.DURATION, 600.0),
        "a process of several in which nothing moves for so long ends; 0: never",
    ),
)
_OF_RUNS = (
    Flag(
        *("checkpoint_seconds", "60", kinds.DURATION, 600.0),
        "time between two checkpoints in --out, from which resume goes on",
    ),
    Flag(
        *("checkpoint_checks", "10", kinds.count(1), None),
        "a checkpoint after every so many checks of the error too",
    ),
    Flag(
        *("progress_seconds", "1", kinds.DURATION, 5.0),
        "time between two lines of progress; 0: a line at every check",
    ),
    Flag(
        *("log_json", "run.jsonl", kinds.TEXT, None),
        "add a line of JSON to this file for every check and other event",
    ),
)
_OF_ALL = (
    Flag(
        *("out", "DIR", kinds.TEXT, None),
        "write result.json, f.npy, g.npy and, with --grad, grad_x.npy, grad_y.npy; "
        "for a task that uses a run (its folder): TASK.json and what is named above",
    ),
    Flag(
        *("mesh", "4x2", kinds.MESH, None),
        "devices that split x, by devices that split y (all, as square as possible)",
    ),
    Flag(
        *("batch_size", "512x2048", kinds.TILE, None),
        "largest tile on a device: one size, or rows x cols (chosen for speed)",
    ),
    Flag("cpu_devices", "8", kinds.count(1), None, "compute on so many CPU devices"),
    Flag(
        *("require", "gpu", kinds.one_of("cpu", "gpu", "tpu"), None),
        "compute on these devices or not at all (what JAX finds)",
    ),
    Flag(
        *("precision", "high", kinds.one_of("default", "high", "highest"), "highest"),
        "of matrix products",
    ),
    Flag(
        *("compilation_cache", "DIR", kinds.TEXT, None),
        "keep compiled programs here, for later runs of any number of processes",
    ),
    Flag("help", "", kinds.SWITCH, False, "print this and exit"),
)
FLAGS = (
    *_OF_PROBLEMS,
    *_OF_ESTIMATES,
    *_OF_RUNS,
    *_OF_USES,
    *_OF_ALL,
    *_OF_PROCESSES,
)


class Parsed(NamedTuple):
    """A command line.

    Attributes:
        positional: what is no flag.
        values: of all flags.
        given: the flags that were named.
    """

    positional: list[str]
    values: dict[str, Any]
    given: list[str]


def parse(
    argv: Sequence[str], table: Sequence[Flag] = FLAGS, program: str = PROGRAM
) -> Parsed:
    """Split the command line into positional arguments and flags.

    Every call has its own flags: nothing is kept between calls.

    Raises:
        BadInput: for an unknown flag or a value that a flag cannot have.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may come after the task
    for name, _, parser, default, text in table:
        switch = parser is kinds.SWITCH
        flag = flags.Flag(parser, None, name, default, text, boolean=switch)
        flags.DEFINE_flag(flag, values)
    try:
        _, *positional = values([program, *argv])
    except flags.Error as error:
        message = str(error).removeprefix("flag ")
        raise BadInput(f"{message} (all flags: {program} --help)") from None
    parsed = {flag.name: values[flag.name] for flag in table}
    given = [name for name, flag in parsed.items() if flag.present]
    return Parsed(positional, {name: f.value for name, f in parsed.items()}, given)


def checked(name: str, value: Any) -> Any:
    """A value from elsewhere as the flag `name` would have it.

    Raises:
        ValueError: if the flag cannot have it.
    """
    (flag,) = (flag for flag in FLAGS if flag.name == name)
    return flag.parser.parse(str(value))  # the text of a float is exact


_OTHERS = {
    "estimate": "memory, communication and time of solve or divergence, before it is "
    "run: estimate.json",
    "resume": "go on with a run that ended too early, from the checkpoint in --run=DIR",
    "devices": "what there is to compute on, and how it would be split",
}


def help_text(solving: Mapping[str, str], using: Mapping[str, str]) -> str:
    """What --help prints, for tasks given as name: sentence."""
    parts = [
        [
            f"{PROGRAM} {'|'.join(solving)}|estimate --x=x.npy --y=y.npy [flags]",
            f"{PROGRAM} {'|'.join(using)}|resume --run=DIR [flags]",
            f"{PROGRAM} devices [flags]",
        ],
        ["Tasks", *_tasks_text({**solving, **_OTHERS})],
        ["Tasks that use a finished run, in its folder", *_tasks_text(using)],
        [
            f"Flags of {', '.join(solving)} and estimate, with an example (and what "
            "holds without)",
            *table_text(_OF_PROBLEMS),
        ],
        ["Flags of estimate", *table_text(_OF_ESTIMATES)],
        [
            f"Flags of {', '.join(solving)}, estimate and resume: the way",
            *table_text(_OF_RUNS),
        ],
        ["Flags of tasks that use a run", *table_text(_OF_USES)],
        ["Flags of all tasks", *table_text(_OF_ALL)],
        ["Flags of all tasks: several processes", *table_text(_OF_PROCESSES)],
        [
            "Exit codes: 0 converged or done, 2 bad input, 3 not converged (or the run "
            "used),",
            "4 does not fit, 5 another process was lost, 6 interrupted, with a "
            "checkpoint.",
        ],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _tasks_text(tasks: Mapping[str, str]) -> list[str]:
    lines = []
    for name, text in tasks.items():
        lines += _entry(name, text)
    return lines


def _entry(name: str, text: str) -> list[str]:
    first, *rest = textwrap.wrap(text, 60)
    return [f"  {name:<26}{first}", *(" " * 28 + line for line in rest)]


def table_text(table: Sequence[Flag]) -> list[str]:
    """Lines that say what flags do."""
    lines = []
    for flag in table:
        usage = f"--{flag.name}" + (f"={flag.example}" if flag.example else "")
        known = flag.default is None or flag.parser is kinds.SWITCH
        text = flag.text + ("" if known else f" ({flag.default})")
        lines += _entry(usage, text)
    return lines
