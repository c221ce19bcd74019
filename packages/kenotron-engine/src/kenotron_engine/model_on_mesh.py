"""A model on its mesh, without anything that updates it: what evaluation and generation take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from kenotron_data import MicroBatch
from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters
from kenotron_engine.assembly import Model, Records
from kenotron_engine.model_plan import ModelPlan
from kenotron_engine.sequence import Share, chunk_of, share_of


@dataclass(frozen=True, kw_only=True)
class ModelOnMesh:
    """This rank's stage of a model, what the model is made of, and the ranks that share it."""

    plan: ModelPlan
    mesh: Mesh
    model: Model

    @property
    def replicas_are_apart(self) -> bool:
        """True where replicas (ranks of dp and cp) make their forward passes without one another.

        They do unless experts are cut over them.
        """
        return self.mesh.sizes["tp"] % self.mesh.config.ep == 0  # ep ranks are neighbours along tp

    def share_of(
        self,
        batch: Iterable[MicroBatch],
        dropout_key: int | None = None,
        count: Tensor | None = None,
    ) -> Share:
        """Return this rank's tokens of its micro-batches (``kenotron_engine.sequence``).

        ``count``: see there; a scalar of shape ().
        """
        plan = self.plan
        how = dropout_key, count, plan.virtual_chunks, plan.virtual_shards
        return share_of(plan.cp_mode, plan.spec, self.mesh, batch, *how)

    def own_chunks(self, share: Share) -> list[tuple[ModelOnMesh, Share]]:
        """Return this model and its tokens for the loss of each virtual chunk of this rank."""
        if self.plan.virtual_chunks == 1:
            return [(self, share)]
        return [
            (replace(self, model=replace(self.model, chunk=i)), chunk_of(share, i))
            for i in range(self.plan.virtual_chunks // self.mesh.sizes["cp"])
        ]

    def with_one_use(self) -> ModelOnMesh:
        """Return this model with one use of its head, whose gradients of several losses are one.

        Without virtual chunks autograd adds them.
        """
        if self.model.chunk is None:
            return self
        return replace(self, model=replace(self.model, used=self.model.head))

    def records(self) -> Records:
        """Return this stage's parameters as checkpoint records."""
        layouts = self.model.layouts
        return {
            layouts[path].name: (parameter.detach(), layouts[path])
            for path, parameter in named_parameters(self.model.stack).items()
        }
