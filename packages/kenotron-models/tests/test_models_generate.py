"""Texts that go on: with and without cache, one and several, on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kenotron_dist import Mesh, RankError, spawn
from kenotron_dist.init import initialize
from kenotron_dist.placement import parameter_layouts
from kenotron_models import (
    Build,
    Context,
    LayerStack,
    Sampling,
    build_decoder,
    generate,
    standard_init,
)
from kenotron_models.families import (
    Gemma2Config,
    Gemma3Config,
    GptOssConfig,
    LlamaConfig,
    Mamba2ModelConfig,
    MambaModelConfig,
    MistralConfig,
    OLMo2Config,
    Qwen3Config,
    SmolLM3Config,
    Starcoder2Config,
)
from kenotron_models.layers import KVCache
from kenotron_tp import TPMode

V = 53
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "num_hidden_layers": 2,
    "vocab_size": V, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=4, sliding_window_size=3),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "starcoder2": Starcoder2Config(**SIZES, sliding_window_size=4),
    "mamba": MambaModelConfig(d_model=32, num_hidden_layers=2, vocab_size=V),
    "mamba2": Mamba2ModelConfig(
        hidden_size=32,
        num_hidden_layers=2,
        vocab_size=V,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        state_size=8,
        chunk_size=4,
    ),
    "smollm3": SmolLM3Config(
        **SIZES,
        num_key_value_heads=2,
        no_rope_layers=(0, 1),
        use_sliding_window=True,
        sliding_window=4,
    ),
    "olmo2": OLMo2Config(**SIZES, num_key_value_heads=2),
    "gemma2": Gemma2Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=3,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=4.0,
    ),
    "gemma3": Gemma3Config(
        **SIZES, num_key_value_heads=2, head_dim=8, sliding_window=3, sliding_window_pattern=2
    ),
    "gpt-oss": GptOssConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=3,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}
TEXTS = [[1, 2, 3], [7], [11, 12, 13, 14, 15, 16, 17]]


def continued(
    mesh: Mesh,
    name: str,
    texts: list[list[int]],
    options: dict[str, Any] | None = None,
    mode: TPMode | None = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """New tokens of each text, and the logits of the last step, this rank's columns."""
    config = FAMILIES[name]
    stack = LayerStack(build_decoder(config, Build(mesh["tp"], mode or TPMode(), ep=mesh["ep"])))
    layouts = parameter_layouts(stack, mesh.axis_sizes)
    stack.to_empty(device="cpu")
    rule = standard_init(config, 0.5)
    initialize(stack, layouts, mesh.view, seed=1, initializer=rule)
    last: list[Tensor] = []

    def forward(tokens: Tensor, context: Context) -> Tensor:
        last[:] = [stack(tokens, context)]
        return last[0]

    steps = list(
        generate(
            forward,
            texts,
            mesh,
            **{"window": 64, "vocab_size": V, "max_new_tokens": 8} | (options or {}),
        )
    )
    new = [[step[i] for step in steps if step[i] is not None] for i in range(len(texts))]
    return new, last[0].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_kept_changes_no_token_and_no_logit(name: str) -> None:
    [(kept, logits)] = spawn(continued, name, TEXTS)
    [(again, others)] = spawn(continued, name, TEXTS, {"cached": False})
    assert kept == again
    assert all(len(text) == 8 for text in kept)
    torch.testing.assert_close(torch.tensor(logits), torch.tensor(others), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_does_not_see_those_beside_it(name: str) -> None:
    how = {"sampling": Sampling(temperature=0.8, seed=5)}
    [(together, _)] = spawn(continued, name, TEXTS, how)
    for number, text in enumerate(TEXTS):
        [(alone, _)] = spawn(continued, name, [text], how | {"first_text": number})
        assert alone == [together[number]]


@pytest.mark.parametrize("name", ["llama", "starcoder2", "mamba", "mamba2", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_texts_are_the_same_on_every_layout(name: str, sequence: bool, tp: int) -> None:
    sampling = Sampling(temperature=1.0, top_k=9, top_p=0.9, repetition_penalty=1.3, seed=3)
    how = {"sampling": sampling}
    [(one, _)] = spawn(continued, name, TEXTS, how)
    ranks = spawn(continued, name, TEXTS, how, TPMode(sequence_parallel=sequence), tp=tp)
    assert [new for new, _ in ranks] == [one] * tp


def by_hand(mesh: Mesh, text: list[int], window: int) -> list[int]:
    """Twenty tokens, each the only one that is asked for."""
    found: list[int] = []
    for _ in range(20):
        if len(text) > window:
            text = text[-(window // 2) :]
        [[token]], _ = continued(mesh, "llama", [text], {"max_new_tokens": 1})
        text = [*text, token]
        found.append(token)
    return found


@pytest.mark.parametrize("window", [2, 6, 9])
def test_a_text_that_outgrows_the_window_goes_on_from_its_last_half(window: int) -> None:
    how = {"window": window, "max_new_tokens": 20}
    [(kept, _)] = spawn(continued, "llama", TEXTS, how)
    [(again, _)] = spawn(continued, "llama", TEXTS, how | {"cached": False})
    assert kept == again
    assert all(len(text) == 20 for text in kept)
    assert spawn(by_hand, [1, 2, 3], window) == [kept[0]]


def test_a_token_ends_its_own_text_only() -> None:
    [(free, _)] = spawn(continued, "llama", TEXTS)
    [(cut, _)] = spawn(continued, "llama", TEXTS, {"ends": Until(free[0][3])})
    assert cut[0] == free[0][: free[0].index(free[0][3]) + 1]
    for text, whole in zip(cut, free, strict=True):
        assert text == whole[: len(text)]


class Until:
    """Ends a text with a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, text: int, token: int) -> bool:
        return token == self.token


def test_a_penalty_keeps_texts_from_repeating() -> None:
    def repeats(penalty: float) -> int:
        how = {"sampling": Sampling(repetition_penalty=penalty), "max_new_tokens": 40}
        [(new, _)] = spawn(continued, "llama", TEXTS, how)
        return sum(len(text) - len(set(text)) for text in new)

    assert repeats(1e6) == 0
    assert repeats(1.0) > 20


def test_the_seed_decides() -> None:
    def text(seed: int) -> list[list[int]]:
        how = {"sampling": Sampling(temperature=1.0, seed=seed)}
        return spawn(continued, "llama", TEXTS, how)[0][0]

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "give at least one prompt"),
        ([[1], []], {}, "prompt 1, of 0 tokens: give at least one"),
        ([[V]], {}, f"with {V} among them: .* within 0..{V - 1}"),
        ([[1]], {"window": 1}, "a window of 1 tokens is too short"),
    ],
)
def test_what_cannot_be_continued(
    texts: list[list[int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankError, match=message):
        spawn(continued, "llama", texts, options)


def test_a_penalty_must_be_positive() -> None:
    with pytest.raises(ValueError, match="repetition_penalty 0 is not a finite number above 0"):
        Sampling(repetition_penalty=0)


def test_a_full_cache_is_said() -> None:
    with pytest.raises(ValueError, match="room for texts of 4 tokens, and 5 are to be kept"):
        KVCache(4).begin(5, equal_lengths=True)
