"""Settings of CUDA and its allocator: there before CUDA starts, unless the user has some."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kenotron_dist import Mesh, spawn
from kenotron_dist.cuda_variables import deterministic_variables, missing_variables

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_MODULE_LOADING")
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
LAUNCHED = """
import json, os
import kenotron_dist.launch as launch
from kenotron_dist import shutdown

def seen_by_cuda():  # the first that asks for devices
    print(json.dumps(dict(os.environ)), flush=True)
    return 0

launch.visible_gpus = seen_by_cuda
try:
    launch.from_env(deterministic={deterministic})
finally:
    shutdown()
"""


def launched(deterministic: bool, **given: str) -> subprocess.CompletedProcess[str]:
    """A rank that a launcher started, which prints its environment when it asks for devices."""
    left_out = (*NAMES, CUBLAS)
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    environ |= given | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", LAUNCHED.replace("{deterministic}", str(deterministic))]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def started(deterministic: bool = False, **given: str) -> dict[str, str | None]:
    """What such a rank finds there."""
    done = launched(deterministic, **given)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    return {name: found.get(name) for name in (*NAMES, *[CUBLAS] * deterministic)}


def test_a_launched_rank_has_them_before_cuda_starts() -> None:
    assert started() == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": None,
        "CUDA_MODULE_LOADING": "EAGER",
    }


def test_what_the_user_set_stays() -> None:
    given = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "CUDA_MODULE_LOADING": "LAZY"}
    assert started(**given) == {"PYTORCH_ALLOC_CONF": None} | given


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_any_name_of_the_allocator_counts(name: str) -> None:
    assert missing_variables({name: "", "CUDA_MODULE_LOADING": "LAZY"}) == {}


def variables(mesh: Mesh) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in NAMES}


def test_a_spawned_rank_has_them() -> None:
    expected = {name: os.environ.get(name) for name in NAMES} | missing_variables(os.environ)
    assert spawn(variables, dp=2) == [expected] * 2


def test_a_deterministic_rank_has_the_workspace_of_cublas_before_cuda_starts() -> None:
    assert started(deterministic=True)[CUBLAS] == ":4096:8"
    assert started(deterministic=True, **{CUBLAS: ":16:8"})[CUBLAS] == ":16:8"
    contradicts = launched(True, **{CUBLAS: ":4096:2:16:8"})
    assert contradicts.returncode == 1
    assert (
        "ValueError: CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8 was given in the environment, but "
        "deterministic runs need :4096:8 or :16:8: unset it, set one of these, or turn determinism "
        "off (general.deterministic: false)"
    ) in contradicts.stderr


@pytest.mark.parametrize(
    ("given", "added"),
    [({}, {CUBLAS: ":4096:8"}), ({CUBLAS: ":4096:8"}, {}), ({CUBLAS: ":16:8"}, {})],
)
def test_a_deterministic_setting_of_the_user_stays(given: dict, added: dict) -> None:
    assert deterministic_variables(given) == added


def workspace(mesh: Mesh) -> str | None:
    return os.environ.get(CUBLAS)


def test_a_spawned_rank_has_the_workspace_where_it_is_asked_for() -> None:
    assert spawn(workspace, dp=2) == [os.environ.get(CUBLAS)] * 2
    assert spawn(workspace, dp=2, deterministic=True) == [":4096:8"] * 2
