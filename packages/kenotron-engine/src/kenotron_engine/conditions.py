"""Conditions of reproducible bits: a checkpoint's model as it was trained, and what differs now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kenotron_dist import Mesh
from kenotron_engine.assembly import build_model
from kenotron_engine.model_on_mesh import ModelOnMesh
from kenotron_engine.model_plan import ModelPlan
from kenotron_engine.sequence import CPMode
from kenotron_models import virtual_shards

CPU = "cpu"
Conditions = dict[str, Any]
"""Names of conditions and their values, as JSON."""


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
    shards = saved.get("virtual_shards") or virtual_shards(plan.spec, saved["max_tp"])
    chunks = saved["max_cp"]
    tp, cp = mesh.sizes["tp"], mesh.sizes["cp"]
    process = process_conditions(mesh.device)
    here, there = process["device"], saved.get("device", CPU)
    reasons = {
        f"the device is {here}, and was {there}": (here == CPU) != (there == CPU),
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
    now = {name: value for name, value in process.items() if name in saved}
    return exact, changed_conditions(saved, now).removeprefix("; ")


def model_as_trained(
    plan: ModelPlan,
    saved: Mapping[str, Any] | None,
    mesh: Mesh,
    *,
    scores: bool,
    threads: int | None,
) -> tuple[ModelOnMesh, str]:
    """Build a checkpoint's model, without its weights, to compute the bits of its training.

    Args:
        plan: see ``as_trained``, as the next ones and the remark that is returned.
        saved: conditions.
        mesh: any layout that the model fits.
        scores: whether texts are scored.
        threads: CPU threads that torch was given; None: it gets those of a reproducible
            training.

    Raises:
        ValueError: the mesh does not fit the model.
    """
    if saved is not None and threads is None:
        torch.set_num_threads(saved["threads"])
    plan, remark = as_trained(plan, saved, mesh, scores=scores)
    return ModelOnMesh(plan=plan, mesh=mesh, model=build_model(plan, mesh)), remark


def process_conditions(device: torch.device) -> Conditions:
    """Return the conditions that no config has: threads, instructions, device, torch's release."""
    name = CPU
    if device.type != CPU:
        name = f"{torch.get_device_module(device).get_device_name(device)}, {torch.version.cuda}"
    return {
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": name,
        "torch": torch.__version__,
    }


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
    before = {"device": CPU, **before}  # the only one, when it was not among the conditions
    differing = [
        f"{name} was {before.get(name, 'not recorded')} and is {value}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    return f"; general.reproducible: {', '.join(differing)}: bits may change" if differing else ""
