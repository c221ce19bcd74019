"""Who takes part: this package's modes, DTensor's plans, and the uncut module.

A contestant is a module, its input and the gradient of its output; one step of it is a forward and
a backward with everything that makes the gradients complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from tp_alone import without_communication
from tp_models import (
    FusedHead,
    Head,
    Shape,
    cut_block,
    cut_output,
    plain_block,
    plain_output,
    torch_parts,
    turns_of,
    whole_weights,
)

from kenotron_dist import Axis, Mesh, sum_gradients
from kenotron_dist.boxes import scatter
from kenotron_dist.placement import parameter_layouts
from kenotron_tp import cross_entropy
from kenotron_tp.sequence import mark_partial

Parts = Callable[[dict[str, Tensor]], dict[str, Tensor]]
WHOLE = "one process, whole"
ALONE = ("ours", "ours, overlap", "ours, sequence", "ours, sequence, overlap")
NO_COMMUNICATION = ", alone"
"""Ends the names of those in ``ALONE`` when they communicate nothing."""
CHUNK = 256
"""Tokens whose logits ``cross_entropy`` of the head's input holds at a time."""


@dataclass
class Contestant:
    """A module with what its step needs."""

    module: nn.Module
    parts: Parts
    """From whole weights, or gradients, to those under this module's names."""
    sequence: bool = False
    """Whether x and y are this rank's tokens."""
    complete: Callable[[], None] = lambda: None
    """Called after backward."""
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    checked: bool = True
    """False where communication is left out: the values are wrong."""
    x: Tensor = field(default_factory=lambda: torch.empty(0))
    dy: Tensor | None = None
    """Gradient of the output; None where it is a scalar."""

    def clear(self) -> None:
        """Drop all gradients."""
        self.x.grad = None
        self.module.zero_grad(set_to_none=True)

    def step(self, autocast: bool) -> Tensor:
        """Forward and backward, within ``around()``; the output."""
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=autocast):
            y = self.module(self.x)
        y.backward(self.dy)
        self.complete()
        return y.detach()

    def give(self, x: Tensor, dy: Tensor | None, axis: Axis) -> None:
        """Take x (T, D) and the gradient of y, or this rank's rows of them."""
        if self.sequence:
            x = x.chunk(axis.size)[axis.rank]
            dy = None if dy is None else dy.chunk(axis.size)[axis.rank]
        self.x, self.dy = x.clone().requires_grad_(), dy


def blocks(shape: Shape, mesh: Mesh, dtype: torch.dtype) -> dict[str, Contestant]:
    """All contestants of the transformer block."""
    turns, axis, ranks = turns_of(shape, mesh.device), mesh["tp"], mesh["tp"].size
    layout = plain_block(shape, 1, turns, fused=True)
    weights = whole_weights(layout, mesh.device, dtype)
    tp = mesh.device_mesh()["tp"]

    def ours(**how: bool) -> Contestant:
        block = cut_block(shape, axis, turns, **how)
        if how.get("sequence_parallel"):
            for norm in (block.norm, block.mlp_norm):
                mark_partial(norm, axis)
        return _ours(block, weights, mesh, how.get("sequence_parallel", False))

    def theirs(plan: dict[str, ParallelStyle], fused: bool, sequence: bool = False) -> Contestant:
        parts = partial(torch_parts, shape=shape, ranks=ranks, fused=fused)
        return _theirs(plain_block(shape, ranks, turns, fused), parts, plan, weights, tp, sequence)

    layout.load_state_dict(weights, assign=True)
    sequence = {"sequence_parallel": True}
    found = {
        "ours": ours(),
        "ours, overlap": ours(overlap=True),
        "ours, sequence": ours(**sequence),
        "ours, sequence, overlap": ours(**sequence, overlap=True),
        "ours, sequence, overlap, regather": ours(**sequence, overlap=True, regather=True),
        "DTensor": theirs(_plan(), fused=False),
        "DTensor, fused": theirs(_plan(), fused=True),
        "DTensor, sequence": theirs(_sequence_plan(), fused=False, sequence=True),
        WHOLE: Contestant(layout, parts=lambda whole: whole),
    }
    _begin(found, mesh, dtype, shape, scalar=False)
    return found


def heads(shape: Shape, mesh: Mesh, dtype: torch.dtype) -> dict[str, Contestant]:
    """All contestants of the LM head."""
    axis, tp = mesh["tp"], mesh.device_mesh()["tp"]
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator).to(mesh.device)
    layout = Head(plain_output(shape), lambda y: F.cross_entropy(y.float(), labels))
    weights = whole_weights(layout, mesh.device, dtype)

    def cut_loss(y: Tensor) -> Tensor:
        loss = cross_entropy(y, labels, axis, vocab_size=shape.vocabulary)[0]
        return loss.mean()

    def ours(**how: bool) -> Contestant:
        head = Head(cut_output(shape, axis, **how), cut_loss)
        return _ours(head, weights, mesh, how.get("sequence_parallel", False))

    def theirs(style: ParallelStyle, sequence: bool = False) -> Contestant:
        head = Head(plain_output(shape), layout.loss)
        return _theirs(head, dict, {"output": style}, weights, tp, sequence)

    layout.load_state_dict(weights, assign=True)
    sequence = {"sequence_parallel": True}
    cut = {"output_layouts": Shard(-1), "use_local_output": False}
    found = {
        "ours": ours(),
        "ours, overlap": ours(overlap=True),
        "ours, sequence": ours(**sequence),
        "ours, sequence, overlap": ours(**sequence, overlap=True),
        "ours, sequence, overlap, regather": ours(**sequence, overlap=True, regather=True),
        "DTensor, logits gathered": theirs(ColwiseParallel(output_layouts=Replicate())),
        "DTensor, loss_parallel": theirs(ColwiseParallel(**cut)),
        "DTensor, sequence, loss_parallel": theirs(
            ColwiseParallel(input_layouts=Shard(0), **cut), sequence=True
        ),
        WHOLE: Contestant(layout, parts=lambda whole: whole),
    }
    for name, contestant in found.items():
        if "loss_parallel" in name:
            contestant.around = loss_parallel

    def fused_loss(x: Tensor, weight: Tensor) -> Tensor:
        of = {"weight": weight, "vocab_size": shape.vocabulary, "chunk": CHUNK}
        return cross_entropy(x, labels, axis, **of)[0].mean()

    head = FusedHead(cut_output(shape, axis), fused_loss)
    found = {"ours, fused": _ours(head, weights, mesh, False), **found}
    _begin(found, mesh, dtype, shape, scalar=True)
    return found


def _ours(module: nn.Module, weights: dict[str, Tensor], mesh: Mesh, sequence: bool) -> Contestant:
    """One of this package's, with its part of the weights."""
    layouts = parameter_layouts(module, mesh.sizes)

    def parts(whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: scatter(t, layouts[n], mesh.view(layouts[n])) for n, t in whole.items()}

    module.load_state_dict(parts(weights), assign=True)
    contestant = Contestant(module, parts, sequence)
    if any(layout.partial_axes for layout in layouts.values()):
        contestant.complete = partial(sum_gradients, module, mesh)
    return contestant


def _theirs(
    module: nn.Module,
    parts: Parts,
    plan: dict[str, ParallelStyle],
    weights: dict[str, Tensor],
    tp: DeviceMesh,
    sequence: bool,
) -> Contestant:
    """One of torch's, parallelized by a plan."""
    module.load_state_dict(parts(weights), assign=True)
    parallelize_module(module, tp, plan)
    contestant = Contestant(module, parts, sequence)
    contestant.complete = partial(_settle, contestant)
    return contestant


def _settle(contestant: Contestant) -> None:
    """Sum gradients that DTensor left partial, and wait for what it left under way."""
    for parameter in contestant.module.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            parameter.grad = grad.redistribute(placements=parameter.placements)
    for tensor in (contestant.x, *contestant.module.parameters()):
        grad = tensor.grad.to_local() if isinstance(tensor.grad, DTensor) else tensor.grad
        if isinstance(grad, AsyncCollectiveTensor):
            grad.wait()


def _plan() -> dict[str, ParallelStyle]:
    """The plan of torch's tutorial on tensor parallelism."""
    return {
        "attention.first.*": ColwiseParallel(),
        "attention.last": RowwiseParallel(),
        "mlp.first.*": ColwiseParallel(),
        "mlp.last": RowwiseParallel(),
    }


def _sequence_plan() -> dict[str, ParallelStyle]:
    """The same tutorial's with sequence parallelism; tokens are dim 0 here."""
    gather = {"input_layouts": Shard(0), "desired_input_layouts": Replicate()}
    return {
        **_plan(),
        "norm": SequenceParallel(sequence_dim=0),
        "attention": PrepareModuleInput(**gather),
        "attention.last": RowwiseParallel(output_layouts=Shard(0)),
        "mlp_norm": SequenceParallel(sequence_dim=0),
        "mlp": PrepareModuleInput(**gather),
        "mlp.last": RowwiseParallel(output_layouts=Shard(0)),
    }


def _begin(
    found: dict[str, Contestant], mesh: Mesh, dtype: torch.dtype, shape: Shape, scalar: bool
) -> None:
    """Give all the same input, and add those that communicate nothing."""
    generator = torch.Generator().manual_seed(3)
    x, dy = torch.randn(2, shape.tokens, shape.width, generator=generator).to(mesh.device, dtype)
    for contestant in found.values():
        contestant.give(x, None if scalar else dy, mesh["tp"])
    for name in ALONE if mesh["tp"].size > 1 else ():
        alone = replace(found[name], around=without_communication, checked=False)
        found[f"{name}{NO_COMMUNICATION}"] = alone
