"""Keys that Llama and its descendants share, under Nanotron's names, in groups of one purpose."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.attention import AttentionSpec
from kenotron_models.attention_backends import AttentionBackend
from kenotron_models.block import BlockSpec
from kenotron_models.families.hf_keys import first_of
from kenotron_models.families.keys import (
    NOT_NEGATIVE,
    OF_CONFIG,
    POSITIVE,
    KeyTable,
    Rule,
    key,
    one_of,
)
from kenotron_models.families.places import MISSING, in_spec
from kenotron_models.mlp import MLPSpec
from kenotron_models.norm import NormSpec
from kenotron_models.part import PartSpec
from kenotron_models.rope import Rope
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec

ROTARY_PARTS = 2  # a rotary embedding turns pairs of features
ATTENTIONS = (
    "sdpa", "flash_attention_2", "flex_attention", "ring_flash_triton", "ring",
    "llama3_ring_attention", "auto", "flash_attn", "blocked", "plain",
)  # fmt: skip
"""Attention backends: Nanotron's names and ours; those of BACKENDS are orders."""
BACKENDS: dict[str, AttentionBackend] = {
    "sdpa": "sdpa",
    "plain": "plain",
    "flash_attn": "flash_attn",
    "blocked": "blocked",
}
"""All other names mean auto."""
EVEN = Rule(
    lambda n: n >= ROTARY_PARTS and n % ROTARY_PARTS == 0, "it must be an even number from 2"
)


@dataclass(frozen=True, kw_only=True)
class DecoderKeys(KeyTable):
    """A decoder with RMSNorm and a gated feed-forward."""

    bos_token_id: int | None = key(1, hf=True, at="bos_token_id")
    """Token number of the beginning of a text; recorded for export, no layer reads it."""
    eos_token_id: int | None = key(2, hf=True, at="eos_token_id", read=first_of)
    """Token number of the end of a text; generation stops on it, no layer reads it."""
    pad_token_id: int | None = key(None, hf=True, at=OF_CONFIG)
    """Token number of padding; recorded for export: padded positions carry no label."""
    hidden_act: str = key("silu", hf=True, at=OF_CONFIG, rule=one_of("silu"), only=("silu",))
    """Activation of the gated feed-forward; only `silu` is known."""
    hidden_size: int = key(4096, least=1, hf=True, needed=True, at="hidden_size")
    """Width of the residual stream, in features."""
    initializer_range: float = key(0.02, hf=True, at=OF_CONFIG)
    """Standard deviation that Hugging Face would draw with; recorded for export only."""
    intermediate_size: int = key(
        11008, least=1, hf=True, needed=True, at=("mlp.features", "experts.features")
    )
    """Width of the feed-forward, in features."""
    max_position_embeddings: int = key(
        2048, least=1, hf=True, at="max_position_embeddings", small=SmallSizes.reach
    )
    """Longest sequence the model is meant for, in tokens; recorded for export only."""
    num_attention_heads: int = key(
        32, least=1, hf=True, needed=True, at="attention.heads", small="heads"
    )
    """Query heads of each layer."""
    num_hidden_layers: int = key(
        32, least=1, hf=True, needed=True, at="num_hidden_layers", small="layers"
    )
    """Decoder layers."""
    rms_norm_eps: float = key(1e-6, rule=POSITIVE, hf=True, at="norm.eps")
    """Added to the mean square inside every RMSNorm."""
    tie_word_embeddings: bool = key(False, hf=True, at="tie_word_embeddings")
    """True: the head is the embedding's own matrix."""
    vocab_size: int = key(32000, least=1, hf=True, needed=True, at="vocab_size", small="vocab_size")
    """Token numbers that exist, without padding."""
    attn_implementation: str = key(
        "auto",
        rule=one_of(*ATTENTIONS),
        small=lambda _, name: "auto" if name == "flash_attn" else name,  # no CPU has it
    )
    """Attention backend, one of ATTENTIONS; they differ in speed only. `sdpa`, `flash_attn`,
    `blocked` and `plain` are orders; `auto` and all others mean the fastest that is there. Where
    samples are divided over cp, only `plain` is an order."""
    z_loss_enabled: bool = key(False)
    """True: the squared log of the softmax's sum is added to the loss (PaLM, arXiv 2204.02311)."""
    z_loss_coefficient: float = key(1e-4, rule=NOT_NEGATIVE)
    """Weight of that term."""

    def rope(self) -> Rope | None:
        """Return the rotary positions of a layer that has some."""
        return None

    @property
    def backend(self) -> AttentionBackend:
        """Attention backend, with Nanotron's names translated."""
        return BACKENDS.get(self.attn_implementation, "auto")

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the dropout of attention, which all families of Hugging Face name."""
        return super().write_hf(spec) | present(
            attention_dropout=in_spec(spec, "attention.dropout")
        )

    def decoder_of(
        self,
        mixers: Sequence[PartSpec],
        feed_forwards: Mapping[int, PartSpec] | None = None,
        norm: NormSpec | None = None,
    ) -> DecoderSpec:
        """Return a decoder of these sizes with one block for each mixer.

        Args:
            mixers: those of all layers.
            feed_forwards: those of layers (from 0) that have another one than a gated MLP.
            norm: kind of all norms; None: an RMSNorm.
        """
        norm = norm or NormSpec(eps=self.rms_norm_eps)
        mlp, others = MLPSpec(features=self.intermediate_size), feed_forwards or {}
        return DecoderSpec(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            blocks=tuple(
                BlockSpec(mixer=mixer, feed_forward=others.get(i, mlp), norm=norm)
                for i, mixer in enumerate(mixers)
            ),
            norm=norm,
            tie_word_embeddings=self.tie_word_embeddings,
            z_loss=self.z_loss_coefficient if self.z_loss_enabled else 0.0,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
        )


@dataclass(frozen=True, kw_only=True)
class HeadKeys(DecoderKeys):
    """A decoder with grouped-query attention."""

    num_key_value_heads: int | None = key(
        None, least=1, divides="num_attention_heads", hf=True, at="attention.kv_heads",
        small="kv_heads",
    )  # fmt: skip
    """Key and value heads of each layer; None: as many as query heads."""
    attention_bias: bool = key(False)
    """True: queries, keys and values have a bias."""
    head_dim: int | None = key(None, rule=EVEN, hf=True, at="attention.head_dim")
    """Features of one head; None: hidden_size over num_attention_heads."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads of each layer, with None filled in."""
        given = self.num_key_value_heads
        return self.num_attention_heads if given is None else given

    @property
    def features_of_head(self) -> int:
        """Features of one head, with None filled in."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def problems(self) -> list[str]:
        """Name heads that do not divide the width."""
        found, heads, hidden = super().problems(), self.num_attention_heads, self.hidden_size
        if self.head_dim is not None:
            return found
        if hidden % heads:
            found.append(
                f"hidden_size: {hidden} was given; it must be a multiple of num_attention_heads "
                f"({heads}); {hidden // heads * heads + heads} would do"
            )
        elif self.features_of_head % ROTARY_PARTS:
            found.append(
                f"hidden_size: {hidden} was given; over {heads} heads each has {hidden // heads} "
                f"features, and rotary positions need an even number; {hidden + heads} would do"
            )
        return found

    def small_keys(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the widths of a narrow copy."""
        width = min(sizes.head_dim, self.features_of_head)
        hidden, whole = sizes.heads * width, self.num_attention_heads * self.features_of_head
        if whole > self.hidden_size:
            hidden //= 2
        elif whole < self.hidden_size:
            hidden *= 2
        return super().small_keys(sizes) | {
            "head_dim": None if self.head_dim is None else width,
            "hidden_size": hidden,
            "intermediate_size": sizes.inner(self.intermediate_size, self.hidden_size, hidden),
        }

    @classmethod
    def read_hf(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the key heads, with null filled in, and features that are not the usual ones."""
        heads, given = values["num_attention_heads"], values.get("head_dim")
        return super().read_hf(values) | {
            "num_key_value_heads": values.get("num_key_value_heads") or heads,
            "head_dim": None if given == values["hidden_size"] // heads else given,
        }

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Check that a layer has attention. Raises ValueError where none has."""
        if in_spec(spec, "attention.heads") is MISSING:
            raise ValueError("Hugging Face's families of these keys have attention in some layer")
        return super().write_hf(spec)

    def attention(self, **changes: Any) -> AttentionSpec:
        """Return what these keys say of attention, with changed fields of the spec."""
        mixer = AttentionSpec(
            heads=self.num_attention_heads,
            kv_heads=self.kv_heads,
            head_dim=self.features_of_head,
            qkv_bias=self.attention_bias,
            backend=self.backend,
            rope=self.rope(),
        )
        return replace(mixer, **changes)


def present(**values: Any) -> dict[str, Any]:
    """Return values by key, without those of places that a spec does not have."""
    return {name: value for name, value in values.items() if value is not MISSING}


def windowed(
    mixer: AttentionSpec, window: int | None, full: Collection[int], layers: int
) -> list[AttentionSpec]:
    """Return a mixer for each layer, without the window in the layers ``full`` (from 0)."""
    return [replace(mixer, window=None if i in full else window) for i in range(layers)]
