"""The command from its arguments to its exit code."""

import sys
from collections.abc import Sequence

from . import (
    cache,
    config as configs,
    devices,
    estimate,
    flags,
    job,
    tasks,
    uses,
    using,
)
from .config import Command, Config, Estimate, Resume, Use
from .errors import BadInput, complain
from .job import BAD_INPUT, CONVERGED

_TABLES = (tasks.TASKS, uses.USES)
_KINDS = {
    **{name: task.command for name, task in tasks.TASKS.items()},
    "estimate": Estimate,
    **{name: use.command for name, use in uses.USES.items()},
    "resume": Resume,
    "devices": Command,
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
            return CONVERGED
        command = configs.resolve(positional, values, given, _KINDS)
        with cache.kept(command.compilation_cache):
            return _do(command, argv)
    except BadInput as error:
        complain("error", str(error))
        return BAD_INPUT


def _do(command: Command, argv: Sequence[str]) -> int:
    if isinstance(command, Use):
        return job.run(command, argv, using.use)
    if isinstance(command, Estimate):
        return job.run(command, argv, estimate.run)
    if isinstance(command, Config | Resume):
        return job.run(command, argv, job.solve)
    return job.run(command, argv, devices.show)
