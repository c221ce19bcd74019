"""What tests of families share: small sizes, and the way to Hugging Face's keys and back."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from kenotron_models import config_from_json
from kenotron_models.hf import config_from_hf, config_to_hf, differences, hf_tensors

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 64,
}  # fmt: skip


def assert_read_as_written(config: Any) -> None:
    """A config is read from its own keys of Hugging Face, and from its JSON, as the same model."""
    values = json.loads(json.dumps(config_to_hf(config)))
    read = config_from_hf(values)
    assert type(read) is type(config)
    assert differences(read.decoder, config.decoder) == []
    assert config_from_json(json.loads(json.dumps(asdict(config)))) == config
    assert hf_tensors(config).keys() == hf_tensors(read).keys()
