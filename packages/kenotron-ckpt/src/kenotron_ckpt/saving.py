"""Synchronous saving: every rank writes its share, one rank commits, then all continue."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kenotron_ckpt.blocks import Tensors
from kenotron_ckpt.collective_errors import on_all, on_each, on_first
from kenotron_ckpt.committing import files_in, sweep
from kenotron_ckpt.folder import CONFIG, MANIFEST, manifest_at
from kenotron_ckpt.generation import Generation
from kenotron_ckpt.preparing import prepare
from kenotron_ckpt.protocol import SaveMoment, passed
from kenotron_ckpt.save_report import SaveReport
from kenotron_ckpt.share import (
    FILE_BYTES,
    WritePlan,
    check_state,
    commit_shares,
    plan_share,
    share_as_json,
    stem_of,
)
from kenotron_ckpt.store import Location, Store, store_at
from kenotron_ckpt.writer import streamed, write_part
from kenotron_dist import Mesh


def save(
    folder: Location,
    step: int,
    tensors: Tensors,
    mesh: Mesh,
    state: Mapping[str, Any],
    config_text: str | None = None,
    *,
    rank_state: Any = None,
    file_bytes: int = FILE_BYTES,
    verify: bool = False,
    generation: Generation | None = None,
) -> Store:
    """Write the checkpoint ``<folder>/<step>/`` and make it the latest.

    Collective over the mesh. A local ``folder`` must be shared by all nodes. One block at a time is
    copied to the host. On return the checkpoint is on the disk. A failure at any moment leaves what
    was there before (the former checkpoint of this step, or nothing that is taken for one) or the
    new one, whole.

    Args:
        folder: the run folder, a path, URL or store; made if need be. To a URL each rank sends its
            own files, one at a time, from a copy in the folder for temporary files (``TMPDIR``).
        step: training steps done, from 0.
        tensors: this rank's (local tensor, layout), by any unique key; ``layout.name`` names the
            record. With a ``FlatSlice`` in the layout the tensor is that slice, 1-D. The union
            over the ranks must be whole; padding is not stored; replicas must be equal.
        mesh: the ranks that call.
        state: JSON values (keys are strings, tuples come back as lists); rank 0's is written.
        config_text: text of a ``config.yaml`` for people to read; rank 0's is written.
        rank_state: JSON values of this rank's own, given back on the same mesh only.
        file_bytes: a rank starts another file when one would get more data than this.
        verify: read every file back from the disk before the commit.
        generation: start that saves, on rank 0; see ``Saver.generation``.

    Returns:
        The store of the checkpoint.

    Raises:
        ValueError: on every rank; a bad argument, a tensor that contradicts its layout, a record
            that is not covered exactly once, or a later generation has taken the run.
        OSError: on every rank; one cannot write.
    """
    step_folder = on_all(mesh, lambda: store_at(folder).at(str(step)))
    on_each(mesh, lambda: check_state(step, state, rank_state))
    plan = on_all(mesh, lambda: plan_share(tensors, mesh, file_bytes))
    try:
        tag = on_first(mesh, lambda: prepare(step_folder))
        shares = on_each(
            mesh, lambda: write_share(step_folder, stem_of(mesh, tag), plan, rank_state, verify)
        )
        what = (step_folder, shares, mesh, state, config_text, verify, generation)
        on_first(mesh, lambda: commit_shares(*what))
    except Exception:
        if mesh.rank == 0:
            discard(step_folder)
        raise
    return step_folder


def save_and_report(
    folder: Store,
    step: int,
    tensors: Tensors,
    mesh: Mesh,
    state: Mapping[str, Any],
    config_text: str | None,
    after: Callable[[Store], tuple[Sequence[int], str]],
    begun: float,
    rank_state: Any,
    **options: Any,
) -> SaveReport:
    """``save``, and report it: an OSError is in the report. Collective over the mesh.

    Args:
        folder, step, tensors, mesh, state, config_text, rank_state, options: see ``save``.
        after: called on rank 0 after the commit; returns ``removed`` and ``follow_up``.
        begun: when the caller began (``time.perf_counter``).
    """
    step_folder, failure = folder.at(str(step)), ""
    nbytes, removed, trouble = 0, [], ""
    try:
        save(folder, step, tensors, mesh, state, config_text, rank_state=rank_state, **options)
    except OSError as error:
        failure = str(error)
    durable = time.perf_counter() - begun

    def follow_up() -> tuple[int, Sequence[int], str]:
        entries = manifest_at(step_folder).files.values()
        return sum(entry.bytes for entry in entries), *after(step_folder)

    if not failure:
        nbytes, removed, trouble = on_first(mesh, follow_up)
    return SaveReport(
        step=step,
        store=step_folder,
        failure=failure,
        nbytes=nbytes,
        blocked=time.perf_counter() - begun,
        durable=durable,
        removed=removed,
        follow_up=trouble,
    )


def discard(step_folder: Store) -> None:
    """After a failed save: give the space back. What cannot be removed now, the next save will."""
    with contextlib.suppress(OSError):
        sweep(step_folder)
        if MANIFEST not in files_in(step_folder):
            step_folder.remove(CONFIG)
        step_folder.remove_folder()
        passed(SaveMoment.DISCARDED)


def write_share(
    step_folder: Store, stem: str, plan: WritePlan, rank_state: Any = None, verify: bool = False
) -> dict[str, Any]:
    """Write this rank's files, named from ``stem`` on; returns ``share_as_json`` of them."""
    shares = (
        write_part(step_folder, stem, part, streamed(part.blocks), verify) for part in plan.parts
    )
    return share_as_json(shares, plan.empty, rank_state)
