"""Conditions of a run with ``general.reproducible``, and its model as it was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kenotron_config import GeneralConfig, ModelConfig, ParallelismConfig
from kenotron_dist import Mesh, all_reduce
from kenotron_dist.rng import key
from kenotron_engine import CPMode, ModelPlan
from kenotron_models import virtual_shards

Conditions = dict[str, Any]
"""Names of conditions and their values, as JSON."""


def conditions(
    general: GeneralConfig, parallelism: ParallelismConfig, model: ModelConfig
) -> Conditions | None:
    """Return the conditions under which this process computes; None without the mode."""
    if not general.reproducible:
        return None
    names = ("cp_layout", "cp_block") if general.reproducible_max_cp > 1 else ()
    chunks = {name: getattr(parallelism, name) for name in names}
    return {
        "max_tp": general.reproducible_max_tp,
        "max_cp": general.reproducible_max_cp,
        **chunks,
        "vocab_multiple": model.make_vocab_size_divisible_by,
        **_of_process(),
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


def as_trained(
    plan: ModelPlan, saved: Mapping[str, Any] | None, mesh: Mesh, *, scores: bool
) -> tuple[ModelPlan, str]:
    """Return the plan of a checkpoint's model with which it computes the bits of its training.

    Args:
        plan: of the model alone.
        saved: the conditions of the checkpoint; None: it is of no reproducible run.
        mesh: the ranks.
        scores: whether texts are scored.

    Returns:
        The plan, and a remark: why it is as given although the run was reproducible, or which
        conditions of this process are others; empty where neither is so.
    """
    if saved is None:
        return plan, ""
    shards, chunks = virtual_shards(plan.spec, saved["max_tp"]), saved["max_cp"]
    tp, cp = mesh.sizes["tp"], mesh.sizes["cp"]
    reasons = {
        f"the device is {mesh.device.type}": mesh.device.type != "cpu",
        f"tp {tp} does not divide the {shards} virtual shards": shards % tp,
        f"cp {cp} does not divide the {chunks} virtual chunks": chunks % cp,
        f"texts are not scored in chunks (reproducible_max_cp {chunks})": scores and chunks > 1,
    }
    found = [reason for reason, is_so in reasons.items() if is_so]
    if found:
        return plan, f"general.reproducible: not the bits of the training, since {found[0]}"
    order = CPMode(
        "ring", order=saved.get("cp_layout", "zigzag"), block=saved.get("cp_block", CPMode.block)
    )
    exact = replace(
        plan,
        reproducible=True,
        virtual_shards=shards,
        virtual_chunks=chunks,
        cp_mode=order,
        vocab_divisible_by=saved.get("vocab_multiple", 1),
    )
    now = {name: value for name, value in _of_process().items() if name in saved}
    return exact, changed_conditions(saved, now).removeprefix("; ")


def _of_process() -> Conditions:
    """Return the conditions that no config has."""
    return {
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


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
