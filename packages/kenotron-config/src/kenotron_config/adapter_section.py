"""The section of adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kenotron_config.field_checks import below, raise_all

Kind = Literal["lora", "dora"]


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapters of linear layers: they alone learn, and checkpoints have them alone."""

    kind: Kind = "lora"
    """`lora`: two narrow matrices next to each layer. `dora`: norms of its rows learn, too."""
    rank: int = 8
    """Width of these matrices."""
    alpha: float = 16.0
    """What is added has the factor alpha / rank."""
    targets: tuple[str, ...] = ("all",)
    """Layers: roles (`attention`, `mixer`, `mlp`, `experts`), ends of names (`q_proj`,
    `mlp.up_proj`) or patterns of them, of modules in Hugging Face's format or of ours; `all`: all
    linear layers of blocks. Stacks of experts are meant by their role, or by a name with the word
    `experts`."""
    dropout: float = 0.0
    """Share of the inputs of these matrices that is dropped in training."""
    path: str | None = None
    """Folder of an adapter that the peft package or kenotron-convert wrote, to begin with; None: it
    begins with the model unchanged."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = below("rank", self.rank, 1)
        if self.kind not in get_args(Kind):
            found.append(f"kind: {self.kind} was given; it must be one of lora, dora")
        if not 0 < self.alpha < float("inf"):
            found.append(f"alpha: {self.alpha} was given; it must be finite and above 0")
        if not 0 <= self.dropout < 1:
            found.append(f"dropout: {self.dropout} was given; it must be from 0 to below 1")
        if not self.targets:
            found.append("targets: nothing was given; name layers, or write [all]")
        raise_all(found)
