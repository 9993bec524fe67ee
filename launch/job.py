"""A job of one or more processes, from its command to its exit code."""

import dataclasses
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

import ott_shard as otts

from . import checkpoint, data, devices, processes, rehearsal, report, results, tasks
from .checkpoint import Interrupted, Keeper, Kept
from .config import Command, Config, Resume
from .data import Clouds, Input
from .errors import Refused
from .processes import INTERRUPTED, PEER_LOST, Beat, Wanted, Watchdog
from .progress import Log, Reporter, check_log
from .tasks import Hooks, Watch

CONVERGED, BAD_INPUT, NOT_CONVERGED = 0, 2, 3
_Command = TypeVar("_Command", bound=Command)


def run(
    command: _Command, argv: Sequence[str], work: Callable[[_Command, Beat], int]
) -> int:
    """Do `work` in every process of the job.

    Args:
        command: what is asked for.
        argv: the arguments that say so.
        work: from the command to the exit code; :func:`solve` or one like it. It is
            given what to call when something has moved.

    Returns:
        The exit code.

    Raises:
        BadInput: in a process that is alone.
    """
    if command.local_processes:
        return _rehearse(command, command.local_processes, argv)
    devices.use_cpu(command.cpu_devices)
    wanted = Wanted(*(getattr(command, name) for name in Wanted._fields))
    start = processes.choose(wanted, os.environ)
    if start is None:
        return work(command, lambda _: None)
    print(processes.begin(start, command.start_seconds), file=sys.stderr, flush=True)
    beat = Watchdog(command.watchdog_seconds).beat
    try:
        code = processes.together(lambda: work(command, beat))
    except Refused:
        code = BAD_INPUT
    except BaseException as error:
        # The others wait for this process; a regular end would wait for them.
        if processes.of_peers(error):
            reason = str(error).strip().splitlines()[0]
            processes.give_up(f"a peer was lost: {reason}", PEER_LOST)
        traceback.print_exc()
        processes.give_up(f"process {jax.process_index()}: {error!r}", 1)
    jax.distributed.shutdown()
    return code


def _rehearse(command: Command, count: int, argv: Sequence[str]) -> int:
    folder = getattr(command, "run", None) or getattr(command, "out", None)
    logs = Path(folder or tempfile.mkdtemp(prefix="ott-shard-")) / "logs"
    print(f"{count} processes, logs in {logs}", file=sys.stderr, flush=True)
    return rehearsal.rehearse(_without_local_processes(argv), count, logs)


def _without_local_processes(argv: Sequence[str]) -> list[str]:
    """The arguments without this flag, which stands as --flag=N or as --flag N."""
    rest, skip = [], False
    for argument in argv:
        name, equals, _ = argument.lstrip("-").partition("=")
        if skip or name == "local_processes":
            skip = not skip and not equals
        else:
            rest.append(argument)
    return rest


def solve(command: Config | Resume, beat: Beat) -> int:
    """Solve, or go on with what was not solved."""
    found = processes.together(lambda: _opened(command), _facts)
    config, kept, clouds, inputs = found
    if config.out is not None:
        processes.check_shared(f"--out={config.out}", config.out)
    first = jax.process_index() == 0
    log = Log(config.log_json if first else None)
    with jax.enable_x64(config.dtype == "float64"):
        mesh = devices.mesh_of(config)
        tell(report.configuration(config, mesh, clouds))
        log("start", config=_fields(config), **results.place(mesh))
        placed = clouds
        if jax.process_count() > 1:
            placed = data.spread(clouds, mesh, config.dtype, beat)
        keeper = Keeper(
            None if config.out is None else Path(config.out),
            _meta(config, inputs),
            seconds=config.checkpoint_seconds,
            checks=config.checkpoint_checks,
            known=kept.snapshots,
            sizes=clouds.sizes,
            beat=beat,
            log=log,
        )
        beat("the first iterations")
        try:
            known = {
                term: checkpoint.resized(term, snapshot, placed.sizes)
                for term, snapshot in kept.snapshots.items()
            }
            reporter = Reporter(config, log) if first else None
            hooks = Hooks(_both(reporter, keeper), known, keeper.solved)
            outcome = tasks.perform(config, mesh, placed, hooks)
        except Interrupted as place:
            log("interrupted", checkpoint=str(place))
            tell(f"interrupted: go on by resume --run={config.out} ({place})")
            return INTERRUPTED
        finally:
            keeper.close()
        beat("the costs")
        record, arrays = results.of_run(config, mesh, clouds, inputs, outcome)
        if config.out is not None:
            results.write(config.out, config.task, record, arrays, beat)
            checkpoint.remove(config.out)
        if jax.process_count() == 1:
            # Compiled last: the results are safe.
            record["temp_bytes_per_device"] = tasks.temp_bytes(config, mesh, placed)
            if config.out is not None:
                results.write_record(config.out, config.task, record)
        log("end", **record)
        tell(report.summary(record, outcome.value_name))
        if config.out is not None:
            tell(f"{'written to':<15}{config.out}")
    return CONVERGED if record["converged"] else NOT_CONVERGED


def tell(text: str) -> None:
    """One process speaks for all."""
    if jax.process_index() == 0:
        print(text, flush=True)


def _both(reporter: Reporter | None, keeper: Keeper) -> Watch:
    def watch(term: str, now: otts.Snapshot) -> None:
        if reporter:
            reporter(term, now)
        keeper(term, now)

    return watch


class Found(NamedTuple):
    """What is to be solved, and what it is made of."""

    config: Config
    kept: Kept
    clouds: Clouds
    inputs: dict[str, Input]


def _facts(found: Found) -> dict[str, str]:
    """What must be the same for all processes."""
    iterations = {k: int(s.iteration) for k, s in found.kept.snapshots.items()}
    return {
        "flags": found.config.common(),
        "input files": json.dumps(_described(found.inputs)),
        "checkpoints": str(iterations),
        "versions": json.dumps(results.versions()),
    }


def _opened(command: Config | Resume) -> Found:
    devices.require(command.require)
    kept = Kept({}, {})
    if isinstance(command, Resume):
        kept = checkpoint.read(command.run)
        try:
            config = Config.kept(kept.meta["config"], command)
        except (KeyError, TypeError):
            raise checkpoint.refused(command.run, "is of another version") from None
    else:
        config = command
    sources = [getattr(config, name) for name in Clouds._fields]
    check_log(config.log_json, sources)
    if config.out is not None:
        results.check_directory(config.out, config.task, sources)
    clouds, inputs = data.load(config)
    if isinstance(command, Resume) and _described(inputs) != kept.meta["inputs"]:
        raise checkpoint.refused(command.run, "is of other input than is there now")
    return Found(config, kept, clouds, inputs)


def _meta(config: Config, inputs: dict[str, Input]) -> dict[str, Any]:
    """What a checkpoint says of its run."""
    fields = _fields(config) | {
        name: file.source
        for name, file in inputs.items()  # from any folder
    }
    versions = results.versions()
    return {"config": fields, "inputs": _described(inputs), "versions": versions}


def _described(inputs: dict[str, Input]) -> dict[str, Any]:
    return {name: list(file[1:]) for name, file in inputs.items()}


def _fields(config: Config) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))
