"""State of a training between steps besides tensors: values that decide steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


class StepOutcome(Protocol):
    """Results of a step that a policy reads, the same on every rank."""

    @property
    def minimised(self) -> float:
        """The loss that was differentiated, without parts that are not reported."""
        ...

    @property
    def grad_norm(self) -> float:
        """2-norm of the gradient before clipping."""
        ...

    @property
    def is_finite(self) -> bool:
        """True where loss and gradient were finite."""
        ...

    @property
    def overflow(self) -> bool:
        """True where the step was left out because gradients did not fit in float16."""
        ...

    @property
    def skipped(self) -> bool:
        """True where parameters stayed as they were."""
        ...

    @property
    def figures(self) -> Mapping[str, Any]:
        """Further numbers by name."""
        ...


class Policy:
    """One value that decides about a step and follows from those before; it is never changed.

    A policy of one's own overrides what it decides. The same on every rank.
    """

    name: ClassVar[str]
    """Of its entry in a checkpoint's state."""

    @property
    def loss_factor(self) -> float:
        """Factor of the loss of the next step, a power of two."""
        return 1.0

    @property
    def may_overflow(self) -> bool:
        """True where this policy can make a gradient finite that is not."""
        return False

    def blocks(self, loss: Tensor, norm: Tensor) -> Tensor | None:
        """Decide on the device whether the step changes nothing; None: it may.

        Args:
            loss: the loss that is differentiated, a scalar.
            norm: 2-norm of its gradient, a scalar.

        Returns:
            A bool scalar; the host decides the same by ``reason``.
        """
        return None

    def reason(self, loss: float, norm: float) -> str:
        """Return why a step with these numbers changes nothing; empty where it may."""
        return ""

    def after(self, result: StepOutcome) -> Self:
        """Return the policy of the next step."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values."""
        return {}

    def restored(self, saved: Mapping[str, Any]) -> Self:
        """Undo ``to_dict``, under the settings of this one. ValueError for a state of another."""
        return self

    @property
    def figures(self) -> dict[str, Any]:
        """Metrics of the next step, by name."""
        return {}


AnyPolicy = TypeVar("AnyPolicy", bound=Policy)


@dataclass(frozen=True)
class StepState:
    """The policies of a training, in the order in which they are asked."""

    policies: tuple[Policy, ...] = ()

    def find(self, kind: type[AnyPolicy]) -> AnyPolicy | None:
        """Return the policy of a kind, if there is one."""
        return next((each for each in self.policies if isinstance(each, kind)), None)

    @property
    def loss_factor(self) -> float:
        """Factor of the loss of the next step."""
        return math.prod(each.loss_factor for each in self.policies)

    @property
    def may_overflow(self) -> bool:
        """True where a policy can make a gradient finite that is not."""
        return any(each.may_overflow for each in self.policies)

    def blocks(self, loss: Tensor, norm: Tensor) -> list[Tensor]:
        """Return what each policy decides on the device, bool scalars; see ``Policy.blocks``."""
        found = [each.blocks(loss, norm) for each in self.policies]
        return [each for each in found if each is not None]

    def reason(self, loss: float, norm: float) -> str:
        """Return why a step with these numbers changes nothing; empty where it may."""
        return "; ".join(filter(None, (each.reason(loss, norm) for each in self.policies)))

    def after(self, result: StepOutcome) -> StepState:
        """Return the state of the next step."""
        return StepState(tuple(each.after(result) for each in self.policies))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return what a checkpoint keeps, by the names of policies."""
        return {each.name: each.to_dict() for each in self.policies}

    def restored(self, saved: Mapping[str, Any]) -> StepState:
        """Undo ``to_dict``: a policy that ``saved`` lacks begins afresh.

        Raises:
            ValueError: a value makes no sense, or is of other settings.
        """
        return StepState(
            tuple(
                each.restored(saved[each.name]) if saved.get(each.name) else each
                for each in self.policies
            )
        )

    @property
    def figures(self) -> dict[str, Any]:
        """Metrics of the next step, by name."""
        return {name: value for each in self.policies for name, value in each.figures.items()}
