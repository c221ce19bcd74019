"""Compiled decoder layers: how many programs a model is, and where they are broken."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import Tensor
from torch._dynamo import reset
from torch._dynamo.utils import counters

from kenotron_dist import Axis, Mesh, spawn
from kenotron_models import Build, Context, LayerStack, attention_varlen, build_decoder
from kenotron_models.compiled import compile_layers
from kenotron_models.families import LlamaConfig
from kenotron_tp import TPMode

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)
TOKENS = 8


def compiled(axis: Axis, mode: TPMode = TPMode(), which: slice = slice(1, -2)) -> LayerStack:
    """The decoder layers of a model, or others of its layers."""
    torch.manual_seed(0)
    layers = build_decoder(CONFIG, Build(axis, mode, "cpu"))[which]
    stack = LayerStack(layers)
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    plain = torch.compile
    torch.compile = lambda *args, **how: plain(*args, **how, backend="eager")
    try:
        compile_layers(stack)
    finally:
        torch.compile = plain
    return stack


def run(stack: LayerStack, rows: int) -> Tensor:
    """Two steps; what is counted is that of both."""
    x = torch.linspace(-1, 1, rows * 32).view(rows, 32)
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        stack(leaf, Context(torch.arange(TOKENS)[None])).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def counted() -> tuple[int, dict[str, int]]:
    """Programs, and breaks by their reason."""
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.fixture(autouse=True)
def no_programs():
    reset()
    counters.clear()
    yield
    reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at inputs' .grad
@pytest.mark.parametrize("capability", [(0, 0), (9, 0)])
def test_all_layers_are_one_program_without_a_break(monkeypatch, capability) -> None:
    monkeypatch.setattr(attention_varlen, "capability", lambda device: capability)
    run(compiled(Axis.solo("tp")), TOKENS)
    assert counted() == (1, {})


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_hooks_on_layers_are_in_no_program() -> None:
    """Hooks that come and go, as those that wait for parameters, change no program and break none.

    One program is that of the decoder layers, one that of the norm behind them.
    """
    stack, seen = compiled(Axis.solo("tp"), which=slice(None)), list[str]()
    assert not any(layer._compiled_call_impl for layer in stack)  # of torch: a call with its hooks
    for _ in range(3):
        hooks = [
            layer.register_forward_pre_hook(lambda *_, i=i: seen.append(f"layer {i}"))
            for i, layer in enumerate(stack)
        ]
        for _ in range(2):
            tokens = torch.arange(TOKENS)
            stack(tokens, Context(tokens[None])).sum().backward()
            for hook in hooks:
                hook.remove()
    assert seen == [f"layer {i}" for i in range(len(stack))] * 3
    assert counted() == (2, {})


def breaks_over_two_ranks(mesh: Mesh, mode: TPMode) -> tuple[int, int]:
    import warnings

    warnings.simplefilter("ignore")
    reset()
    counters.clear()
    rows = TOKENS // 2 if mode.sequence_parallel else TOKENS
    run(compiled(mesh["tp"], mode), rows)
    programs, reasons = counted()
    return programs, sum(reasons.values())


@pytest.mark.parametrize("mode", [TPMode(), TPMode(sequence_parallel=True)], ids=["whole", "cut"])
def test_over_two_ranks_a_layer_is_broken_at_its_products_alone(mode: TPMode) -> None:
    """Five programs for all layers: around qkv, out, gate_up and down, which communicate.

    The compiler counts six breaks: those four, and the layer's calls of both blocks they are in.
    """
    found = spawn(breaks_over_two_ranks, mode, tp=2, timeout=timedelta(seconds=120))
    assert found == [(5, 6)] * 2
