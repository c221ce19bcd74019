"""Part ``save``: how fast state leaves the GPU, how long a save blocks, what a resume needs."""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from gpu_items import NotRunError, Result, Setting, item
from gpu_trainer import Trainer, draw_batch, llama, parameters_of

from kenotron_dist import Mesh


@item("device to host", 60)
def to_host(setting: Setting) -> Iterator[Result]:
    """GB/s of copies to pinned and to pageable memory, and back."""
    size = setting.pick(1 << 30, 1 << 16)
    there = torch.empty(size, dtype=torch.uint8, device=setting.device)
    for name in setting.pick(("pinned", "pageable"), ("pageable",)):
        began = time.perf_counter()
        here = torch.empty(size, dtype=torch.uint8, pin_memory=name == "pinned").zero_()
        yield {f"{name}: s to take 1 GiB": time.perf_counter() - began}
        for way, target, source in (("to the host", here, there), ("back", there, here)):

            def call(target: torch.Tensor = target, source: torch.Tensor = source) -> object:
                return target.copy_(source, non_blocking=True)

            ms = setting.median_ms(call, repeats=5, warmup=1)
            yield {f"{name}, {way}": {"GB/s": size / ms / 1e6}}


def pinned_bytes() -> dict[str, int]:
    """Return what torch's allocator of pinned memory holds; empty where it does not say."""
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "host_memory_stats"):
        return {}
    stats = torch.cuda.host_memory_stats()
    return {key: int(value) for key, value in stats.items() if "bytes" in key and "peak" in key}


def trainer_of(setting: Setting) -> tuple[Trainer, Any]:
    """Return the 1B shape with 6 layers, about 12 GB of state, and a batch."""
    mesh, config = Mesh.connect(device=setting.device), llama(setting, "1b", layers=6)
    trainer = Trainer(config, mesh, dtype=torch.bfloat16)
    length = setting.pick(2048, 16)
    return trainer, draw_batch(config, mesh, micros=1, rows=1, length=length, seed=0)


def check_room(setting: Setting, nbytes: int) -> None:
    """Raise NotRunError where the disk has no room for a checkpoint of ``nbytes``."""
    free = shutil.disk_usage(setting.scratch).free
    if free < 1.2 * nbytes:
        raise NotRunError(
            f"{setting.scratch} has {free / 1e9:.1f} GB free, the checkpoint {nbytes / 1e9:.1f} GB"
        )


@item("a save beside training", 120, needs=("xxhash",))
def blocked(setting: Setting) -> Iterator[Result]:
    """Seconds a save blocks the training, steps meanwhile, seconds until it stands on the disk."""
    from kenotron_ckpt import Saver

    trainer, batch = trainer_of(setting)
    trainer.step(batch)
    tensors = trainer.records()
    nbytes = sum(each.nbytes for each, _ in tensors.values())
    yield {"GB": nbytes / 1e9}
    check_room(setting, nbytes)
    with Saver(setting.scratch / "run", trainer.mesh) as saver:
        began = time.perf_counter()
        saver.reserve(tensors)
        yield {"s to take the host memory": time.perf_counter() - began}
        usual = timed_steps(setting, trainer, batch, saver, setting.pick(8, 1))
        yield {"ms a step": 1e3 * statistics.median(usual)}
        began = time.perf_counter()
        saver.save(1, tensors, {})
        call = time.perf_counter() - began
        meanwhile = timed_steps(setting, trainer, batch, saver, setting.pick(4, 1))
        saver.finish()
        (report,) = saver.reports()
    yield {
        "s in the call": call,
        "s blocked": report.blocked,
        "ms of the first step meanwhile": 1e3 * meanwhile[0],
        "ms a step meanwhile": 1e3 * statistics.median(meanwhile),
        "s until it stands": report.durable,
        "GB/s to the disk": report.gb_per_s,
        "failure": report.failure or "none",
    }
    pinned = pinned_bytes()
    for name, each in pinned.items():
        yield {name: {"GB": each / 1e9, "over the state": each / nbytes}}


def timed_steps(
    setting: Setting, trainer: Trainer, batch: Any, saver: Any, count: int
) -> list[float]:
    """Return wall-clock seconds of steps that ask the saver before they change anything."""
    return setting.wall_seconds(lambda: trainer.step(batch, before_update=saver.wait), count)


@item("peak memory of a resume", 120, needs=("xxhash",))
def resume(setting: Setting) -> Iterator[Result]:
    """Bytes a parameter: of the state in training, at most in a step, at most in a resume."""
    from kenotron_ckpt import load, save

    trainer, batch = trainer_of(setting)
    setting.reset_peak()
    trainer.step(batch)
    trainer.step(batch)
    count, mesh = parameters_of(trainer.stack), trainer.mesh
    held, peak = setting.held_bytes(), setting.peak_bytes()
    yield {"parameters": count, "held in training, bytes a parameter": held / count}
    yield {"peak of a step, bytes a parameter": peak / count}
    nbytes = sum(each.nbytes for each, _ in trainer.records().values())
    check_room(setting, nbytes)
    save(setting.scratch / "run", 2, trainer.records(), mesh, {})
    del trainer  # hooks of parameters may keep its memory: what is left is subtracted
    gc.collect()
    setting.empty_cache()
    left = setting.held_bytes()
    other, _ = trainer_of(setting)
    setting.reset_peak()
    began = time.perf_counter()
    load(setting.scratch / "run", other.wanted(), mesh)
    other.optimizer.steps = 2
    other.optimizer.publish()
    yield {
        "peak of a resume, bytes a parameter": (setting.peak_bytes() - left) / count,
        "left of the run before, bytes a parameter": left / count,
        "s to load": time.perf_counter() - began,
        "GB read": nbytes / 1e9,
    }
    other.step(batch)


ITEMS = [to_host, blocked, resume]
