"""Assemble this rank's part of a model, and everything that updates it, on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kenotron_data import MicroBatch
from kenotron_dist import (
    Mesh,
    TensorLayout,
    deferring,
    materialize,
    named_parameters,
    parameter_layouts,
)
from kenotron_dist.init import Constant, Initializer, initialize
from kenotron_engine.cuda_graphs import MicroBatchGraphs
from kenotron_engine.model_plan import ModelPlan, check_balance, one_f_one_b
from kenotron_engine.sequence import Share, check_cut, share_of
from kenotron_models import (
    Build,
    Head,
    LayerStack,
    TransformersLayer,
    build_decoder,
    compile_layers,
    layer_costs,
    standard_init,
)
from kenotron_optim import (
    GlobalNorm,
    GradAccumulator,
    LRSchedule,
    MuonConfig,
    OptimizerConfig,
    ParameterGroup,
    SlicedOptimizer,
    parameter_groups,
    update_rule,
    whole_matrices,
)
from kenotron_pp import NamedLayers, Pipeline, Schedule, Stages

Records = dict[str, tuple[Tensor, TensorLayout]]
"""What a checkpoint stores: logical name -> (this rank's tensor, its layout)."""
Layouts = dict[str, TensorLayout]
"""Layouts of the parameters of a whole model, by parameter name."""


@dataclass(frozen=True)
class Model:
    """This rank's stage of the model, and what is known of the whole."""

    stack: LayerStack
    """Layers of this stage under their global names."""
    layouts: Layouts
    """Layouts of the whole model, by parameter name."""
    pipeline: Pipeline

    @property
    def head(self) -> Head | None:
        """The last layer, where this rank has it and it leaves its product to the loss."""
        head = dict(self.stack.named_modules()).get("head")
        return head if isinstance(head, Head) else None


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything one step needs."""

    plan: ModelPlan
    optim: OptimizerConfig
    mesh: Mesh
    model: Model
    grads: GradAccumulator
    norm: GlobalNorm
    groups: list[ParameterGroup]
    optimizer: SlicedOptimizer
    schedule: LRSchedule
    graphs: MicroBatchGraphs | None = None
    """With ``ModelPlan.cuda_graph``."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return this stage's parameters by name, after waiting for those in flight.

        After an update parameters may still travel (``SlicedOptimizer.overlap_forward``): read them
        through this method or ``records``, not through the model.
        """
        self.optimizer.wait_for_parameters()
        return named_parameters(self.model.stack)

    def share_of(
        self,
        batch: Iterable[MicroBatch],
        dropout_key: int | None = None,
        count: Tensor | None = None,
    ) -> Share:
        """Return this rank's tokens of its micro-batches (``kenotron_engine.sequence``).

        ``count``: see there; a scalar of shape ().
        """
        plan = self.plan
        return share_of(plan.cp_mode, plan.spec, self.mesh, batch, dropout_key, count)

    def records(self) -> Records:
        """Return this stage's parameters as checkpoint records, after waiting likewise."""
        layouts = self.model.layouts
        return {
            layouts[path].name: (parameter.detach(), layouts[path])
            for path, parameter in self.parameters().items()
        }


def decoder_layers(plan: ModelPlan, mesh: Mesh) -> list[tuple[str, nn.Module]]:
    """Return all layers of a plan by name, in order, their parameters on the meta device."""
    return build_decoder(
        plan.spec,
        Build(mesh["tp"], plan.mode, dtype=plan.dtype, ep=mesh["ep"], ep_chunks=plan.ep_chunks),
        recompute=plan.recompute,
        vocab_divisible_by=plan.vocab_divisible_by,
    )


def assemble(
    layers: NamedLayers,
    mesh: Mesh,
    fill: Callable[[LayerStack, Layouts], None],
    *,
    costs: Sequence[float] | None = None,
    schedule: Schedule | None = None,
    settles: bool = True,
) -> Model:
    """Keep this rank's layers of a model, give them memory and values, and connect the stages.

    Collective over the mesh: makes the groups of the pipeline.

    Args:
        layers: all layers of the model by name, on the meta device; the same on every rank.
        mesh: pp takes stages of the list; the other axes are those that the layers are cut over.
        fill: gives values to the parameters of this rank's stack; takes the stack, whose memory
            is not initialised, and the layouts of the whole model.
        costs: relative cost of each layer, by which stages are balanced; None: all are equal.
        schedule: order of forwards and backwards; None: 1F1B.
        settles: whether a run of the pipeline ends by waiting for the device; see
            ``kenotron_pp.Pipeline``.
    """
    schedule = schedule or one_f_one_b()
    stages = Stages.balanced(layers, costs or [1.0] * len(layers), mesh.sizes["pp"], schedule)
    layouts = parameter_layouts(LayerStack(layers), mesh.axis_sizes, stages.of_parameter)
    stack = LayerStack(stages.own(layers, mesh["pp"].rank))
    materialize(stack, mesh.device)
    fill(stack, layouts)
    chunks = stages.chunks(layers, mesh["pp"].rank)
    own = chunks if schedule.chunks > 1 else chunks[0]
    others = [*(mesh[name] for name in ("tp", "cp", "dp", "ep")), mesh["dp", "cp"], mesh.world]
    pairs, device = mesh.pairs("pp"), mesh.device
    pipeline = Pipeline(own, mesh["pp"], schedule, device, pairs, others, settles=settles)
    return Model(stack, layouts, pipeline)


def build_model(plan: ModelPlan, mesh: Mesh, layers: NamedLayers | None = None) -> Model:
    """Build this rank's stage of a model, and fill it from the seed.

    Args:
        plan: what the model is made of.
        mesh: see ``assemble``.
        layers: layers of a model that is not of ``plan.spec``: by name, in order, on the meta
            device. The first is called with tokens (T,) and a ``kenotron_models.Context``, each
            other one with what the one before it returned; the last returns logits (T, V/t).
            None: ``decoder_layers(plan, mesh)``.
    """

    def fill(stack: LayerStack, layouts: Layouts) -> None:
        draw: Callable[[TensorLayout], Initializer] = lambda _: Constant(0.0)  # noqa: E731
        if plan.draws is not None:
            std, scaling, *residuals = plan.draws
            draw = standard_init(plan.spec, std, scaling, *residuals)
        initialize(stack, layouts, mesh.view, seed=plan.seed, initializer=draw)
        for layer in stack:
            if isinstance(layer, TransformersLayer):
                layer.fill_buffers(mesh.device)
        if plan.compile:
            compile_layers(stack)

    costs = layer_costs(plan.spec) if layers is None else None
    layers = decoder_layers(plan, mesh) if layers is None else layers
    check_cut(plan.cp_mode, plan.spec, layers, mesh)
    check_balance(plan, mesh.sizes["pp"])
    # A step waits for its device itself, once.
    return assemble(layers, mesh, fill, costs=costs, schedule=plan.schedule, settles=False)


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
        ValueError: ``plan.cuda_graph`` where there is no GPU, or where layers add losses.
    """
    model = build_model(plan, mesh, layers)
    if plan.cuda_graph:
        _check_graphed(model, mesh)
    grads = _accumulator(model, optim, mesh, bucket_mb)
    if layers is None:  # ours use each of these weights once in a backward
        cut = {id(layer.weight) for layer in deferring(model.stack)}
        grads.take_products([path for path, p in grads.parameters.items() if id(p) in cut])
    groups = parameter_groups(
        grads.names,
        optim.weight_decay,
        exclude=optim.weight_decay_exclude_named_params,
        exclude_kinds=optim.weight_decay_exclude_kinds,
        layouts=model.layouts,
        lr_multipliers=optim.lr_multipliers,
    )
    state = getattr(torch, optim.state_dtype)
    rule = update_rule(optim.optimizer_factory)
    optimizer = SlicedOptimizer(grads, rule, groups, optim.zero_stage, state)
    optimizer.overlap_forward(model.stack)
    schedule = LRSchedule.from_config(optim.learning_rate_scheduler, train_steps)
    return Training(
        plan=plan,
        optim=optim,
        mesh=mesh,
        model=model,
        grads=grads,
        norm=GlobalNorm(grads),
        groups=groups,
        optimizer=optimizer,
        schedule=schedule,
        graphs=MicroBatchGraphs(grads, model.stack) if plan.cuda_graph else None,
    )


def _accumulator(
    model: Model, optim: OptimizerConfig, mesh: Mesh, bucket_mb: int | None
) -> GradAccumulator:
    """Add hooks that sum up the gradients of this stage; Muon asks for whole matrices."""
    rule = optim.optimizer_factory
    whole = (
        whole_matrices(model.layouts, mesh.axis_sizes, rule.adamw_named_params)
        if isinstance(rule, MuonConfig)
        else ()
    )
    return GradAccumulator(
        named_parameters(model.stack),
        model.layouts,
        mesh,
        whole=whole,
        fp32=optim.accumulate_grad_in_fp32,
        bucket_mb=bucket_mb,
    )


def _check_graphed(model: Model, mesh: Mesh) -> None:
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
    adding = [name for name, m in model.stack.named_modules() if getattr(m, "adds_loss", False)]
    if adding:
        raise ValueError(
            f"cuda_graph: true was given, but {adding[0]} adds a loss, which is read on the "
            "host: set it to false"
        )
