"""Every launcher's variables give a rank's place, and contradictions are named."""

import pytest

from kenotron_dist import MeshConfig, World, resolve, slurm, start
from kenotron_dist.environment import check_tasks

BASE = {"MASTER_ADDR": "n1", "MASTER_PORT": "1234"}
TORCHRUN = {
    **BASE,
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
STEP = {
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09],m5",
}
BATCH = {"SLURM_JOB_ID": "100", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}
ALONE = World(0, 1, 0, 1, "127.0.0.1", 0, "none")


def without(table, *names):
    return {name: value for name, value in table.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        ({}, ALONE),
        (BASE, ALONE),  # an address alone starts nothing
        (TORCHRUN, World(5, 8, 1, 4, "n1", 1234, "torchrun", 2, True)),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, World(5, 8, 1, 5, "n1", 1234, "torchrun", 2, True)),
        ({**STEP, **TORCHRUN}, World(5, 8, 1, 4, "n1", 1234, "torchrun", 2, True)),
        ({**BATCH, **TORCHRUN}, World(5, 8, 1, 4, "n1", 1234, "torchrun", 2, True)),
        ({**MPI, **TORCHRUN}, World(5, 8, 1, 4, "n1", 1234, "torchrun", 2, True)),
        (BY_HAND, World(1, 2, 1, 2, "localhost", 1234, "torchrun")),
        ({**BY_HAND, **MPI}, World(1, 2, 1, 2, "localhost", 1234, "torchrun")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, World(0, 1, 0, 1, "127.0.0.1", 29500, "torchrun")),
        # one task of a step that starts its own processes: another set, so no contradiction
        ({**STEP, **BY_HAND}, World(1, 2, 1, 2, "localhost", 1234, "torchrun")),
        (STEP, World(6, 7, 0, 1, "gpu07", 18100, "slurm")),
        ({**STEP, "SLURM_NODEID": "1"}, World(6, 7, 0, 2, "gpu07", 18100, "slurm")),
        ({**STEP, **BASE}, World(6, 7, 0, 1, "n1", 1234, "slurm")),
        ({**STEP, "SLURM_STEP_ID": "3"}, World(6, 7, 0, 1, "gpu07", 18103, "slurm")),
        ({**STEP, "SLURM_RESTART_COUNT": "1"}, World(6, 7, 0, 1, "gpu07", 18100, "slurm", 1)),
        (  # the step's own numbers go before the job's
            {**STEP, "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "7"},
            World(6, 7, 0, 1, "gpu07", 18100, "slurm"),
        ),
        (
            {**without(STEP, "SLURM_TASKS_PER_NODE"), "SLURM_NTASKS_PER_NODE": "4"},
            World(6, 7, 0, 4, "gpu07", 18100, "slurm"),
        ),
        (without(STEP, "SLURM_TASKS_PER_NODE"), World(6, 7, 0, 7, "gpu07", 18100, "slurm")),
        ({**BATCH, "SLURM_NTASKS": "1"}, ALONE),
        ({**STEP, **MPI}, World(1, 2, 1, 2, "127.0.0.1", 29500, "mpi")),  # mpirun in an allocation
        (MPI, World(1, 2, 1, 2, "127.0.0.1", 29500, "mpi")),
        ({**MPI, **BASE}, World(1, 2, 1, 2, "n1", 1234, "mpi")),
        ({**HYDRA, **BASE}, World(1, 4, 1, 2, "n1", 1234, "mpi")),
    ],
)
def test_the_launcher_says_who_this_is(environ, world):
    assert resolve(environ) == world


def test_the_port_of_an_mpi_job_is_its_own():
    ports = {resolve({**MPI, "PMIX_NAMESPACE": f"job-{i}@1"}).master_port for i in range(20)}
    assert len(ports) == 20 and all(15_000 <= port < 30_000 for port in ports)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "RANK=0, WORLD_SIZE contradict: WORLD_SIZE is missing: set WORLD_SIZE or"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, RANK contradict: RANK is missing"),
        ({**TORCHRUN, "RANK": "x"}, "RANK=x is not a whole number: correct or unset RANK"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is less than 0"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is less than 1"),
        (
            {**TORCHRUN, "RANK": "8"},
            "RANK=8, WORLD_SIZE=8 do not fit together: ranks count from 0 to 7",
        ),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4, LOCAL_WORLD_SIZE=4 do not fit together"),
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "16"},
            "WORLD_SIZE=8, LOCAL_WORLD_SIZE=16 contradict: the world is not made of whole hosts",
        ),
        (
            {**BY_HAND, "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            "WORLD_SIZE=3, LOCAL_WORLD_SIZE=2 contradict: the world is not made of whole hosts",
        ),
        (without(TORCHRUN, "MASTER_ADDR"), "RANK=5, WORLD_SIZE=8 are not enough: MASTER_ADDR is"),
        (without(TORCHRUN, "MASTER_PORT"), "set MASTER_PORT to one value on all ranks"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port"),
        (
            {**BY_HAND, "MASTER_ADDR": "n1"},
            "LOCAL_WORLD_SIZE is missing, and this may not be the only host",
        ),
        ({**BY_HAND, "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is missing"),
        (
            {**BY_HAND, **MPI, "RANK": "0"},
            "RANK=0, WORLD_SIZE=2, OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2 contradict one "
            "another: unset RANK and WORLD_SIZE and let the launcher speak",
        ),
        ({**BY_HAND, **MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "contradict one another"),
        (
            {**STEP, **BASE, "RANK": "0", "WORLD_SIZE": "7"},
            "RANK=0, WORLD_SIZE=7, SLURM_PROCID=6, SLURM_NTASKS=7 contradict one another",
        ),
        (
            BATCH,
            "SLURM_NTASKS=4, SLURM_PROCID=0 ask for several processes, but srun did not start "
            "this one: write srun before the command in the script",
        ),
        ({**BATCH, "SLURM_STEP_ID": "4294967291"}, "srun did not start this one"),
        ({**STEP, "SLURM_PROCID": "7"}, "SLURM_PROCID=7, SLURM_NTASKS=7 do not fit together"),
        ({**STEP, "SLURM_LOCALID": "1"}, "SLURM_LOCALID=1, SLURM_TASKS_PER_NODE=2(x3),1 do not"),
        (
            {**STEP, "SLURM_TASKS_PER_NODE": "2(x4)"},
            "SLURM_NTASKS=7, SLURM_TASKS_PER_NODE=2(x4) contradict one another",
        ),
        ({**STEP, "SLURM_TASKS_PER_NODE": "2x4"}, "SLURM_TASKS_PER_NODE=2x4 cannot be read ("),
        (
            {**without(STEP, "SLURM_TASKS_PER_NODE"), "SLURM_NNODES": "4"},
            "SLURM_NNODES=4 nodes, but no variable says how many tasks run on each",
        ),
        (without(STEP, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is missing: set MASTER_ADDR"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[1"}, "cannot be read (brackets do not match in host"),
        (without(STEP, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        (
            {**MPI, "OMPI_COMM_WORLD_SIZE": "4"},
            "OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_LOCAL_SIZE=2 span several hosts, but "
            "MASTER_ADDR is missing",
        ),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_SIZE=2 do not fit"),
        (without(MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0 does not say how many ranks there are: start with"),
    ],
)
def test_contradictions_are_named_with_a_remedy(environ, words):
    with pytest.raises(ValueError) as caught:
        resolve(environ)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07]-x,m5", ["n1-x", "n2-x", "n3-x", "n07-x", "m5"]),
        ("a,b", ["a", "b"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]c[0-1]", ["r1c0", "r1c1", "r2c0", "r2c1"]),
        ("node-1.cluster,node-2.cluster", ["node-1.cluster", "node-2.cluster"]),
    ],
)
def test_host_lists_are_expanded(text, names):
    assert slurm.hosts(text) == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no host in host list ''"),
        ("n[1-", "brackets do not match"),
        ("n]1[", "brackets do not match"),
        ("n[[1]]", "brackets do not match"),
        ("n[a-b]", "'a-b' is no range of numbers in host list 'n[a-b]'"),
        ("n[3-1]", "'3-1' is no range"),
        ("n[]", "'' is no range"),
    ],
)
def test_a_broken_host_list_is_refused(text, words):
    with pytest.raises(ValueError) as caught:
        slurm.hosts(text)
    assert words in str(caught.value)


def test_tasks_per_node_are_expanded():
    assert slurm.tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert slurm.tasks_per_node("4") == [4]
    with pytest.raises(ValueError, match=r"'2\(x\)' is not of the form 2\(x3\),1"):
        slurm.tasks_per_node("2(x)")


PTY = STEP | {
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "m5",
}


def test_a_mesh_of_several_ranks_in_a_shell_of_srun_names_slurm():
    check_tasks(resolve(PTY), 1)
    check_tasks(resolve(TORCHRUN), 8)
    words = (
        r"Slurm \(srun, or a shell of srun --pty\) started this process as its only task, and the "
        "mesh has 4 ranks: start it with srun --ntasks 4, or unset SLURM_STEP_ID and SLURM_STEPID"
    )
    with pytest.raises(ValueError, match=words):
        check_tasks(resolve(PTY), 4)
    alone = {name: "01"["SIZE" in name] for name in MPI}
    with pytest.raises(ValueError, match="MPI started this process .* with mpirun -n 2, or unset"):
        check_tasks(resolve(alone), 2)


def test_start_refuses_it_before_anything_is_joined(monkeypatch):
    for name, value in PTY.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="Slurm .* the mesh has 2 ranks"):
        start(len, config=MeshConfig(dp=2))
