"""Check that a checkpoint has the tensors that a run resumes with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kenotron_ckpt import Record, Store
from kenotron_dist import Mesh, gather_objects
from kenotron_engine import Records


def check_optimizer(
    wanted: Iterable[str], saved: Iterable[str], rule: str, folder: Store, mesh: Mesh
) -> str:
    """Refuse a checkpoint of an optimizer that did not keep what the configured one does.

    Returns a remark on what it kept and the configured one does not. Collective over the mesh.
    """
    needed, there = (
        {name for name in names if name.startswith("optimizer.")} for names in (wanted, saved)
    )
    first = {_kind(name): name for name in sorted(needed - there, reverse=True)}
    if missing := {
        kind: name for each in gather_objects(first, mesh.world) for kind, name in each.items()
    }:
        other = (
            f"was written with another optimizer, without {min(missing.values())}; choose that one"
            if there
            else "has weights only; begin a run from them with another "
            f"checkpoints.checkpoints_path and model.init_method: {{path: {folder}}}"
        )
        raise ValueError(
            f"{folder} has no {', '.join(sorted(missing))} of optimizer.optimizer_factory "
            f"({rule}): it {other}, or start this one afresh with "
            f"checkpoints.load_optimizer: false and checkpoints.resume_checkpoint_path: {folder}"
        )
    extra = ", ".join(sorted(set(map(_kind, there)) - set(map(_kind, needed))))
    return f"; {extra} of another optimizer is left behind" if extra else ""


def check_module(wanted: bool, folder: Store, saved: Iterable[str]) -> str:
    """Refuse a checkpoint without the module of `model.mtp`; a remark on one that is not read."""
    there = any(name.startswith("mtp.") for name in saved)
    if wanted and not there:
        raise ValueError(
            f"{folder} has no module of model.mtp, which was given: its run had none; leave mtp "
            "out, or begin a new run with it"
        )
    return "; the module of model.mtp is left behind" if there and not wanted else ""


def _kind(name: str) -> str:
    """``exp_avg`` of ``optimizer.exp_avg.layers.0.mlp.down.weight``."""
    return name.split(".")[1]


def converted(wanted: Records, saved: Mapping[str, Record]) -> str:
    """A remark on state of the optimizer that is read in another number format."""
    found = {
        (saved[layout.name].dtype, str(tensor.dtype).removeprefix("torch."))
        for tensor, layout in wanted.values()
        if layout.name in saved
    }
    changes = sorted(f"{before} to {now}" for before, now in found if before != now)
    if not changes:
        return ""
    return f"; state of the optimizer is converted from {', '.join(changes)}"
