"""Position of a run in its data: three integers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Cursor:
    """Position of a run in its data; the same on every rank and for every layout.

    Args:
        stage: number of the data stage.
        epoch: epoch of the next sample, consumed // (samples of the dataset).
        consumed: samples that the stage's steps have taken so far, over all ranks.

    Raises:
        ValueError: a value is negative or no integer.
    """

    stage: int = 0
    epoch: int = 0
    consumed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        for name, value in asdict(self).items():
            if type(value) is not int or value < 0:
                raise ValueError(
                    f"the cursor's {name} must be an integer of 0 or more, not {value!r}"
                )

    def to_dict(self) -> dict[str, int]:
        """Return the values as a dict that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> "Cursor":
        """Read what `to_dict` wrote; ValueError names keys that are missing or unknown."""
        needed = [field.name for field in fields(cls)]
        if sorted(values) != sorted(needed):
            raise ValueError(
                f"a cursor is saved with the keys {needed}, but these were read: {sorted(values)}"
            )
        return cls(**values)
