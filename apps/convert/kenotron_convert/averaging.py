"""One checkpoint from several: the mean of their weights, or of their own moving averages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kenotron_ckpt import (
    Checkpoint,
    Location,
    Record,
    Store,
    StreamedTensor,
    open_checkpoint,
    read_box,
)
from kenotron_convert.importing import TOKENIZER, check_free, fresh_state, write_or_remove
from kenotron_dist import Mesh
from kenotron_models import model_from_json
from kenotron_models.hf import differences

OPTIMIZER = "optimizer."
MOVING = "optimizer.average."
"""Names of the moving averages that ``optimizer.weight_average`` keeps."""


def average(
    ckpts: Sequence[Location], folder: Path, *, ema: bool = False, overwrite: bool = False
) -> Path:
    """Write ``<folder>/0/``, a checkpoint of averaged weights; returns its path.

    Each tensor is the mean over the checkpoints, added in fp64 in the order given, in the dtype of
    the first one. No optimizer state is kept.

    Args:
        ckpts: step folders or run folders of one model, in any layout.
        folder: the run folder to write to.
        ema: whether the moving average of each checkpoint is taken instead of its weights.
        overwrite: whether a checkpoint of step 0 may be replaced.

    Raises:
        ValueError: checkpoints are of different models, one has no moving average or weights that
            are nan or inf, or there is a run. OSError. Nothing is written then.
    """
    if not ckpts:
        raise ValueError("no checkpoint was given; give --ckpt one step folder or several")
    if len(ckpts) == 1 and not ema:
        raise ValueError(
            f"--ckpt {ckpts[0]}: one checkpoint was given, and the mean of one is itself: give "
            "several, or --ema for the moving average that it keeps"
        )
    opened = [open_checkpoint(each, Mesh.connect(), select=_is_read(ema)) for each in ckpts]
    places = [Path(str(each.store)).resolve() for each in opened]
    if twice := [e.store for e, at in zip(opened, places, strict=True) if places.count(at) > 1]:
        raise ValueError(f"--ckpt {twice[0]}: this checkpoint was given twice: give each once")
    records = [_records(each, ema) for each in opened]
    first = opened[0]
    for checkpoint, own in zip(opened[1:], records[1:], strict=True):
        _check_alike(first, records[0], checkpoint, own)
    for checkpoint in opened:
        _check_model(first, checkpoint)
    state = first.manifest.state
    check_free(folder, overwrite, *(each.store for each in opened))
    weights = {n: r for n, r in first.manifest.records.items() if not n.startswith(OPTIMIZER)}
    sources = {}
    for name, weight in weights.items():
        parts = [(each.store, own[name]) for each, own in zip(opened, records, strict=True)]
        dtype = getattr(torch, weight.dtype)
        sources[name] = StreamedTensor(weight.shape, dtype, partial(_mean, parts, name, dtype))
    config, _ = model_from_json(state["model_config"])
    dtype = getattr(torch, next(iter(weights.values())).dtype)
    kept = {key: state[key] for key in ("tokenizer", "sequence_length") if key in state}
    said = {"from": [str(each.store) for each in opened], "ema": ema}
    whole = {**fresh_state(config, dtype, {}), **kept, "averaged": said}
    whole["model_config"] = state["model_config"]
    del whole["imported"]
    written = write_or_remove(folder, sources, whole)
    if (words := Path(str(first.store)).parent / TOKENIZER).is_dir():
        shutil.copytree(words, folder / TOKENIZER, dirs_exist_ok=True)
    return written


def _is_read(ema: bool) -> Callable[[str], bool]:
    return lambda name: not name.startswith(OPTIMIZER) or (ema and name.startswith(MOVING))


def _records(checkpoint: Checkpoint, ema: bool) -> dict[str, Record]:
    """Return the records to average, by name; with ``ema`` frozen weights are read as such."""
    found = checkpoint.manifest.records
    weights = {name: record for name, record in found.items() if not name.startswith(OPTIMIZER)}
    if not ema:
        return weights
    moving = {n.removeprefix(MOVING): r for n, r in found.items() if n.startswith(MOVING)}
    if not moving:
        raise ValueError(
            f"{checkpoint.store} has no moving average of its weights: it was written without "
            "optimizer.weight_average, or before its first update; leave out --ema for the mean of "
            "several checkpoints"
        )
    return weights | moving


def _check_alike(
    first: Checkpoint, wanted: dict[str, Record], other: Checkpoint, own: dict[str, Record]
) -> None:
    """Refuse checkpoints whose tensors differ in name or shape."""
    shapes, theirs = ({n: r.shape for n, r in each.items()} for each in (wanted, own))
    different = sorted(n for n in shapes.keys() | theirs if shapes.get(n) != theirs.get(n))
    if different:
        there, here = (each.get(different[0], "missing") for each in (theirs, shapes))
        raise ValueError(
            f"{other.store} is of another model than {first.store}: {different[0]} is {there} "
            f"there and {here} here; give checkpoints of one model"
        )


def _check_model(first: Checkpoint, other: Checkpoint) -> None:
    """Refuse checkpoints whose weights mean other models."""
    for each in (first, other):
        if "model_config" not in each.manifest.state:
            raise ValueError(f"{each.store} does not describe a model: model_config is missing")
    (ours, scaled), (theirs, their_scaled) = (
        model_from_json(each.manifest.state["model_config"]) for each in (first, other)
    )
    changed = differences(ours.decoder, theirs.decoder, ("max_position_embeddings",))
    changed += [] if scaled == their_scaled else ["multipliers"]
    if changed:
        raise ValueError(
            f"{other.store} is of another model than {first.store}: {changed[0]}; give "
            "checkpoints of one model"
        )


def _mean(parts: Sequence[tuple[Store, Record]], name: str, dtype: torch.dtype) -> Tensor:
    total: Tensor | None = None
    for store, record in parts:
        values = read_box(store, record, (0,) * len(record.shape), record.shape)
        if not values.isfinite().all():
            raise ValueError(f"{store}: weights are nan or inf in {name}")
        total = values.double() if total is None else total.add_(values)
    assert total is not None
    return (total / len(parts)).to(dtype)
