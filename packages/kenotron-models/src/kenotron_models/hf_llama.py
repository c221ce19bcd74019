"""Llama (2, 3, 3.1, 3.2) in Hugging Face's names."""

from kenotron_models.config import LlamaConfig
from kenotron_models.hf_family import Family, llama_from_hf, llama_to_hf

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    config=LlamaConfig,
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    only={
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "attention_dropout": (0, None),
    },
    read=lambda values: LlamaConfig(**llama_from_hf(values)),
    write=lambda spec: {**llama_to_hf(spec), "attention_bias": False, "mlp_bias": False},
)
