"""Comparison of the state in a checkpoint with the config that resumes it: model and numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from kenotron_ckpt import Store
from kenotron_config import ModelConfig, multipliers_in
from kenotron_models import TransformersSpec, model_from_json, model_to_json
from kenotron_models.hf import differences
from kenotron_train.run.initial import key_of

NO_EFFECT = (
    "initializer_range", "max_position_embeddings", "pad_token_id", "pretraining_tp", "use_cache",
    "bos_token_id", "eos_token_id", "path",
)  # fmt: skip
"""Fields of a model that may differ between a checkpoint and the config that resumes it."""
ROPE = ("rope_theta", "rope_scaling")
"""Those that ``checkpoints.accept_changed_rope`` lets differ, too."""
ROPE_OF_A_LAYER = ("theta", "scaling")
"""The same two in ``DecoderSpec``."""
COUNTS = ("optimizer_steps", "consumed_train_samples", "consumed_tokens", "schedule_start")
"""Numbers of a state that count something."""


def model_of(model: ModelConfig) -> dict[str, Any]:
    """Return what a checkpoint says of its model, as JSON has it: tuples are lists."""
    return json.loads(json.dumps(model_to_json(model.model_config, multipliers_in(model))))


def check_model(saved: Any, model: ModelConfig, folder: Store, *, accepts_rope: bool) -> None:
    """Refuse a checkpoint of another model than that of a config.

    Keys that both have are compared first, then the decoders that both mean: another family, or a
    key that the checkpoint does not have, may mean another model.

    Args:
        saved: ``model_config`` of the checkpoint's state.
        model: what is to be trained.
        folder: of the checkpoint.
        accepts_rope: ``checkpoints.accept_changed_rope``.

    Raises:
        ValueError: naming the keys, with the values of both.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"{folder} cannot be resumed: its model_config is {saved!r}, no mapping")
    rope = (ROPE, ROPE_OF_A_LAYER) if accepts_rope else ((), ())
    changed = _changed_keys(saved, model, rope[0])
    changed = changed or _changed_decoder(saved, model, folder, rope[1])
    if changed:
        hint = (
            "; --set checkpoints.accept_changed_rope=true extends the context of the checkpoint"
            if any(line.startswith(ROPE) for line in changed)
            else ""
        )
        problems = "; ".join(changed) + hint
        raise ValueError(f"{folder} is of another model: model.model_config.{problems}")


def check_numbers(state: Mapping[str, Any], step: int, folder: Store) -> None:
    """Refuse a state whose numbers cannot be those of a run.

    Args:
        state: of the checkpoint.
        step: that of its manifest.
        folder: of the checkpoint.

    Raises:
        ValueError: naming the number and the rule.
    """
    if state["step"] != step or isinstance(state["step"], bool):
        raise ValueError(
            f"{folder} cannot be resumed: its state.step is {state['step']!r}, but the manifest is "
            f"of step {step}: it was edited; resume from another checkpoint"
        )
    cursor = state["cursor"] if isinstance(state["cursor"], Mapping) else {"cursor": None}
    counts = {name: state.get(name, 0) for name in COUNTS}
    counts |= {f"cursor.{key}": value for key, value in cursor.items()}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(
                f"{folder} cannot be resumed: its state.{name} is {value!r}, no whole number from "
                "0: it was edited; resume from another checkpoint"
            )


def _changed_keys(saved: Mapping[str, Any], model: ModelConfig, rope: tuple[str, ...]) -> list[str]:
    """Return a line for each key of the checkpoint whose value is another one in the config."""
    given = model_of(model)
    return [
        f"{name} is {given.get(name)!r} in the config and {value!r} in the checkpoint"
        for name, value in {"multipliers": None, **saved}.items()
        if name not in (*NO_EFFECT, *rope)
        and not name.startswith("is_")
        and _uncut(name, given.get(name)) != _uncut(name, value)
    ]


def _changed_decoder(
    saved: Mapping[str, Any], model: ModelConfig, folder: Store, rope: tuple[str, ...]
) -> list[str]:
    """Return a line for each field in which the decoders of checkpoint and config differ."""
    try:
        theirs, multipliers = model_from_json(saved)
        before = multipliers.applied(theirs.decoder)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder} cannot be resumed: its model_config: {error}") from error
    now = replace(multipliers_in(model).applied(model.model_config.decoder), mtp_weight=0.0)
    if isinstance(now, TransformersSpec) or isinstance(before, TransformersSpec):
        if type(now) is type(before):
            return []  # their only key was compared
        return ["is_hf_config differs: one of the models is of transformers, the other is not"]
    lines = [line.partition(": ") for line in differences(now, before, (*NO_EFFECT, *rope))]
    changed = [
        f"{key_of(name)} is {values.replace(' and ', ' in the config and ', 1)} in the checkpoint"
        for name, _, values in lines
    ]
    if changed and (new := _set_here_alone(saved, model)):
        changed.append(f"keys that the checkpoint does not have: {', '.join(new)}")
    return list(dict.fromkeys(changed))


def _set_here_alone(saved: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Return the keys of the config, with values, that have no default and are not saved."""
    sizes = model.model_config
    defaults = {
        field.name: field.default for field in fields(sizes) if field.default is not MISSING
    }
    return [
        f"{name}: {value}"
        for name, value in model_of(model).items()
        if name not in saved and not name.startswith("is_") and value != defaults.get(name)
    ]


def _uncut(name: str, value: Any) -> Any:
    """Return a value of ``model_config``; layers as text without the cuts into stages."""
    return value.replace("|", "") if name == "layers" and isinstance(value, str) else value
