"""Part ``ranks``: several ranks over NCCL that share the GPU; over gloo in a dry run.

What ranks call is at the top level of this module: they import it by name.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from gpu_items import Item, Result, Setting, check, item
from gpu_pytest import FILES, pytest_item
from gpu_trainer import Trainer, draw_batch, llama

from kenotron_dist import (
    Mesh,
    RankError,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    gather_objects,
    receive,
    reduce_scatter,
    send,
    shift,
)
from kenotron_dist.diagnosis import StallReport, check_replicas, watch
from kenotron_dist.placement import TensorLayout
from kenotron_dist.testing import on_ranks
from kenotron_pp import Schedule, interleaved, one_f_one_b, zero_bubble_v
from kenotron_tp import TPMode

BOUND = 5e-4
"""Largest relative deviation of losses between layouts in fp32 on a GPU."""


def on_device(setting: Setting, fn: Callable[..., Any], *args: Any, **sizes: int) -> list[Any]:
    """Call ``fn(mesh, *args)`` on ranks that share the device; a wait ends after 45 s."""
    shared = {"device": setting.device, "share_gpus": True, "preload": ("gpu_trainer",)}
    return on_ranks(fn, *args, seconds=45, **shared, **sizes)


def verbs_body(mesh: Mesh) -> str:
    """Every collective and transfer with values that are known; the backend's name."""
    axis, device = mesh["tp"], mesh.device
    n, rank = axis.size, axis.rank
    wrong: list[str] = []

    def expect(name: str, found: torch.Tensor, due: list[float]) -> None:
        if found.tolist() != due:
            wrong.append(f"{name}: {found.tolist()} instead of {due}")

    every = [float(i) for i in range(n)]
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        mine = torch.full((n,), rank, device=device, dtype=dtype)
        expect(f"all_reduce {dtype}", all_reduce(mine, axis), [sum(every)] * n)
        expect(f"reduce_scatter {dtype}", reduce_scatter(mine, axis), [sum(every)])
        expect(f"all_gather {dtype}", all_gather(mine[:1], axis), every)
        expect(f"all_to_all {dtype}", all_to_all(mine, axis), every)
    largest = all_reduce(torch.full((1,), float(rank), device=device), axis, op="max")
    expect("all_reduce max", largest, [n - 1.0])
    handle = all_reduce(torch.ones(100_000, device=device), axis, async_op=True)
    expect("all_reduce async", handle.wait()[:1], [float(n)])
    expect("broadcast", broadcast(torch.full((1,), float(rank), device=device), axis, 1), [1.0])
    moved = shift(torch.full((1,), float(rank), device=device), axis)
    expect("shift", moved if isinstance(moved, torch.Tensor) else moved.wait(), [(rank - 1.0) % n])
    if rank == 0:
        send(torch.full((3,), 5.0, device=device), axis, 1).wait()
    elif rank == 1:
        place = torch.empty(3, device=device)
        expect("receive", receive(place, axis, 0).wait(), [5.0] * 3)
    if broadcast_object({"a": [1]} if rank == 0 else None, axis) != {"a": [1]}:
        wrong.append("broadcast_object")
    if gather_objects(rank, axis) != list(range(n)):
        wrong.append("gather_objects")
    layouts = {"same": TensorLayout("same", (5,))}
    check_replicas({"same": torch.ones(5, device=device)}, layouts, mesh)
    barrier(mesh.world)
    check(not wrong, "\n".join(wrong))
    return mesh.backend


@item("verbs on 2 and 3 ranks", 90)
def verbs(setting: Setting) -> Iterator[Result]:
    """Every collective with known sums, transfers, objects."""
    for tp in setting.pick((2, 3), (2,)):
        began = time.perf_counter()
        backends = on_device(setting, verbs_body, tp=tp)
        yield {f"{tp} ranks": {"backend": backends[0], "s": time.perf_counter() - began}}
        due = setting.pick("nccl", "gloo")
        check(set(backends) == {due}, f"ranks talked over {backends}, not {due}")


def losses_body(
    mesh: Mesh, setting: Setting, schedule: Schedule, micros: int, mode: TPMode
) -> list[float]:
    """Losses of some steps of the tiny model in fp32, on this layout."""
    config = llama(setting, "tiny", layers=setting.pick(6, 4))
    trainer = Trainer(config, mesh, dtype=torch.float32, seed=0, schedule=schedule, mode=mode)
    length = setting.pick(64, 16)
    batch = draw_batch(config, mesh, micros=micros, rows=2, length=length, seed=1)
    return [trainer.step(batch).item() for _ in range(setting.pick(4, 2))]


LAYOUTS: dict[str, tuple[dict[str, int], Schedule, int, TPMode]] = {
    "dp 2": ({"dp": 2}, one_f_one_b, 2, TPMode()),
    "tp 2": ({"tp": 2}, one_f_one_b, 2, TPMode()),
    "tp 2, sequence parallel, overlap": (
        {"tp": 2}, one_f_one_b, 2, TPMode(sequence_parallel=True, overlap=True),
    ),
    "pp 2": ({"pp": 2}, one_f_one_b, 4, TPMode()),
    "pp 2, zb-v": ({"pp": 2}, zero_bubble_v, 4, TPMode()),
    "pp 3, interleaved, one micro-batch": ({"pp": 3}, interleaved(2), 1, TPMode()),
    "pp 2 x dp 2": ({"pp": 2, "dp": 2}, one_f_one_b, 2, TPMode()),
}  # fmt: skip
"""What is trained: sizes, schedule, micro-batches, mode of layers cut over tp."""
IN_A_DRY_RUN = ("dp 2", "tp 2", "pp 3, interleaved, one micro-batch")


def layout_item(name: str) -> Item:
    """Make the item that trains one layout and one rank, and compares their losses."""
    sizes, schedule, micros, mode = LAYOUTS[name]

    def run(setting: Setting) -> Iterator[Result]:
        began = time.perf_counter()
        own = (setting, schedule, micros, mode)
        ranks = on_device(setting, losses_body, *own, **sizes)
        took = time.perf_counter() - began
        one = losses_body(Mesh.connect(device=setting.device), *own[:1], one_f_one_b, *own[2:])
        off = max(abs(a - b) / abs(b) for a, b in zip(ranks[0], one, strict=True))
        yield {"losses": ranks[0], "deviation from one rank": off, "s": took}
        check(all(each == ranks[0] for each in ranks), f"ranks report other losses: {ranks}")
        check(off < BOUND, f"losses deviate by {off:.1e} from those of one rank: {ranks[0]} {one}")

    reason = "" if name in IN_A_DRY_RUN else "the other layouts stand for it in a dry run"
    return Item(name, 90.0, run, (), reason)


def stall_body(mesh: Mesh, limit: float) -> tuple[str, float]:
    """Rank 1 is late by more than the limit; what this rank's watchdog reports, and when."""
    reports: list[tuple[str, float]] = []
    heard = threading.Event()

    def on_stall(report: StallReport) -> None:
        reports.append((str(report), time.monotonic()))
        heard.set()

    x = torch.ones(1000, device=mesh.device)
    all_reduce(x, mesh["tp"]).sum().item()  # communicators are there
    with watch(mesh, limit=timedelta(seconds=limit), on_stall=on_stall):
        barrier(mesh.world)
        began = time.monotonic()
        if mesh.rank == 1:
            time.sleep(3 * limit + 2)
        all_reduce(x, mesh["tp"])
        if mesh.rank == 0:
            heard.wait(3 * limit + 2)  # over NCCL the call returns and the device waits
        all_reduce(x, mesh["tp"]).sum().item()
    return (reports[0][0], reports[0][1] - began) if reports else ("", 0.0)


@item("a rank that stalls", 60)
def stall(setting: Setting) -> Iterator[Result]:
    """Seconds from the beginning of a wait until the watchdog reports, and what it names."""
    limit = setting.pick(3.0, 0.5)
    (text, seconds), _ = on_device(setting, stall_body, limit, tp=2)
    yield {"limit s": limit, "reported after s": seconds, "report": text}
    check(bool(text), "no report came")
    check("rank 1" in text, f"the report does not name rank 1: {text}")


def killed_body(mesh: Mesh) -> None:
    """Rank 1 dies; the others communicate with it."""
    x = torch.ones(1000, device=mesh.device)
    all_reduce(x, mesh["tp"]).sum().item()
    with watch(mesh, limit=timedelta(seconds=5)):
        barrier(mesh.world)
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(x, mesh["tp"]).sum().item()


@item("a rank that is killed", 60)
def killed(setting: Setting) -> Iterator[Result]:
    """Seconds until the caller of ``spawn`` learns of it, and what it is told."""
    began = time.perf_counter()
    try:
        on_device(setting, killed_body, tp=2)
        text = ""
    except RankError as error:
        text = str(error)
    yield {"s, with the start of the ranks": time.perf_counter() - began, "error": text}
    check("rank 1" in text and "SIGKILL" in text, f"the error does not name rank 1: {text!r}")


def landed_body(mesh: Mesh, elements: int) -> dict[str, float]:
    """How long the output of an all-gather lives after its last reference is gone."""

    def held() -> int:
        return torch.cuda.memory_allocated() if mesh.device.type == "cuda" else 0

    found: dict[str, float] = {}
    with watch(mesh, limit=timedelta(seconds=30)):
        x = torch.ones(elements, device=mesh.device)
        all_gather(x, mesh["tp"]).sum().item()
        time.sleep(2.0)
        before = held()
        out = all_gather(x, mesh["tp"], async_op=True).wait()
        out.sum().item()
        gone = weakref.ref(out)
        nbytes = out.nbytes
        del out
        found["MB of the output"] = nbytes / 1e6
        found["MB held at once"] = (held() - before) / 1e6
        began = time.perf_counter()
        while (held() > before or gone() is not None) and time.perf_counter() < began + 5:
            time.sleep(0.01)
        found["s until it is free"] = time.perf_counter() - began
        barrier(mesh.world)
    return found


@item("memory of a landed all-gather", 60)
def landed(setting: Setting) -> Iterator[Result]:
    """Whether the watchdog keeps the output of a collective alive that nobody else holds."""
    ranks = on_device(setting, landed_body, setting.pick(1 << 26, 1 << 10), tp=2)
    yield dict(ranks[0])
    late = ranks[0]["s until it is free"]
    check(late < 0.5, f"the output was held for {late:.2f} s after its last reference was gone")


ITEMS = [
    verbs,
    *(layout_item(name) for name in LAYOUTS),
    stall,
    killed,
    landed,
    *(pytest_item(path) for path in FILES),
]
