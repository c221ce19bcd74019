"""The arguments of update rules, as plain dataclasses (no torch, no YAML here)."""

from dataclasses import dataclass
from typing import Literal

from kenotron_optim.config_fields import INFINITY, raise_all, regex


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, 2019), under the names that Nanotron gives its arguments.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    adam_eps: float
    """Added to the root of the second moment."""
    adam_beta1: float
    """Share of the first moment that each update keeps."""
    adam_beta2: float
    """Share of the second moment that each update keeps."""
    torch_adam_is_fused: bool
    """True: one fused kernel updates all tensors; the rounding may differ in the last bit."""
    name: Literal["adamW"] = "adamW"
    """Marks a YAML mapping as this class."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if self.name != "adamW":
            found.append(f"name: {self.name!r} was given; AdamW's is 'adamW'")
        if not 0 < self.adam_eps < INFINITY:
            found.append(f"adam_eps: {self.adam_eps} was given; it must be finite and above 0")
        for name, beta in (("adam_beta1", self.adam_beta1), ("adam_beta2", self.adam_beta2)):
            if not 0 <= beta < 1:
                found.append(f"{name}: {beta} was given; it must be at least 0 and below 1")
        raise_all(found)


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent; weight decay is added to the gradient.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    momentum: float = 0.0
    """Share of the velocity that each update keeps; 0: plain descent, which has no state."""
    dampening: float = 0.0
    """Share of the gradient that is kept out of the velocity."""
    nesterov: bool = False
    """True: the gradient is looked at one step of the velocity ahead (Nesterov, 1983)."""
    name: Literal["sgd"] = "sgd"
    """Marks a YAML mapping as this class."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if self.name != "sgd":
            found.append(f"name: {self.name!r} was given; SGD's is 'sgd'")
        for name, share in (("momentum", self.momentum), ("dampening", self.dampening)):
            if not 0 <= share <= 1:
                found.append(f"{name}: {share} was given; it must be from 0 to 1")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            found.append(
                f"nesterov: true was given; it needs momentum above 0 ({self.momentum}) and "
                f"dampening 0 ({self.dampening})"
            )
        raise_all(found)


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon for matrices inside the model (Jordan et al., 2024), AdamW for everything else.

    Updates of matrices are scaled to the size of AdamW's (Liu et al., 2025), so that both take the
    same learning rate and weight decay. Each matrix is made orthogonal whole, by one rank, however
    it is cut. Each expert is a matrix, and so are q, k, v, gate and up.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    momentum: float = 0.95
    """Share of the velocity that each update keeps."""
    nesterov: bool = True
    """True: the gradient is looked at one step of the velocity ahead (Nesterov, 1983)."""
    ns_steps: int = 5
    """Newton-Schulz iterations that make an update orthogonal."""
    per_head: bool = False
    """True: the part of each head in q, k and v is a matrix by itself."""
    adamw_named_params: tuple[str, ...] = ()
    """Regular expressions; a matrix whose whole name matches one is left to AdamW, as are embedding
    tables and the output layer, by the roles that modules declare."""
    adam_eps: float = 1e-8
    """AdamW's: added to the root of the second moment."""
    adam_beta1: float = 0.9
    """AdamW's: share of the first moment that each update keeps."""
    adam_beta2: float = 0.95
    """AdamW's: share of the second moment that each update keeps."""
    torch_adam_is_fused: bool = False
    """AdamW's: whether one fused kernel updates all tensors."""
    name: Literal["muon"] = "muon"
    """Marks a YAML mapping as this class."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if self.name != "muon":
            found.append(f"name: {self.name!r} was given; Muon's is 'muon'")
        if not 0 <= self.momentum < 1:
            found.append(f"momentum: {self.momentum} was given; it must be at least 0, below 1")
        if not 1 <= self.ns_steps < 100:
            found.append(f"ns_steps: {self.ns_steps} was given; it must be from 1 to 99")
        for pattern in self.adamw_named_params:
            found += regex("adamw_named_params", pattern)
        try:
            self.adamw()
        except ValueError as error:
            found += str(error).splitlines()
        raise_all(found)

    def adamw(self) -> AdamWConfig:
        """Return the rule that updates everything that is no matrix."""
        return AdamWConfig(
            adam_eps=self.adam_eps,
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            torch_adam_is_fused=self.torch_adam_is_fused,
        )


UpdateRule = AdamWConfig | SGDConfig | MuonConfig
