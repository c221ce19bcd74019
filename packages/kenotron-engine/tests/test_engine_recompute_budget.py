"""As few layers compute activations again as fit in a given memory."""

from __future__ import annotations

import pytest

from kenotron_engine import StageLayers, recompute_within

KEPT = {"none": 100, "selective": 60, "full": 10}
STAGES = [StageLayers(range(4), 2.0), StageLayers(range(4, 8), 1.0)]


def chosen(room: float) -> str:
    found = recompute_within(room, STAGES, lambda _, again: KEPT[again])
    return " ".join(each[0] for each in found)


@pytest.mark.parametrize(
    ("room", "want"),
    [
        (800, "n n n n n n n n"),  # 2 x 400, and 400
        (799, "s n n n n n n n"),
        (480, "s s s s n n n n"),  # 2 x 240
        (479, "f s s s n n n n"),
        (300, "f f s s s s s n"),  # 2 x (10 + 10 + 60 + 60), and 60 + 60 + 60 + 100
        (90, "f f f f f f f s"),  # 2 x 40, and 10 + 10 + 10 + 60
        (80, "f f f f f f f f"),
    ],
)
def test_as_little_is_computed_again_as_fits(room: float, want: str) -> None:
    assert chosen(room) == want


def test_no_choice_that_fits_is_an_error() -> None:
    with pytest.raises(ValueError, match="7.9e-08 GB were given .* pipeline rank 0 keeps 8e-08 GB"):
        chosen(79)
