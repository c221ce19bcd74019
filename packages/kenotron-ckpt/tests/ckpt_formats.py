"""A tiny checkpoint of each released format, as the release wrote it: ``ckpt_formats.json``.

``python ckpt_formats.py NAME`` adds the one that the installed ``kenotron_ckpt`` writes.
"""

import base64
import json
import sys
import tempfile
from pathlib import Path

import torch

FIXTURES = Path(__file__).with_suffix(".json")
STATE = {"lr": 0.5, "name": "é"}


def tensors():
    """What every fixture holds: two parameters."""
    return {
        "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
    }


def write(folder):
    """Save the tensors as a step of a run folder."""
    from kenotron_ckpt import save
    from kenotron_dist import Mesh
    from kenotron_dist.placement import TensorLayout

    values = {
        name: (value, TensorLayout(name, tuple(value.shape))) for name, value in tensors().items()
    }
    save(folder, 7, values, Mesh.connect(), STATE)


def unpack(name, folder):
    """Write a fixture's step folder, and return it."""
    step = folder / "7"
    step.mkdir(parents=True)
    for file, data in json.loads(FIXTURES.read_text())[name].items():
        (step / file).write_bytes(base64.b64decode(data))
    return step


def main():
    known = json.loads(FIXTURES.read_text()) if FIXTURES.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        files = sorted(path for path in Path(folder, "7").iterdir() if path.suffix != ".txt")
        known[sys.argv[1]] = {f.name: base64.b64encode(f.read_bytes()).decode() for f in files}
    FIXTURES.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
