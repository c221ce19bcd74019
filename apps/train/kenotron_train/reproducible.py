"""Conditions of a run with ``general.reproducible``."""

from __future__ import annotations

import json

import torch

from kenotron_config import GeneralConfig, ModelConfig, ParallelismConfig
from kenotron_dist import Mesh, all_reduce
from kenotron_dist.rng import key
from kenotron_engine import Conditions, process_conditions


def conditions(
    general: GeneralConfig,
    parallelism: ParallelismConfig,
    model: ModelConfig,
    shards: int,
    device: torch.device,
) -> Conditions | None:
    """Return the conditions of this process's bits on a device; None without the mode.

    ``shards``: virtual ones of the model.
    """
    if not general.reproducible:
        return None
    names = ("cp_layout", "cp_block") if general.reproducible_max_cp > 1 else ()
    chunks = {name: getattr(parallelism, name) for name in names}
    return {
        "max_tp": general.reproducible_max_tp,
        "virtual_shards": shards,
        "max_cp": general.reproducible_max_cp,
        **chunks,
        "vocab_multiple": model.make_vocab_size_divisible_by,
        **process_conditions(device),
    }


def check_conditions(found: Conditions | None, mesh: Mesh) -> None:
    """Raise ValueError on all ranks where they compute under different conditions. Collective."""
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
