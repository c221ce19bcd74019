"""A model and everything that updates it, as one value: what a step takes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from kenotron_dist import Mesh, deferring
from kenotron_dist.diagnosis import check_replicas
from kenotron_dist.placement import named_parameters
from kenotron_engine.assembly import Model, Records, build_model, first_values
from kenotron_engine.cuda_graphs import MicroBatchGraphs
from kenotron_engine.model_on_mesh import ModelOnMesh
from kenotron_engine.model_plan import ModelPlan
from kenotron_engine.objective import Objective, objective_of
from kenotron_engine.sample_order import check_sample_order
from kenotron_models import LayerStack
from kenotron_optim import (
    ExactNorm,
    GlobalNorm,
    GradAccumulator,
    LRSchedule,
    OptimizerConfig,
    ParameterGroup,
    SampleGradients,
    SlicedOptimizer,
    WeightAverages,
    parameter_groups,
    update_rule,
    zero3_cuts,
)
from kenotron_pp import NamedLayers


@dataclass(frozen=True, kw_only=True)
class Training(ModelOnMesh):
    """Everything one step needs."""

    optim: OptimizerConfig
    grads: GradAccumulator
    norm: GlobalNorm
    groups: list[ParameterGroup]
    optimizer: SlicedOptimizer
    schedule: LRSchedule
    objective: Objective
    """Objective of steps that are given no other."""
    averages: WeightAverages | None = None
    """With ``OptimizerConfig.weight_average``."""
    graphs: MicroBatchGraphs | None = None
    """With ``ModelPlan.cuda_graph``."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this stage's parameters by name, after waiting for those in flight.

        After an update parameters may still travel (``SlicedOptimizer.overlap_forward``): read them
        through this method or ``records``, not through the model. With ZeRO stage 3 it is
        collective over the data axes, and gives memory to all parameters until their next use.
        """
        self.optimizer.wait_for_parameters()
        return named_parameters(self.model.stack)

    @property
    def replicas_are_apart(self) -> bool:
        """True where dp replicas make their forward passes without one another.

        With ZeRO stage 3 they do not: each pass gathers parameters.
        """
        return super().replicas_are_apart and not self.optimizer.stage.cuts_parameters

    def records(self) -> Records:
        """Return this stage's parameters as checkpoint records, after waiting likewise.

        With ZeRO stage 3 they are this rank's slices, but for frozen vectors; nothing is gathered,
        and what is written into them counts if ``SlicedOptimizer.reload`` is called next.
        """
        layouts, slices = self.model.layouts, Records()
        if self.optimizer.stage.cuts_parameters:
            parameters = {
                path: p
                for path, p in named_parameters(self.model.stack).items()
                if not zero3_cuts(p, learns=p.requires_grad)
            }
            slices = self.optimizer.parameter_slices()
        else:
            parameters = self.parameters()
        return slices | {
            layouts[path].name: (parameter.detach(), layouts[path])
            for path, parameter in parameters.items()
        }

    def first_records(self) -> Records:
        """Return what first weights are read into: parameters, and masters of narrower ones.

        Masters get every bit of the source. All have the names of their parameters in their
        layouts.
        """
        found = self.records()
        if self.plan.dtype != torch.float32:
            for key, (tensor, layout) in self.optimizer.wanted(started=False).items():
                found[f"optimizer.{key}"] = (tensor, layout.renamed(layout.name.split(".", 2)[2]))
        return found

    def saved_records(self) -> Records:
        """Return those of ``records`` that a checkpoint has: with adapters these alone."""
        records, adapter = self.records(), self.plan.adapter
        if adapter is None:
            return records
        own = adapter.tensors()
        return {key: record for key, record in records.items() if record[1].name in own}

    def check_replicas(self) -> None:
        """Compare replicas of parameters over ranks. Collective over the mesh.

        Raises ValueError as ``kenotron_dist.diagnosis.check_replicas``.
        """
        records = self.records()
        layouts = {layout.name: layout for layout in self.model.layouts.values()}
        layouts |= {name: layout for name, (_, layout) in records.items()}
        check_replicas({name: held for name, (held, _) in records.items()}, layouts, self.mesh)


def build_training(
    plan: ModelPlan,
    optim: OptimizerConfig,
    mesh: Mesh,
    train_steps: int,
    *,
    layers: NamedLayers | None = None,
    bucket_mb: int | None = None,
) -> Training:
    """Build the model and everything that updates it. Collective over the mesh.

    Args:
        plan: what the model is made of.
        optim: the optimizer, its learning-rate schedule, and how gradients are added up.
        mesh: the ranks.
        train_steps: updates of the whole training, where the schedule ends.
        layers: layers of another model; see ``build_model``.
        bucket_mb: size of the buckets that gradients are reduced in, in MiB; None: that of
            ``GradAccumulator``.

    Raises:
        ValueError: ``plan.cuda_graph`` or ``plan.reproducible`` with what each cannot have.
    """
    check_sample_order(plan, optim, mesh, own_layers=layers is not None)
    sharded = optim.zero.cuts_parameters
    model = build_model(plan, mesh, layers, memory=not sharded)
    _check_graphed(plan, model, mesh, optim)
    grads = _accumulator(plan, model, optim, mesh, bucket_mb, None if layers else ())
    if layers is None:  # ours use each of these weights once in a backward
        cut = {id(layer.weight) for layer in deferring(model.stack)}
        grads.take_products([path for path, p in grads.parameters.items() if id(p) in cut])
    own, average = (plan.scales or {}).items(), optim.weight_average
    groups = parameter_groups(
        grads.names,
        optim.weight_decay,
        exclude=optim.weight_decay_exclude_named_params,
        exclude_kinds=optim.weight_decay_exclude_kinds,
        layouts=model.layouts,
        lr_multipliers=optim.lr_multipliers,
        factors_of={name: (each.lr, each.weight_decay) for name, each in own} or None,
    )
    rule = update_rule(optim.optimizer_factory, model.layouts)
    sharing = optim.zero, getattr(torch, optim.state_dtype), optim.regather
    optimizer = SlicedOptimizer(grads, rule, groups, *sharing, offload=optim.offload)
    fill = _by_layer(model, partial(first_values, plan, mesh, model.layouts)) if sharded else None
    optimizer.overlap_forward(model.stack, fill)
    return Training(
        plan=plan,
        optim=optim,
        mesh=mesh,
        model=model,
        grads=grads,
        norm=(ExactNorm if plan.reproducible else GlobalNorm)(grads),
        groups=groups,
        optimizer=optimizer,
        schedule=LRSchedule.from_config(optim.learning_rate_scheduler, train_steps),
        objective=objective_of(plan.spec),
        averages=WeightAverages(optimizer, grads, average) if average else None,
        graphs=MicroBatchGraphs(grads, model.stack) if plan.cuda_graph else None,
    )


def _accumulator(
    plan: ModelPlan,
    model: Model,
    optim: OptimizerConfig,
    mesh: Mesh,
    bucket_mb: int | None,
    irregular: Collection[str] | None,
) -> GradAccumulator:
    """Add hooks that sum up the gradients of this stage.

    Own experts have a gradient in every backward, of zeros where they have no tokens: nothing is
    ``irregular``. That of other layers is not known.
    """
    made = named_parameters(model.stack), model.layouts, mesh
    fp32 = optim.accumulate_grad_in_fp32
    if plan.reproducible:
        virtual = {"chunks": plan.virtual_chunks, "shards": plan.virtual_shards}
        return SampleGradients(*made, fp32=fp32, bucket_mb=bucket_mb, **virtual)
    return GradAccumulator(
        *made,
        fp32=fp32,
        bucket_mb=bucket_mb,
        irregular=irregular,
        reduce=optim.reduce if optim.zero.cuts_gradients else "step",
        shard_ranks=optim.shard_ranks,
    )


def _by_layer(model: Model, fill: Callable[[LayerStack], None]) -> Callable[[nn.Module], None]:
    """Fill one layer of a stage at a time, under its own names."""
    names = {id(layer): name for name, layer in model.stack.named_modules()}
    return lambda layer: fill(LayerStack([(names[id(layer)], layer)]))


def _check_graphed(plan: ModelPlan, model: Model, mesh: Mesh, optim: OptimizerConfig) -> None:
    if not plan.cuda_graph:
        return
    if mesh.device.type != "cuda":
        raise ValueError(
            f"cuda_graph: true was given, but this rank computes on {mesh.device}: CUDA graphs "
            "need a GPU; set it to false"
        )
    if mesh.sizes["cp"] > 1:
        raise ValueError(
            f"cuda_graph: true was given with cp = {mesh.sizes['cp']}: a graph cannot wait for "
            "other ranks: set it to false"
        )
    if optim.zero.cuts_gradients:
        raise ValueError(
            f"cuda_graph: true was given with zero_stage {optim.zero_stage}: a graph adds up whole "
            "gradients: set it to false, or zero_stage to 1"
        )
    adding = [name for name, m in model.stack.named_modules() if getattr(m, "adds_loss", False)]
    if adding:
        raise ValueError(
            f"cuda_graph: true was given, but {adding[0]} adds a loss, which is read on the "
            "host: set it to false"
        )
