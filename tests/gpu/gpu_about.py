"""What a run of the GPU day belongs to: hardware, versions, commit, packages that are at hand."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

WANTED = {  # module -> what would be measured or checked with it
    "numpy": "kenotron-dist",
    "xxhash": "kenotron-ckpt",
    "safetensors": "checkpoints of other programs",
    "pydantic": "apps/train: the whole training step",
    "yaml": "apps/train: the whole training step",
    "rich": "apps/train",
    "pytest": "the test files for GPUs",
    "hypothesis": "the test files for GPUs",
    "transformers": "a contestant",
    "torchtitan": "a contestant",
    "liger_kernel": "a contestant",
    "flash_attn": "attention of documents",
    "triton": "torch.compile",
}
"""Modules that the day would like."""


def gpu_name() -> str:
    """Return the name of the first GPU; empty when there is none."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def describe(root: Path) -> dict[str, Any]:
    """Return hardware, versions, commit, date and packages as JSON values."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit_of(root),
        "hardware": hardware(),
        "versions": versions(),
        "packages": packages(),
    }


def hardware() -> dict[str, Any]:
    """Return what this machine is made of."""
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": gpu_name() or "none",
    }
    if found["gpu"] != "none":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpus": torch.cuda.device_count(),
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        }
    return found


def versions() -> dict[str, str]:
    """Return versions of Python, torch, the CUDA libraries and the driver."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    found["cuda"] = str(torch.version.cuda or "none")
    found["cudnn"] = str(torch.backends.cudnn.version() or "none")
    found["nccl"] = "none"
    if torch.version.cuda:
        with contextlib.suppress(Exception):
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["triton"] = packages().get("triton") or "none"
    found["driver"] = _driver()
    return found


def packages() -> dict[str, str | None]:
    """Return the version of each wanted module; None for one that cannot be imported."""
    found: dict[str, str | None] = {}
    owners = importlib.metadata.packages_distributions()
    for name in WANTED:
        if importlib.util.find_spec(name) is None:
            found[name] = None
        else:
            owner = owners.get(name, [name])[0]
            found[name] = importlib.metadata.version(owner) if name in owners else "unknown"
    return found


def commit_of(root: Path) -> str:
    """Return the commit of the working tree at ``root``.

    Git knows it; where the tree was copied without git, ``KENOTRON_COMMIT`` or the file ``COMMIT``
    in ``root`` tells it.
    """
    git = ["git", "-C", str(root)]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        top = _said([*git, "rev-parse", "--show-toplevel"])
        if Path(top).resolve() == root.resolve():
            changed = " with changes" if _said([*git, "status", "--porcelain"]) else ""
            return _said([*git, "rev-parse", "HEAD"]) + changed
    if os.environ.get("KENOTRON_COMMIT"):
        return os.environ["KENOTRON_COMMIT"].strip()
    file = root / "COMMIT"
    return file.read_text().strip() if file.is_file() else "unknown"


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return _said(query).partition("\n")[0] or "unknown"
    return "unknown"


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()
