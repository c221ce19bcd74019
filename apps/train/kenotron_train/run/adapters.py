"""Adapters of a run: their first values, and what checkpoints say of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kenotron_ckpt import Record, SafetensorsFolder, Store, has_manifests, open_safetensors
from kenotron_config import ExistingCheckpointInitConfig, ModelConfig
from kenotron_dist.placement import named_parameters
from kenotron_models.adapters import ADAPTER, Adapted, AdapterSpec, peft_problems
from kenotron_models.hf import read_json
from kenotron_train.assemble import TrainingRun

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a folder of peft."""
SAME = ("kind", "rank", "alpha", "targets")
"""Keys of ``model.adapter`` that a checkpoint and the config that resumes it have in common."""
CHECKSUM = "base_checksum"
"""What a checkpoint says of the weights next to adapters."""


def check_adapter_file(
    model: ModelConfig, spec: AdapterSpec | None, folder: Path, resume: str | Path | None
) -> None:
    """Refuse a folder that adapters cannot begin as, where a run would begin as it.

    Args:
        model: section of the run.
        spec: the adapters of the model.
        folder: ``checkpoints.checkpoints_path``.
        resume: ``checkpoints.resume_checkpoint_path``.

    Raises:
        ValueError: it is not there, is damaged, or is of other adapters than ``model.adapter``.
    """
    section, begun = model.adapter, resume or has_manifests(folder)
    if begun or section is None or section.path is None or spec is None:
        return
    _opened(Path(section.path), spec)


def _opened(path: Path, spec: AdapterSpec) -> tuple[SafetensorsFolder, dict[str, Record]]:
    """Open a folder of peft, and find the adapters there.

    Raises ValueError, with the key, where they are others.
    """
    try:
        if problems := peft_problems(spec, read_json(path / CONFIG)):
            raise ValueError(f"{path / CONFIG}: {'; '.join(problems)}")
        folder = open_safetensors(path, single=WEIGHTS)
        return folder, folder.records(spec.tensors())
    except (ValueError, OSError) as error:
        raise ValueError(f"model.adapter.path: {error}") from error


def begin_adapters(training: TrainingRun) -> str:
    """Give adapters their first values that depend on weights; a sentence about them.

    Collective over the mesh. Raises ValueError for a folder of other adapters than those of
    ``model.adapter``; OSError.
    """
    section, plan = training.checkpoints.model.adapter, training.plan
    if section is None or plan.adapter is None:
        return ""
    if section.path is None:
        _begin_norms(training)
        return ""
    path = Path(section.path)
    folder, records = _opened(path, plan.adapter)
    wanted = {k: v for k, v in training.first_records().items() if v[1].name in records}
    try:
        folder.load(records, wanted, training.mesh)
    except ValueError as error:
        raise ValueError(f"model.adapter.path: {error}") from error
    if plan.dtype == torch.float32:
        training.optimizer.reload()
    return f"The adapters begin as those of {path}"


def _begin_norms(training: TrainingRun) -> None:
    """DoRA's norms begin as those of the weights."""
    assert training.plan.adapter is not None
    if training.plan.adapter.kind != "dora":
        return
    paths = {id(p): path for path, p in named_parameters(training.model.stack).items()}

    def write(layer: nn.Module) -> None:
        adapted = [module for module in layer.modules() if isinstance(module, Adapted)]
        norms = {name: x for module in adapted for name, x in module.norms_of_base().items()}
        for parameter in layer.parameters():
            name = training.model.layouts[paths[id(parameter)]].name
            if name in norms:
                parameter.copy_(norms[name])

    training.optimizer.rewrite(write)


def adapter_state(model: ModelConfig) -> dict[str, Any]:
    """Return what a checkpoint says of adapters, next to its model; nothing without them."""
    if model.adapter is None:
        return {}
    method = model.init_method
    base = method.path if isinstance(method, ExistingCheckpointInitConfig) else None
    return {ADAPTER: {**asdict(model.adapter), "base": base}}


def saved_adapter(training: TrainingRun) -> dict[str, Any]:
    """Return ``adapter_state`` and the checksum of the base. Collective over the mesh."""
    state = adapter_state(training.checkpoints.model)
    if state:
        state[ADAPTER][CHECKSUM] = training.base_checksum
    return state


def check_base(saved: Any, training: TrainingRun, folder: Store) -> None:
    """Refuse a checkpoint whose adapters learned next to other weights than those that are there.

    Collective over the mesh. Weights of another dtype are not compared.

    Args:
        saved: ``model_config`` of the checkpoint's state, which ``check_adapter`` accepted.
        training: with its base.
        folder: of the checkpoint.

    Raises:
        ValueError: naming both bases.
    """
    if training.checkpoints.model.adapter is None or CHECKSUM not in saved[ADAPTER]:
        return  # written by an older version
    before, now = str(saved[ADAPTER][CHECKSUM]), training.base_checksum
    if before == now or before.partition(":")[0] != now.partition(":")[0]:
        return
    at = adapter_state(training.checkpoints.model)[ADAPTER]["base"]
    was, here = (
        f"those of {place}" if place else "drawn by general.seed and model.init_method"
        for place in (saved[ADAPTER].get("base"), at)
    )
    raise ValueError(
        f"{folder} is of an adapter of other weights: they were {was} (checksum {before}), and are "
        f"{here} now (checksum {now}): give model.init_method and general.seed that lead to the "
        "weights that the adapter learned with"
    )


def check_adapter(saved: Any, model: ModelConfig, folder: Store) -> Any:
    """Return ``model_config`` of a checkpoint without what it says of adapters.

    What is no mapping is returned as it is: ``check_model`` refuses it.

    Raises:
        ValueError: the adapters are not those of ``model.adapter``.
    """
    if not isinstance(saved, Mapping):
        return saved
    before, now = saved.get(ADAPTER), adapter_state(model).get(ADAPTER)
    if not isinstance(before, Mapping | None):
        raise ValueError(f"{folder} cannot be resumed: its {ADAPTER} is {before!r}, no mapping")
    rest = {name: value for name, value in saved.items() if name != ADAPTER}
    if before is None or now is None:
        if before is not now:
            has, wants = ("an adapter alone", "none") if before else ("no adapter", "one")
            raise ValueError(
                f"{folder} cannot be resumed: it has {has}, and model.adapter asks for {wants}"
            )
        return rest
    changed = [
        f"{key} is {now[key]!r} in the config and {before.get(key)!r} in the checkpoint"
        for key in SAME
        if _plain(now[key]) != _plain(before.get(key))
    ]
    if changed:
        raise ValueError(f"{folder} is of another adapter: model.adapter.{'; '.join(changed)}")
    return rest


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
