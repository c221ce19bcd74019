"""Options of a mixture of experts.

Shapes: E experts, K experts of a token, F features of an expert, S tokens of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kenotron_ep import DispatchWay
from kenotron_models.mlp import Activation, ClampedSwiGLU, MLPSpec
from kenotron_models.router import RouterSpec


@dataclass(frozen=True, kw_only=True)
class ExpertsOptions:
    """Sizes of a layer of experts, and what follows from them; a config has checked them."""

    router: RouterSpec
    """Rule by which they are chosen."""
    features: int
    """F, inner width of each."""
    gated: bool = True
    """True where they have a gate."""
    activation: Activation | ClampedSwiGLU = "silu"
    """Their activation."""
    bias: bool = False
    """Their matrices have biases."""
    transposed: bool = False
    """Matrices are stored with input features first, and features of gate and up alternate, as in
    gpt-oss."""
    shared_features: int = 0
    """Inner width of the shared expert; 0: there is none."""
    shared_gate: bool = False
    """The shared expert's result is multiplied by a sigmoid of each token."""
    way: Literal["alltoall", "allgather", "auto"] = "alltoall"
    """Method of exchanging tokens with their experts over ep; auto: see ``way_over``. The numbers
    are the same; gradients of tokens that are gathered are equal to rounding."""
    capacity_factor: float | None = None
    """In a training an expert keeps ``ceil(capacity_factor * K * S / E)`` choices of each sample of
    S tokens, and drops later ones (``expert_capacity``); None: all are kept."""

    def way_over(self, ranks: int) -> DispatchWay:
        """Return how tokens travel over so many ranks of ep.

        ``auto`` gathers where a token has more experts than there are ranks: it is then sent fewer
        times (``kenotron_ep.exchange_traffic``).
        """
        if self.way != "auto":
            return self.way
        return "allgather" if 1 < ranks < self.router.top_k else "alltoall"

    @property
    def shared(self) -> MLPSpec | None:
        """The shared expert."""
        if not self.shared_features:
            return None
        return MLPSpec(features=self.shared_features, gated=self.gated, activation=self.activation)

    def mixing_flops(self, batch: int, sequence: int, *, causal: bool) -> int:
        """Count nothing: all its operations are products with matrices."""
        return 0

    def idle(self, width: int) -> int:
        """Count the elements of the experts that a token is not sent to."""
        unused = self.router.experts - self.router.top_k
        return unused * self._matrices * self.features * width

    def cost(self, width: int) -> int:
        """Count the products of the router, of K experts and of the shared one."""
        shared = 0 if self.shared is None else self.shared.cost(width)
        active = self.router.top_k * self._matrices * self.features * width
        return active + self.router.experts * width + shared

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2
