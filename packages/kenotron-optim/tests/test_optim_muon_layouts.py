"""Muon on every layout: the bits of torch's Muon on whole matrices of one process.

Gradients are multiples of 1/8 and small, so that their sums are exact in any order.

Shapes: E = 4 experts; 8 query heads and 2 heads of keys and of values, of 3 features each.
"""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Mesh, declare_roles
from kenotron_dist.boxes import gather_into, local_shape, scatter
from kenotron_dist.placement import (
    Chunk,
    Fused,
    Shard,
    TensorLayout,
    named_parameters,
    parameter_layouts,
)
from kenotron_dist.testing import on_ranks
from kenotron_optim import (
    GradAccumulator,
    MuonConfig,
    SlicedOptimizer,
    decay_groups,
    matrix_parts,
    update_rule,
)
from kenotron_optim.matrix_exchange import MatrixExchange
from kenotron_optim.muon import flops_of, orthogonalize, scale_of

KV = Chunk(6, parts=2)
TENSORS: dict[str, tuple[tuple[int, ...], tuple]] = {
    "qkv": ((36, 10), (Shard("tp", 0, (Chunk(24, parts=8), KV, KV)),)),
    "out": ((10, 24), (Shard("tp", 1),)),
    "gate_up": ((16, 10), (Shard("tp", 0, (Chunk(8), Chunk(8))),)),
    "whole": ((7, 3), ()),
    "experts": ((4, 12, 5), (Shard("ep", 0), Fused(1, (6, 6)))),
    "down": ((4, 5, 6), (Shard("ep", 0),)),
    "stack": ((2, 5, 8), (Shard("tp", 2), Fused(0, (1, 1)))),
    "cube": ((2, 3, 4), ()),
    "table": ((9, 4), (Shard("tp", 0, (Chunk(9, pad=3),)),)),
    "bias": ((5,), ()),
}
ROWS = {"qkv": (24, 6, 6), "gate_up": (8, 8), "experts": (6, 6)}
"""Sizes of the matrices along the output dimension."""
STEPS, DECAY = 3, 0.1
LAYOUTS = [
    {"dp": 2},
    {"dp": 3},
    {"tp": 2},
    {"tp": 4},
    {"dp": 2, "ep": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "tp": 2, "ep": 2},
    {"cp": 2, "tp": 2, "ep": 4},
]


def draw(name: str, step: int) -> Tensor:
    seed = zlib.crc32(f"{name} {step}".encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-40, 41, TENSORS[name][0], generator=generator).float() / 8


def gradient(name: str, step: int) -> Tensor:
    """Without the rows of a table that no rank looks up."""
    return draw(name, step) / 8


class Net(nn.Module):
    """This rank's parts of the tensors; ranks hold the same values on every layout."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.placements = {name: placement for name, (_, placement) in TENSORS.items()}
        for name, (shape, placement) in TENSORS.items():
            layout = TensorLayout(name, shape, placement)
            local = scatter(draw(name, -1), layout, mesh.view(layout))
            assert local.shape == local_shape(layout, mesh.view(layout))
            self.register_parameter(name, nn.Parameter(local))
        declare_roles(self, table="embedding", out="residual")


def trained(
    mesh: Mesh,
    stage: int,
    config: MuonConfig,
    dtype: str = "float32",
    steps: range = range(STEPS),
    start: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Parameters and momentum after some steps, with nan for what other ranks have.

    ``start``: where to begin, records of an earlier run.
    """
    net = Net(mesh)
    layouts = parameter_layouts(net, mesh.axis_sizes)
    reduce = "micro_batch" if stage > 1 else "step"
    grads = GradAccumulator(named_parameters(net), layouts, mesh, reduce=reduce)
    groups = decay_groups(grads.names, DECAY, exclude=["bias", "down"])
    rule = update_rule(config, layouts)
    optimizer = SlicedOptimizer(grads, rule, groups, stage, getattr(torch, dtype))
    if start is not None:
        for tensor, layout in optimizer.wanted().values():
            name = layout.name
            view = mesh.view(layout)
            local = scatter(start[name], plain(layout), view).view(-1)
            assert layout.flat is not None
            tensor.copy_(local[layout.flat.start : layout.flat.stop])
        optimizer.steps = steps.start
        optimizer.publish()
    for step in steps:
        grads.start(backwards=1)
        for name, parameter in net.named_parameters():
            layout = layouts[name]
            view = mesh.view(layout)
            own = scatter(gradient(name, step), layout, view)
            kv_replicas = max(view.sizes["tp"] // 2, 1) if name == "qkv" else 1
            ranks = math.prod(view.sizes[axis] for axis in view.data)
            if name == "qkv":  # replicas of a kv head see parts of its gradient
                heads = 24 // view.sizes["tp"]
                own[heads:] /= kv_replicas
            parameter.backward(own / ranks)
        optimizer.step(grads.finish(), lr=0.02 / (step + 1))
    optimizer.wait_for_parameters()
    found = {}
    for name, parameter in net.named_parameters():
        found[name] = torch.full(TENSORS[name][0], torch.nan)
        gather_into(found[name], parameter.detach(), layouts[name], mesh.view(layouts[name]))
    for name, (tensor, layout) in optimizer.state().items():
        view = mesh.view(layout)
        flat = torch.full((math.prod(local_shape(plain(layout), view)),), torch.nan)
        assert layout.flat is not None
        flat[layout.flat.start : layout.flat.stop] = tensor.float()
        found[name] = torch.full(layout.shape, torch.nan)
        local = flat.view(local_shape(plain(layout), view))
        gather_into(found[name], local, plain(layout), view)
    return found


def plain(layout: TensorLayout) -> TensorLayout:
    """Without the slice."""
    kept = tuple(p for p in layout.placement if p is not layout.flat)
    return TensorLayout(layout.name, layout.shape, kept)


def joined(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors from all ranks, which must agree where several have an element."""
    found: dict[str, Tensor] = {}
    for rank in ranks:
        for name, values in rank.items():
            known = found.setdefault(name, values)
            both = ~known.isnan() & ~values.isnan()
            assert torch.equal(known[both], values[both]), name
            found[name] = torch.where(known.isnan(), values, known)
    assert not any(values.isnan().any() for values in found.values())
    return found


def expected(config: MuonConfig) -> dict[str, Tensor]:
    """torch's own optimizers, on whole tensors cut into matrices by hand."""
    whole = {name: draw(name, -1) for name in TENSORS}
    muon: list[tuple[str, tuple, nn.Parameter]] = []
    for name in ("qkv", "out", "gate_up", "whole", "experts", "down", "stack"):
        x = whole[name]
        for e in range(len(x)) if x.ndim == 3 else [None]:
            at, rows = 0, ROWS.get(name, (x.shape[-2],))
            if config.per_head and name == "qkv":
                rows = (3,) * 12
            for size in rows:
                index = (*([] if e is None else [e]), slice(at, at + size))
                muon.append((name, index, nn.Parameter(x[index].clone())))
                at += size
    rest = {name: nn.Parameter(whole[name].clone()) for name in ("cube", "table", "bias")}
    how = {
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "ns_steps": config.ns_steps,
        "adjust_lr_fn": "match_rms_adamw",
    }
    optimizers = [
        torch.optim.Muon([p for n, _, p in muon if n != "down"], weight_decay=DECAY, **how),
        torch.optim.Muon([p for n, _, p in muon if n == "down"], weight_decay=0.0, **how),
        torch.optim.AdamW([rest["cube"], rest["table"]], weight_decay=DECAY, betas=(0.9, 0.95)),
        torch.optim.AdamW([rest["bias"]], weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    for step in range(STEPS):
        for name, index, p in muon:
            p.grad = gradient(name, step)[index].clone()
        for name, p in rest.items():
            p.grad = gradient(name, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (step + 1)
            optimizer.step()
    for name, index, p in muon:
        whole[name][index] = p.detach()
    return whole | {name: p.detach() for name, p in rest.items()}


FUSED, PER_HEAD = MuonConfig(ns_steps=3), MuonConfig(nesterov=False, per_head=True)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_layout_and_stage_has_the_bits_of_one_process(sizes: dict[str, int]) -> None:
    for stage, config in ((0, FUSED), (1, FUSED), (2, FUSED), (3, PER_HEAD)):
        want = expected(config)
        found = joined(on_ranks(trained, stage, config, **sizes))
        for name, values in want.items():
            if name in ("cube", "table", "bias"):  # vectorised AdamW rounds slices' ends otherwise
                torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(found[name], values), name


def test_state_in_bfloat16_is_the_same_for_all_stages() -> None:
    runs = [joined(on_ranks(trained, s, FUSED, "bfloat16", dp=2, tp=2)) for s in (0, 1, 3)]
    for other in runs[1:]:
        assert all(torch.equal(values, other[name]) for name, values in runs[0].items())
    assert not torch.equal(runs[0]["qkv"], expected(FUSED)["qkv"])


def test_momentum_is_read_by_any_other_layout_and_stage() -> None:
    want = expected(FUSED)
    first = joined(on_ranks(trained, 1, FUSED, "float32", range(1), dp=2, tp=2, ep=2))
    for stage, sizes in ((3, {"tp": 4}), (0, {"dp": 3}), (2, {"dp": 2, "ep": 2})):
        rest = "float32", range(1, STEPS), first
        found = joined(on_ranks(trained, stage, FUSED, *rest, **sizes))
        names = [n for n in want if n not in ("cube", "table", "bias")]
        assert all(torch.equal(found[name], want[name]) for name in names)


def test_an_orthogonal_matrix_has_torchs_bits() -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    for shape in ((5, 9), (9, 5), (8, 8)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        want = _zeropower_via_newtonschulz(x, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        assert torch.equal(orthogonalize(x, 5), want)
    assert scale_of(4, 25) == 1.0 and flops_of(2, 3, 5) == flops_of(3, 2, 5) == 5 * (48 + 16)


def loads(mesh: Mesh) -> tuple[list[int], int, int]:
    """Operations of each rank, all of them, and those of the largest matrix."""
    net = Net(mesh)
    layouts = parameter_layouts(net, mesh.axis_sizes)
    grads = GradAccumulator(named_parameters(net), layouts, mesh)
    parts = matrix_parts(layouts)
    costs = [flops_of(p.rows, p.columns, 5) for own in parts.values() for p in own]
    exchange = MatrixExchange(grads, parts, 5, whole=False)
    return exchange.loads, sum(costs), max(costs)


def test_operations_are_balanced() -> None:
    found, total, largest = on_ranks(loads, dp=2, tp=2)[0]
    assert sum(found) == total and max(found) - min(found) <= largest
    assert max(found) < 1.3 * total / 4 or max(found) == largest


def test_muon_without_layouts_is_refused() -> None:
    with pytest.raises(ValueError, match="muon was given without layouts: pass update_rule"):
        update_rule(MuonConfig())
