"""Part ``profile``: which kernels take the time of a step, and where the GPU waits for the host."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from gpu_items import Item, Result, Setting, check
from gpu_trainer import Trainer, draw_batch, llama, sequence
from torch.profiler import ProfilerActivity, profile

from kenotron_dist import Mesh

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that occupy the GPU."""
LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of the host's calls that start them."""
GAP_US = 20.0
"""A pause of the GPU that is longer than this counts."""
SHOWN = 20
"""Rows of each table."""
STEPS = 3
"""Steps in a trace."""

Event = Mapping[str, Any]


def traced(setting: Setting, call: Callable[[], Any], *, stacks: bool) -> list[Event]:
    """Return the events of a trace of some calls; with ``stacks`` the Python functions too."""
    activities = [ProfilerActivity.CPU]
    if setting.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for _ in range(setting.pick(5, 1)):
        call()
    setting.synchronize()
    with profile(activities=activities, with_stack=stacks) as found:
        for _ in range(setting.pick(STEPS, 1)):
            call()
        setting.synchronize()
    file = setting.scratch / f"trace-{stacks}.json"
    found.export_chrome_trace(str(file))
    return [each for each in json.loads(file.read_text())["traceEvents"] if each.get("ph") == "X"]


def top_kernels(events: Iterable[Event], categories: tuple[str, ...] = KERNELS) -> Result:
    """Return total milliseconds, calls and share of each kernel, the longest first."""
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for each in events:
        if each.get("cat") in categories:
            total[each["name"][:90]] += each["dur"]
            calls[each["name"][:90]] += 1
    whole = sum(total.values()) or 1.0
    return {
        name: {"ms": time / 1e3, "calls": calls[name], "share": time / whole}
        for name, time in total.most_common(SHOWN)
    }


def gaps(events: Iterable[Event], shortest: float = GAP_US) -> list[tuple[float, Event]]:
    """Return pauses of the GPU in µs, each with the event that ended it, in order of time."""
    busy = sorted((e for e in events if e.get("cat") in KERNELS), key=lambda e: e["ts"])
    found, end = [], None
    for each in busy:
        if end is not None and each["ts"] - end > shortest:
            found.append((each["ts"] - end, each))
        end = max(end or 0.0, each["ts"] + each["dur"])
    return found


def busy_share(events: Iterable[Event]) -> dict[str, float]:
    """Return the milliseconds from the first kernel to the last, and the share they fill."""
    busy = [each for each in events if each.get("cat") in KERNELS]
    if not busy:
        return {}
    span = max(e["ts"] + e["dur"] for e in busy) - min(e["ts"] for e in busy)
    idle = sum(pause for pause, _ in gaps(busy, 0.0))
    return {"ms of the trace": span / 1e3, "share that the GPU is busy": 1 - idle / span}


def host_lines(events: list[Event], found: list[tuple[float, Event]]) -> Result:
    """Return for each host line that ended gaps: how often, and their milliseconds.

    A kernel's launch has its correlation number. The line is the innermost Python function of the
    packages around the launch, on its thread; else the outermost operator, as in backward.
    """
    launches = {e["args"]["correlation"]: e for e in events if is_launch(e)}
    pauses: dict[int, float] = {}
    unknown = 0.0
    for pause, kernel in found:
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        if launch is None:
            unknown += pause
        else:
            pauses[id(launch)] = pauses.get(id(launch), 0.0) + pause
    times, total = Counter(), Counter()
    late = [each for each in launches.values() if id(each) in pauses]
    for launch, line in lines_of(late, events):
        times[line] += 1
        total[line] += pauses[id(launch)]
    if unknown:
        times["unknown"], total["unknown"] = len(found) - times.total(), unknown
    return {
        line: {"gaps": times[line], "ms": time / 1e3} for line, time in total.most_common(SHOWN)
    }


def lines_of(launches: list[Event], events: list[Event]) -> Iterator[tuple[Event, str]]:
    """Yield each launch with the name of the host event that it belongs to.

    One pass over each thread in order of time, with the open events on a stack.
    """
    around: dict[Any, list[tuple[float, float, Event]]] = defaultdict(list)
    for each in events:
        if each.get("cat") in ("python_function", "cpu_op"):
            around[each["tid"]].append((each["ts"], -each["dur"], each))
    for launch in launches:
        around[launch["tid"]].append((launch["ts"], 0.0, launch))
    wanted = {id(launch) for launch in launches}
    for thread in around.values():
        open_: list[Event] = []
        for when, _, each in sorted(thread, key=lambda one: one[:2]):
            while open_ and open_[-1]["ts"] + open_[-1]["dur"] < when:
                open_.pop()
            if id(each) in wanted:
                yield each, innermost(open_)
            else:
                open_.append(each)


def is_launch(event: Event) -> bool:
    """Whether a host event started work of the GPU."""
    return event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})


def innermost(open_: list[Event]) -> str:
    """Return the innermost Python function of the packages, else the outermost event."""
    for each in reversed(open_):
        if each["cat"] == "python_function" and "kenotron_" in each["name"]:
            return short(each["name"])
    return short(open_[0]["name"]) if open_ else "unknown"


def short(name: str) -> str:
    """Return ``folder/file.py(12): function`` without the folders above."""
    path, separator, rest = name.partition(".py")
    return "/".join(Path(path).parts[-2:]) + separator + rest if separator else name[:90]


def profile_item(compiled: bool) -> Item:
    """Make the item that profiles steps of the 1B shape."""

    def run(setting: Setting) -> Iterator[Result]:
        mesh, config = Mesh.connect(device=setting.device), llama(setting, "1b")
        trainer = Trainer(config, mesh, dtype=torch.bfloat16, compiled=compiled)
        batch = draw_batch(config, mesh, micros=1, rows=1, length=sequence(setting), seed=0)

        def call() -> object:
            return trainer.step(batch)

        events = traced(setting, call, stacks=False)
        kinds = KERNELS if setting.device == "cuda" else ("cpu_op",)
        top = top_kernels(events, kinds)
        launched = sum(each.get("cat") in kinds for each in events)
        yield busy_share(events) | {"kernels a step": launched / setting.pick(STEPS, 1)}
        yield top
        check(bool(top), "the trace holds no kernels")
        found = gaps(events)
        whole = sum(pause for pause, _ in found) / 1e3
        yield {"gaps over 20 µs": len(found), "ms in those gaps": whole}
        if setting.device == "cuda":
            again = traced(setting, call, stacks=True)
            lines = host_lines(again, gaps(again))
            yield {f"gap before {line}": row for line, row in lines.items()}

    name = "compiled" if compiled else "eager"
    return Item(f"1b, {name}: kernels and gaps", 110, run)


ITEMS = [profile_item(False), profile_item(True)]
