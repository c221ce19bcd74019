"""Running a row of the grid: its config, and everything that is compared, from all of its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grid
import numpy as np
import parity
from grid import GLOBAL_BATCH, Row

from kenotron_config import Config
from kenotron_dist import Mesh, spawn
from kenotron_engine import Piece, join_pieces, pieces_of, weight_pieces
from kenotron_models import AnyConfig
from kenotron_models.families import (
    DeepseekV3Config,
    LlamaConfig,
    Mamba2ModelConfig,
    MambaModelConfig,
    MistralConfig,
    MoEConfig,
    NemotronHConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)
from kenotron_models.layers import RopeScaling
from kenotron_train.assemble import TrainingRun, build_training
from kenotron_train.config_file import parse_config
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.progress import Progress
from kenotron_train.run.loop import run

PRELOAD = ("torch._dynamo", "kenotron_train.run.loop")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
Weights = dict[str, np.ndarray]
YARN = RopeScaling(factor=4.0, rope_type="yarn", original_max_position_embeddings=8)
QWEN2_EXPERTS = MoEConfig(
    num_experts=8,
    top_k=3,
    moe_intermediate_size=24,
    enable_shared_expert=True,
    shared_expert_intermediate_size=32,
    layers=(1, 2, 4),
    norm_topk_prob=True,
    router_aux_loss_coef=0.02,
    router_z_loss_coef=0.001,
    router_bias_rate=0.01,
)
FAMILIES = {
    "llama": (
        LlamaConfig,
        {
            "rope_scaling": RopeScaling(factor=8.0, original_max_position_embeddings=16),
            "z_loss_enabled": True,
            "z_loss_coefficient": 0.01,
        },
    ),
    "mistral": (MistralConfig, {"sliding_window_size": 4}),
    "qwen2": (
        Qwen2Config,
        {
            "attention_bias": True,
            "sliding_window_size": 6,
            "rope_seq_len_interpolation_factor": 2.0,
        },
    ),
    "qwen2_moe": (Qwen2Config, {"attention_bias": True, "moe_config": QWEN2_EXPERTS}),
    "qwen2_moe_limited": (
        Qwen2Config,
        {
            "attention_bias": True,
            "moe_config": replace(
                QWEN2_EXPERTS, expert_capacity_factor=1.0, router_jitter_noise=0.05
            ),
        },
    ),
    "deepseek": (
        DeepseekV3Config,
        {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "router_aux_loss_coef": 0.02,
            "router_bias_rate": 0.01,
        },
    ),
    "qwen3": (Qwen3Config, {"head_dim": 16, "rope_interleaved": True, "rope_scaling": YARN}),
}
"""Families of Llama's keys, and keys of theirs."""
PART = GLOBAL_BATCH // 3
EXTRAS = {
    "": {},
    "mtp": {"model.mtp": "{weight: 0.3}"},
    "mup": {
        "model.init_method": "{use_mup: true, std: 0.05, output_multiplier: 2.0, depth_rule: "
        "inverse, base: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2}}"
    },
    "muon": {
        "optimizer.optimizer_factory": "{name: muon, adamw_named_params: ['layers.0.*'], "
        "torch_adam_is_fused: false}",
        "optimizer.weight_average": "{decay: 0.9}",
        "optimizer.spikes": "{sigma: 1.0, window: 4}",
    },
    "ramp": {"tokens.batch_ramp": f"{{start: {PART}, increment: {PART}, samples: {2 * PART}}}"},
}
"""Keys of the config that a row's extra has. A ramp has one, two and three micro-batches."""


@dataclass(frozen=True)
class Measured:
    """What came of a run. Tensors are whole and in float32, by logical name."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    """Learning rates."""
    validation: float
    """Mean loss on held-out samples after the last step."""
    first: Weights
    """Weights before the first step."""
    gradients: Weights
    """Of the first step, before clipping."""
    last: Weights
    """After the last step: weights, the optimizer's masters and moments, averages of weights."""


def model_of(row: Row) -> AnyConfig:
    """A small model with what its family has, and some that it may have."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": row.layers,
        "num_attention_heads": 8,
        "vocab_size": row.vocab,
        "max_position_embeddings": row.sequence,
        "tie_word_embeddings": row.tied,
    }
    if row.arch in grid.MIXERS["arch"]:
        return recurrent_of(row)
    if row.arch == "starcoder2":
        drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), row.dropout)
        window = {"sliding_window_size": 5, "global_attn_layers": (1,)}
        return Starcoder2Config(**sizes, **drops, **window, grouped_query=True, num_kv_heads=2)
    kind, extra = FAMILIES[row.arch]
    if kind is Qwen2Config:
        extra = extra | {"no_rope_layer": 3 if row.layers == 6 else 5}
        extra = extra | {"use_doc_masking": row.documents == "separate"}
    heads = {} if kind is DeepseekV3Config else {"num_key_value_heads": 2}
    return kind(**sizes, attn_implementation=row.attention, **heads | extra)


def recurrent_of(row: Row) -> AnyConfig:
    """A small state-space model, or one mixed with attention and feed-forwards."""
    shared: dict[str, Any] = {
        "vocab_size": row.vocab,
        "tie_word_embeddings": row.tied,
        "use_doc_masking": row.documents == "separate",
    }
    if row.arch == "hybrid":
        sizes = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
                 "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
        return NemotronHConfig(
            **shared, **sizes, layers="M*-M-*"[: row.layers], hidden_size=64, chunk_size=8,
            intermediate_size=96, attn_implementation=row.attention,
        )  # fmt: skip
    shared["num_hidden_layers"] = row.layers
    if row.arch == "mamba":
        return MambaModelConfig(**shared, d_model=64)
    heads = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 8}
    return Mamba2ModelConfig(**shared, hidden_size=64, **heads)


def configure(
    row: Row,
    folder: Path,
    run: str,
    steps: int,
    resume: Path | None,
    keys: Mapping[str, str] = MappingProxyType({}),
) -> Config:
    """The config of a row, which reads what ``write_documents`` wrote and writes into ``run``.

    ``keys``: further keys, or other values.
    """
    overrides = {
        **{f"parallelism.{name}": size for name, size in row.axes.items() if name != "ep"},
        "parallelism.cp_attention": row.way,
        "parallelism.cp_layout": row.order,
        "parallelism.pp_engine": row.engine,
        "parallelism.tp_mode": "REDUCE_SCATTER" if "sp" in row.mode else "ALL_REDUCE",
        "parallelism.tp_linear_async_communication": str("overlap" in row.mode).lower(),
        "parallelism.tp_recompute_allgather": str(not row.tied).lower(),
        "parallelism.recompute": row.recompute,
        "model.dtype": DTYPES[row.dtype],
        "optimizer.zero_stage": row.zero,
        "optimizer.reduce": row.reduce,
        "optimizer.accumulate_grad_in_fp32": str(row.accumulate == "fp32").lower(),
        "optimizer.learning_rate_scheduler.lr_decay_steps": 16,
        "tokens.train_steps": steps,
        "tokens.sequence_length": row.sequence,
        "tokens.micro_batch_size": GLOBAL_BATCH // row.micro // row.axes["dp"],
        "tokens.batch_accumulation_per_replica": row.micro,
        "tokens.limit_val_batches": 1,
        "data_stages.0.data.dataset.hf_dataset_or_datasets": folder / "documents.jsonl",
        "checkpoints.checkpoints_path": folder / run,
        "checkpoints.checkpoint_interval": saved_after(steps) if resume is None else 1000,
        "checkpoints.checkpointing_engine": row.saver,
    }
    if resume is not None:
        overrides["checkpoints.resume_checkpoint_path"] = resume
    flags = [f"{key}={value}" for key, value in {**overrides, **EXTRAS[row.extra], **keys}.items()]
    config = parse_config(parity.YAML, "grid", flags)
    model = replace(config.model, model_config=model_of(row))
    parallelism = replace(config.parallelism, ep=row.ep, ep_chunks=row.chunks)
    return replace(config, model=model, parallelism=parallelism)


def saved_after(steps: int) -> int:
    """The step after which a checkpoint is written, for a run that goes on from it elsewhere."""
    return steps // 2 + 1


def write_documents(folder: Path) -> None:
    """Documents of 5 to 23 bytes: most samples of 16 tokens hold parts of two or three."""
    words = ["pipeline", "tensor", "slice", "rank", "mesh", "axis", "loss", "step"]
    texts = (
        f"{words[i % 8]} {i % 13}" + f" of {words[i * 5 % 7]}" * (i % 3 == 0) for i in range(6000)
    )
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))


def measure(
    row: Row,
    folder: Path,
    run: str,
    steps: int,
    resume: Path | None = None,
    keys: Mapping[str, str] = MappingProxyType({}),
) -> Measured:
    """Run a row on its ranks, which must report the same numbers and hold the same replicas.

    It leaves its checkpoints in ``folder / run``. ``keys`` as in ``configure``.
    """
    config = configure(row, folder, run, steps, resume, keys)
    ranks = spawn(_measure, config, resume is None, **row.axes, preload=PRELOAD)
    assert all(rank[0] == ranks[0][0] for rank in ranks), "ranks report different numbers"
    lines = (folder / run / "metrics.jsonl").read_text()
    validation = json.loads(lines.splitlines()[-1])["validation_loss"]
    whole = [join_pieces(rank[1][part] for rank in ranks) for part in range(3)]
    return Measured(*ranks[0][0], validation, *whole)


Series = tuple[list[float], list[float], list[float]]
"""Losses, gradient norms and learning rates."""
Pieces = list[list[Piece]]
"""Of the first weights, the gradients and the last state."""


class _Keep(LifeCycle):
    """Keeps this rank's pieces of what there is before the first step and after the last."""

    def __init__(self) -> None:
        self.first: list[Piece] = []
        self.last: list[Piece] = []

    def pre_training(self, training: TrainingRun, progress: Progress) -> None:
        self.first = weight_pieces(training)

    def post_training(self, training: TrainingRun, progress: Progress) -> None:
        averages = training.averages.state() if training.averages else {}
        state = pieces_of({**training.optimizer.state(), **averages}, training.mesh)
        self.last = weight_pieces(training) + state


def _measure(mesh: Mesh, config: Config, fresh: bool) -> tuple[Series, Pieces]:
    """What this rank saw of what ``Measured`` holds."""
    gradients = parity.gradients_of(build_training(config, mesh))[1] if fresh else []
    keep = _Keep()
    results = run(mesh, config, target_mask=parity.target_mask, hooks=(keep,)).results
    series = [r.loss for r in results], [r.grad_norm for r in results], [r.lr for r in results]
    return series, [keep.first, gradients, keep.last]
