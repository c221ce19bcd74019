"""Texts that models are compared on with those of transformers."""

from __future__ import annotations

from dataclasses import replace

from kenotron_models.families import MistralConfig
from kenotron_models.hf_probe import SHORT, probes_of
from kenotron_models.layers import RopeScaling


def test_texts_of_a_comparison_reach_windows_stretched_positions_and_documents() -> None:
    scaling = RopeScaling(rope_type="linear", factor=4.0)
    config = MistralConfig(
        sliding_window_size=600, vocab_size=50, max_position_embeddings=4096, rope_scaling=scaling
    )
    text, gradient, stretched, documents = probes_of(config.decoder, 1000)
    assert text.tokens.shape == (1, 616)
    assert 0 <= text.tokens.min() < text.tokens.max() < 50
    assert gradient.gradient and not text.gradient
    assert stretched.positions.diff().eq(1).sum() == SHORT - 2
    assert stretched.positions.max() == 2 * 8192 + SHORT // 2 - 1
    assert documents.lengths == (1, 6, 37, 84) and documents.positions.max() == 83
    assert probes_of(config.decoder, 10**10)[0].tokens.shape == (2, 512)
    few = probes_of(replace(config, max_position_embeddings=5).decoder, 1000)
    assert few[-1].lengths == (1, 4)
