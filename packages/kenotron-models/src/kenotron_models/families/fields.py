"""The keys that Llama and its descendants share, under Nanotron's names, and their checks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from kenotron_models.attention import AttentionSpec
from kenotron_models.attention_backends import AttentionBackend
from kenotron_models.block import BlockSpec
from kenotron_models.mlp import MLPSpec
from kenotron_models.norm import NormSpec
from kenotron_models.part import PartSpec
from kenotron_models.rope import Rope
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.small import SmallSizes
from kenotron_models.spec import MOST_LAYERS, DecoderSpec

ROTARY_PARTS = 2  # a rotary embedding turns pairs of features
ATTENTIONS = (
    "sdpa", "flash_attention_2", "flex_attention", "ring_flash_triton", "ring",
    "llama3_ring_attention", "auto", "flash_attn", "blocked", "plain",
)  # fmt: skip
"""What may compute attention: Nanotron's names and ours; those of BACKENDS are orders."""
BACKENDS: dict[str, AttentionBackend] = {
    "sdpa": "sdpa",
    "plain": "plain",
    "flash_attn": "flash_attn",
    "blocked": "blocked",
}
"""All other names mean auto."""


@dataclass(frozen=True, kw_only=True)
class SharedFields:
    """Sizes and constants of a decoder with RMSNorm, rotary positions and a gated feed-forward.

    The config of each family adds its own keys and its marker.
    """

    activation: ClassVar[str] = "silu"
    """What hidden_act must be."""
    bos_token_id: int | None = 1
    """Token number of the beginning of a text; recorded for export, no layer reads it."""
    eos_token_id: int | None = 2
    """Token number of the end of a text; generation stops on it, no layer reads it."""
    hidden_act: str = "silu"
    """Activation of the gated feed-forward; only `silu` is known."""
    hidden_size: int = 4096
    """Width of the residual stream, in features."""
    initializer_range: float = 0.02
    """Standard deviation that Hugging Face would draw with; recorded for export only."""
    intermediate_size: int = 11008
    """Width of the feed-forward, in features."""
    max_position_embeddings: int = 2048
    """Longest sequence the model is meant for, in tokens; recorded for export only."""
    num_attention_heads: int = 32
    """Query heads of each layer."""
    num_hidden_layers: int = 32
    """Decoder layers."""
    num_key_value_heads: int | None = None
    """Key and value heads of each layer; None: as many as query heads."""
    pad_token_id: int | None = None
    """Token number of padding; no effect: padded positions carry no label."""
    pretraining_tp: int = 1
    """No effect: parallelism is chosen when the model is built, not by the model's sizes."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square inside every RMSNorm."""
    rope_scaling: RopeScaling | None = None
    """Stretching of rotary positions; None: none."""
    rope_theta: float = 10000.0
    """Base of the rotary wave lengths."""
    rope_interleaved: bool = False
    """True: rotate neighbouring features (0, 1), (2, 3); False: feature i with i + half."""
    tie_word_embeddings: bool = False
    """True: the head is the embedding's own matrix."""
    use_cache: bool = True
    """No effect: generation decides by itself whether it keeps keys and values."""
    vocab_size: int = 32000
    """Token numbers that exist, without padding."""
    attention_bias: bool = False
    """True: queries, keys and values have a bias."""
    attn_implementation: str = "auto"
    """What computes attention, one of ATTENTIONS; they differ in speed only. `sdpa`, `flash_attn`,
    `blocked` and `plain` are orders; `auto` and all others mean the fastest that is there. Where
    samples are divided over cp, only `plain` is an order."""
    head_dim: int | None = None
    """Features of one head; None: hidden_size over num_attention_heads."""
    z_loss_enabled: bool = False
    """True: the squared log of the softmax's sum is added to the loss (PaLM, arXiv 2204.02311)."""
    z_loss_coefficient: float = 1e-4
    """Weight of that term."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads of each layer, with None filled in."""
        given = self.num_key_value_heads
        return self.num_attention_heads if given is None else given

    @property
    def features_of_head(self) -> int:
        """Features of one head, with None filled in."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def small(self, sizes: SmallSizes) -> Self:
        """Return a narrow copy of the same structure."""
        width = min(sizes.head_dim, self.features_of_head)
        hidden, whole = sizes.heads * width, self.num_attention_heads * self.features_of_head
        if whole > self.hidden_size:
            hidden //= 2
        elif whole < self.hidden_size:
            hidden *= 2
        ordered = self.attn_implementation == "flash_attn"  # which no CPU can follow
        return replace(
            self,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=None if self.num_key_value_heads is None else sizes.kv_heads,
            head_dim=None if self.head_dim is None else width,
            hidden_size=hidden,
            intermediate_size=sizes.inner(self.intermediate_size, self.hidden_size, hidden),
            vocab_size=sizes.vocab_size,
            max_position_embeddings=sizes.reach(self.max_position_embeddings),
            rope_scaling=sizes.scaling(self.rope_scaling),
            attn_implementation="auto" if ordered else self.attn_implementation,
            **self.small_layers(sizes),
        )

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the family's own keys of a narrow copy; there are none in a plain decoder."""
        return {}

    def attention(self) -> AttentionSpec:
        """Return what these keys say of attention."""
        return AttentionSpec(
            heads=self.num_attention_heads,
            kv_heads=self.kv_heads,
            head_dim=self.features_of_head,
            qkv_bias=self.attention_bias,
            backend=BACKENDS.get(self.attn_implementation, "auto"),
            rope=Rope(
                theta=self.rope_theta,
                scaling=self.rope_scaling,
                interleaved=self.rope_interleaved,
            ),
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


def check(config: SharedFields) -> list[str]:
    """Name everything that is wrong with a model's sizes.

    Args:
        config: the sizes; not changed.

    Returns:
        One line for each problem, `field: value given; what is needed`; empty when all is well.
    """
    sizes = size_problems(config)
    return [*sizes, *([] if sizes else head_problems(config)), *choice_problems(config)]


def window_problems(window: int | None) -> list[str]:
    """Name a window without a token."""
    if window is None or window >= 1:
        return []
    return [f"sliding_window_size: {window} was given; it must be at least 1, or null"]


def at_least(bound: int, sizes: Mapping[str, int]) -> list[str]:
    """Name sizes (by key) below the bound, and a number of layers that no model has."""
    few = [
        f"{name}: {n} was given; it must be at least {bound}"
        for name, n in sizes.items()
        if n < bound
    ]
    layers = sizes.get("num_hidden_layers", 0)
    many = [f"num_hidden_layers: {layers} was given; it must be at most {MOST_LAYERS}"]
    return few + (many if layers > MOST_LAYERS else [])


def marker_problems(config: object, marker: str) -> list[str]:
    """Name a marker that was set to false: the class is known by it."""
    if getattr(config, marker):
        return []
    return [f"{marker}: false was given; it must be true, or be left out"]


def raise_all(problems: list[str]) -> None:
    """Raise ValueError with all problems, if there is any."""
    if problems:
        raise ValueError("\n".join(problems))


def windowed(
    mixer: AttentionSpec, window: int | None, full: Collection[int], layers: int
) -> list[AttentionSpec]:
    """Return a mixer for each layer, without the window in the layers ``full`` (from 0)."""
    return [replace(mixer, window=None if i in full else window) for i in range(layers)]


def size_problems(config: SharedFields) -> list[str]:
    """Sizes that are not positive, constants that are not finite."""
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
    }
    found = at_least(1, sizes)
    constants = {"rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope_theta}
    return found + [
        f"{name}: {value} was given; it must be a finite number above 0"
        for name, value in constants.items()
        if not 0 < value < float("inf")
    ]


def head_problems(config: SharedFields) -> list[str]:
    """Heads that do not divide one another or the width."""
    heads, kv_heads, hidden = config.num_attention_heads, config.kv_heads, config.hidden_size
    found = []
    if heads % kv_heads:
        found.append(
            f"num_key_value_heads: {kv_heads} was given; it must divide num_attention_heads "
            f"({heads}); change one of the two"
        )
    if config.head_dim is not None:
        if config.head_dim < ROTARY_PARTS or config.head_dim % ROTARY_PARTS:
            found.append(
                f"head_dim: {config.head_dim} was given; it must be an even number from 2, or null"
            )
    elif hidden % heads:
        found.append(
            f"hidden_size: {hidden} was given; it must be a multiple of num_attention_heads "
            f"({heads}); {hidden // heads * heads + heads} would do"
        )
    elif config.features_of_head % ROTARY_PARTS:
        found.append(
            f"hidden_size: {hidden} was given; over {heads} heads each has {hidden // heads} "
            f"features, and rotary positions need an even number; {hidden + heads} would do"
        )
    return found


def choice_problems(config: SharedFields) -> list[str]:
    """Name an activation or a back end that there is not, and a z-loss with a wrong weight."""
    found = []
    if config.hidden_act != (known := config.activation):
        found.append(f"hidden_act: {config.hidden_act!r} was given; it must be {known!r}")
    if config.attn_implementation not in ATTENTIONS:
        found.append(
            f"attn_implementation: {config.attn_implementation!r} was given; it must be one of "
            f"{', '.join(ATTENTIONS)}"
        )
    if not 0 <= config.z_loss_coefficient < float("inf"):
        found.append(
            f"z_loss_coefficient: {config.z_loss_coefficient} was given; it must be finite and not "
            "negative"
        )
    return found
