"""gloo's threads are batch threads where a launch function makes the mesh; else they stay."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from kenotron_dist import Mesh, gloo_threads
from kenotron_dist.gloo_threads import let_gloo_threads_wait
from kenotron_dist.testing import on_ranks


def may_choose():
    """Whether this system lets a thread be a batch thread."""
    code = "import os; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


pytestmark = pytest.mark.skipif(not may_choose(), reason="the system has no batch threads for us")
NAMED = torch.torch_version.TorchVersion(torch.__version__) >= (2, 13)
named = pytest.mark.skipif(not NAMED, reason="gloo of this torch gives its threads no name")


def policies():
    return {os.sched_getscheduler(thread) for thread in gloo_threads.gloo_threads()}


def check_threads(mesh):
    """Those of the world, of the axes and of a group that is made later; nobody else's."""
    before = len(gloo_threads.gloo_threads())
    assert before >= 3  # the world, tp and dp
    assert policies() == {os.SCHED_BATCH}
    mesh.twin("tp")
    more = len(gloo_threads.gloo_threads())
    assert more > before
    assert policies() == {os.SCHED_BATCH}
    mesh.device_mesh()
    assert len(gloo_threads.gloo_threads()) > more
    assert policies() == {os.SCHED_BATCH}
    return os.sched_getscheduler(0) == os.SCHED_OTHER


@named
def test_threads_of_every_group_are_batch_threads_and_python_is_not():
    assert on_ranks(check_threads, dp=2, tp=2) == [True] * 4


def check_untouched(mesh):
    """Threads of a mesh that did not ask for it keep their policy, whatever groups it makes."""
    before = {*gloo_threads.gloo_threads()}
    plain = Mesh.connect(dp=2, tp=2)
    plain.twin("tp")
    plain.device_mesh()
    made = {*gloo_threads.gloo_threads()} - before
    return bool(made) and {os.sched_getscheduler(thread) for thread in made} == {os.SCHED_OTHER}


@named
def test_a_mesh_leaves_the_threads_unless_asked():
    assert on_ranks(check_untouched, dp=2, tp=2) == [True] * 4


def check_choice(mesh):
    for thread in gloo_threads.gloo_threads():
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    let_gloo_threads_wait()
    return policies() == {os.SCHED_IDLE}


@named
def test_a_policy_that_somebody_chose_stays():
    assert on_ranks(check_choice, tp=2) == [True, True]


def check_forbidden(mesh):
    for thread in gloo_threads.gloo_threads():
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    with pytest.MonkeyPatch.context() as patch:

        def forbidden(*_):
            raise PermissionError(1, "not permitted")

        patch.setattr(os, "sched_setscheduler", forbidden)
        let_gloo_threads_wait()
    left = policies()
    let_gloo_threads_wait()
    return left == {os.SCHED_OTHER} and policies() == {os.SCHED_BATCH}


@named
def test_a_system_that_forbids_it_is_no_error():
    assert on_ranks(check_forbidden, tp=2) == [True, True]


def check_unnamed(mesh):
    every = {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}
    return gloo_threads.gloo_threads() == [] and every == {os.SCHED_OTHER}


def test_a_thread_that_has_ended_is_no_error(monkeypatch):
    monkeypatch.setattr(gloo_threads, "gloo_threads", lambda: [2**22 + 1])  # above pid_max
    let_gloo_threads_wait()


def check_names(mesh):
    known = gloo_threads.gloo_threads()
    ctypes.CDLL(None).prctl(15, b"train\xd0", 0, 0, 0)  # the kernel cuts names where it must
    return bool(known) and gloo_threads.gloo_threads() == known


@named
def test_a_thread_whose_name_is_no_text_is_no_error():
    assert on_ranks(check_names, tp=2) == [True, True]


@pytest.mark.skipif(NAMED, reason="gloo of this torch names its threads")
def test_threads_without_a_name_are_left_as_they_are():
    assert on_ranks(check_unnamed, tp=2) == [True, True]
