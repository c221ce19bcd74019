"""Phi-3 (Abdin et al., arXiv 2404.14219): fused projections in files, and dropout."""

from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.families.fields import SharedFields, check, marker_problems, raise_all
from kenotron_models.families.hf_keys import first_mixer, llama_from_hf, llama_to_hf
from kenotron_models.families.partial_rope import share_problems, small_share
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.hf_rope import share_from_hf
from kenotron_models.hf_tensors import LLAMA_NAMES, Fused
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Phi3Config(SharedFields):
    """Sizes and constants of a Phi-3 decoder, under Hugging Face's names.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_phi3_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    partial_rotary_factor: float = 1.0
    """Share of a head's features that positions turn, its first ones."""
    sliding_window: int | None = None
    """Tokens that a token sees, itself counted; None: all before it."""
    resid_pdrop: float = 0.0
    """Share of what attention and feed-forward add that is dropped in training."""
    attention_dropout: float = 0.0
    """Share of attention's probabilities that is dropped in training."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*check(self), *marker_problems(self, "is_phi3_config")]
        if self.sliding_window is not None and self.sliding_window < 1:
            found.append(
                f"sliding_window: {self.sliding_window} was given; it must be at least 1, or null"
            )
        found += [
            f"{name}: {share} was given; it must be at least 0, below 1"
            for name in ("resid_pdrop", "attention_dropout")
            if not 0 <= (share := getattr(self, name)) < 1
        ]
        width, share = self.features_of_head, self.partial_rotary_factor
        raise_all([*found, *([] if found else share_problems(share, width))])

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of windows and positions of a narrow copy."""
        width = min(sizes.head_dim, self.features_of_head)
        return {
            "sliding_window": sizes.window(self.sliding_window),
            "partial_rotary_factor": small_share(self.partial_rotary_factor, width),
        }

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        mixer = self.attention()
        assert mixer.rope is not None  # all layers have positions
        mixer = replace(
            mixer,
            out_bias=self.attention_bias,
            window=self.sliding_window,
            dropout=self.attention_dropout,
            rope=replace(mixer.rope, share=self.partial_rotary_factor),
        )
        spec = self.decoder_of([mixer] * self.num_hidden_layers)
        blocks = (replace(block, dropout=self.resid_pdrop) for block in spec.blocks)
        return replace(spec, blocks=tuple(blocks))


def _read(values: Values) -> Phi3Config:
    return Phi3Config(
        **llama_from_hf(values, partial=True),
        partial_rotary_factor=share_from_hf(values),
        sliding_window=values.get("sliding_window"),
        resid_pdrop=values.get("resid_pdrop") or 0.0,
        attention_dropout=values.get("attention_dropout") or 0.0,
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    mixer = first_mixer(spec)
    return {
        **llama_to_hf(spec),
        "partial_rotary_factor": 1.0 if mixer.rope is None else mixer.rope.share,
        "sliding_window": mixer.window,
        "resid_pdrop": spec.blocks[0].dropout,
        "embd_pdrop": 0.0,
    }


PHI3 = Family(
    marker="is_phi3_config",
    config=Phi3Config,
    hf=HuggingFace(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "pad_token_id": 32000,
        },
        only={
            "hidden_act": ("silu",),
            "embd_pdrop": (0, None),
            "attention_bias": (False, None),
        },
        read=_read,
        write=_write,
        names={
            **LLAMA_NAMES,
            "attention.qkv": Fused("self_attn.qkv_proj", turned=2),
            "mlp.gate_up": Fused("mlp.gate_up_proj"),
        },
    ),
)
