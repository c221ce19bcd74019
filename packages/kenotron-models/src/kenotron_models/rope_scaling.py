"""Scaling of rotary positions, as a plain dataclass (no torch here)."""

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

RopeType = Literal["llama3", "linear", "yarn"]
ONLY_OF = {
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "original_max_position_embeddings": ("llama3", "yarn"),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "truncate": ("yarn",),
    "attention_factor": ("yarn",),
}
"""Fields that not every type reads, and which do."""
NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary positions for longer texts than a model was trained on.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    factor: float
    """Times by which wave lengths grow."""
    rope_type: str = "llama3"
    """`llama3`: long waves grow, short ones stay; `yarn`: so too, with other bounds and a factor on
    the scores; `linear`: all grow."""
    low_freq_factor: float = 1.0
    """Of llama3: waves longer than the original length over this grow by the whole factor."""
    high_freq_factor: float = 4.0
    """Of llama3: waves shorter than the original length over this stay."""
    original_max_position_embeddings: int = 8192
    """Of llama3 and yarn: longest text of the first training, in tokens."""
    beta_fast: float = 32.0
    """Of yarn: waves that turn more often than this over that length stay."""
    beta_slow: float = 1.0
    """Of yarn: waves that turn less often than this over that length grow by the whole factor."""
    truncate: bool = True
    """Of yarn: the numbers of the waves at these two bounds are rounded outwards."""
    attention_factor: float | None = None
    """Of yarn: what queries and keys are multiplied with; None: 0.1 ln(factor) + 1."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if self.rope_type not in get_args(RopeType):
            found.append(
                f"rope_type: {self.rope_type!r} was given; it must be one of "
                f"{', '.join(get_args(RopeType))}"
            )
        for name in NUMBERS:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                found.append(f"{name}: {value} was given; it must be a finite number above 0")
        if 0 < self.factor < 1:
            found.append(f"factor: {self.factor} was given; it must be at least 1")
        if self.high_freq_factor <= self.low_freq_factor and self.rope_type == "llama3":
            found.append(
                f"high_freq_factor: {self.high_freq_factor} was given; it must be above "
                f"low_freq_factor ({self.low_freq_factor})"
            )
        if self.beta_fast <= self.beta_slow and self.rope_type == "yarn":
            found.append(
                f"beta_fast: {self.beta_fast} was given; it must be above beta_slow "
                f"({self.beta_slow})"
            )
        if (length := self.original_max_position_embeddings) < 1:
            found.append(
                f"original_max_position_embeddings: {length} was given; it must be at least 1"
            )
        if found:
            raise ValueError("\n".join(found))

    @property
    def as_read(self) -> "RopeScaling":
        """The same stretching: fields that its type does not read are at their defaults."""
        unread = {
            each.name: each.default
            for each in fields(self)
            if self.rope_type not in ONLY_OF.get(each.name, (self.rope_type,))
        }
        return replace(self, **unread)
