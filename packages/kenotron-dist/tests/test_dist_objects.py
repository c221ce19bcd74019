"""JSON values between ranks; a value that is not JSON is an error everywhere, and nobody hangs."""

import pytest

from kenotron_dist import Axis, all_reduce, broadcast_object, gather_objects
from kenotron_dist.testing import on_ranks

VALUES = [
    None, True, 0, -1.5, "", "é\u2028\x00", [], {}, {"a": [1, {"b": None}], "": "x"},
    2**70, "long" * 100_000, list(range(3000)), float("inf"),
]  # fmt: skip


def exchange(mesh):
    axis = mesh["tp"]
    for value in VALUES:
        for source in {0, axis.size - 1}:
            mine = value if axis.rank == source else {"not": "sent"}
            found = broadcast_object(mine, axis, source)
            assert found == value and type(found) is type(value)
    different = [VALUES[(axis.rank + i) % len(VALUES)] for i in range(len(VALUES))]
    for i, value in enumerate(different):
        expected = [VALUES[(rank + i) % len(VALUES)] for rank in range(axis.size)]
        assert gather_objects(value, axis) == expected
    changed = gather_objects({1: (2, 3)}, axis)
    assert changed == [{"1": [2, 3]}] * axis.size
    original = [1]
    assert broadcast_object(original, axis) is not original


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_values_arrive_as_they_were(tp):
    on_ranks(exchange, tp=tp)


def circle():
    loop = []
    loop.append(loop)
    return loop


def not_json(mesh):
    axis = mesh["tp"]
    errors = []
    for bad in ({1, 2}, circle(), b"bytes"):
        for verb in (gather_objects, lambda v, a: broadcast_object(v, a, 1)):
            with pytest.raises(TypeError) as error:
                verb(bad if axis.rank == 1 else "fine", axis)
            errors.append(str(error.value))
    all_reduce(__import__("torch").ones(3), axis)  # the group is as good as before
    assert gather_objects(axis.rank, axis) == list(range(axis.size))
    assert broadcast_object("fine" if axis.rank == 0 else {1}, axis) == "fine"  # never sent
    return errors


def test_a_value_that_is_not_json_is_an_error_on_all_ranks():
    first, *others = on_ranks(not_json, tp=3)
    assert first[:2] == [
        "gather_objects: the value of rank 1 is not JSON "
        "(TypeError: Object of type set is not JSON serializable)",
        "broadcast_object: the value of rank 1 is not JSON "
        "(TypeError: Object of type set is not JSON serializable)",
    ]
    assert "Circular reference" in first[2] and "bytes" in first[4]
    assert others == [first, first]


def test_one_rank_alone_and_an_index_that_is_no_rank():
    axis = Axis.solo("tp")
    assert broadcast_object((1,), axis) == [1]
    assert gather_objects("x", axis) == ["x"]
    with pytest.raises(TypeError, match="gather_objects: the value of rank 0 is not JSON"):
        gather_objects(object(), axis)
    with pytest.raises(ValueError, match="broadcast: index 1 is outside the tp axis of 1 ranks"):
        broadcast_object("x", axis, 1)
