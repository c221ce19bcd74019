"""The phases of a training step whose kernels are counted, at the sizes of published models.

One process, bf16, no recomputation, one sequence of 4096 tokens. Layer phases are those of one
decoder layer, optimizer phases those of that layer's parameters.

Shapes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from kernel_counter import Cost, KernelCounter, counting
from torch import nn

from kenotron_dist import Axis, Mesh, MeshConfig, weight_products
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_models import Build, Context, LayerStack, build_decoder
from kenotron_models.families import LlamaConfig
from kenotron_optim import (
    AdamWConfig,
    GlobalNorm,
    GradAccumulator,
    SlicedOptimizer,
    clip_,
    parameter_groups,
    update_rule,
)
from kenotron_tp import cross_entropy

TOKENS = 4096
META = torch.device("meta")
ADAMW = {"adam_eps": 1e-8, "adam_beta1": 0.9, "adam_beta2": 0.95}
MODELS = {
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
        vocab_size=128256,
        rope_theta=500000.0,
    ),
    "llama-3.2-1b": LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
        vocab_size=128256,
        rope_theta=500000.0,
    ),
}


def phases(config: LlamaConfig) -> Iterator[tuple[str, KernelCounter, Cost]]:
    """Yield every phase of a step: its name, what was counted by operation, and its cost."""
    yield from _layer_phases(config)
    yield from _head_phases(config)
    for fused in (False, True):
        yield from _update_phases(config, fused)


def costs(config: LlamaConfig) -> dict[str, Cost]:
    """Return the cost of every phase of a step."""
    return {name: cost for name, _, cost in phases(config)}


def _layer(config: LlamaConfig) -> nn.Module:
    return LayerStack(
        build_decoder(config, Build(Axis.solo("tp"), device=META, dtype=torch.bfloat16))[1:2]
    )


def _accumulator(layer: nn.Module) -> GradAccumulator:
    mesh = Mesh(MeshConfig(), 0, META)
    layouts = parameter_layouts(layer, mesh.sizes)
    return GradAccumulator(named_parameters(layer), layouts, mesh)


def _layer_phases(config: LlamaConfig) -> Iterator[tuple[str, KernelCounter, Cost]]:
    layer = _layer(config)
    context = Context(torch.empty(1, TOKENS, dtype=torch.int64, device=META))
    x = torch.empty(TOKENS, config.hidden_size, dtype=torch.bfloat16, device=META)
    x.requires_grad_()
    with counting():
        layer(x, context)  # what the layers of a micro-batch share is made here
    with counting() as forward:
        y = layer(x, context)
    yield "layer forward", forward, forward.cost
    dy = torch.empty_like(y)
    with counting() as backward:
        torch.autograd.grad(y, [x, *layer.parameters()], dy)
    yield "layer backward", backward, backward.cost
    grads = _accumulator(layer)
    for _ in range(2):  # the first micro-batch's gradients are copied, others are added
        x.grad = None
        with counting():
            y = layer(x, context)
        with counting() as hooked:
            y.backward(dy)
    grads.finish()
    hooked.names.subtract(backward.names)
    hooked.nbytes.subtract(backward.nbytes)
    yield "gradient hooks", hooked, hooked.cost
    yield from _product_phase(layer, context, x)


def _product_phase(
    layer: nn.Module, context: Context, x: torch.Tensor
) -> Iterator[tuple[str, KernelCounter, Cost]]:
    """Both in one, where products are added to the buffers as CUDA can."""
    grads = _accumulator(layer)
    able = mock.patch.object(weight_products, "adds_in_fp32", lambda device: True)
    with able:
        grads.take_products(
            [path for path, p in grads.parameters.items() if p.ndim == 2], anywhere=True
        )
        for _ in range(2):
            x.grad = None
            with counting():
                y = layer(x, context)
            with counting() as both:
                y.backward(torch.empty_like(y))
    grads.finish()
    yield "backward and hooks, taken", both, both.cost


def _head_phases(config: LlamaConfig) -> Iterator[tuple[str, KernelCounter, Cost]]:
    width, vocab = config.hidden_size, config.vocab_size
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": META, "requires_grad": True}
    x, weight = torch.empty(TOKENS, width, **like), torch.empty(vocab, width, **like)
    labels = torch.empty(TOKENS, dtype=torch.int64, device=META)
    with counting() as counter:
        loss, _ = cross_entropy(
            x, labels, Axis.solo("tp"), weight=weight, reduction="sum", times=1 / TOKENS
        )
        loss.backward()
    yield "head", counter, counter.cost


def _update_phases(config: LlamaConfig, fused: bool) -> Iterator[tuple[str, KernelCounter, Cost]]:
    layer = _layer(config)
    grads = _accumulator(layer)
    norm = GlobalNorm(grads)
    groups = parameter_groups(grads.names, 0.1)
    on_any_device = mock.patch("torch.optim.adam._device_dtype_check_for_fused")
    with on_any_device:
        rule = update_rule(AdamWConfig(**ADAMW, torch_adam_is_fused=fused))
        optimizer = SlicedOptimizer(grads, rule, groups)
    slices = grads.finish()
    if not fused:
        with counting() as clip:
            clip_(slices, 1.0, norm(slices))
        yield "norm and clip", clip, clip.cost
        with counting() as publish:
            optimizer.publish()
        yield "publish", publish, publish.cost
    with on_any_device, counting():
        optimizer.step(slices, 1e-3)  # state is made here
    with counting() as publish:
        optimizer.publish()
    with on_any_device, counting() as update:
        optimizer.step(slices, 1e-3)
    update.names.subtract(publish.names)
    update.nbytes.subtract(publish.nbytes)
    yield f"optimizer step, {'fused' if fused else 'plain'}", update, update.cost
