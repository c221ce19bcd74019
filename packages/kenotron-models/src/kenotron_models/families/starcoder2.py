"""StarCoder2: LayerNorm, biases, a plain feed-forward; Nanotron's keys, and Hugging Face's."""

from dataclasses import dataclass, replace
from typing import Any, Self

from kenotron_models.attention import AttentionSpec
from kenotron_models.block import BlockSpec
from kenotron_models.families.fields import marker_problems, raise_all, windowed
from kenotron_models.families.hf_keys import first_mixer, first_mlp, shared_from_hf
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.hf_tensors import LLAMA_NAMES, Fused
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


@dataclass(frozen=True, kw_only=True)
class Starcoder2Config:
    """Sizes and constants of a StarCoder2 decoder, under the names that Nanotron gives them.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    activation_function: str = "gelu_pytorch_tanh"
    """Activation of the feed-forward."""
    attention_softmax_in_fp32: bool = True
    """No effect: the softmax is always computed in float32."""
    attn_pdrop: float = 0.1
    """Share of attention's probabilities that is dropped in training."""
    bos_token_id: int | None = 49152
    """Token number of the beginning of a text."""
    embd_pdrop: float = 0.1
    """Share of embedded features that is dropped in training."""
    eos_token_id: int | None = 49152
    """Token number of the end of a text."""
    global_attn_layers: tuple[int, ...] = ()
    """Layers without the sliding window."""
    grouped_query: bool = False
    """True: several query heads share a key and value head."""
    hidden_size: int = 2048
    """Width of the residual stream, in features."""
    initializer_range: float = 0.02
    """Standard deviation that Hugging Face would draw with; recorded for export only."""
    intermediate_size: int | None = None
    """Width of the feed-forward, in features; None: four times hidden_size."""
    is_starcoder2_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance inside every LayerNorm."""
    max_position_embeddings: int = 4096
    """Longest sequence the model is meant for, in tokens."""
    multi_query: bool = False
    """True: all query heads share one key and value head; so it is too when grouped_query is
    false."""
    num_attention_heads: int = 16
    """Query heads of each layer."""
    num_hidden_layers: int = 24
    """Decoder layers."""
    num_kv_heads: int | None = None
    """Key and value heads of grouped_query."""
    resid_pdrop: float = 0.1
    """Share of what a block adds that is dropped in training."""
    rope_scaling: RopeScaling | None = None
    """Stretching of rotary positions; None: none."""
    rope_theta: float = 10000.0
    """Base of the rotary wave lengths."""
    scale_attention_softmax_in_fp32: bool = True
    """No effect: the softmax is always computed in float32."""
    scale_attn_weights: bool = True
    """True: scores are divided by the root of the features of a head."""
    sliding_window_size: int | None = None
    """Tokens that a token sees, itself counted; None: all before it."""
    tie_word_embeddings: bool = True
    """True: the head is the embedding's own matrix."""
    use_position_embeddings: bool = False
    """True: positions have learned embeddings."""
    use_rotary_embeddings: bool = True
    """True: positions turn queries and keys."""
    vocab_size: int = 49280
    """Token numbers that exist, without padding."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        found = [
            f"{name}: {getattr(self, name)} was given; it must be at least 1"
            for name in names
            if getattr(self, name) < 1
        ]
        found += self._head_problems() if not found else []
        if self.activation_function not in ACTIVATIONS:
            found.append(
                f"activation_function: {self.activation_function!r} was given; it must be one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
            if not 0 <= (share := getattr(self, name)) < 1:
                found.append(f"{name}: {share} was given; it must be at least 0, below 1")
        if self.use_position_embeddings == self.use_rotary_embeddings:
            found.append(
                f"use_position_embeddings: {str(self.use_position_embeddings).lower()} was given; "
                "exactly one of it and use_rotary_embeddings must be true"
            )
        raise_all([*found, *marker_problems(self, "is_starcoder2_config")])

    @property
    def kv_heads(self) -> int:
        """Key and value heads of each layer: one unless they are grouped."""
        return self.num_kv_heads or self.num_attention_heads if self.grouped_query else 1

    def small(self, sizes: SmallSizes) -> Self:
        """Return a narrow copy of the same structure."""
        hidden = sizes.heads * min(sizes.head_dim, self.hidden_size // self.num_attention_heads)
        inner, kv_heads = self.intermediate_size, self.num_kv_heads
        if kv_heads is not None and self.grouped_query:
            kv_heads = sizes.kv_heads
        return replace(
            self,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_kv_heads=kv_heads,
            hidden_size=hidden,
            intermediate_size=None
            if inner is None
            else sizes.inner(inner, self.hidden_size, hidden),
            vocab_size=sizes.vocab_size,
            max_position_embeddings=sizes.reach(self.max_position_embeddings),
            rope_scaling=sizes.scaling(self.rope_scaling),
            sliding_window_size=sizes.window(self.sliding_window_size),
            global_attn_layers=sizes.some_layers(self.global_attn_layers, self.num_hidden_layers),
        )

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
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

    def _head_problems(self) -> list[str]:
        found = []
        if self.hidden_size % self.num_attention_heads:
            found.append(
                f"hidden_size: {self.hidden_size} was given; it must be a multiple of "
                f"num_attention_heads ({self.num_attention_heads})"
            )
        if self.grouped_query and self.multi_query:
            found.append("multi_query: true was given; it excludes grouped_query")
        if self.grouped_query and self.num_kv_heads is None:
            found.append("num_kv_heads: nothing was given; grouped_query needs a number")
        if (kv := self.kv_heads) < 1 or self.num_attention_heads % kv:
            found.append(
                f"num_kv_heads: {kv} was given; it must divide num_attention_heads "
                f"({self.num_attention_heads})"
            )
        return found


_ACTIVATION: dict[Any, str] = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
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
        "hidden_act": _ACTIVATION[first_mlp(spec).activation],
        "norm_epsilon": spec.norm.eps,
        "sliding_window": first_mixer(spec).window,
        "embedding_dropout": spec.embedding_dropout,
        "residual_dropout": spec.blocks[0].dropout,
        "use_bias": True,
    }


STARCODER2 = Family(
    marker="is_starcoder2_config",
    config=Starcoder2Config,
    hf=HuggingFace(
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
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
        names={**LLAMA_NAMES, "mlp.up": Fused("mlp.c_fc"), "mlp.down": Fused("mlp.c_proj")},
    ),
)
