"""Importing a package of layers costs little more than importing torch."""

import functools
import os
import subprocess
import sys

import pytest

PACKAGES = ("kenotron_tp", "kenotron_cp", "kenotron_ep")
CODE = """
import time
begin = time.process_time()
import torch
loaded = time.process_time()
import {package}
print((time.process_time() - loaded) / (loaded - begin))
"""
HEAVY = """
import sys, {package}
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "numpy.testing")
print([name for name in heavy if name in sys.modules])
"""


@functools.cache
def heavy_of_torch() -> str:
    return python(HEAVY.format(package="torch"))


def python(code: str) -> str:
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # the second run finds compiled modules
    run = [sys.executable, "-c", code]
    return subprocess.run(run, env=env, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_it_takes_less_than_a_twentieth_of_the_time_of_torch(package: str) -> None:
    assert min(float(python(CODE.format(package=package))) for _ in range(3)) < 0.05


@pytest.mark.parametrize("package", PACKAGES)
def test_it_does_not_load_compilers_or_dtensor(package: str) -> None:
    assert python(HEAVY.format(package=package)) == heavy_of_torch()
