"""How far tensors, and JSON values, of two checkpoints are apart."""

import pytest
import torch

from kenotron_ckpt.compare import distance, of_values


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_distance_is_the_same_however_many_elements_are_compared_at_once(monkeypatch, chunk):
    monkeypatch.setattr("kenotron_ckpt.compare._CHUNK", chunk)
    a = torch.tensor([1.0, float("nan"), float("inf"), -2.0, 0.0])
    same = distance(a, a.clone())
    assert (same.bitwise, same.unequal, same.largest) == (True, 0, 0.0)
    found = distance(a, a + torch.tensor([0.0, 0, 0, 0.25, 0.125]))
    assert (found.bitwise, found.unequal, found.largest) == (False, 2, 0.25)
    found = distance(a, torch.tensor([1.0, float("nan"), 5.0, -2.0, 0.0]))
    assert (found.unequal, found.largest) == (1, float("inf"))
    wide = torch.tensor([2**60, 7])
    found = distance(wide, torch.tensor([2**60 + 1, 7]))
    assert (found.bitwise, found.unequal) == (False, 1)
    flags = torch.tensor([True, False])
    assert distance(flags, ~flags).largest == 1.0
    half = distance(a[:1].bfloat16(), a[:1])
    assert (half.bitwise, half.unequal) == (False, 0)


def test_values_are_compared_by_path_and_type():
    a = {"x": [1, {"y": None}], "t": True, "n": float("nan")}
    assert list(of_values("s", a, {"x": [1, {"y": None}], "t": True, "n": float("nan")})) == []
    b = {"x": [1, {"y": 0}], "t": 1, "n": 2.0}
    assert list(of_values("s", a, b)) == [
        "s.n: nan in A, 2.0 in B", "s.t: True in A, 1 in B", "s.x.1.y: None in A, 0 in B"
    ]  # fmt: skip
    assert list(of_values("s", [1], [1, 2])) == ["s: [1] in A, [1, 2] in B"]
