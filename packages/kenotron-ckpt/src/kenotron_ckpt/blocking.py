"""The same saver for those who rather wait than have a copy of all values in host memory."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kenotron_ckpt import saving
from kenotron_ckpt.blocks import Tensors
from kenotron_ckpt.collective_errors import on_first
from kenotron_ckpt.folder import read_manifest
from kenotron_ckpt.report import SaveReport
from kenotron_ckpt.saver import Saver
from kenotron_dist import Handle


class BlockingSaver(Saver):
    """A ``Saver`` whose ``save`` returns when the checkpoint stands: collective over the mesh."""

    def reserve(self, tensors: Tensors, volatile: Collection[str] = ()) -> None:
        """Nothing is needed: one block at a time is copied to the host."""

    def save(
        self,
        step: int,
        tensors: Tensors,
        state: Mapping[str, Any],
        config_text: str | None = None,
        *,
        rank_state: Any = None,
        volatile: Collection[str] = (),
        pending: Sequence[Handle] = (),
    ) -> None:
        """Save. Raises ValueError on all ranks for what cannot be saved, and SaveFailed."""
        begun = time.perf_counter()
        self._check_open(step)
        for handle in pending:
            handle.wait()
        failure, nbytes, trouble, removed = "", 0, "", []
        try:
            folder = saving.save(
                self.folder,
                step,
                tensors,
                self.mesh,
                state,
                config_text,
                rank_state=rank_state,
                file_bytes=self._file_bytes,
                verify=self._verify,
            )
        except OSError as error:
            failure = str(error)
        durable = time.perf_counter() - begun
        if not failure:
            nbytes, removed, trouble = on_first(self.mesh, lambda: self._after(folder))
        self._note(
            SaveReport(
                step=step,
                folder=self.folder / str(step),
                failure=failure,
                nbytes=nbytes,
                blocked=time.perf_counter() - begun,
                durable=durable,
                removed=removed,
                follow_up=trouble,
            )
        )
        self._raise_failure()

    def _after(self, folder: Any) -> tuple[int, list[int], str]:
        """Bytes of the checkpoint, steps removed, and what went wrong with that."""
        nbytes = sum(entry.bytes for entry in read_manifest(folder).files.values())
        return nbytes, *self._follow_up(folder)
