"""StarCoder2 in Hugging Face's names: LayerNorm, biases, a plain feed-forward."""

from typing import Any

from kenotron_models.config_starcoder2 import ACTIVATIONS, Starcoder2Config
from kenotron_models.hf_family import Family, Values, shared_from_hf
from kenotron_models.spec import DecoderSpec

_ACTIVATION = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""Our activations, and the first of transformers' names for each."""


def _read(values: Values) -> Starcoder2Config:
    shared = shared_from_hf(values)
    shared.pop("pad_token_id", None)
    kv_heads = values.get("num_key_value_heads") or shared["num_attention_heads"]
    return Starcoder2Config(
        **shared,
        grouped_query=kv_heads > 1,
        multi_query=kv_heads == 1,
        num_kv_heads=kv_heads if kv_heads > 1 else None,
        activation_function=values["hidden_act"],
        layer_norm_epsilon=float(values["norm_epsilon"]),
        sliding_window_size=values.get("sliding_window"),
        attn_pdrop=values.get("attention_dropout") or 0.0,
        embd_pdrop=values.get("embedding_dropout") or 0.0,
        resid_pdrop=values.get("residual_dropout") or 0.0,
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {
        "hidden_act": _ACTIVATION[spec.activation],
        "norm_epsilon": spec.norm_eps,
        "sliding_window": spec.window,
        "embedding_dropout": spec.embedding_dropout,
        "residual_dropout": spec.residual_dropout,
        "use_bias": True,
    }


STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    config=Starcoder2Config,
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    only={
        "hidden_act": tuple(ACTIVATIONS),
        "use_bias": (True, None),
        "mlp_type": ("default", None),
        "norm_type": ("layer_norm", None),
    },
    read=_read,
    write=_write,
    layer={"mlp.up": ("mlp.c_fc",), "mlp.down": ("mlp.c_proj",)},
)
