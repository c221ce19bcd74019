"""The plan of what a rank writes, for one save after another."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kenotron_ckpt.blocks import Tensors, places_of
from kenotron_ckpt.share import WritePlan, plan_share
from kenotron_dist import Mesh


class SharePlans:
    """Plans a rank's files, again only where a tensor is at another place in memory."""

    def __init__(self, mesh: Mesh, file_bytes: int, **options: int) -> None:
        """Take what all plans have in common: arguments of ``plan_share``."""
        self._mesh, self._file_bytes, self._options = mesh, file_bytes, options
        self._places: list[Any] = []
        self._plan: WritePlan | None = None

    def plan(self, tensors: Tensors, volatile: Collection[str] = ()) -> WritePlan:
        """Return the plan for tensors; see ``plan_share``, also for the ValueError."""
        volatile = {*volatile, *getattr(tensors, "volatile", ())}
        places = [sorted(volatile), *places_of(tensors, self._mesh.view)]
        if self._plan is None or self._places != places:
            made = plan_share(tensors, self._mesh, self._file_bytes, volatile, **self._options)
            self._places, self._plan = places, made
        return self._plan

    def forget(self) -> None:
        """Drop the plan, which refers to tensors."""
        self._places, self._plan = [], None
