"""A step loads no compiler: it would take every rank a second at its start."""

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from engine_cases import batches_of, training_of
from kenotron_dist import Mesh
from kenotron_engine import training_step
mesh = Mesh.connect()
training_step(training_of(mesh), batches_of(mesh, 1)[0], 1)
print(*sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""


def test_a_training_step_loads_no_compiler():
    run = [sys.executable, "-c", CODE]
    here = Path(__file__).parent
    done = subprocess.run(run, cwd=here, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
