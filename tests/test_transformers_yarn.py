"""YaRN's angles against Hugging Face's function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kenotron_models.layers import RopeScaling, rotary_angles


@pytest.mark.parametrize(
    ("theta", "width", "change"),
    [
        (10_000.0, 64, {"factor": 4.0, "original_max_position_embeddings": 32_768}),
        (1e6, 128, {"factor": 2.5, "original_max_position_embeddings": 4096}),
        (500.0, 8, {"factor": 16.0, "original_max_position_embeddings": 16}),
        (1e4, 32, {"factor": 1.0, "original_max_position_embeddings": 512}),
        (
            3e4,
            64,
            {"factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
        ),
        (
            1e4,
            64,
            {
                "factor": 8.0, "original_max_position_embeddings": 1024, "beta_fast": 16.0,
                "beta_slow": 2.0, "attention_factor": 0.7,
            },
        ),
    ],
)  # fmt: skip
def test_yarn_is_theirs(theta: float, width: int, change: dict[str, Any]) -> None:
    config = LlamaConfig(
        head_dim=width,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "yarn", "rope_theta": theta, **change},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    places = torch.tensor([[0, 1, 7, 100]])
    angles = places[:, :, None, None] * frequencies
    cos, sin = rotary_angles(places, width, theta, RopeScaling(rope_type="yarn", **change))
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=1e-5, atol=1e-5)
