"""Importing the package costs little more than importing torch."""

import os
import subprocess
import sys

CODE = """
import time, torch
begin = time.process_time()
import kenotron_tp
print(time.process_time() - begin)
"""
HEAVY = """
import sys, kenotron_tp
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "numpy.testing")
print([name for name in heavy if name in sys.modules])
"""


def python(code):
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # the second run finds compiled modules
    run = [sys.executable, "-c", code]
    return subprocess.run(run, env=env, check=True, capture_output=True, text=True).stdout


def test_it_takes_less_than_50_ms_beside_torch():
    assert min(float(python(CODE)) for _ in range(3)) < 0.05


def test_it_does_not_load_compilers_or_dtensor():
    code = HEAVY.replace("import sys, kenotron_tp", "import sys, torch; begin = set(sys.modules)")
    already = python(code)
    assert python(HEAVY) == already
