"""The name of a run."""

from __future__ import annotations

import os
import time


def job_id() -> str:
    """Slurm's number of this job; ``local`` without one."""
    return os.environ.get("SLURM_JOB_ID", "local")


def run_name(pattern: str) -> str:
    """``general.run`` with ``%date`` and ``%jobid`` replaced."""
    stamp = time.strftime("%Y%m%d_%H%M%S")
    return pattern.replace("%date", stamp).replace("%jobid", job_id())
