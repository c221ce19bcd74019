"""The section `doremi`: domains of the data, and how a proxy run learns their weights."""

import math
from dataclasses import dataclass

SUM_TOLERANCE = 1e-3
"""Largest deviation of the sum of domain weights from 1."""


@dataclass(frozen=True, kw_only=True)
class DoReMiConfig:
    """Weights of domains: given ones, or learned ones (Xie et al., arXiv 2305.10429)."""

    domain_names: str | tuple[str, ...]
    """The domains, a list or with commas between; data set i of each stage is domain i."""
    smoothing_param: float = 1e-3
    """Share of even weights that is mixed in after each update."""
    step_size: float = 1.0
    """Rate at which the weights of domains move."""
    domain_weights: str | tuple[float, ...] | None = None
    """Share of each domain in the samples of this run; None: equal shares."""
    ref_model_resume_checkpoint_path: str | None = None
    """Checkpoint of the reference model, which makes this run the proxy; None: a run that is
    trained with `domain_weights`, such as the reference and the final one."""
    reference_losses_path: str | None = None
    """Folder of the reference's losses, for a proxy run; None: `reference_losses` in
    `checkpoints.checkpoints_path`."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*_wrong_names(self.names, self.domain_names)]
        if not 0 <= self.smoothing_param < 1:
            found.append(
                f"smoothing_param: {self.smoothing_param} was given; it must be from 0 to below 1"
            )
        if not 0 < self.step_size < math.inf:
            found.append(f"step_size: {self.step_size} was given; it must be finite and above 0")
        found += self._wrong_weights()
        if found:
            raise ValueError("\n".join(found))

    @property
    def names(self) -> tuple[str, ...]:
        """The domains, in the order given."""
        given = self.domain_names
        return tuple(
            name.strip() for name in (given.split(",") if isinstance(given, str) else given)
        )

    @property
    def is_proxy(self) -> bool:
        """True where the run learns weights."""
        return self.ref_model_resume_checkpoint_path is not None

    @property
    def shares(self) -> dict[str, float]:
        """The weight of each domain in the samples, by name."""
        weights = self._weights
        if weights is None:
            return dict.fromkeys(self.names, 1 / len(self.names))
        return dict(zip(self.names, weights, strict=True))

    @property
    def _weights(self) -> tuple[float, ...] | None:
        given = self.domain_weights
        if isinstance(given, str):
            return tuple(float(part) for part in given.split(","))
        return given

    def _wrong_weights(self) -> list[str]:
        """Say what is wrong with the weights, if anything is."""
        key, count = "domain_weights", len(self.names)
        try:
            weights = self._weights
        except ValueError:
            return [
                f"{key}: {self.domain_weights!r} was given; it must be numbers with commas between"
            ]
        if weights is None:
            return []
        if len(weights) != count:
            return [
                f"{key}: {len(weights)} weights were given; domain_names has {count} domains: give "
                "one weight for each"
            ]
        if wrong := [each for each in weights if not 0 <= each < math.inf]:
            return [f"{key}: {wrong[0]} was given; a weight is a finite number from 0 on"]
        total = math.fsum(weights)
        if abs(total - 1) > SUM_TOLERANCE:
            scaled = ", ".join(f"{each / total:.4g}" for each in weights) if total else "equal ones"
            return [
                f"{key}: {', '.join(f'{each:g}' for each in weights)} was given, with the sum "
                f"{total:.6g}; it must be 1 (to {SUM_TOLERANCE:g}): for the same proportions give "
                f"{scaled}"
            ]
        if self.is_proxy and not all(weights):
            name = self.names[weights.index(0)]
            return [
                f"{key}: 0 was given for {name!r}; a proxy run learns the weight of a domain from "
                "its samples: give more than 0, or leave the domain out"
            ]
        return []


def _wrong_names(names: tuple[str, ...], given: object) -> list[str]:
    if len(names) >= 2 and all(names) and len(set(names)) == len(names):
        return []
    return [
        f"domain_names: {given!r} was given; it must name at least two domains, each once and none "
        "empty"
    ]
