"""Conditions that fix the bits of a run with ``general.reproducible``, besides its config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from kenotron_config import GeneralConfig, ParallelismConfig
from kenotron_dist import Mesh, all_reduce
from kenotron_dist.rng import key

Conditions = dict[str, Any]
"""Names of conditions and their values, as JSON."""


def conditions(general: GeneralConfig, parallelism: ParallelismConfig) -> Conditions | None:
    """Return the conditions under which this process computes; None without the mode."""
    if not general.reproducible:
        return None
    names = ("cp_layout", "cp_block") if general.reproducible_max_cp > 1 else ()
    chunks = {name: getattr(parallelism, name) for name in names}
    return {
        "threads": torch.get_num_threads(),
        "max_tp": general.reproducible_max_tp,
        "max_cp": general.reproducible_max_cp,
        **chunks,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def check_conditions(general: GeneralConfig, parallelism: ParallelismConfig, mesh: Mesh) -> None:
    """Raise ValueError on all ranks where they compute under different conditions. Collective."""
    found = conditions(general, parallelism)
    if found is None:
        return
    own = torch.tensor([key(json.dumps(found), bits=56)], device=mesh.device)
    if all_reduce(own, mesh.world, op="max") != all_reduce(own, mesh.world, op="min"):
        raise ValueError(
            f"general.reproducible: true was given, and the ranks' conditions differ; rank "
            f"{mesh.rank} has {described(found)}: start ranks on machines of one kind"
        )


def described(found: Conditions) -> str:
    """Return conditions in words."""
    return ", ".join(f"{name} {value}" for name, value in found.items())


def changed_conditions(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """Return a remark about a checkpoint's conditions and those of this run; empty if equal."""
    if before is None and now is None:
        return ""
    if before is None or now is None:
        was, is_ = ("false", "true") if before is None else ("true", "false")
        return (
            f"; general.reproducible was {was} and is {is_}: the curve is not that of one process "
            "in this mode"
        )
    differing = [
        f"{name} was {before.get(name)} and is {value}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    return f"; general.reproducible: {', '.join(differing)}: bits may change" if differing else ""
