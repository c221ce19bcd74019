"""Awkward tensors for any mesh, with values that are a function of the name alone."""

import math

import torch

from kenotron_dist import Mesh
from kenotron_dist.boxes import local_boxes, local_shape, scatter
from kenotron_dist.placement import Chunk, Partial, Shard, TensorLayout, Tie

torch.set_num_threads(1)

MESHES = [
    {},
    {"tp": 2},
    {"dp": 3},
    {"tp": 4},
    {"pp": 2, "dp": 2},
    {"tp": 8},
    {"pp": 2, "dp": 2, "tp": 2},
    {"dp": 2, "cp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "tp": 2, "ep": 2},
    {"dp": 4, "ep": 4},
]
PADDING = 77.0


def name_of(sizes):
    return "-".join(f"{axis}{size}" for axis, size in sizes.items()) or "one"


def parameters(sizes):
    """Logical name -> (layout, dtype) of every tensor of the model on a mesh of these sizes."""
    tp, last = sizes["tp"], sizes["pp"] - 1
    # On tp 4 and 8 there are fewer kv parts than ranks.
    heads = (Chunk(16, parts=8), Chunk(4, parts=2), Chunk(4, parts=2))
    vocabulary = (Tie("embedding"), Shard("tp", 0, (Chunk(13, pad=-13 % tp),)))
    ends = (0,) if last == 0 else (0, last)
    found = [
        (TensorLayout("plain", (5, 3)), torch.float32),
        (TensorLayout("rows", (16, 3), (Shard("tp", 0),), (last,)), torch.float16),
        (TensorLayout("cols", (3, 8), (Shard("tp", 1),)), torch.bfloat16),
        (TensorLayout("qkv", (24, 5), (Shard("tp", 0, heads),), (last,)), torch.bfloat16),
        (TensorLayout("qkv.wide", (2, 24, 3), (Shard("tp", 1, heads),)), torch.float32),
        (TensorLayout("bias", (24,), (Shard("tp", 0, heads),)), torch.bfloat16),
        (
            TensorLayout("embedding", (13, 4), vocabulary, ends),
            torch.bfloat16,
        ),
        (TensorLayout("norm", (7,), (Partial("tp"),), (last,)), torch.float32),
        (TensorLayout("scalar", (), (), (last,)), torch.float64),
        (TensorLayout("count", (3,)), torch.int64),
        (TensorLayout("mask", (2, 3)), torch.bool),
        (TensorLayout("experts", (8, 3, 2), (Shard("ep", 0),), (last,)), torch.bfloat16),
        (TensorLayout("nothing", (0, 4)), torch.float32),
    ]
    return {layout.name: (layout, dtype) for layout, dtype in found}


def whole(name, shape, dtype):
    generator = torch.Generator().manual_seed(sum(name.encode()) * 7 + len(name))
    return torch.randn(shape, generator=generator).mul(100).to(dtype)


def local(layout, dtype, mesh, blank=False):
    """The rank's tensor: padding, and everything when blank, is PADDING."""
    full = whole(layout.name, layout.shape, dtype)
    if blank:
        full.fill_(PADDING)
    return cut(full, layout, mesh)


def cut(full, layout, mesh):
    """The rank's tensor of the logical tensor ``full``: padding is PADDING."""
    flat = layout.flat
    unsliced = TensorLayout(layout.name, layout.shape, layout.shards, layout.stages)
    tensor = scatter(full, unsliced, mesh.view(unsliced))
    held = torch.zeros(tensor.shape, dtype=torch.bool)
    for box in local_boxes(unsliced, mesh.view(unsliced)):
        box.of_local(held).fill_(True)
    tensor[~held] = torch.tensor(PADDING).to(full.dtype)
    return tensor if flat is None else tensor.reshape(-1)[flat.start : flat.stop].clone()


def even(numel, ranks, rank):
    """ZeRO's cut: ceil(N/d) each, the last ones shorter or empty."""
    size = -(-numel // ranks)
    return min(rank * size, numel), min(rank * size + size, numel)


def uneven(numel, ranks, rank):
    """Rank 0 gets nothing where there are several, the last one most."""
    edges = [numel * i**2 // ranks**2 for i in range(ranks)]
    edges[-1] = max(edges[-1] // 2, 0)
    return sorted([*edges, numel])[rank : rank + 2]


def model(mesh: Mesh, blank=False):
    """Parameters and optimizer state of a rank, for save; blank, for load."""
    tensors = {}
    for name, (layout, dtype) in parameters(mesh.sizes).items():
        if mesh.coords["pp"] not in layout.stages:
            continue
        tensors[name] = (local(layout, dtype, mesh, blank), layout)
        if name == "embedding" and mesh.sizes["pp"] == 1:
            tensors["head"] = (tensors[name][0].clone(), layout)  # tied, on the same stage
        if layout.shape == ():
            continue
        data = mesh[mesh.view(layout).data]
        numel = math.prod(local_shape(layout, mesh.view(layout)))
        for kind, cut in (("exp_avg", even), ("uneven", uneven)):
            sliced = layout.renamed(f"optimizer.{kind}.{name}").sliced(
                *cut(numel, data.size, data.rank)
            )
            tensors[sliced.name] = (local(sliced, torch.float32, mesh, blank), sliced)
    return tensors


def zero0(mesh: Mesh):
    """Every data rank's slice of every optimizer record, blank: several entries a record."""
    wanted = {}
    for name, (layout, _) in parameters(mesh.sizes).items():
        if mesh.coords["pp"] in layout.stages and layout.shape:
            data = mesh[mesh.view(layout).data]
            numel = math.prod(local_shape(layout, mesh.view(layout)))
            for rank in range(data.size):
                start, stop = even(numel, data.size, rank)
                sliced = layout.renamed(f"optimizer.exp_avg.{name}").sliced(start, stop)
                wanted[f"{name}.{rank}"] = (local(sliced, torch.float32, mesh, True), sliced)
    return wanted


def small(mesh: Mesh, blank=False):
    """Two records, enough where the layout does not matter."""
    found = {}
    for layout in (TensorLayout("w", (8, 4), (Shard("tp", 0),)), TensorLayout("b", (4,))):
        found[layout.name] = (local(layout, torch.float32, mesh, blank), layout)
    return found
