"""What the parity tests train: a small model made to expose bugs, and ways to plant some.

Five layers are uneven for every pipeline, two kv heads are fewer than four tp ranks, a vocabulary
of 257 pads on every tp size, and every row has its own number of targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from kenotron_config import Config
from kenotron_data import Batch, Cursor
from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters
from kenotron_engine import Piece, Whole, build_model, join_pieces
from kenotron_engine import gradients_of as engine_gradients
from kenotron_train.assemble import TrainingRun, build_training, data_plan, plan_of
from kenotron_train.config_file import parse_config
from kenotron_train.data.stage_dataset import open_corpus, open_loader
from kenotron_train.data_plan import DataPlan
from kenotron_train.run.loop import train

GLOBAL_BATCH = 24
BOUND = 1e-5
"""Largest relative deviation of a loss or a gradient norm from one process."""

YAML = """
general: {project: parity, run: parity, seed: 7}
parallelism: {dp: 1, pp: 1, tp: 1, pp_engine: 1f1b, tp_mode: ALL_REDUCE}
model:
  dtype: float32
  init_method: {std: 0.05}
  model_config:
    is_llama_config: true
    hidden_size: 64
    intermediate_size: 96
    num_hidden_layers: 5
    num_attention_heads: 8
    num_key_value_heads: 2
    vocab_size: 257
    max_position_embeddings: 16
    tie_word_embeddings: false
optimizer:
  zero_stage: 1
  weight_decay: 0.1
  clip_grad: 2.5
  accumulate_grad_in_fp32: true
  optimizer_factory:
    {name: adamW, adam_eps: 1e-8, adam_beta1: 0.9, adam_beta2: 0.95, torch_adam_is_fused: false}
  learning_rate_scheduler:
    {learning_rate: 1e-3, lr_warmup_steps: 4, lr_decay_style: cosine, min_decay_lr: 1e-4}
tokens:
  {sequence_length: 16, train_steps: 20, micro_batch_size: 8, batch_accumulation_per_replica: 3}
checkpoints: {checkpoints_path: checkpoints, checkpoint_interval: 1000, save_final_state: false}
logging: {log_level: warning}
data_stages:
- {name: text, start_training_step: 1, data: {seed: 3, dataset: {hf_dataset_or_datasets: text}}}
"""


@dataclass(frozen=True)
class Layout:
    """One way to spread the same training."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    tied: bool = False
    sequence_parallel: bool = False
    overlap: bool = False
    zero: int = 1
    engine: str = "1f1b"

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def __str__(self) -> str:
        words = [f"pp{self.pp}", f"dp{self.dp}", f"tp{self.tp}", self.engine, f"zero{self.zero}"]
        words += [f"cp{self.cp}"] * (self.cp > 1)
        words += ["tied"] * self.tied + ["sp"] * self.sequence_parallel
        words += ["overlap"] * self.overlap
        return "-".join(words)


@dataclass(frozen=True)
class Trace:
    """What one rank measured."""

    losses: list[float]
    norms: list[float]


def configure(layout: Layout, folder: Path, steps: int = 20) -> Config:
    """The config of a layout: the global batch is the same, in three micro-batches where it can."""
    micro = 3
    overrides = {
        "parallelism.pp": layout.pp,
        "parallelism.dp": layout.dp,
        "parallelism.tp": layout.tp,
        "parallelism.cp": layout.cp,
        "parallelism.pp_engine": layout.engine,
        "parallelism.tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
        "parallelism.tp_linear_async_communication": str(layout.overlap).lower(),
        "parallelism.tp_recompute_allgather": str(not layout.tied).lower(),
        "model.model_config.tie_word_embeddings": str(layout.tied).lower(),
        "optimizer.zero_stage": layout.zero,
        "tokens.train_steps": steps,
        "tokens.micro_batch_size": GLOBAL_BATCH // micro // layout.dp,
        "tokens.batch_accumulation_per_replica": micro,
        "optimizer.learning_rate_scheduler.lr_decay_steps": 16,
        "data_stages.0.data.dataset.hf_dataset_or_datasets": folder / "text.txt",
        "checkpoints.checkpoints_path": folder / "checkpoints" / str(layout),
    }
    return parse_config(YAML, "parity", [f"{key}={value}" for key, value in overrides.items()])


def write_text(folder: Path) -> None:
    """A text that a small model can learn something from."""
    words = ["pipeline", "tensor", "slice", "rank", "mesh", "axis", "loss", "step"]
    lines = (
        f"{words[i % 8]} {i % 13} of {words[i * 5 % 7]} is {i * i % 97}.\n" for i in range(2000)
    )
    (folder / "text.txt").write_text("".join(lines))


def target_mask(samples: torch.Tensor, sequence: int) -> torch.Tensor:
    """Every row has its own number of targets, so no two micro-batches have the same."""
    count = 1 + (samples * 7 + samples // 3) % sequence
    return torch.arange(sequence)[None] < count[:, None]


def trace(mesh: Mesh, config: Config) -> Trace:
    """Train, and report what every step reported."""
    results = train(mesh, config, target_mask=target_mask)
    return Trace([r.loss for r in results], [r.grad_norm for r in results])


def first_batch(data: DataPlan, mesh: Mesh) -> Batch:
    """This data rank's part of the first global batch."""
    with open_loader(data, mesh, open_corpus(data, 0), Cursor(), target_mask) as loader:
        return next(loader)


def parameters(mesh: Mesh, config: Config) -> dict[str, np.ndarray]:
    """First values of every parameter, on one process."""
    stack = build_model(plan_of(config), mesh).stack
    return {name: p.detach().numpy().copy() for name, p in named_parameters(stack).items()}


def rows(mesh: Mesh, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels (rows, S) of the first global batch, on one process."""
    batch = first_batch(data_plan(config), mesh)
    return batch.tokens_MBS.flatten(0, 1).numpy(), batch.labels_MBS.flatten(0, 1).numpy()


def gradients(mesh: Mesh, config: Config) -> tuple[float, list[Piece]]:
    """Loss and gradient of the first step, before clipping: this rank's pieces."""
    return gradients_of(build_training(config, mesh))


def gradients_of(training: TrainingRun) -> tuple[float, list[Piece]]:
    """``gradients`` of a training that is built."""
    return engine_gradients(training, first_batch(training.data, training.mesh))


def assemble(ranks: list[tuple[float, list[Piece]]]) -> Whole:
    """Whole gradients by logical name from every rank's; replicas must agree bit for bit."""
    return join_pieces(own for _, own in ranks)


def deviation(got: list[float], want: list[float]) -> float:
    """Largest relative deviation over the steps that were made."""
    steps = min(len(got), len(want))
    return farthest(got[:steps], want[:steps])


def farthest(got: list[float], want: list[float]) -> float:
    """Largest relative deviation of two series of one length; nan where one is in them."""
    return float(np.max(np.abs(np.array(got) / np.array(want) - 1)))


def planted(mesh: Mesh, config: Config, fault: str) -> Trace:
    """Train with a bug of a kind that has been seen in the wild."""
    with FAULTS[fault]():
        return trace(mesh, config)


def _local_count() -> mock._patch:
    """Every rank divides its loss by its own targets and a share of the ranks."""

    def counts(batch, mesh):
        return ((batch.labels_MBS != -100).sum() * mesh["dp"].size).repeat(2)

    return mock.patch("kenotron_engine.objective.global_counts", counts)


def _padding_counts() -> mock._patch:
    """Padding columns of the vocabulary take part in the softmax."""
    from kenotron_tp import cross_entropy as right

    def wrong(x, labels, axis, *, vocab_size, **options):
        return right(x, labels, axis, **options)

    return mock.patch("kenotron_engine.objective.cross_entropy", wrong)


def _replicas_count() -> mock._patch:
    """Every replica of an element adds to the norm."""
    return mock.patch("kenotron_optim.clip.norm_weight", lambda *_: 1.0)


FAULTS = {
    "wrong loss scale": _local_count,
    "padded vocabulary gets probability": _padding_counts,
    "norm counts replicas": _replicas_count,
}
