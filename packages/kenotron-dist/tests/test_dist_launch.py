"""`from_env` joins real worlds, and says what is wrong where it cannot."""

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from kenotron_dist import Mesh, RankError, all_reduce, from_env, shutdown, spawn
from kenotron_dist.device import choose_device
from kenotron_dist.testing import free_port

PROGRAM = str(Path(__file__).with_name("dist_launched.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
LAUNCHERS = ("OMPI_", "SLURM_", "PMI", "TORCHELASTIC_")
PLAIN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def variables(rank, size, port):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run(*command):
    """Start a launcher in an environment that knows of no other."""
    kept = ("SLURM_CONF",)  # where the cluster is, not who we are in it
    environ = {k: v for k, v in os.environ.items() if k in kept or not k.startswith(LAUNCHERS)}
    environ = {k: v for k, v in environ.items() if k not in PLAIN}
    environ["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def found(folder):
    return {file.name: file.read_text() for file in sorted(folder.glob("*.txt"))}


LOCAL = """
import sys
from kenotron_dist import MeshConfig, start

def loaded(mesh):
    return "colorsys" in sys.modules

if __name__ == "__main__":
    print(start(loaded, config=MeshConfig(dp=2), preload=sys.argv[1:]))
"""


@pytest.mark.parametrize("preload", [[], ["colorsys"]])
def test_what_local_ranks_need_is_loaded_once(preload, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LOCAL)
    done = subprocess.run(
        [sys.executable, program, *preload], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{bool(preload)}\n", done.stderr


def test_torchrun_starts_again_after_a_failure(tmp_path):
    run(*TORCHRUN, "--max-restarts=1", "--monitor-interval=0.1", PROGRAM, str(tmp_path), "fail")
    assert found(tmp_path) == {"0-1.txt": "torchrun 2 3", "1-1.txt": "torchrun 2 3"}


def test_torchrun_with_a_rendezvous_of_its_own(tmp_path):
    run(*TORCHRUN, "--standalone", PROGRAM, str(tmp_path), "work")
    assert found(tmp_path) == {"0-0.txt": "torchrun 2 3", "1-0.txt": "torchrun 2 3"}


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI's mpirun is not installed")
def test_mpirun(tmp_path):
    options = ["-n", "2", "--allow-run-as-root", "--oversubscribe"]
    run("mpirun", *options, sys.executable, PROGRAM, str(tmp_path), "work")
    assert found(tmp_path) == {"0-0.txt": "mpi 2 3", "1-0.txt": "mpi 2 3"}


def slurm_answers():
    if shutil.which("srun") is None or shutil.which("sinfo") is None:
        return False
    return subprocess.run(["sinfo"], capture_output=True, timeout=20).returncode == 0


@pytest.mark.skipif(not slurm_answers(), reason="no Slurm cluster answers here")
def test_srun(tmp_path):
    run("srun", "-n2", "--overcommit", sys.executable, PROGRAM, str(tmp_path), "work")
    assert found(tmp_path) == {"0-0.txt": "slurm 2 3", "1-0.txt": "slurm 2 3"}


def member(environ, pipe, program):
    """A process that joins the world that `environ` describes and sends what `program` returns."""
    torch.set_num_threads(1)
    try:
        world = from_env(environ, timeout=timedelta(seconds=3))
        pipe.send(program(world))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        time.sleep(2)  # it may host the store
    shutdown()


def sums(world):
    mesh = Mesh.connect(dp=world.world_size)
    return all_reduce(torch.ones(4), mesh["dp"]).tolist()


def start(*environs, program=sums):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "kenotron_dist"])
    pipes, processes = [], []
    for environ in environs:
        ours, theirs = context.Pipe()
        process = context.Process(target=member, args=(environ, theirs, program), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        answers = [pipe.recv() if pipe.poll(20) else None for pipe in pipes]
        for process in processes:
            process.join(20)
        return answers, [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_a_world_by_hand_and_a_clean_end():
    port = free_port()
    answers, codes = start(*(variables(rank, 3, port) for rank in range(3)))
    assert answers == [[3.0] * 4] * 3 and codes == [0, 0, 0]


def late(world):
    mesh = Mesh.connect(dp=world.world_size)
    total = all_reduce(torch.ones(4), mesh["dp"]).tolist()
    if world.rank == 1:
        time.sleep(1)
        dist.distributed_c10d._get_default_store().set("late", "1")
    return total


def test_the_host_of_the_store_leaves_last():
    port = free_port()
    answers, codes = start(*(variables(rank, 2, port) for rank in range(2)), program=late)
    assert answers == [[2.0] * 4] * 2 and codes == [0, 0]


def test_one_process_needs_no_network():
    answers, codes = start({})
    assert answers == [[1.0] * 4] and codes == [0]


def test_world_sizes_that_differ_are_told():
    port = free_port()
    environs = [variables(0, 2, port), {**variables(1, 3, port)}]
    answers, _ = start(*environs)
    told = [answer for answer in answers if "another one in a world of" in answer]
    assert told and told[0].startswith("ValueError: rank ")


def test_two_processes_with_one_rank_are_told():
    port = free_port()
    answers, _ = start(variables(0, 3, port), variables(1, 3, port), variables(1, 3, port))
    told = [answer for answer in answers if "is taken by process" in answer]
    assert len(told) == 1 and told[0].startswith("ValueError: rank 1 is taken by")


def test_a_port_in_use_is_named():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        words = rf"rank 0 cannot open port {port}, which is in use .*: set MASTER_PORT to a free"
        with pytest.raises(ConnectionError, match=words):
            from_env(variables(0, 2, port), timeout=timedelta(seconds=2))
    assert not dist.is_initialized()


def test_a_master_that_cannot_be_reached_is_named():
    port = free_port()
    began = time.monotonic()
    words = rf"rank 1 cannot reach the store at 127.0.0.1, port {port}, within 1 s: see that rank 0"
    with pytest.raises(ConnectionError, match=words):
        from_env(variables(1, 2, port), timeout=timedelta(seconds=1))
    assert time.monotonic() - began < 10


def ends(error, code, path):
    sys.stderr = open(path, "w")
    try:
        if error is not None:
            raise error
    finally:
        shutdown(code)


@pytest.mark.parametrize(
    ("error", "code", "left_with", "words"),
    [
        (None, 0, 0, ""),
        (None, 4, 4, ""),
        (KeyError("lost"), 0, 1, "KeyError: 'lost'"),
        (SystemExit(), 0, 0, ""),
        (SystemExit(7), 0, 7, ""),
        (SystemExit("bad config"), 0, 1, "bad config"),
    ],
)
def test_the_end_tells_what_happened(error, code, left_with, words, tmp_path):
    path = tmp_path / "stderr.txt"
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=ends, args=(error, code, str(path)))
    process.start()
    process.join(20)
    assert process.exitcode == left_with
    assert path.read_text().rpartition("\n")[0].endswith(words)


def joins_again(mesh):
    from_env({})


def test_a_second_process_group_is_refused():
    with pytest.raises(RankError, match="this process has a process group already: call it once"):
        spawn(joins_again, tp=2)


@pytest.mark.parametrize(
    ("asked", "gpus", "needed", "chosen"),
    [
        ((None, None), 0, 1, ("cpu", "gloo")),
        ((None, None), 1, 2, ("cpu", "gloo")),
        ((None, None), 2, 2, ("cuda", "nccl")),
        ((None, "gloo"), 2, 2, ("cpu", "gloo")),
        ((None, "nccl"), 8, 2, ("cuda", "nccl")),
        (("cpu", None), 8, 2, ("cpu", "gloo")),
        (("cuda", None), 8, 8, ("cuda", "nccl")),
        (("cuda", "gloo"), 8, 8, ("cuda", "gloo")),
    ],
)
def test_the_device_is_a_gpu_for_every_local_rank_or_the_cpu(asked, gpus, needed, chosen):
    assert choose_device(*asked, gpus, needed) == chosen


@pytest.mark.parametrize(
    ("asked", "gpus", "needed", "words"),
    [
        (("tpu", None), 0, 1, "device 'tpu' is neither 'cpu' nor 'cuda'"),
        ((None, "mpi"), 0, 1, "backend 'mpi' is neither 'gloo' nor 'nccl'"),
        (("cpu", "nccl"), 8, 1, "backend 'nccl' needs device 'cuda': use 'gloo' on the cpu"),
        (
            ("cuda", None),
            1,
            4,
            "4 local ranks need as many GPUs, but 1 can be seen: start fewer processes on this "
            "host, or choose device 'cpu'",
        ),
        ((None, "nccl"), 0, 1, "a rank needs a GPU"),
    ],
)
def test_a_device_that_is_not_there_is_refused(asked, gpus, needed, words):
    with pytest.raises(ValueError) as caught:
        choose_device(*asked, gpus, needed)
    assert words in str(caught.value)
