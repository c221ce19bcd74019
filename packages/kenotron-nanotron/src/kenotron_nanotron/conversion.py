"""Convert a checkpoint of Nanotron or Kénotron to an ordinary checkpoint, tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_ckpt import StreamedTensor, save_streamed
from kenotron_nanotron.checkpoint import NanotronCheckpoint, read_nanotron
from kenotron_nanotron.expert_names import Due
from kenotron_nanotron.metadata import METADATA, MODEL_CONFIG
from kenotron_nanotron.optimizer_state import read_optimizer
from kenotron_nanotron.tensor_names import FAMILIES, HEAD, model_config, model_tensors

_SEQUENCE = re.compile(r"^\s+(?:- )?sequence_length: (\d+)\s*$", re.MULTILINE)


def import_nanotron(
    source: str | Path,
    folder: str | Path,
    *,
    rename: Mapping[str, str | None] | None = None,
    optimizer: bool = False,
) -> Path:
    """Write ``<folder>/<step>/`` from a checkpoint of Nanotron or Kénotron; returns its path.

    One tensor at a time is in memory. Values are not changed: each record has the dtype of its
    source. Experts become stacks of matrices. One process calls; any mesh loads the result.

    Args:
        source: a step folder, or a run folder (``latest.txt`` names the step).
        folder: the run folder to write to.
        rename: Nanotron's name of every tensor -> its name here, None to leave it out; for models
            other than Llama, Qwen2, LlaMoE and Mamba, whose names are known.
        optimizer: also convert Adam's state, and fp32 masters where there are some. Its files are
            pickles: they are opened by torch's ``weights_only`` loader.

    The state is that of a training program: step, samples, tokens, stage, model configuration, and
    under ``imported`` what the source said, with notes on what was not taken over. The schedule of
    the learning rate and random states are not read.

    Raises ValueError, naming the file or tensor and the rule: see ``read_nanotron`` and
    ``read_optimizer``; a tensor that is missing, that has no name here, or another shape than
    ``model_config.json`` says. OSError. Nothing is written then.
    """
    checkpoint = read_nanotron(source)
    if (Path(folder) / str(checkpoint.metadata.last_train_step) / METADATA).exists():
        raise ValueError(
            f"{folder} has Nanotron's own checkpoint of step "
            f"{checkpoint.metadata.last_train_step}: give the import another run folder"
        )
    names = _known_names(checkpoint) if rename is None else _renamed(checkpoint, rename)
    sources = {
        due.name: _source(due, checkpoint.tensors[name].dtype, checkpoint.tensors[name].read)
        for name, due in names.items()
    }
    steps = checkpoint.metadata.last_train_step
    if optimizer:
        adam = read_optimizer(checkpoint)
        steps = adam.steps
        for name, due in names.items():
            for kind in adam.kinds:
                read = partial(adam.tensor, kind, name)
                sources[f"optimizer.{kind}.{due.name}"] = _source(due, torch.float32, read)
    state = _state(checkpoint, steps) | {
        "imported": {
            "from": str(checkpoint.folder),
            "metadata": dict(checkpoint.metadata.raw),
            "notes": _notes(checkpoint, optimizer),
        }
    }
    text = checkpoint.config_text or None
    return save_streamed(folder, checkpoint.metadata.last_train_step, sources, state, text)


def _source(due: Due, dtype: torch.dtype, read: Callable[[], Tensor]) -> StreamedTensor:
    """Our tensor, made of theirs that ``read`` returns."""
    return StreamedTensor(due.own_shape, dtype, lambda: due.change(read()).contiguous())


def _known_names(checkpoint: NanotronCheckpoint) -> dict[str, Due]:
    """Nanotron's names -> our tensors; every tensor is there, known, and of the right shape."""
    where = str(checkpoint.folder / MODEL_CONFIG)
    due = model_tensors(checkpoint.model_config, where)
    if HEAD in checkpoint.tensors and HEAD not in due:
        raise ValueError(
            f"{where}: tie_word_embeddings is true, so the matrix is written once, as the "
            f"embedding, but {HEAD} is there too: one of the two is wrong"
        )
    missing = [name for name in due if name not in checkpoint.tensors]
    unknown = [name for name in checkpoint.tensors if name not in due]
    if missing or unknown:
        raise ValueError(
            f"{checkpoint.folder}: its tensors are not those of its {MODEL_CONFIG}:"
            + "".join(f"\n  {name} is missing" for name in missing)
            + "".join(f"\n  {name} has no name here{_near(name, missing)}" for name in unknown)
        )
    for name, one in due.items():
        shape = checkpoint.tensors[name].shape
        if shape != one.shape:
            raise ValueError(
                f"{checkpoint.folder}: {name} has shape {list(shape)}, but {MODEL_CONFIG} makes it "
                f"{list(one.shape)}"
            )
    return due


def _near(name: str, missing: list[str]) -> str:
    near = get_close_matches(name, missing, n=1)
    return f"; is it {near[0]}?" if near else ""


def _renamed(checkpoint: NanotronCheckpoint, rename: Mapping[str, str | None]) -> dict[str, Due]:
    unknown = sorted(set(checkpoint.tensors) - set(rename))
    absent = sorted(set(rename) - set(checkpoint.tensors))
    chosen = {name: own for name, own in rename.items() if own is not None}
    twice = sorted({own for own in chosen.values() if list(chosen.values()).count(own) > 1})
    problems = [f"{name} has no name in rename; None leaves it out" for name in unknown]
    problems += [f"{name} is in rename and not in the checkpoint" for name in absent]
    problems += [f"{own} is the new name of two tensors" for own in twice]
    if problems:
        raise ValueError("\n  ".join([f"{checkpoint.folder} cannot be imported:", *problems]))
    return {name: Due(own, checkpoint.tensors[name].shape) for name, own in chosen.items()}


def _state(checkpoint: NanotronCheckpoint, steps: int) -> dict[str, Any]:
    """Return what a training program needs to resume."""
    metadata = checkpoint.metadata
    sequence = _sequence_length(checkpoint)
    stage = metadata.stages[metadata.last_stage] if metadata.stages else None
    tokens = metadata.consumed_tokens_total
    if tokens is None:
        tokens = metadata.consumed_train_samples * (sequence or 0)
    config = checkpoint.model_config
    known = any(config.get(marker) for marker in FAMILIES)
    reading: dict[str, Any] = {"data_stages": "the order of Nanotron's samples"}
    return {
        "step": metadata.last_train_step,
        "optimizer_steps": steps,
        "cursor": {
            "stage": metadata.last_stage,
            "epoch": 0,  # the size of the data set is not known here
            "consumed": stage.consumed_train_samples if stage else metadata.consumed_train_samples,
        },
        "consumed_train_samples": metadata.consumed_train_samples,
        "consumed_tokens": tokens,
        "model_config": model_config(config, checkpoint.config_text) if known else dict(config),
        "reading": reading | ({"sequence_length": sequence} if sequence else {}),
    }


def _sequence_length(checkpoint: NanotronCheckpoint) -> int | None:
    """Tokens of a sample, where metadata or config.yaml tell, and tell one number."""
    found = {stage.sequence_length for stage in checkpoint.metadata.stages} - {None}
    found = found or set(map(int, _SEQUENCE.findall(checkpoint.config_text)))
    return found.pop() if len(found) == 1 else None


def _notes(checkpoint: NanotronCheckpoint, optimizer: bool) -> list[str]:
    notes = ["the schedule of the learning rate and random states were not read"]
    if not optimizer:
        notes.append("no optimizer state: resume with checkpoints.load_optimizer: false")
    metadata = checkpoint.metadata
    if metadata.consumed_tokens_total is None and not _sequence_length(checkpoint):
        notes.append("the length of samples is not known: tokens are counted from 0")
    told = {"rope_interleaved", "interleaved_rotary", "is_llamoe_config", "is_mamba_config"}
    if not told & set(checkpoint.model_config):
        notes.append(
            f"{MODEL_CONFIG} has no rope_interleaved: it does not say whether rotary positions "
            "turn neighbouring features or halves; set it as the run was"
        )
    return notes
