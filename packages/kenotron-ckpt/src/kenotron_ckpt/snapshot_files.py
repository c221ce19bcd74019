"""Files of a snapshot, written by several threads while training continues."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from kenotron_ckpt.share import WritePlan, share_as_json
from kenotron_ckpt.snapshot import Snapshot
from kenotron_ckpt.store import Store
from kenotron_ckpt.threads import together
from kenotron_ckpt.writer import Share, write_part


def write_snapshot(
    step_folder: Store,
    stem: str,
    plan: WritePlan,
    snapshot: Snapshot,
    rank_state: Any = None,
    *,
    threads: int,
    verify: bool = False,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write this rank's parts, and copy those that the snapshot had no room for.

    Args:
        step_folder, stem: where the files come, and how their names begin.
        plan, snapshot: of one save.
        rank_state: see ``save``.
        threads: files that are written at a time.
        verify: read every file back.
        begin: called first by every thread (``set_device``).

    Returns:
        ``share_as_json`` of them. Raises OSError.
    """
    waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for index in snapshot.first:
        waiting.put(index)
    shares: list[Share] = []
    errors: list[BaseException] = []
    threads = min(threads, len(plan.parts))

    def work() -> None:
        while (index := waiting.get()) is not None:
            try:
                hosts = snapshot.ready(index)
                shares.append(write_part(step_folder, stem, plan.parts[index], hosts, verify))
                if (following := snapshot.reuse(index)) is not None:
                    waiting.put(following)
            except BaseException as error:
                errors.append(error)
            if errors or len(shares) == len(plan.parts):
                for _ in range(threads):
                    waiting.put(None)

    together(work, threads, begin)
    if errors:
        raise errors[0]
    return share_as_json(sorted(shares, key=lambda share: min(share[1])), plan.empty, rank_state)
