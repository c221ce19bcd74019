"""Keys of routing that the configs of families with experts share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import get_args

from kenotron_models.experts import ExpertsSpec
from kenotron_models.router import Balance


@dataclass(frozen=True, kw_only=True)
class RoutingFields:
    """How tokens are spread over experts; a config of a family inherits it."""

    router_aux_loss_type: Balance = "sample"
    """Over which tokens router_aux_loss_coef spreads the load. sample: those of each sample, in
    each layer (seq_aux_loss of Megatron-LM). micro_batch: those of a micro-batch, in each layer
    (its aux_loss). all_layers: those of a micro-batch, in all layers together, one loss for the
    model (Hugging Face's load_balancing_loss_func); pp must be 1. With an even load the first two
    are 1 in each layer, the third is the number of experts of a token."""
    router_jitter_noise: float = 0.0
    """In a training, features that a router reads are multiplied by uniform random numbers from 1
    minus this to 1 plus this. Experts read the features without noise (ST-MoE); Hugging Face's
    Mixtral multiplies those, too."""
    expert_capacity_factor: float | None = None
    """In a training an expert keeps of each sample at most this many times its even share of
    choices, rounded up; later tokens go without it, also where the balance is bad. Evaluation and
    generation drop nothing. None: nothing is ever dropped."""

    def routing_problems(self, experts: str, top_k: str) -> list[str]:
        """Name values that these keys do not have.

        Args:
            experts: key of the number of experts.
            top_k: key of the experts of a token.
        """
        found, kinds, noise = [], get_args(Balance), self.router_jitter_noise
        if self.router_aux_loss_type not in kinds:
            found.append(
                f"router_aux_loss_type: {self.router_aux_loss_type!r} was given; it must be one of "
                f"{', '.join(kinds)}"
            )
        if not 0 <= noise < 1:
            found.append(
                f"router_jitter_noise: {noise} was given; it must be at least 0 and below 1"
            )
        return found + self._capacity_problems(experts, top_k)

    def _capacity_problems(self, experts: str, top_k: str) -> list[str]:
        """A capacity that is none: without room, or with room for every choice."""
        factor, name = self.expert_capacity_factor, "expert_capacity_factor"
        number, each = getattr(self, experts), getattr(self, top_k)
        if factor is None or not 1 <= each <= number:
            return []
        if not 0 < factor < float("inf"):
            return [f"{name}: {factor} was given; it must be a finite number above 0, or null"]
        if factor * each < number:
            return []
        return [
            f"{name}: {factor} was given; from {experts} / {top_k} ({number / each:g}) on there is "
            "room for every choice and nothing is dropped: give less, or null"
        ]

    def small_capacity(self, experts: int, top_k: int) -> float | None:
        """Return the factor of a small copy with so many experts, and experts of a token."""
        factor = self.expert_capacity_factor
        return None if factor is None or factor * top_k >= experts else factor

    def routed(self, experts: ExpertsSpec, layers: Iterable[int]) -> dict[int, ExpertsSpec]:
        """Return ``experts`` with what these keys say, for each of the ``layers`` (from 0)."""
        numbers = [*dict.fromkeys(layers)]
        router = replace(
            experts.router,
            balance=self.router_aux_loss_type,
            layers=len(numbers) if self.router_aux_loss_type == "all_layers" else 1,
            jitter=self.router_jitter_noise,
        )
        changed = replace(experts, router=router, capacity_factor=self.expert_capacity_factor)
        return dict.fromkeys(numbers, changed)
