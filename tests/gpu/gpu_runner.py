"""Run items one by one, each in a process of its own, and append one JSON line for each.

The parent imports torch but never touches the device: a child that is forked has nothing to load,
and a dead CUDA context dies with its child.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from gpu_items import Item, NotRunError, Result, Setting

DRY_SECONDS = 120.0
"""Timeout of every item of a dry run."""
LEAST_SECONDS = 5.0
"""An item that has less time left than this is not started."""
ERROR_LINES = 12
"""Lines of a traceback, or of a crashed item's output, that a record keeps."""
FORK = multiprocessing.get_context("fork")
NEW = multiprocessing.get_context("spawn")


class _Running(NamedTuple):
    item: Item
    process: BaseProcess
    scratch: Path
    began: float
    limit: float


def run_part(
    part: str,
    items: Sequence[Item],
    setting: Setting,
    record: Callable[[Result], None],
    *,
    seconds: float,
    workers: int = 1,
    fresh: str = "",
) -> list[Result]:
    """Run the items of one part.

    Args:
        part: name of the part.
        items: in the order of their value.
        setting: device and size; its ``scratch`` is the folder for the folders of the items.
        record: called with the record of each item as soon as it has ended.
        seconds: time for the whole part; what does not fit is recorded as not run.
        workers: how many items run at the same time.
        fresh: name of the items' module: each item runs in a new interpreter, which finds it there,
            and not in a fork of this process.

    Returns:
        The records in the order in which the items ended.
    """
    end = time.monotonic() + seconds
    records: list[Result] = []
    waiting, running = list(items), []

    def keep(name: str, status: str, took: float, found: Result) -> None:
        entry = {"part": part, "item": name, "status": status, "seconds": round(took, 2), **found}
        records.append(entry)
        record(entry)

    try:
        while waiting or running:
            while waiting and len(running) < workers:
                each = waiting.pop(0)
                reason = why_not(each, setting, end - time.monotonic())
                if reason:
                    keep(each.name, "not run", 0.0, {"reason": reason})
                else:
                    running.append(_start(each, setting, end, fresh))
            soonest = min((one.began + one.limit for one in running), default=0.0)
            wait([one.process.sentinel for one in running], max(soonest - time.monotonic(), 0.0))
            for one in list(running):
                over = time.monotonic() > one.began + one.limit
                if over or not one.process.is_alive():
                    running.remove(one)
                    took = time.monotonic() - one.began
                    status, found = _outcome(one)
                    keep(one.item.name, status, took, found)
    finally:  # an exception or a signal: nothing that was started stays on the device
        for one in running:
            _outcome(one)
    return records


def why_not(each: Item, setting: Setting, left: float) -> str:
    """Return why an item is not run; empty when it is."""
    if setting.dry and each.gpu:
        return f"needs a GPU: {each.gpu}"
    missing = [name for name in each.needs if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} cannot be imported here"
    if left < LEAST_SECONDS:
        return "the time of its part was used up"
    return ""


def _start(each: Item, setting: Setting, end: float, fresh: str) -> _Running:
    scratch = Path(tempfile.mkdtemp(dir=setting.scratch))
    own = Setting(setting.device, setting.dry, scratch)
    process: BaseProcess = FORK.Process(target=_body, args=(each, own))
    if fresh:
        process = NEW.Process(target=_find_and_run, args=(fresh, each.name, own))
    began = time.monotonic()
    limit = DRY_SECONDS if setting.dry else each.seconds
    process.start()
    return _Running(each, process, scratch, began, min(limit, end - began))


def _find_and_run(module: str, name: str, setting: Setting) -> None:
    items = importlib.import_module(module).ITEMS
    _body(next(each for each in items if each.name == name), setting)


def _body(each: Item, setting: Setting) -> None:
    """Run one item; what it found, and how it ended, are in files of its scratch folder."""
    os.setsid()  # all processes that it starts end with it
    files = setting.scratch / "outcome.json", setting.scratch / "output.txt"
    log = os.open(files[1], os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    inner = setting.scratch / "f"
    inner.mkdir()
    tempfile.tempdir = str(inner)
    found: Result = {}

    def write(status: str, error: str = "") -> None:
        outcome = {"status": status, "result": jsonable(found), "error": error}
        files[0].with_suffix(".new").write_text(json.dumps(outcome))
        files[0].with_suffix(".new").rename(files[0])

    try:
        setting.prepare()
        for new in each.run(Setting(setting.device, setting.dry, inner)):
            found |= new
            write("unfinished")
        write("ok")
    except NotRunError as reason:
        write("not run", str(reason))
    except BaseException:
        write("failed", last_lines(traceback.format_exc()))
    os._exit(0)  # no finalisation: a broken context may hang in it


def _outcome(one: _Running) -> tuple[str, Result]:
    """End what is left of an item; its status and what it found."""
    late = one.process.is_alive()
    code = None if late else one.process.exitcode
    if one.process.pid is not None:
        try:
            os.killpg(one.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            one.process.kill()
    one.process.join()
    try:
        outcome = json.loads((one.scratch / "outcome.json").read_text())
    except FileNotFoundError:
        outcome = {"status": "unfinished", "result": {}, "error": ""}
    output = one.scratch / "output.txt"
    text = output.read_text(errors="replace") if output.exists() else ""
    shutil.rmtree(one.scratch, ignore_errors=True)
    found: Result = {"result": outcome["result"]}
    if outcome["status"] == "ok":
        return "ok", found
    if outcome["status"] == "not run":
        return "not run", found | {"reason": outcome["error"]}
    if outcome["status"] == "failed":
        return "failed", found | {"error": outcome["error"]}
    said = last_lines(text)
    if late:
        return "timeout", found | {"error": f"ended after {one.limit:.0f} s\n{said}".strip()}
    name = signal.Signals(-code).name if code is not None and code < 0 else f"code {code}"
    return "failed", found | {"error": f"its process ended with {name}\n{said}".strip()}


def call_apart(call: Callable[[], Any], *, fresh: bool = False) -> Any:
    """Return what ``call`` returns in a child; both must pickle.

    Args:
        call: made in the child, which may touch the device.
        fresh: the child is a new interpreter, and not a fork of this process.

    Raises:
        RuntimeError: the child failed; the message is the last line of its traceback.
    """
    context: Any = NEW if fresh else FORK
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(call, theirs))
    process.start()
    theirs.close()
    try:
        good, value = ours.recv()
    except EOFError:
        good, value = False, "its process died"
    process.join()
    if not good:
        raise RuntimeError(value)
    return value


def _answer(call: Callable[[], Any], pipe: Connection) -> None:
    try:
        pipe.send((True, call()))
    except BaseException:
        pipe.send((False, last_lines(traceback.format_exc(), 1)))
    os._exit(0)


def append(file: Path, entry: Result) -> None:
    """Append one JSON line to a file and flush it to the disk."""
    with file.open("a") as stream:
        stream.write(json.dumps(jsonable(entry)) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def last_lines(text: str, count: int = ERROR_LINES) -> str:
    """Return the last lines of a text that are not empty, each at most 300 characters."""
    lines = [line.rstrip()[:300] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:])


def jsonable(value: Any) -> Any:
    """Return ``value`` made of JSON values: floats with 6 digits, nan and inf as text."""
    if isinstance(value, dict):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, int | str | None) else str(value)
