"""Whatever layout saves, whatever layout loads: the same bits, of random pairs of layouts.

The ranks of a mesh are threads here, or take turns: processes would be too slow for so many.
"""

import math
import os
import tempfile
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from ckpt_cases import PADDING, cut, even, local, model, name_of, uneven
from ckpt_checks import CPU, View
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron_ckpt import Saver, load
from kenotron_ckpt.blocks import blocks_of
from kenotron_ckpt.checksums import manifest_faults
from kenotron_ckpt.folder import manifest_at
from kenotron_ckpt.host_buffer import HostBuffer
from kenotron_ckpt.reader import fill, plan_reads
from kenotron_ckpt.save_job import SaveJob
from kenotron_ckpt.share import plan_share
from kenotron_ckpt.snapshot import Snapshot
from kenotron_ckpt.store import store_at
from kenotron_dist import Mesh, MeshConfig, StoreMessages, spawn
from kenotron_dist.boxes import local_shape
from kenotron_dist.placement import Chunk, Shard, TensorLayout, Tie

TP = (1, 2, 3, 4, 6, 8)
GRIDS = [
    {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep}
    for pp in range(1, 9)
    for dp in range(1, 9)
    for cp in range(1, 9)
    for tp in TP
    for ep in range(1, 9)
    if pp * dp * cp * tp <= 8 and dp * cp * tp % ep == 0
]
HEADS = 24


def views(sizes):
    config = MeshConfig(**sizes)
    return [View(config, rank, CPU) for rank in range(config.world_size)]


@dataclass(frozen=True)
class Model:
    """A model of two layers, the same on all meshes."""

    tied: bool
    dtype: torch.dtype
    kv: int
    """Heads of keys and of values; ``tp`` may be more."""
    vocabulary: int
    experts: int = 8

    def layouts(self, sizes):
        """Parameters by logical name: layout, dtype."""
        pp, tp = sizes["pp"], sizes["tp"]
        heads = (Chunk(HEADS, HEADS), Chunk(2 * self.kv, self.kv), Chunk(2 * self.kv, self.kv))
        wide = sum(chunk.size for chunk in heads)
        rows = (Shard("tp", 0, (Chunk(self.vocabulary, pad=-self.vocabulary % tp),)),)
        size = (self.vocabulary, 3)
        ends = tuple(sorted({0, pp - 1}))
        found = [TensorLayout("norm", (5,), (), (pp - 1,))]
        if self.tied:
            found.append(TensorLayout("embedding", size, (Tie("embedding"), *rows), ends))
        else:
            found.append(TensorLayout("embedding", size, rows))
            found.append(TensorLayout("head", size, rows, (pp - 1,)))
        for layer in range(2):
            at = (layer * pp // 2,)
            found.append(TensorLayout(f"{layer}.qkv", (wide, 3), (Shard("tp", 0, heads),), at))
            found.append(TensorLayout(f"{layer}.out", (2, HEADS), (Shard("tp", 1),), at))
            stacked = (Shard("ep", 0),)
            found.append(TensorLayout(f"{layer}.up", (self.experts, 3, 2), stacked, at))
            found.append(TensorLayout(f"{layer}.bias", (self.experts, 2), stacked, at))
        named = {layout.name: (layout, self.dtype) for layout in found}
        return named | {"step": (TensorLayout("step", (), (), (pp - 1,)), torch.int64)}


@lru_cache(maxsize=1000)
def bits(name, shape, dtype):
    """Any bits at all: NaNs of many kinds, infinities, subnormal numbers, both zeros."""
    size = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(sum(name.encode()) * 31 + size)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    if dtype.is_floating_point:
        special = torch.tensor([math.inf, -math.inf, -0.0, 0.0, math.nan]).to(dtype)
        first = special.view(torch.uint8)[:size]
        data[: first.numel()] = first
    return data.view(dtype).reshape(shape)


def of_rank(shape_of, mesh, zero):
    """Parameters and optimizer state of a rank: sliced over dp and cp, or whole on each."""
    tensors = {}

    def add(key, layout, dtype):
        tensors[key] = (cut(bits(layout.name, layout.shape, dtype), layout, mesh), layout)

    for name, (layout, dtype) in shape_of.layouts(mesh.sizes).items():
        if mesh.coords["pp"] not in layout.stages:
            continue
        add(name, layout, dtype)
        if name == "step":
            continue
        for kind, slices in (("exp_avg", even), ("exp_avg_sq", uneven)):
            moment = layout.renamed(f"optimizer.{kind}.{name}")
            if zero:
                data = mesh[mesh.view(layout).data]
                numel = math.prod(local_shape(layout, mesh.view(layout)))
                moment = moment.sliced(*slices(numel, data.size, data.rank))
            add(moment.name, moment, torch.float32)
    return tensors


def save_as(sizes, shape_of, zero, step_folder, file_bytes, pool_bytes, threads):
    """Save as all ranks of a mesh do in the background, a thread each."""
    notes = StoreMessages(Mesh.connect(), "layouts")
    jobs = []
    for mesh in views(sizes):
        tensors = of_rank(shape_of, mesh, zero)
        plan = plan_share(tensors, mesh, file_bytes, pool_bytes=pool_bytes, threads=threads)
        arena = HostBuffer()
        arena.fit(plan.parts, pool_bytes, pin=False)
        jobs.append(
            SaveJob(
                number=1,
                step_folder=store_at(step_folder),
                mesh=mesh,
                notes=notes,
                plan=plan,
                snapshot=Snapshot(plan.parts, arena, CPU),
                state={"zero": zero},
                rank_state=mesh.rank,
                config_text=None,
                threads=threads,
                verify=False,
                after=lambda _: ([], ""),
            )
        )
    ranks = [threading.Thread(target=job.run) for job in jobs]
    for rank in ranks:
        rank.start()
    for job, rank in zip(jobs, ranks, strict=True):
        rank.join()
        assert job.failure == ""
        assert job.snapshot.wait() < 1


def load_as(sizes, shape_of, zero, step_folder):
    """Load rank by rank; returns what was not bit for bit as it should be."""
    manifest = manifest_at(step_folder)
    wrong = manifest_faults(store_at(step_folder), manifest)
    assert manifest.rank_states == tuple(range(len(manifest.rank_states)))
    for mesh in views(sizes):
        due = of_rank(shape_of, mesh, zero)
        wanted = {k: (torch.full_like(t, PADDING), layout) for k, (t, layout) in due.items()}
        fill(step_folder, plan_reads(manifest.records, blocks_of(wanted, mesh.view)))
        for key, (tensor, _) in due.items():
            found = wanted[key][0]
            assert found.dtype == tensor.dtype
            if found.numel() and not torch.equal(raw(found), raw(tensor)):
                wrong.append((mesh.rank, key))
    return wrong


def raw(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@st.composite
def pairs(draw):
    """Two grids, and a model that both can hold."""
    a, b = draw(st.sampled_from(GRIDS)), draw(st.sampled_from(GRIDS))
    tps = (a["tp"], b["tp"])
    kv = [n for n in (1, 2, 3, 4, 6) if all(max(n, tp) % min(n, tp) == 0 for tp in tps)]
    shape_of = Model(
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        kv=draw(st.sampled_from(kv)),
        vocabulary=draw(st.integers(5, 13)),
        experts=math.lcm(a["ep"], b["ep"]) * draw(st.integers(1, 2)),
    )
    return a, b, shape_of


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    pair=pairs(),
    zeros=st.tuples(st.booleans(), st.booleans()),
    file_bytes=st.sampled_from([200, 1000, 1 << 31]),
    pool_bytes=st.sampled_from([300, 1500, 1 << 30]),
    threads=st.integers(1, 3),
)
def test_any_layout_loads_the_bits_that_any_layout_saved(
    pair, zeros, file_bytes, pool_bytes, threads
):
    a, b, shape_of = pair
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # hundreds of files: not what is tried here
        step_folder = Path(folder) / "7"
        save_as(a, shape_of, zeros[0], step_folder, file_bytes, pool_bytes, threads)
        assert load_as(b, shape_of, zeros[1], step_folder) == []


PAIRS = [
    ({"pp": 2, "dp": 2, "tp": 2}, [{"dp": 8}, {"tp": 4}, {}]),
    ({"dp": 8}, [{"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "cp": 3}]),
    ({}, [{"pp": 2, "tp": 2}]),
]


def save_beside(mesh, folder):
    """Save the awkward model of all tests with a small pool, and train on."""
    with Saver(folder, mesh, pool_bytes=800, file_bytes=2000, threads=2, verify=True) as saver:
        tensors = model(mesh)
        saver.save(3, tensors, {"consumed": 12}, "model: tiny\n", rank_state=mesh.coords)
        saver.wait()
        for tensor, _ in tensors.values():
            tensor.zero_()
    return [str(report.failure) for report in saver.reports()]


def load_bits(mesh, folder):
    wanted = model(mesh, blank=True)
    loaded = load(folder, wanted, mesh)
    assert (loaded.step, loaded.state, loaded.passed_over) == (3, {"consumed": 12}, [])
    wrong = [
        key
        for key, (tensor, layout) in wanted.items()
        if not torch.equal(raw(tensor), raw(local(layout, tensor.dtype, mesh)))
    ]
    return wrong, loaded.rank_state


@pytest.mark.parametrize(("a", "others"), PAIRS, ids=[name_of(pair[0]) for pair in PAIRS])
def test_processes_load_what_a_saver_on_another_mesh_saved(tmp_path, a, others):
    said = spawn(save_beside, tmp_path, **a)
    assert said == [[""]] * len(said)
    for b in others:
        for wrong, own in spawn(load_bits, tmp_path, **b):
            assert wrong == []
            assert own is None  # what a rank saves of its own is for the same mesh
