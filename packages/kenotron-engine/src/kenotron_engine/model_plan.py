"""Parts of a model, and the way in which its layers compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kenotron_engine.sequence import CPMode
from kenotron_models import DecoderSpec, ParameterScale, Recompute, expert_layers
from kenotron_models.adapters import AdapterSpec
from kenotron_pp import Schedule, schedule_named
from kenotron_tp import TPMode


def one_f_one_b() -> Schedule:
    """Return the schedule that a pipeline has if none is named."""
    return schedule_named("1f1b")


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """Parts of a model, and the way in which its layers compute; the same on every rank."""

    spec: DecoderSpec
    """Embedding, blocks, norm and head."""
    dtype: torch.dtype = torch.float32
    """Of parameters and activations."""
    mode: TPMode = TPMode()
    """Communication of layers over tp."""
    cp_mode: CPMode = CPMode()
    """Attention over cp."""
    ep_chunks: int = 1
    """Parts in which tokens are sent over ep, one while another is computed."""
    schedule: Schedule = field(default_factory=one_f_one_b)
    """Order of forwards and backwards over pp."""
    recompute: Recompute | tuple[Recompute, ...] = "none"
    """Parts that decoder layers compute again in the backward, for all layers or one by one."""
    vocab_divisible_by: int = 1
    """The vocabulary is padded to a multiple of this times tp."""
    seed: int = 42
    """Of first weights and dropout."""
    draws: tuple[float, str] | tuple[float, str, int] | None = (0.02, "NUM_LAYERS")
    """Standard deviation of the first weights, and what scales those of residual outputs (see
    ``kenotron_models.standard_init``); None: zeros, for weights that are read later."""
    scales: Mapping[str, ParameterScale] | None = None
    """First values and factors of each parameter (``kenotron_models.mup_scales``), in place of
    ``draws``; None: the standard parametrisation."""
    adapter: AdapterSpec | None = None
    """Adapters of linear layers, which learn alone; None: all parameters learn."""
    compile: bool = False
    """True: torch.compile makes one program of each layer's work between communications."""
    cuda_graph: bool = False
    """True: forward and backward of a micro-batch are one CUDA graph. Needs pp, cp and tp 1."""
    reproducible: bool = False
    """True: samples are computed one by one and added in one tree (``SampleGradients``), the same
    bits on every pp, dp, ep and ZeRO stage."""
    virtual_shards: int = 1
    """Virtual shards over tp in the reproducible mode: with equally many the bits are the same on
    every tp that divides them (``kenotron_models.virtual_shards`` says how many a model allows)."""
    virtual_chunks: int = 1
    """Virtual ranks of cp in the reproducible mode: with equally many the bits are the same on
    every cp that divides them."""


def check_balance(plan: ModelPlan, stages: int) -> None:
    """Raise ValueError for a balance loss of all layers in a model of several pipeline parts."""
    kinds, parts = expert_layers(plan.spec).values(), stages * plan.schedule.chunks
    if parts > 1 and any(kind.router.balances_all_layers for kind in kinds):
        raise ValueError(
            f"balance all_layers was given with {parts} parts of the model over pp: this loss "
            "needs all layers in one part: choose micro_batch or sample, or pp = 1 with one chunk"
        )
