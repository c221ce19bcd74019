"""Keys of state-space models and of Mamba-2 layers under Hugging Face's names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kenotron_models.block import BlockSpec
from kenotron_models.families.hf_keys import first_of
from kenotron_models.families.keys import OF_CONFIG, POSITIVE, KeyTable, Rule, key
from kenotron_models.families.places import placed
from kenotron_models.hf_tensors import FusedModules, Names
from kenotron_models.mamba2 import Mamba2Spec
from kenotron_models.norm import NormSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec
from kenotron_models.state_init import FirstSteps

LONGEST = 1 << 20
"""Tokens of a text: the state is of fixed size, so that nothing but this number bounds them."""
SMALL_STATE = 8
"""Most features of a state, and tokens of a chunk, in a narrow copy."""
LIMITS = Rule(
    lambda x: len(x) == 2 and 0 <= x[0] <= x[1],
    "it must be two numbers from 0, the smaller one first",
)


def few(_: SmallSizes, features: int) -> int:
    """Return the features of a state, or the tokens of a chunk, of a narrow copy."""
    return min(features, SMALL_STATE)


def step_limits(limits: Sequence[Any] | None) -> tuple[float, ...]:
    """Return the limits of steps as a config.json has them: infinity may be a mapping or a word."""
    limits = (0.0, math.inf) if limits is None else limits
    plain = (each.get("__float__", each) if isinstance(each, dict) else each for each in limits)
    return tuple(map(float, plain))


def first_step_problems(low: float, high: float, names: tuple[str, str]) -> list[str]:
    """Name bounds of the first steps, under these keys, that are none."""
    if 0 < low <= high < math.inf:
        return []
    return [
        f"{names[0]}: {low} was given; it must be above 0 and at most {names[1]} ({high}), which "
        "must be finite"
    ]


def state_space_names(ours: str, theirs: str, norm: str, /, **parts: str) -> Names:
    """Modules of a state space, and what Hugging Face's models call them.

    Args:
        ours: our part, as ``mamba``.
        theirs: their module.
        norm: their norm before it.
        parts: modules inside, and what theirs are called there.
    """
    parts = {"in_proj": "in_proj", "conv": "conv1d", **parts, "out_proj": "out_proj"}
    names = {f"{ours}.{part}": FusedModules(f"{theirs}.{name}") for part, name in parts.items()}
    return {f"{ours}_norm": FusedModules(norm), ours: FusedModules(theirs), **names}


@dataclass(frozen=True, kw_only=True)
class StateSpaceKeys(KeyTable):
    """Keys of models whose layers have a state."""

    vocab_size: int = key(32768, least=1, hf=True, needed=True, at="vocab_size", small="vocab_size")
    """Token numbers that exist, without padding."""
    residual_in_fp32: bool = key(True, hf=True, at="residual_in_fp32")
    """True: the residual stream is float32, also in a narrower model."""
    tie_word_embeddings: bool = key(False, hf=True, at="tie_word_embeddings")
    """True: the head is the embedding's own matrix."""
    use_doc_masking: bool = key(
        False, at=tuple(f"{part}.separate_documents" for part in ("mamba", "mamba2", "attention"))
    )
    """True: a token sees its own document only, and states begin again with it."""
    pad_token_id: int | None = key(None, hf=True, at=OF_CONFIG)
    """Token number of padding; recorded for export: padded positions carry no label."""
    bos_token_id: int | None = key(None, hf=True, at="bos_token_id")
    """Token number of the beginning of a text; recorded for export, no layer reads it."""
    eos_token_id: int | None = key(None, hf=True, at="eos_token_id", read=first_of)
    """Token number of the end of a text; generation stops on it, no layer reads it."""

    def _decoder(
        self,
        width: int,
        blocks: tuple[BlockSpec, ...],
        eps: float,
        longest: int = LONGEST,
        stage_starts: tuple[int, ...] = (),
    ) -> DecoderSpec:
        """Return the decoder of some blocks, with an RMSNorm behind the last one."""
        return DecoderSpec(
            hidden_size=width,
            vocab_size=self.vocab_size,
            max_position_embeddings=longest,
            blocks=blocks,
            stage_starts=stage_starts,
            norm=NormSpec(eps=eps),
            tie_word_embeddings=self.tie_word_embeddings,
            residual_in_fp32=self.residual_in_fp32,
            bos_token_id=self.bos_token_id,
            eos_token_id=self.eos_token_id,
        )


@dataclass(frozen=True, kw_only=True)
class Mamba2Keys(StateSpaceKeys):
    """Keys of layers of Mamba-2; a family has further keys for their heads and states."""

    hidden_size: int = key(4096, least=1, hf=True, needed=True, at="hidden_size")
    """Width of the residual stream, in features."""
    n_groups: int = key(8, least=1, hf=True, at="mamba2.groups", small="kv_heads")
    """Groups of heads that share B and C."""
    conv_kernel: int = key(4, least=1, hf=True, at="mamba2.width")
    """Width of the convolution, in tokens."""
    use_bias: bool = key(False, hf=True, at="mamba2.bias")
    """True: input and output projection have a bias."""
    use_conv_bias: bool = key(True, hf=True, at="mamba2.conv_bias")
    """True: the convolution has a bias."""
    layer_norm_epsilon: float = key(1e-5, rule=POSITIVE, hf=True, at="norm.eps")
    """Added to the mean square inside every norm."""
    time_step_min: float = key(0.001, hf=True, at="mamba2.steps.low")
    """Smallest first step."""
    time_step_max: float = key(0.1, hf=True, at="mamba2.steps.high")
    """Largest first step."""
    time_step_floor: float = key(1e-4, rule=POSITIVE, hf=True, at="mamba2.steps.floor")
    """No first step is below this."""
    time_step_limit: tuple[float, ...] = key(
        (0.0, math.inf), rule=LIMITS, hf=True, at="mamba2.step_limits", read=step_limits,
        write=list,
    )  # fmt: skip
    """Smallest and largest step at any time."""
    chunk_size: int = key(256, least=1, hf=True, at="mamba2.chunk", small=few)
    """Tokens that the scan computes as one; the numbers differ by rounding only."""

    def problems(self) -> list[str]:
        """Name bounds of steps that are none."""
        names = ("time_step_min", "time_step_max")
        steps = first_step_problems(self.time_step_min, self.time_step_max, names)
        return super().problems() + steps

    def mamba2(self) -> Mamba2Spec:
        """Return what these keys say of a layer."""
        low, high = self.time_step_limit
        return Mamba2Spec(
            **placed(self, "mamba2"),
            steps=FirstSteps(self.time_step_min, self.time_step_max, self.time_step_floor),
            step_limits=(low, high),
            eps=self.layer_norm_epsilon,
        )
