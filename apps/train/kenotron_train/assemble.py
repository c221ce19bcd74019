"""Build everything a run consists of from its config: model, pipeline, optimizer, data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kenotron_dist import Mesh, TensorLayout, named_parameters, parameter_layouts, tie_storages
from kenotron_dist.init import Constant, initialize
from kenotron_models import (
    Head,
    LayerStack,
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
    ParameterGroup,
    SlicedOptimizer,
    parameter_groups,
    parameter_kinds,
    update_rule,
    whole_matrices,
)
from kenotron_optim.config import Kind
from kenotron_pp import Pipeline, Stages
from kenotron_train.config import Config

Records = dict[str, tuple[Tensor, TensorLayout]]
"""What a checkpoint stores: logical name -> (this rank's tensor, its layout)."""


@dataclass(frozen=True)
class Model:
    """This rank's stage of the model, and what is known of the whole."""

    stack: LayerStack
    """Layers of this stage under their global names."""
    layouts: dict[str, TensorLayout]
    """Layouts of the whole model, by parameter name."""
    kinds: dict[str, frozenset[Kind]]
    """Kinds of the whole model's logical tensors (norms, biases, embeddings)."""
    pipeline: Pipeline

    @property
    def head(self) -> Head | None:
        """The last layer, where this rank has it and it leaves its product to the loss."""
        head = dict(self.stack.named_modules()).get("head")
        return head if isinstance(head, Head) else None


@dataclass(frozen=True)
class Training:
    """Everything one step needs."""

    config: Config
    mesh: Mesh
    model: Model
    grads: GradAccumulator
    norm: GlobalNorm
    groups: list[ParameterGroup]
    optimizer: SlicedOptimizer
    schedule: LRSchedule


OwnModel = Callable[[Config, Mesh], list[tuple[str, nn.Module]]]
"""Layers of a model by name, in order, their parameters on the meta device. The first is called
with tokens (T,) and a ``kenotron_models.Context``, each other one with what the one before it
returned; the last returns logits (T, V/t). Cut parameters say so (``kenotron_dist.Placements``)."""


def decoder_layers(config: Config, mesh: Mesh) -> list[tuple[str, nn.Module]]:
    """The layers of ``model.model_config``, on meta."""
    return build_decoder(
        config.decoder,
        mesh["tp"],
        mode=config.parallelism.mode,
        recompute=[
            config.parallelism.recompute_of(i) for i in range(config.decoder.num_hidden_layers)
        ],
        vocab_divisible_by=config.model.make_vocab_size_divisible_by,
        dtype=getattr(torch, config.model.dtype),
    )


def build_model(config: Config, mesh: Mesh, own_model: OwnModel | None = None) -> Model:
    """Build all layers on meta, keep this stage's, fill them from the seed; with zeros where their
    weights are read later.

    Collective over the mesh only where groups are made later; no communication here.
    """
    spec = config.decoder
    layers = (own_model or decoder_layers)(config, mesh)
    schedule = config.parallelism.schedule
    costs = layer_costs(spec) if own_model is None else [1.0] * len(layers)
    stages = Stages.balanced(layers, costs, mesh.sizes["pp"], schedule)
    whole = LayerStack(layers)
    layouts = parameter_layouts(whole, mesh.sizes, stages.of_parameter)
    kinds = parameter_kinds(whole, layouts)
    stack = LayerStack(stages.own(layers, mesh["pp"].rank))
    stack.to_empty(device=mesh.device)
    tie_storages(stack)
    draws = config.draws
    initialize(
        stack,
        layouts,
        mesh.sizes,
        mesh.coords,
        seed=config.general.seed,
        initializer=standard_init(spec, *draws) if draws else lambda _: Constant(0.0),
    )
    if config.model.compile:
        compile_layers(stack)
    chunks = [[layer for _, layer in chunk] for chunk in stages.chunks(layers, mesh["pp"].rank)]
    own = chunks if schedule.chunks > 1 else chunks[0]
    pipeline = Pipeline(own, mesh["pp"], schedule, mesh.device, mesh.twin("pp"))
    return Model(stack, layouts, kinds, pipeline)


def build_training(config: Config, mesh: Mesh, own_model: OwnModel | None = None) -> Training:
    """Build the model and everything that updates it. Collective over the mesh."""
    model = build_model(config, mesh, own_model)
    optim = config.optimizer
    rule = optim.optimizer_factory
    whole = (
        whole_matrices(model.layouts, model.kinds, mesh.sizes, rule.adamw_named_params)
        if isinstance(rule, MuonConfig)
        else ()
    )
    grads = GradAccumulator(
        named_parameters(model.stack),
        model.layouts,
        mesh,
        whole=whole,
        fp32=optim.accumulate_grad_in_fp32,
        bucket_mb=config.model.ddp_bucket_cap_mb,
    )
    groups = parameter_groups(
        grads.names,
        optim.weight_decay,
        exclude=optim.weight_decay_exclude_named_params,
        exclude_kinds=optim.weight_decay_exclude_kinds,
        kinds=model.kinds,
        lr_multipliers=optim.lr_multipliers,
    )
    optimizer = SlicedOptimizer(grads, update_rule(rule), groups, optim.zero_stage)
    schedule = LRSchedule.from_config(optim.learning_rate_scheduler, config.tokens.train_steps)
    return Training(config, mesh, model, grads, GlobalNorm(grads), groups, optimizer, schedule)


def model_records(model: Model) -> Records:
    """This stage's parameters as checkpoint records: logical name -> (tensor, layout)."""
    return {
        model.layouts[path].name: (parameter.detach(), model.layouts[path])
        for path, parameter in named_parameters(model.stack).items()
    }
