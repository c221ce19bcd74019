"""LlaMoE, Nanotron's example of experts: a Llama whose feed-forwards are ungated experts (GELU)."""

from dataclasses import dataclass
from typing import ClassVar

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.decoder_keys import HeadKeys
from kenotron_models.families.keys import Rule, key, marker
from kenotron_models.families.rope_keys import NanotronKeys
from kenotron_models.families.routing_keys import ExpertKeys, experts_key, top_k_key
from kenotron_models.family import Family
from kenotron_models.rope import Rope
from kenotron_models.rope_scaling import RopeScaling
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class LlaMoEConfig(ExpertKeys, NanotronKeys, HeadKeys):
    """A Llama whose feed-forwards are experts, under the names of Nanotron's example.

    As there, rotary positions turn neighbouring features with base 10,000, experts have two
    matrices and a GELU, and weights are not renormalised. Unlike there, ``tie_word_embeddings`` and
    ``rope_scaling`` mean what they say, and ``hidden_act`` must have its default.
    """

    former: ClassVar = ("rope_theta", "rope_interleaved")
    is_llamoe_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    rope_scaling: RopeScaling | None = key(None, small=SmallSizes.scaling)
    """Stretching of rotary positions; None: none."""
    moe_num_experts: int = experts_key(1)
    """Experts of a layer."""
    num_experts_per_tok: int = top_k_key(1)
    """Experts that each token is sent to."""
    moe_capacity_factor: int = key(
        1, rule=Rule(lambda x: x == 1, "no token is dropped, so it must be 1, or be left out")
    )
    """No effect, as in Nanotron: no token is dropped. Only 1 is accepted."""

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        experts = ExpertsSpec(
            router=self.router(),
            features=self.intermediate_size,
            gated=False,
            activation="gelu_tanh",
        )
        mixer = self.attention(rope=Rope(interleaved=True, scaling=self.rope_scaling))
        layers = self.num_hidden_layers
        return self.decoder_of([mixer] * layers, dict.fromkeys(range(layers), experts))


LLAMOE = Family(marker="is_llamoe_config", config=LlaMoEConfig)
