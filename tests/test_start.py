"""How processes of a job start: what flags, environment and clusters say."""

import pytest

from launch import job, processes
from launch.errors import BadInput
from launch.main import main
from launch.processes import Wanted

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[0-3]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
BY_HAND = Wanted("node0:1234", 4, 0)


@pytest.mark.parametrize(
    ("wanted", "environ", "method", "words"),
    [
        (Wanted(), {}, None, ""),
        (Wanted(), {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, None, ""),
        (BY_HAND, {}, "deactivate", "by --coordinator_address, --num_processes"),
        (BY_HAND, SLURM, "deactivate", "by --coordinator_address"),
        (Wanted(), SLURM, "slurm", "task 2 of 4 of SLURM"),
        (
            Wanted(process_id=1),
            {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2"},
            "deactivate",
            "by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, --process_id",
        ),
        (
            Wanted(),
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
            | {"OMPI_MCA_orte_hnp_uri": "x"},
            "ompi",
            "rank 1 of 2 of Open MPI",
        ),
        (
            Wanted(),
            {"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "3"},
            "k8s",
            "pod 3",
        ),
    ],
)
def test_how_a_process_starts(wanted, environ, method, words):
    """Flags beat the environment, which beats the cluster."""
    start = processes.choose(wanted, environ)
    assert (start and start.method) == method
    if start:
        assert words in start.why


@pytest.mark.parametrize(
    ("more", "ids"),
    [
        ({"SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "8"}, tuple(range(8))),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_GPUS_ON_NODE": "2"}, (0, 1)),
        ({"SLURM_NTASKS_PER_NODE": "4", "CUDA_VISIBLE_DEVICES": "3"}, (0,)),
        ({"SLURM_NTASKS_PER_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None),
        ({}, None),
    ],
)
def test_a_task_has_all_its_gpus(more, ids):
    """One task on a node of 8 GPUs gets 8, where JAX by itself would take one."""
    start = processes.choose(Wanted(), SLURM | more)
    assert start.wanted.local_device_ids == ids
    start = processes.choose(Wanted(local_device_ids=(1,)), SLURM | more)
    assert start.wanted.local_device_ids == (1,)


@pytest.mark.parametrize(
    ("wanted", "environ", "words"),
    [
        (Wanted(num_processes=2), {}, "--coordinator_address is missing"),
        (Wanted("h:1", 2), {}, "--process_id is missing"),
        (Wanted("h:1", 2, 2), {}, "--process_id=2: must be less than"),
        (Wanted("h", 2, 1), {}, "--coordinator_address=h: must be HOST:PORT"),
        (
            Wanted("h:1", 2),
            {"JAX_PROCESS_ID": "one"},
            "JAX_PROCESS_ID=one: must be a number",
        ),
    ],
)
def test_half_of_a_job_is_refused(wanted, environ, words):
    with pytest.raises(BadInput, match=words):
        processes.choose(wanted, environ)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("resume", "--run is missing"),
        ("resume --run=d --out=e", "--out=e: results go to the folder of the run"),
        ("resume --run=d --epsilon=1", "--epsilon is for solve or divergence"),
        ("solve --demo=discs --local_processes=0", "local_processes"),
        ("solve --demo=discs --num_processes=2", "--coordinator_address is missing"),
        ("solve --demo=discs --local_device_ids=0,0", "local_device_ids"),
        ("solve --demo=discs --watchdog_seconds=-1", "watchdog_seconds"),
        ("solve --demo=discs --checkpoint_checks=0", "checkpoint_checks"),
    ],
)
def test_refused_in_one_line(typed, words, capsys):
    assert main(typed.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("ott-shard: error: ") and error.count("\n") == 1
    assert words in error


@pytest.mark.parametrize(
    "typed",
    ["a --local_processes=2 b", "a --local_processes 2 b", "a -local_processes=2 b"],
)
def test_children_are_not_told_to_have_children(typed):
    assert job._without_local_processes(typed.split()) == ["a", "b"]
