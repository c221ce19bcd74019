"""From the config of a run to its plan, and to the training that is built of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

import kenotron_engine
from kenotron_config import Config
from kenotron_dist import Mesh
from kenotron_dist.statistics import checksum
from kenotron_engine import ModelPlan
from kenotron_train.cost.cost_plan import cost_plan
from kenotron_train.cost.recomputed import recomputed
from kenotron_train.data_plan import DataPlan, data_plan


@dataclass(frozen=True, kw_only=True)
class Training(kenotron_engine.Training):
    """Everything one step needs, the config that it is built of, and what is read by it."""

    config: Config
    data: DataPlan

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
        virtual_chunks=config.general.reproducible_max_cp if config.general.reproducible else 1,
    )


def decoder_layers(config: Config, mesh: Mesh) -> list[tuple[str, nn.Module]]:
    """Return the layers of ``model.model_config``, on meta."""
    return kenotron_engine.decoder_layers(plan_of(config), mesh)


def build_training(config: Config, mesh: Mesh, own_model: OwnModel | None = None) -> Training:
    """Build the model of a config and everything that updates it. Collective over the mesh.

    With ``general.reproducible`` torch computes with ``general.reproducible_threads`` from now on.

    Raises:
        ValueError: ``model.cuda_graph`` where there is no GPU, or where layers add losses;
            ``general.reproducible`` on a GPU or with ``own_model``.
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
    return Training(**vars(built), config=config, data=data_plan(config))
