"""Assemble this rank's part of a model on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.init import Constant, Initializer, initialize
from kenotron_dist.placement import TensorLayout, materialize, parameter_layouts
from kenotron_dist.separate_uses import separate_use
from kenotron_engine.model_plan import ModelPlan, check_balance, one_f_one_b
from kenotron_engine.sequence import check_cut
from kenotron_engine.stages import stages_of
from kenotron_models import (
    Build,
    Context,
    LayerStack,
    build_decoder,
    compile_layers,
    layer_costs,
    mup_init,
    standard_init,
    with_values,
)
from kenotron_models.adapters import adapt, adapter_init
from kenotron_models.layers import Head
from kenotron_optim import zero3_cuts
from kenotron_pp import NamedLayers, Pipeline, Schedule, Stages
from kenotron_tp import TPMode

Records = dict[str, tuple[Tensor, TensorLayout]]
"""Tensors that a checkpoint stores: logical name -> (this rank's tensor, its layout)."""
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
    chunk: int | None = None
    """Number of the virtual chunk whose loss is computed; None: there is one."""
    used: Head | None = None
    """The head of one use that several losses share; None: each has its own."""

    @property
    def head(self) -> Head | None:
        """The last layer, where this rank has it and it leaves its product to the loss."""
        if self.used is not None:
            return self.used
        head = dict(self.stack.named_modules()).get("head")
        if not isinstance(head, Head):
            return None
        if self.chunk is None:
            return head
        return with_values(head, {"weight": separate_use(head.weight, self.chunk)})


def decoder_layers(plan: ModelPlan, mesh: Mesh) -> list[tuple[str, nn.Module]]:
    """Return all layers of a plan by name, in order, their parameters on the meta device."""
    experts = {"ep": mesh["ep"], "ep_chunks": plan.ep_chunks, "by_source": plan.reproducible}
    build = Build(mesh["tp"], plan.mode, dtype=plan.dtype, **experts)
    if plan.virtual_shards > 1:  # layers compute all tokens, whatever is cut between them
        cut, shards = plan.mode.sequence_parallel, plan.virtual_shards
        build = replace(build, mode=TPMode(), cuts_between=cut, shards=shards)
    layers = build_decoder(
        plan.spec,
        build,
        recompute=plan.recompute,
        vocab_divisible_by=plan.vocab_divisible_by,
    )
    if plan.adapter is not None:
        adapt(layers, plan.adapter, mesh["tp"])
    return layers


def assemble(
    layers: NamedLayers,
    mesh: Mesh,
    fill: Callable[[LayerStack, Layouts], None] | None,
    *,
    costs: Sequence[float] | None = None,
    starts: Sequence[int] = (),
    schedule: Schedule | None = None,
    settles: bool = True,
) -> Model:
    """Keep this rank's layers of a model, give them memory and values, and connect the stages.

    Collective over the mesh: makes the groups of the pipeline.

    Args:
        layers: all layers of the model by name, on the meta device; the same on every rank.
        mesh: pp takes stages of the list; the other axes are those that the layers are cut over.
        fill: gives values to the parameters of this rank's stack; takes the stack, whose memory
            is not initialised, and the layouts of the whole model. None: parameters that ZeRO-3
            cuts have no memory, for an optimizer that gives it to them where they are used.
        costs: relative cost of each layer, by which stages are balanced; None: all are equal.
        starts: see ``stages_of``.
        schedule: order of forwards and backwards; None: 1F1B.
        settles: whether a run of the pipeline ends by waiting for the device; see
            ``kenotron_pp.Pipeline``.
    """
    schedule = schedule or one_f_one_b()
    stages = stages_of(layers, costs, starts, mesh.sizes["pp"], schedule)
    layouts = parameter_layouts(LayerStack(layers), mesh.axis_sizes, stages.of_parameter)
    stack = LayerStack(stages.own(layers, mesh["pp"].rank))
    materialize(stack, mesh.device, memory=None if fill is not None else _stays_whole)
    if fill is not None:
        fill(stack, layouts)
    stack.fill_buffers(mesh.device)
    chunks = stages.chunks(layers, mesh["pp"].rank)
    own = chunks if schedule.chunks > 1 else chunks[0]
    others = [*(mesh[name] for name in ("tp", "cp", "dp", "ep")), mesh["dp", "cp"], mesh.world]
    pairs, device = mesh.pairs("pp"), mesh.device
    entering = _before(layers, stages, mesh) if mesh.is_fake else None
    modules = (module for _, layer in layers for module in layer.modules())
    adds = any(getattr(module, "adds_loss", False) for module in modules)
    pipeline = Pipeline(
        own, mesh["pp"], schedule, device, pairs, others,
        settles=settles, entering=entering, adds=adds,
    )  # fmt: skip
    return Model(stack, layouts, pipeline)


def _stays_whole(parameter: nn.Parameter) -> bool:
    return not zero3_cuts(parameter, learns=parameter.requires_grad)


def _before(
    layers: NamedLayers, stages: Stages, mesh: Mesh
) -> Callable[[int, Tensor, Context], Tensor]:
    """Make what a stage passes on, of tensors on meta, from all layers up to its last one.

    Its communications are those of other ranks: nothing records them.
    """

    def passed_on(stage: int, x: Tensor, context: Context) -> Tensor:
        with mesh.pulse.unheard():
            for _, layer in layers[: stages.ranges[stage].stop]:
                x = layer(x, context)
        return x

    return passed_on


def first_values(plan: ModelPlan, mesh: Mesh, layouts: Layouts, stack: LayerStack) -> None:
    """Fill some layers of this rank from the seed.

    Args:
        plan: says how values are drawn; without ``draws`` they are 0.
        mesh: says which parts this rank has.
        layouts: of the whole model.
        stack: the layers, which have memory.
    """
    if mesh.device.type == "meta":
        return
    draw: Callable[[TensorLayout], Initializer] = lambda _: Constant(0.0)  # noqa: E731
    if plan.scales is not None:
        draw = mup_init(plan.spec, plan.scales)
    elif plan.draws is not None:
        std, scaling, *residuals = plan.draws
        draw = standard_init(plan.spec, std, scaling, *residuals)
    draw = draw if plan.adapter is None else adapter_init(draw)
    initialize(stack, layouts, mesh.view, seed=plan.seed, initializer=draw)


def build_model(
    plan: ModelPlan, mesh: Mesh, layers: NamedLayers | None = None, *, memory: bool = True
) -> Model:
    """Build this rank's stage of a model, and fill it from the seed.

    Args:
        plan: what the model is made of.
        mesh: see ``assemble``.
        layers: layers of a model that is not of ``plan.spec``: by name, in order, on the meta
            device. The first is called with tokens (T,) and a ``kenotron_models.Context``, each
            other one with what the one before it returned; the last returns logits (T, V/t).
            None: ``decoder_layers(plan, mesh)``.
        memory: whether parameters that ZeRO-3 cuts have memory and values; see ``assemble``.

    Raises:
        ValueError: layers were given, and ``plan.scales`` or ``plan.adapter``, which are those of
            ``plan.spec``, or a further prediction, whose module they do not have.
    """
    if layers is not None and plan.scales is not None:
        raise ValueError(
            "scales were given for layers that are not of the plan's spec: their widths are not "
            "known; leave them out (model.init_method: give std instead of use_mup)"
        )

    if layers is not None and plan.adapter is not None:
        raise ValueError(
            "adapters were given for layers that are not of the plan's spec: their linear layers "
            "are not known; leave them out (model.adapter)"
        )

    def fill(stack: LayerStack, layouts: Layouts) -> None:
        first_values(plan, mesh, layouts, stack)

    if layers is not None and plan.spec.mtp_weight:
        raise ValueError(
            f"mtp_weight {plan.spec.mtp_weight} was given for layers that are not of the plan's "
            "spec: they have no module that predicts a further token; set it to 0"
        )
    costs = layer_costs(plan.spec) if layers is None else None
    layers = decoder_layers(plan, mesh) if layers is None else layers
    check_cut(plan.cp_mode, plan.spec, layers, mesh, plan.virtual_shards)
    check_balance(plan, mesh.sizes["pp"])
    # A step waits for its device itself, once.
    model = assemble(
        layers,
        mesh,
        fill if memory else None,
        costs=costs,
        starts=plan.spec.stage_starts,
        schedule=plan.schedule,
        settles=False,
    )
    if plan.compile:
        compile_layers(model.stack)
    return model
