"""Tiny models of Hugging Face with a tokenizer, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GenerationConfig,
    Glm4MoeConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Starcoder2Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "bos_token_id": 256, "eos_token_id": 257, "initializer_range": 0.4,
}  # fmt: skip
ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16, "rope_theta": 1e4}  # fmt: skip
LATENT: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_group": 4, "topk_group": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
RECURRENT: dict[str, Any] = {
    **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None, "initializer_range": 0.4,
    "state_size": 8,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def expert_configs() -> dict[str, PretrainedConfig]:
    """One model of each kind of experts."""
    return {
        "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
        "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True),
        "deepseek_v3": DeepseekV3Config(**LATENT),
    }


def configs() -> dict[str, PretrainedConfig]:
    """One model of each dense family, and of hybrids."""
    return {
        "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=ROPE),
        "mistral": MistralConfig(**SIZES, sliding_window=5),
        "qwen2": Qwen2Config(**SIZES),
        "qwen3": Qwen3Config(**SIZES, head_dim=16),
        "starcoder2": Starcoder2Config(**SIZES, sliding_window=6),
        "mamba": MambaConfig(**RECURRENT),
        "mamba2": Mamba2Config(**RECURRENT, num_heads=4, head_dim=16, n_groups=1, chunk_size=8),
        "qwen3_next": Qwen3NextConfig(
            **SIZES,
            **EXPERTS,
            head_dim=16,
            full_attention_interval=2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=6,
            shared_expert_intermediate_size=16,
        ),
        "jamba": JambaConfig(
            **SIZES, num_experts=4, attn_layer_period=2, attn_layer_offset=1, pad_token_id=None
        ),
        "granite_hybrid": GraniteMoeHybridConfig(
            **SIZES,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_local_experts=4,
            shared_intermediate_size=16,
            mamba_n_heads=4,
            mamba_d_state=8,
            mamba_chunk_size=8,
            residual_multiplier=0.7,
            embedding_multiplier=3.0,
            logits_scaling=2.0,
        ),
        "olmoe": OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
        "glm4_moe": Glm4MoeConfig(
            **SIZES,
            head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
        ),
    }


def byte_tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    """Ids of bytes, a token that begins every text and one that ends it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    if chat:
        made.chat_template = TEMPLATE
    return made


def write_model(folder: Path, name: str, *, chat: bool = False, seed: int = 0) -> Path:
    """A model with random weights and its tokenizer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config((configs() | expert_configs())[name])
    model.generation_config = GenerationConfig(bos_token_id=256, eos_token_id=257)
    model.save_pretrained(folder)
    byte_tokenizer(chat).save_pretrained(folder)
    return folder


def continued(folder: Path, prompt: str, count: int) -> tuple[str, list[int]]:
    """What transformers adds greedily: text and tokens."""
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=count, do_sample=False)
    new = out[0, ids["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(new, skip_special_tokens=True), new
