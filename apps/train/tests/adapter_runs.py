"""Runs with adapters, and adapters of peft that they begin as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from foreign_models import alone, configure, run
from safetensors.torch import load_file

from kenotron_convert.importing import model_config

WORDS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
FIVE = {"tokens.train_steps": 5, "optimizer.weight_decay": 0.0}


def peft_folder(
    base: Path,
    target: Path,
    kind: str = "lora",
    words: list[str] | None = WORDS,
    factor: float = 3.0,
    **options: object,
) -> Path:
    """An adapter that peft draws, B not 0."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=words, use_dora=kind == "dora", init_lora_weights=False,
        task_type="CAUSAL_LM", **options,
    )  # fmt: skip
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= 1 + 0.1 * torch.rand(parameter.shape)
        elif "lora_" in name:
            parameter.data *= factor
    model.save_pretrained(target)
    return target


def section(**changes: object) -> str:
    """`model.adapter`."""
    return json.dumps({"rank": 4, "alpha": 8, "targets": WORDS} | changes)


def set_up(folder: Path, place: Path, changes: dict, *, native: bool, **adapter: object) -> object:
    """The config of a run with adapters, by the bridge or natively."""
    more = {"model.adapter": section(**adapter)}
    if native:
        more["model.model_config"] = json.dumps(model_config(folder))
    keys = {"attn_implementation": "kenotron"} if "parallelism.cp" in changes else {}
    return configure(folder, place, FIVE | more | changes, **keys)


def trained_as_peft(config: object, folder: Path, first: Path, place: Path) -> tuple[list, Any]:
    """Train in ``place``/run; peft has the same losses. Writes the adapter to ``place``/ours.

    Returns peft's losses and its trained model.
    """
    found = run(config)
    due, theirs = alone(folder, [rate for _, _, rate in found], config, first)
    assert [loss for loss, _, _ in found] == pytest.approx(due, rel=1e-6)
    assert abs(due[-1] - due[0]) > 1e-3
    command = "adapter-to-peft", "--ckpt", "run", "--out", "ours"
    done = runs.program("apps/convert", place, *command)
    assert done.returncode == 0, done.stderr
    return due, theirs


def same_tensors(place: Path, theirs: Any, **tolerances: float) -> dict[str, torch.Tensor]:
    """Return the tensors of ``place``/ours; those that peft's model saves are the same."""
    theirs.save_pretrained(place / "theirs")
    name = "adapter_model.safetensors"
    ours, expected = load_file(place / "ours" / name), load_file(place / "theirs" / name)
    assert {*ours} == {*expected}
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, **tolerances)
    return ours


def losses(config: object) -> list[float]:
    return [loss for loss, _, _ in run(config)]
