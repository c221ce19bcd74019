"""A small Llama, an optimizer and batches for tests of the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kenotron_data import Batch, Loader, RandomTokens
from kenotron_dist import Mesh
from kenotron_engine import ModelPlan, Training, build_training
from kenotron_models.families import LlamaConfig, MoEConfig, Qwen2Config
from kenotron_optim import AdamWConfig, LRSchedulerConfig, OptimizerConfig

LLAMA = LlamaConfig(
    vocab_size=61,  # no layout of 2 ranks divides it
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=12,
    tie_word_embeddings=True,
)
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
ADAMW = OptimizerConfig(
    optimizer_factory=AdamWConfig(
        adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True
    ),
    zero_stage=1,
    weight_decay=0.1,
    clip_grad=1.0,
    accumulate_grad_in_fp32=True,
    learning_rate_scheduler=LRSchedulerConfig(learning_rate=1e-2, min_decay_lr=1e-3),
)
ROWS, SEQUENCE = 4, 12


EXPERTS = Qwen2Config(
    **{name: getattr(LLAMA, name) for name in SIZES},
    moe_config=MoEConfig(
        num_experts=8, top_k=3, moe_intermediate_size=12, shared_expert_intermediate_size=16,
        enable_shared_expert=True, router_aux_loss_coef=0.05, router_bias_rate=0.01, layers=(1,),
        router_z_loss_coef=0.01,
    ),
)  # fmt: skip


def plan(**changes: Any) -> ModelPlan:
    return ModelPlan(**{"spec": LLAMA.decoder, **changes})


def training_of(mesh: Mesh, of: ModelPlan | None = None, **optim: Any) -> Training:
    return build_training(of or plan(), replace(ADAMW, **optim), mesh, train_steps=4)


def batches_of(mesh: Mesh, count: int, vocab_size: int = LLAMA.vocab_size) -> list[Batch]:
    """Global batches of two micro-batches; the first rows have fewer targets than tokens."""
    with Loader(
        RandomTokens(vocab_size, SEQUENCE, seed=3, samples=64),
        seed=5,
        microbatches=2,
        micro_batch_size=ROWS // mesh["dp"].size,
        dp_rank=mesh["dp"].rank,
        dp_size=mesh["dp"].size,
    ) as loader:
        found = [next(loader) for _ in range(count)]
    for batch in found:
        batch.labels_MBS[batch.samples_MB % 3 == 0, :5] = -100
    return found


def with_targets(mesh: Mesh, targets: list[int]) -> Batch:
    """One row of 8 tokens, of which so many have a target on each data rank."""
    labels = torch.full((1, 1, 8), -100)
    labels[0, 0, : targets[mesh["dp"].rank]] = 1
    zeros = torch.zeros(1, 1, 8, dtype=torch.int64)
    return Batch(zeros, labels, zeros, torch.zeros(1, 1, dtype=torch.int64))
