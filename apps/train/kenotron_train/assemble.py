"""From the config of a run to values that follow from it, and to what is built of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

import kenotron_engine
from kenotron_config import Config, Mask, dump_config, public
from kenotron_cost import CostPlan, cost_plan, recomputed
from kenotron_dist import Mesh
from kenotron_dist.statistics import checksum
from kenotron_engine import ModelPlan
from kenotron_train.checkpoint_plan import CheckpointPlan
from kenotron_train.data_plan import DataPlan
from kenotron_train.log_plan import LogPlan
from kenotron_train.reproducible import conditions


@dataclass(frozen=True, kw_only=True)
class TrainingRun(kenotron_engine.Training):
    """Everything one step needs, and values of the config for what surrounds the steps."""

    cost: CostPlan
    data: DataPlan
    checkpoints: CheckpointPlan
    log: LogPlan

    @cached_property
    def base_checksum(self) -> str:
        """Checksum of the weights that do not learn next to adapters, with their dtype before it.

        The same on every layout. Collective over the mesh at its first use, which must come after
        these weights are there.
        """
        own = self.plan.adapter.tensors() if self.plan.adapter else {}
        frozen = {key: each for key, each in self.records().items() if each[1].name not in own}
        dtype = str(self.plan.dtype).removeprefix("torch.")
        return f"{dtype}:{checksum(frozen, self.mesh)}"


OwnModel = Callable[[Config, Mesh], list[tuple[str, nn.Module]]]
"""Layers of a model by name, in order, their parameters on the meta device. The first is called
with tokens (T,) and a ``kenotron_models.Context``, each other one with what the one before it
returned; the last returns logits (T, V/t). Cut parameters say so
(``kenotron_dist.placement.Placements``)."""


def data_plan(config: Config) -> DataPlan:
    """Return what the samples of a config's run follow from."""
    doremi, run = config.doremi, Path(config.checkpoints.checkpoints_path)
    given = doremi.reference_losses_path if doremi is not None else None
    return DataPlan(
        stages=config.data_stages,
        sequences=tuple(map(config.sequence_of, range(len(config.data_stages)))),
        tokens=config.tokens,
        batches=config.batches,
        global_batch_size=config.global_batch_size,
        tokenizer=config.tokenizer,
        doremi=doremi,
        losses=run / "reference_losses" if given is None else Path(given),
        vocab_size=config.model.model_config.vocab_size,
        separate_documents=config.decoder.separate_documents,
        accepts_changed=config.checkpoints.accept_changed_data,
    )


def checkpoint_plan(config: Config, device: torch.device) -> CheckpointPlan:
    """Return what first weights and checkpoints of a config's run on a device follow from."""
    section, asked = config.checkpoints, config
    if section.resume_checkpoint_path == section.checkpoints_path:  # no config said so
        asked = replace(config, checkpoints=replace(section, resume_checkpoint_path=None))
    return CheckpointPlan(
        section=section,
        upload=config.s3_upload,
        model=config.model,
        multipliers=config.multipliers,
        conditions=conditions(
            config.general,
            config.parallelism,
            config.model,
            cost_plan(config).virtual_shards,
            device,
        ),
        yaml=dump_config(asked),
    )


def log_plan(config: Config) -> LogPlan:
    """Return what the log of a config's run follows from."""
    return LogPlan(
        folder=Path(config.checkpoints.checkpoints_path),
        general=config.general,
        train_steps=config.tokens.train_steps,
        logging=config.logging,
        profiler=config.profiler,
        layers=config.metrics_logging,
        mask=Mask(config),
        yaml=dump_config(config),
        keys=public(asdict(config)),
    )


def plan_of(config: Config) -> ModelPlan:
    """Return a config's model and how its layers compute."""
    cost, parallelism, model = cost_plan(config), config.parallelism, config.model
    return ModelPlan(
        spec=cost.spec,
        dtype=cost.dtype,
        mode=parallelism.mode,
        cp_mode=cost.cp_mode,
        ep_chunks=parallelism.ep_chunks,
        schedule=parallelism.schedule,
        recompute=recomputed(cost),
        vocab_divisible_by=cost.vocab_divisible_by,
        seed=config.general.seed,
        draws=config.draws,
        scales=config.scales,
        adapter=config.adapter,
        compile=model.compile,
        cuda_graph=model.cuda_graph,
        reproducible=config.general.reproducible,
        virtual_shards=cost.virtual_shards,
        virtual_chunks=cost.virtual_chunks or 1,
    )


def decoder_layers(config: Config, mesh: Mesh) -> list[tuple[str, nn.Module]]:
    """Return the layers of ``model.model_config``, on meta."""
    return kenotron_engine.decoder_layers(plan_of(config), mesh)


def build_training(config: Config, mesh: Mesh, own_model: OwnModel | None = None) -> TrainingRun:
    """Build the model of a config and everything that updates it. Collective over the mesh.

    With ``general.reproducible`` torch computes with ``general.reproducible_threads`` from now on.

    Raises:
        ValueError: ``model.cuda_graph`` where there is no GPU, or where layers add losses;
            ``general.reproducible`` with ``own_model``.
    """
    if config.general.reproducible:
        torch.set_num_threads(config.general.reproducible_threads)
    built = kenotron_engine.build_training(
        plan_of(config),
        config.optimizer,
        mesh,
        config.tokens.train_steps,
        layers=None if own_model is None else own_model(config, mesh),
        bucket_mb=config.model.ddp_bucket_cap_mb,
    )
    return TrainingRun(
        **vars(built),
        cost=cost_plan(config),
        data=data_plan(config),
        checkpoints=checkpoint_plan(config, mesh.device),
        log=log_plan(config),
    )
