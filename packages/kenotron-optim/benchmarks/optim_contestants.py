"""Who takes the step: this package, torch and DeepSpeed, on matrices like a decoder's."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_optim import (
    GlobalNorm,
    GradAccumulator,
    MuonConfig,
    SlicedOptimizer,
    clip_,
    decay_groups,
    update_rule,
)


class Size(NamedTuple):
    """Of a model."""

    width: int
    inner: int
    layers: int


SMALL = Size(512, 1376, 16)  # 50.6 M parameters
LARGE = Size(1024, 2816, 24)  # 308 M
WIDTH = SMALL.width
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
Step = Callable[[Tensor], None]
"""Does everything that follows the loss."""


class Block(nn.Module):
    """The matrices of a decoder layer, without attention."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm, self.gate_up = nn.RMSNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, width) -> (N, width)."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(q * k.tanh() + v)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


def build(dtype: torch.dtype, size: Size) -> nn.Sequential:
    """The same values for everybody."""
    torch.manual_seed(0)
    blocks = [Block(size.width, size.inner) for _ in range(size.layers)]
    return nn.Sequential(*blocks).to(dtype)


def ours(
    mesh: Mesh, dtype: torch.dtype, size: Size, stage: int, *, muon: bool = False
) -> tuple[nn.Module, Step]:
    """The accumulator, the norm, clipping and the sliced optimizer."""
    model = build(dtype, size)
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


def ddp(mesh: Mesh, dtype: torch.dtype, size: Size, *, zero: bool) -> tuple[nn.Module, Step]:
    """DDP, ``clip_grad_norm_`` and fused AdamW, with or without ``ZeroRedundancyOptimizer``."""
    parallel = DistributedDataParallel(build(dtype, size), gradient_as_bucket_view=True)
    kind = ZeroRedundancyOptimizer if zero else torch.optim.AdamW
    options = {"optimizer_class": torch.optim.AdamW, **ADAMW} if zero else ADAMW
    return parallel, _torch_step(parallel, kind(parallel.parameters(), **options))


def fsdp(mesh: Mesh, dtype: torch.dtype, size: Size, *, reshard: bool) -> tuple[nn.Module, Step]:
    """FSDP2, every block sharded; ``reshard``: also between forward and backward, as ZeRO-3."""
    from torch.distributed.fsdp import fully_shard

    model = build(dtype, size)
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


def deepspeed(mesh: Mesh, dtype: torch.dtype, size: Size, *, stage: int) -> tuple[nn.Module, Step]:
    """DeepSpeed's ZeRO with torch's AdamW; it needs no compiler then."""
    import deepspeed as library

    places = {"LOCAL_RANK": mesh.rank, "RANK": mesh.rank, "WORLD_SIZE": mesh.world.size}
    os.environ |= {name: str(value) for name, value in places.items()}  # it reads them
    model = build(dtype, size)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = library.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
        config=config,
        dist_init_required=False,
    )

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return engine, step


Contestant = Callable[[Mesh, torch.dtype, Size], tuple[nn.Module, Step]]
CONTESTANTS: dict[str, Contestant] = {
    "ours, ZeRO 0": partial(ours, stage=0),
    "ours, ZeRO 1": partial(ours, stage=1),
    "torch DDP": partial(ddp, zero=False),
    "torch DDP + ZeRO": partial(ddp, zero=True),
    "torch FSDP2": partial(fsdp, reshard=False),
    "ours, ZeRO 2": partial(ours, stage=2),
    "ours, ZeRO 3": partial(ours, stage=3),
    "torch FSDP2, reshard": partial(fsdp, reshard=True),
    "ours, ZeRO 1, Muon": partial(ours, stage=1, muon=True),
    "DeepSpeed, ZeRO 2": partial(deepspeed, stage=2),
    "DeepSpeed, ZeRO 3": partial(deepspeed, stage=3),
}
