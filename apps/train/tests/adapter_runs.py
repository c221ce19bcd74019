"""Runs with adapters, and adapters of peft that they begin as."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from foreign_models import configure, run

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
    return configure(folder, place, FIVE | more | changes)


def losses(config: object) -> list[float]:
    return [loss for loss, _, _ in run(config)]
