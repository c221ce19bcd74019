"""StarCoder2: LayerNorm, biases, a plain feed-forward; Nanotron's keys, and Hugging Face's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kenotron_models.attention import AttentionSpec
from kenotron_models.block import BlockSpec
from kenotron_models.families.decoder_keys import present, windowed
from kenotron_models.families.hf_keys import first_of
from kenotron_models.families.keys import OF_CONFIG, POSITIVE, SHARE, KeyTable, key, marker, one_of
from kenotron_models.families.places import MISSING, in_spec
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_rope import check_whole_heads, rope_from_hf, rope_to_hf
from kenotron_models.hf_tensors import LLAMA_NAMES, FusedModules
from kenotron_models.mlp import Activation, MLPSpec
from kenotron_models.norm import NormSpec
from kenotron_models.rope import Rope
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

ACTIVATIONS: dict[str, Activation] = {
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu",
    "silu": "silu",
}  # fmt: skip
"""Names of activations in transformers, and ours."""
_ACTIVATION: dict[Any, str] = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""Our activations, and the first of transformers' names for each."""


def _share(given: float | None) -> float:
    return given or 0.0


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config(KeyTable):
    """Sizes and constants of a StarCoder2 decoder, under the names that Nanotron gives them."""

    activation_function: str = key(
        "gelu_pytorch_tanh", rule=one_of(*ACTIVATIONS), hf="hidden_act", only=tuple(ACTIVATIONS),
        at="mlp.activation", write=_ACTIVATION.get,
    )  # fmt: skip
    """Activation of the feed-forward."""
    attention_softmax_in_fp32: bool = key(True)
    """No effect: the softmax is always computed in float32."""
    attn_pdrop: float = key(
        0.1, rule=SHARE, hf="attention_dropout", at="attention.dropout", read=_share
    )
    """Share of attention's probabilities that is dropped in training."""
    bos_token_id: int | None = key(49152, hf=True, at="bos_token_id")
    """Token number of the beginning of a text."""
    embd_pdrop: float = key(
        0.1, rule=SHARE, hf="embedding_dropout", at="embedding_dropout", read=_share
    )
    """Share of embedded features that is dropped in training."""
    eos_token_id: int | None = key(49152, hf=True, at="eos_token_id", read=first_of)
    """Token number of the end of a text."""
    global_attn_layers: tuple[int, ...] = key(())
    """Layers without the sliding window."""
    grouped_query: bool = key(False)
    """True: several query heads share a key and value head."""
    hidden_size: int = key(2048, least=1, hf=True, needed=True, at="hidden_size")
    """Width of the residual stream, in features."""
    initializer_range: float = key(0.02, hf=True, at=OF_CONFIG)
    """Standard deviation that Hugging Face would draw with; recorded for export only."""
    intermediate_size: int | None = key(None, least=1, hf=True, needed=True, at="mlp.features")
    """Width of the feed-forward, in features; None: four times hidden_size."""
    is_starcoder2_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    layer_norm_epsilon: float = key(1e-5, rule=POSITIVE, hf="norm_epsilon", at="norm.eps")
    """Added to the variance inside every LayerNorm."""
    max_position_embeddings: int = key(
        4096, least=1, hf=True, at="max_position_embeddings", small=SmallSizes.reach
    )
    """Longest sequence the model is meant for, in tokens."""
    multi_query: bool = key(False)
    """True: all query heads share one key and value head; so it is too when grouped_query is
    false."""
    num_attention_heads: int = key(
        16, least=1, divides="hidden_size", hf=True, needed=True, at="attention.heads",
        small="heads",
    )  # fmt: skip
    """Query heads of each layer."""
    num_hidden_layers: int = key(
        24, least=1, hf=True, needed=True, at="num_hidden_layers", small="layers"
    )
    """Decoder layers."""
    num_kv_heads: int | None = key(None)
    """Key and value heads of grouped_query."""
    resid_pdrop: float = key(
        0.1, rule=SHARE, hf="residual_dropout", at="block.dropout", read=_share
    )
    """Share of what a block adds that is dropped in training."""
    rope_scaling: RopeScaling | None = key(None, small=SmallSizes.scaling)
    """Stretching of rotary positions; None: none."""
    rope_theta: float = key(10000.0, rule=POSITIVE)
    """Base of the rotary wave lengths."""
    scale_attention_softmax_in_fp32: bool = key(True)
    """No effect: the softmax is always computed in float32."""
    scale_attn_weights: bool = key(True)
    """True: scores are divided by the root of the features of a head."""
    sliding_window_size: int | None = key(
        None, least=1, hf="sliding_window", at="attention.window", small=SmallSizes.window
    )
    """Tokens that a token sees, itself counted; None: all before it."""
    tie_word_embeddings: bool = key(True, hf=True, at="tie_word_embeddings")
    """True: the head is the embedding's own matrix."""
    use_position_embeddings: bool = key(False)
    """True: positions have learned embeddings."""
    use_rotary_embeddings: bool = key(True)
    """True: positions turn queries and keys."""
    vocab_size: int = key(49280, least=1, hf=True, needed=True, at="vocab_size", small="vocab_size")
    """Token numbers that exist, without padding."""

    def problems(self) -> list[str]:
        """Name values that do not go together."""
        found, kv_heads = super().problems(), self.kv_heads
        if self.grouped_query and self.multi_query:
            found.append("multi_query: true was given; it excludes grouped_query")
        if self.grouped_query and self.num_kv_heads is None:
            found.append("num_kv_heads: nothing was given; grouped_query needs a number")
        if kv_heads < 1 or self.num_attention_heads % kv_heads:
            found.append(
                f"num_kv_heads: {kv_heads} was given; it must divide num_attention_heads "
                f"({self.num_attention_heads})"
            )
        if self.use_position_embeddings == self.use_rotary_embeddings:
            found.append(
                f"use_position_embeddings: {str(self.use_position_embeddings).lower()} was given; "
                "exactly one of it and use_rotary_embeddings must be true"
            )
        return found

    @property
    def kv_heads(self) -> int:
        """Key and value heads of each layer: one unless they are grouped."""
        return self.num_kv_heads or self.num_attention_heads if self.grouped_query else 1

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the widths, heads and layers without a window of a narrow copy."""
        hidden = sizes.heads * min(sizes.head_dim, self.hidden_size // self.num_attention_heads)
        inner, given = self.intermediate_size, self.num_kv_heads
        full = sizes.some_layers(self.global_attn_layers, self.num_hidden_layers)
        return {
            "num_kv_heads": sizes.kv_heads if given is not None and self.grouped_query else given,
            "hidden_size": hidden,
            "intermediate_size": inner and sizes.inner(inner, self.hidden_size, hidden),
            "global_attn_layers": full,
        }

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        mixer = AttentionSpec(
            heads=self.num_attention_heads,
            kv_heads=self.kv_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            scale=None if self.scale_attn_weights else 1.0,
            qkv_bias=True,
            out_bias=True,
            rope=Rope(theta=self.rope_theta, scaling=self.rope_scaling)
            if self.use_rotary_embeddings
            else None,
            dropout=self.attn_pdrop,
        )
        mlp = MLPSpec(
            features=self.intermediate_size or 4 * self.hidden_size,
            gated=False,
            activation=ACTIVATIONS[self.activation_function],
            bias=True,
        )
        norm = NormSpec(kind="layer_norm", eps=self.layer_norm_epsilon)
        # Blocks differ only in the window of their attention.
        full, window = self.global_attn_layers, self.sliding_window_size
        mixers = windowed(mixer, window, full, self.num_hidden_layers)
        return DecoderSpec(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            blocks=tuple(
                BlockSpec(mixer=each, feed_forward=mlp, norm=norm, dropout=self.resid_pdrop)
                for each in mixers
            ),
            norm=norm,
            tie_word_embeddings=self.tie_word_embeddings,
            learned_positions=self.use_position_embeddings,
            embedding_dropout=self.embd_pdrop,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
        )

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return key heads and rotary positions."""
        kv_heads = values.get("num_key_value_heads") or values["num_attention_heads"]
        if type(kv_heads) is not int or kv_heads < 1:
            raise ValueError(
                f"num_key_value_heads: {kv_heads!r} was given; it must be a whole number from 1"
            )
        check_whole_heads(values)
        theta, scaling = rope_from_hf(values)
        return {
            "grouped_query": kv_heads > 1,
            "multi_query": kv_heads == 1,
            "num_kv_heads": kv_heads if kv_heads > 1 else None,
            "rope_theta": theta,
            "rope_scaling": scaling,
        }

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return key heads, rotary positions and biases."""
        rope, kv_heads = in_spec(spec, "attention.rope"), in_spec(spec, "attention.kv_heads")
        own = {"use_bias": True, "pad_token_id": None}
        turned = {} if rope is MISSING else rope_to_hf(rope)
        return present(num_key_value_heads=kv_heads) | turned | own


STARCODER2 = Family(
    marker="is_starcoder2_config",
    config=Starcoder2Config,
    hf=HuggingFace(
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        defaults={
            "num_key_value_heads": 2,
            "attention_dropout": 0.0,
            "embedding_dropout": 0.0,
            "residual_dropout": 0.0,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        only={
            "use_bias": (True, None),
            "mlp_type": ("default", None),
            "norm_type": ("layer_norm", None),
        },
        names={
            **LLAMA_NAMES,
            "mlp.up": FusedModules("mlp.c_fc"),
            "mlp.down": FusedModules("mlp.c_proj"),
        },
    ),
)
