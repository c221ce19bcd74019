"""One process against Hugging Face's Llama with the same weights: loss and every gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
import torch.nn.functional as F
from parity import Layout
from transformers import AutoConfig, AutoModelForCausalLM

from kenotron_config import Config
from kenotron_dist import Axis, spawn
from kenotron_engine import gradient_deviations
from kenotron_models import Build
from kenotron_models.hf import config_to_hf, hf_tensors
from kenotron_models.layers import NormSpec, RopeScaling


def to_transformers(config: Config, ours: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors under transformers' names."""
    return {
        part.name: part.of(ours[name])
        for name, whole in hf_tensors(config.model.model_config).items()
        for part in whole.parts
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("transformers")
    parity.write_text(path)
    return path


LLAMA3 = RopeScaling(factor=8.0, original_max_position_embeddings=16)
LINEAR = RopeScaling(factor=4.0, rope_type="linear")


@pytest.mark.parametrize(
    ("tied", "change"),
    [
        (False, {}),
        (True, {}),
        (True, {"rope_scaling": LLAMA3}),
        (False, {"rope_scaling": LINEAR}),
        (False, {"attention_bias": True}),
    ],
    ids=["untied", "tied", "llama3", "linear", "bias"],
)
def test_loss_and_every_gradient_equal_transformers(
    tied: bool, change: dict[str, Any], folder: Path
) -> None:
    config = parity.configure(Layout(tied=tied), folder)
    config = replace(
        config,
        model=replace(config.model, model_config=replace(config.model.model_config, **change)),
    )
    weights = to_transformers(config, spawn(parity.parameters, config)[0])
    tokens, labels = map(torch.from_numpy, spawn(parity.rows, config)[0])
    ranks = spawn(parity.gradients, config)
    ours = to_transformers(config, parity.assemble(ranks))

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config_to_hf(config.model.model_config))
    )
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    logits = model(tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}

    assert ranks[0][0] == pytest.approx(loss.item(), rel=1e-6)
    deviations = gradient_deviations(ours, theirs)
    worst = max(deviations, key=lambda name: deviations[name])
    print(f"\n{worst} at {deviations[worst]:.2f} of what is allowed", end="")
    assert deviations[worst] <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_offset_norm_is_gemmas(dtype: torch.dtype) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    torch.manual_seed(5)
    theirs = GemmaRMSNorm(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight, std=0.3)
    ours = NormSpec(kind="offset_rms_norm", eps=1e-5).build(
        48, Build(Axis.solo("tp"), device="cpu")
    )
    ours.to(dtype).load_state_dict(theirs.state_dict())  # the same weights, without a transform
    x = torch.randn(64, 48, dtype=dtype)
    torch.testing.assert_close(
        ours(x), theirs(x), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6
    )
    found = [
        torch.autograd.grad(norm(x).float().square().sum(), norm.weight)[0]
        for norm in (ours, theirs)
    ]
    torch.testing.assert_close(found[0].float(), found[1].float(), rtol=1e-2, atol=1e-3)
