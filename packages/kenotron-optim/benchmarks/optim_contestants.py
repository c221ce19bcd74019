"""Who takes the step: this package, and what torch offers, on matrices like a decoder's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from kenotron_dist import Mesh, named_parameters, parameter_layouts
from kenotron_optim import (
    GlobalNorm,
    GradAccumulator,
    MuonConfig,
    SlicedOptimizer,
    clip_,
    decay_groups,
    update_rule,
)

WIDTH, INNER, LAYERS = 512, 1376, 16  # 50.6 M parameters
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
Step = Callable[[Tensor], None]
"""Does everything that follows the loss."""


class Block(nn.Module):
    """The matrices of a decoder layer, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm, self.gate_up = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, WIDTH) -> (N, WIDTH)."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(q * k.tanh() + v)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def build(dtype: torch.dtype) -> nn.Sequential:
    """The same values for everybody."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(LAYERS)]).to(dtype)


def ours(
    mesh: Mesh, dtype: torch.dtype, stage: int, *, muon: bool = False
) -> tuple[nn.Module, Step]:
    """The accumulator, the norm, clipping and the sliced optimizer."""
    model = build(dtype)
    layouts = parameter_layouts(model, mesh.axis_sizes)
    reduce = "micro_batch" if stage > 1 else "step"
    grads = GradAccumulator(named_parameters(model), layouts, mesh, reduce=reduce)
    norm = GlobalNorm(grads)
    groups = decay_groups(grads.names, ADAMW["weight_decay"])
    rule = update_rule(MuonConfig(), layouts) if muon else lambda g: torch.optim.AdamW(g, **ADAMW)
    optimizer = SlicedOptimizer(grads, rule, groups, stage)
    if stage:
        optimizer.overlap_forward(model)

    def step(loss: Tensor) -> None:
        grads.start(backwards=1)
        loss.backward()
        slices = grads.finish()
        clip_(slices, 1.0, norm(slices))
        optimizer.step(slices, ADAMW["lr"])

    return model, step


def ddp(mesh: Mesh, dtype: torch.dtype, zero: bool) -> tuple[nn.Module, Step]:
    """DDP, ``clip_grad_norm_`` and fused AdamW, with or without ``ZeroRedundancyOptimizer``."""
    parallel = DistributedDataParallel(build(dtype), gradient_as_bucket_view=True)
    kind = ZeroRedundancyOptimizer if zero else torch.optim.AdamW
    options = {"optimizer_class": torch.optim.AdamW, **ADAMW} if zero else ADAMW
    return parallel, _torch_step(parallel, kind(parallel.parameters(), **options))


def fsdp(mesh: Mesh, dtype: torch.dtype, *, reshard: bool) -> tuple[nn.Module, Step]:
    """FSDP2, every block sharded; ``reshard``: also between forward and backward, as ZeRO-3."""
    from torch.distributed.fsdp import fully_shard

    model = build(dtype)
    grid = mesh.device_mesh()["dp"]
    for block in model:
        fully_shard(block, mesh=grid, reshard_after_forward=reshard)
    fully_shard(model, mesh=grid, reshard_after_forward=reshard)
    options = {**ADAMW, "fused": False}  # fused AdamW does not take DTensors on CPU
    return model, _torch_step(model, torch.optim.AdamW(model.parameters(), **options))


def _torch_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


CONTESTANTS: dict[str, Callable[[Mesh, torch.dtype], tuple[nn.Module, Step]]] = {
    "ours, ZeRO 0": lambda mesh, dtype: ours(mesh, dtype, 0),
    "ours, ZeRO 1": lambda mesh, dtype: ours(mesh, dtype, 1),
    "torch DDP": lambda mesh, dtype: ddp(mesh, dtype, zero=False),
    "torch DDP + ZeRO": lambda mesh, dtype: ddp(mesh, dtype, zero=True),
    "torch FSDP2": lambda mesh, dtype: fsdp(mesh, dtype, reshard=False),
    "ours, ZeRO 2": lambda mesh, dtype: ours(mesh, dtype, 2),
    "ours, ZeRO 3": lambda mesh, dtype: ours(mesh, dtype, 3),
    "torch FSDP2, reshard": lambda mesh, dtype: fsdp(mesh, dtype, reshard=True),
    "ours, ZeRO 1, Muon": lambda mesh, dtype: ours(mesh, dtype, 1, muon=True),
}
