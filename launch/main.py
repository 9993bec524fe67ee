"""The command from its arguments to its exit code."""

import sys
from collections.abc import Sequence

import jax

from . import (
    config as configs,
    data,
    devices,
    estimate,
    flags,
    job,
    report,
    results,
    saved,
    tasks,
    uses,
)
from .config import Config, Estimate, Joined, Resume, Use
from .errors import BadInput, Elsewhere, complain

_CONVERGED, _BAD_INPUT, _NOT_CONVERGED = 0, 2, 3
_TABLES = (tasks.TASKS, uses.USES)
_KINDS = {
    **{name: task.command for name, task in tasks.TASKS.items()},
    "estimate": Estimate,
    **{name: use.command for name, use in uses.USES.items()},
    "resume": Resume,
    "devices": Joined,
}


def run() -> None:
    """The installed command."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Do what the arguments, without the program's name, say.

    Returns:
        The exit code: 0 converged (or done), 2 bad input, 3 not converged, or a use of
        a run that had not, 4 does not fit; 5 and 6 as in :mod:`launch.processes`.
    """
    try:
        positional, values, given = flags.parse(argv)
        if values["help"]:
            texts = ({k: task.text for k, task in table.items()} for table in _TABLES)
            print(flags.help_text(*texts))
            return _CONVERGED
        command = configs.resolve(positional, values, given, _KINDS)
        if isinstance(command, Use):
            return _use(command)
        if isinstance(command, Estimate):
            return job.run(command, argv, estimate.run)
        if isinstance(command, Config | Resume):
            return job.run(command, argv, job.solve)
        assert isinstance(command, Joined)
        return job.run(command, argv, devices.show)
    except Elsewhere:
        return _BAD_INPUT
    except BadInput as error:
        complain("error", str(error))
        return _BAD_INPUT


def _use(use: Use) -> int:
    """A task that uses the plan of a finished run."""
    uses.check_installed(use)
    run = saved.read(use.run)
    inputs = [file.source for file in run.inputs.values()]
    results.check_directory(use.folder, use.task, [*inputs, use.source])
    devices.use_cpu(use.cpu_devices)
    devices.require(use.require)
    with jax.enable_x64(run.problem.dtype == "float64"):
        arrays = saved.load(run)
        numbers, file = data.of_use(use, run.problem.dtype)
        mesh = devices.mesh_of(use)
        print(report.use(use, mesh, run, arrays.clouds, numbers), flush=True)
        if not run.converged:
            complain("warning", report.warning(run))
        made = uses.perform(use, mesh, run, arrays, numbers)
    record = results.of_use(use, mesh, run, file, made)
    print(report.summary_of_use(record), flush=True)
    _write(use.folder, use.task, record, made.arrays)
    return _CONVERGED if run.converged else _NOT_CONVERGED


def _write(out: str, task: str, record: dict, arrays: dict) -> None:
    results.write(out, task, record, arrays)
    print(f"{'written to':<15}{out}")
