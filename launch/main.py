"""The command from its arguments to its exit code."""

import sys
from collections.abc import Sequence

import jax

from . import config as configs, data, devices, flags, report, results, tasks
from .config import Config
from .errors import BadInput

_CONVERGED, _BAD_INPUT, _NOT_CONVERGED = 0, 2, 3


def run() -> None:
    """The installed command."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Do what the arguments, without the program's name, say.

    Returns:
        The exit code: 0 converged (or help), 2 bad input, 3 not converged.
    """
    try:
        positional, values = flags.parse(argv)
        if values["help"]:
            print(flags.help_text({k: task.text for k, task in tasks.TASKS.items()}))
            return _CONVERGED
        return _execute(configs.resolve(positional, values, tasks.TASKS))
    except BadInput as error:
        line = " ".join(str(error).split())
        print(f"{flags.PROGRAM}: error: {line}", file=sys.stderr)
        return _BAD_INPUT


def _execute(config: Config) -> int:
    if config.out is not None:
        results.check_directory(config.out)
    devices.use_cpu(config.cpu_devices)
    with jax.enable_x64(config.dtype == "float64"):
        clouds = data.load(config)
        mesh = devices.make_mesh(config.mesh)
        progress = report.ProgressPrinter(config.progress_seconds)
        print(report.configuration(config, mesh, clouds), flush=True)
        outcome = tasks.perform(config, mesh, clouds, progress)
        record, arrays = results.collect(config, mesh, clouds, outcome)
    print(report.summary(record, outcome.value_name), flush=True)
    if config.out is not None:
        results.write(config.out, record, arrays)
        print(f"{'written to':<15}{config.out}")
    return _CONVERGED if record["converged"] else _NOT_CONVERGED
