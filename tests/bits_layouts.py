"""Small layouts and models of which one step must have the bits of one process.

They cover the axes of a layout and the layers that the reproducible mode has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grid import CUT_LENGTH, Row

from kenotron_models import AnyConfig, families
from kenotron_models.layers import RopeScaling

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 150,
}  # fmt: skip
TYPES = ("sliding_attention", "full_attention", "sliding_attention")
ROUTED = {"num_experts_per_tok": 3, "router_aux_loss_coef": 0.02}
LINEAR = ("linear_attention", "linear_attention", "full_attention")


@dataclass(frozen=True)
class Case:
    """A layout of a small model."""

    row: Row
    model: AnyConfig | None = None
    """None: that of the row."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Further ones of its config."""
    domains: bool = False
    """True: the step is one of a run that learns weights of domains."""


CASES: dict[str, Case] = {
    "pp 2, dp 2": Case(
        Row(sizes=(2, 2, 1), engine="zb-h1", arch="starcoder2", tied=True, dropout=0.1,
            recompute="full")),
    "dp 3, ZeRO 3, bf16": Case(
        Row(sizes=(1, 3, 1), arch="mistral", dtype="bf16", zero=3, attention="blocked", micro=1)),
    "tp 2, Muon": Case(
        Row(sizes=(1, 1, 2), mode="sp+overlap", arch="qwen3", extra="muon", tied=True)),
    "pp 2, tp 2, µP": Case(Row(sizes=(2, 1, 2), engine="zb-v", extra="mup", zero=0)),
    "tp 4, bf16": Case(
        Row(sizes=(1, 1, 4), mode="sp", arch="qwen2", documents="separate", dtype="bf16")),
    "cp 4, bf16": Case(Row(cp=4, way="ulysses", dtype="bf16", sequence=CUT_LENGTH)),
    "dp 2, cp 2, domains": Case(
        Row(sizes=(1, 2, 1), cp=2, arch="mistral", zero=2, sequence=CUT_LENGTH), domains=True),
    "cp 2, tp 2": Case(
        Row(sizes=(1, 1, 2), cp=2, arch="starcoder2", dropout=0.1, mode="sp", tied=True,
            sequence=CUT_LENGTH)),
    "cp 2, ulysses": Case(
        Row(sizes=(1, 2, 1), cp=2, way="ulysses", order="contiguous", arch="qwen2", zero=2,
            documents="separate", sequence=CUT_LENGTH, recompute="mixer")),
    "dp 2, ep 2, capacity": Case(
        Row(sizes=(1, 2, 1), ep=2, arch="qwen2_moe_limited", zero=3, documents="separate")),
    "dp 2, tp 2, ep 4, bf16": Case(
        Row(sizes=(1, 2, 2), ep=4, arch="deepseek", dtype="bf16", mode="sp", zero=0,
            recompute="selective")),
    "cp 2, tp 2, ep 2": Case(
        Row(sizes=(1, 1, 2), cp=2, ep=2, arch="qwen2_moe_limited", mode="sp",
            sequence=CUT_LENGTH, documents="separate", recompute="full")),
    "cp 2, sinks": Case(
        Row(cp=2, ep=2, sequence=CUT_LENGTH),
        families.GptOssConfig(
            **SIZES, **ROUTED, head_dim=12, sliding_window=5, layer_types=TYPES,
            num_local_experts=6, router_aux_loss_type="micro_batch", rope_scaling=RopeScaling(
                factor=4.0, rope_type="yarn", original_max_position_embeddings=8))),
    "tp 2, Mamba": Case(
        Row(sizes=(1, 1, 2), mode="sp"),
        families.JambaConfig(
            **SIZES, **ROUTED, attn_layer_period=2, attn_layer_offset=0, num_experts=8,
            mamba_d_state=8, mamba_dt_rank=4)),
    "cp 2, Mamba": Case(
        Row(cp=2, arch="mamba", layers=5, documents="separate", sequence=CUT_LENGTH)),
    "cp 4, Mamba-2": Case(
        Row(cp=4, arch="hybrid", layers=5, dtype="bf16", sequence=CUT_LENGTH)),
    "cp 2, tp 2, Jamba": Case(
        Row(sizes=(1, 1, 2), cp=2, mode="sp", sequence=CUT_LENGTH),
        families.JambaConfig(
            **SIZES, **ROUTED, attn_layer_period=2, attn_layer_offset=0, num_experts=8,
            mamba_d_state=8, mamba_dt_rank=4),
        keys={"general.reproducible_max_tp": "8"}),
    "cp 2, tp 2, Mamba-2": Case(
        Row(sizes=(1, 1, 2), cp=2, mode="sp", arch="hybrid", layers=5, documents="separate",
            sequence=CUT_LENGTH)),
    "dp 2, Mamba, bf16": Case(
        Row(sizes=(1, 2, 1), arch="mamba", layers=5, documents="separate", dtype="bf16")),
    "tp 4, Mamba-2": Case(
        Row(sizes=(1, 1, 4), mode="sp", arch="hybrid", layers=5, documents="separate")),
    "tp 2, delta rule": Case(
        Row(sizes=(1, 1, 2), mode="sp", sequence=150),
        families.Qwen3NextConfig(
            **SIZES, **ROUTED, head_dim=16, num_experts=8, moe_intermediate_size=24,
            router_aux_loss_type="all_layers", use_doc_masking=True,
            layer_types=LINEAR, linear_num_key_heads=4, linear_num_value_heads=8,
            linear_key_head_dim=6, linear_value_head_dim=10, shared_expert_intermediate_size=40)),
    "pp 2, tp 2, MTP": Case(
        Row(sizes=(2, 1, 2), extra="mtp", mode="sp", engine="interleaved", tied=True),
        keys={"general.reproducible_max_tp": "8"}),
    "cp 2, MTP": Case(
        Row(cp=2, extra="mtp", arch="qwen2", documents="separate", sequence=CUT_LENGTH)),
    "tp 2, caps": Case(
        Row(sizes=(1, 1, 2), attention="blocked"),
        families.Gemma2Config(
            **SIZES, head_dim=12, sliding_window=5, layer_types=TYPES, query_pre_attn_scalar=20,
            final_logit_softcapping=2.5, attn_logit_softcapping=1.5,
            attn_implementation="blocked")),
    "dp 2, 2,100 tokens, bf16": Case(
        Row(sizes=(1, 2, 1), arch="mistral", dtype="bf16", layers=1, sequence=2100, tied=True)),
    "cp 2, tp 2, norms over heads": Case(
        Row(sizes=(1, 1, 2), cp=2, sequence=CUT_LENGTH), families.OLMo2Config(**SIZES)),
    "dp 2, whole layers": Case(
        Row(sizes=(1, 2, 1)), families.OLMo2Config(**SIZES),
        keys={"general.reproducible_max_tp": "1"}),
    "dp 2, ep 2, factors": Case(
        Row(sizes=(1, 2, 1), ep=2, zero=3),
        families.GraniteHybridConfig(
            **SIZES, **ROUTED, layer_types=LINEAR, embedding_multiplier=3.0,
            attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=3.0,
            shared_intermediate_size=40, mamba_n_heads=8, mamba_n_groups=4, mamba_d_state=8,
            mamba_chunk_size=8)),
}  # fmt: skip
