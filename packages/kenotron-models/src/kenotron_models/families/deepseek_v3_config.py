"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and experts chosen by biased sigmoid scores."""

from dataclasses import dataclass, replace
from typing import Self

from kenotron_models.families.fields import (
    BACKENDS,
    at_least,
    choice_problems,
    marker_problems,
    raise_all,
    size_problems,
)
from kenotron_models.families.sigmoid_experts import SigmoidExpertsFields, sigmoid_problems
from kenotron_models.latent_attention import LatentAttentionSpec
from kenotron_models.rope import Rope
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(SigmoidExpertsFields):
    """Sizes and constants of a DeepSeek-V3 decoder, under Hugging Face's names.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_deepseek_v3_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    rope_interleaved: bool = True
    """True: rotate neighbouring features (0, 1), (2, 3); False: feature i with i + half."""
    q_lora_rank: int | None = 1536
    """Features of the latent of queries; None: they are made of the token itself."""
    kv_lora_rank: int = 512
    """Features of the latent of keys and values."""
    qk_nope_head_dim: int = 128
    """Features of a head that positions do not turn."""
    qk_rope_head_dim: int = 64
    """Features of a head that positions turn."""
    v_head_dim: int = 128
    """Features of a value; not above those of a head."""
    attention_scale: float | None = None
    """What scores are multiplied with; None: one over the root of a head's features."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        names = ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
        found = [*size_problems(self), *marker_problems(self, "is_deepseek_v3_config")]
        found += at_least(1, {name: getattr(self, name) for name in names})
        found += at_least(0, {"qk_nope_head_dim": self.qk_nope_head_dim})
        found += [*sigmoid_problems(self), *choice_problems(self), *_unread(self)]
        raise_all([*found, *_head_problems(self)])

    @property
    def kv_heads(self) -> int:
        """As many key and value heads as query heads."""
        return self.num_attention_heads

    @property
    def features_of_head(self) -> int:
        """Features of a head that scores are made of."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def small(self, sizes: SmallSizes) -> Self:
        """Return a narrow copy of the same structure."""
        half = max(2, min(sizes.head_dim, self.qk_rope_head_dim) // 2 * 2)
        hidden = sizes.heads * half
        return replace(
            self,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=None,
            hidden_size=hidden,
            intermediate_size=sizes.inner(self.intermediate_size, self.hidden_size, hidden),
            q_lora_rank=None if self.q_lora_rank is None else hidden // 2,
            kv_lora_rank=hidden // 2,
            qk_nope_head_dim=half if self.qk_nope_head_dim else 0,
            qk_rope_head_dim=half,
            v_head_dim=half,
            vocab_size=sizes.vocab_size,
            max_position_embeddings=sizes.reach(self.max_position_embeddings),
            rope_scaling=sizes.scaling(self.rope_scaling),
            **self.small_routing(sizes, 2 * half),
        )

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        heads, layers = self.num_attention_heads, self.num_hidden_layers
        mixer = LatentAttentionSpec(
            heads=heads,
            kv_heads=heads,
            head_dim=self.features_of_head,
            scale=self.attention_scale,
            turned=self.qk_rope_head_dim,
            value_features=self.v_head_dim,
            kv_rank=self.kv_lora_rank,
            q_rank=self.q_lora_rank,
            rope=Rope(
                theta=self.rope_theta,
                scaling=self.rope_scaling,
                interleaved=self.rope_interleaved,
            ),
            backend=BACKENDS.get(self.attn_implementation, "auto"),
        )
        return self.decoder_of([mixer] * layers, self.experts())


def _unread(config: DeepseekV3Config) -> list[str]:
    """Keys of other families that say something else than this one computes."""
    heads, own = config.num_attention_heads, "this family has"
    found = []
    if config.attention_bias:
        found.append(f"attention_bias: true was given; {own} no biases")
    if config.num_key_value_heads not in (None, heads):
        found.append(
            f"num_key_value_heads: {config.num_key_value_heads} was given; {own} as many as "
            f"num_attention_heads ({heads}); leave it out"
        )
    if config.head_dim is not None:
        found.append(
            f"head_dim: {config.head_dim} was given; {own} qk_nope_head_dim and qk_rope_head_dim"
        )
    return found


def _head_problems(config: DeepseekV3Config) -> list[str]:
    found = []
    if config.q_lora_rank is not None and config.q_lora_rank < 1:
        found.append(f"q_lora_rank: {config.q_lora_rank} was given; it must be at least 1, or null")
    if config.qk_rope_head_dim % 2:
        found.append(
            f"qk_rope_head_dim: {config.qk_rope_head_dim} was given; it must be an even number"
        )
    if config.v_head_dim > config.features_of_head:
        found.append(
            f"v_head_dim: {config.v_head_dim} was given; it must not be above qk_nope_head_dim + "
            f"qk_rope_head_dim ({config.features_of_head})"
        )
    return found
