"""Phi-3 (Abdin et al., arXiv 2404.14219): fused projections in files, and dropout."""

from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.families.keys import SHARE, key, marker
from kenotron_models.families.rope_keys import PartialRopeKeys
from kenotron_models.family import Family, HuggingFace
from kenotron_models.hf_tensors import LLAMA_NAMES, FusedModules
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Phi3Config(PartialRopeKeys):
    """Sizes and constants of a Phi-3 decoder, under Hugging Face's names."""

    is_phi3_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    sliding_window: int | None = key(
        None, least=1, hf=True, at="attention.window", small=SmallSizes.window
    )
    """Tokens that a token sees, itself counted; None: all before it."""
    resid_pdrop: float = key(0.0, rule=SHARE, hf=True, at="block.dropout")
    """Share of what attention and feed-forward add that is dropped in training."""
    attention_dropout: float = key(0.0, rule=SHARE, hf=True, at="attention.dropout")
    """Share of attention's probabilities that is dropped in training."""

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        mixer = self.attention(
            out_bias=self.attention_bias,
            window=self.sliding_window,
            dropout=self.attention_dropout,
        )
        spec = self.decoder_of([mixer] * self.num_hidden_layers)
        blocks = (replace(block, dropout=self.resid_pdrop) for block in spec.blocks)
        return replace(spec, blocks=tuple(blocks))

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the key of a dropout that there is not."""
        return super().write_hf(spec) | {"embd_pdrop": 0.0}


PHI3 = Family(
    marker="is_phi3_config",
    config=Phi3Config,
    hf=HuggingFace(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32000,
            "pad_token_id": 32000,
        },
        only={"embd_pdrop": (0, None), "attention_bias": (False, None)},
        names={
            **LLAMA_NAMES,
            "attention.qkv": FusedModules("self_attn.qkv_proj", turned=2),
            "mlp.gate_up": FusedModules("mlp.gate_up_proj"),
        },
    ),
)
