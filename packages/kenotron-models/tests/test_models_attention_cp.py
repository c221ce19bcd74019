"""Rows that are cut over ranks: the loss and every gradient are one process's."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from attention_cases import positions
from decoder_gradients import SPECS, complete, gradients
from torch import Tensor

from kenotron_dist import Axis, spawn
from kenotron_models import Build, Context, LayerStack, SequenceCut, build_decoder
from kenotron_models.layers import Block, KVCache


@cache
def on_one(name: str) -> tuple[float, dict[str, Tensor]]:
    ranks = spawn(gradients, name, "plain")
    return ranks[0][0], complete(ranks)


CASES = [
    ("all", "plain", "ring", "none", {"cp": 2}),
    ("all", "sequence", "gather", "full", {"cp": 2, "tp": 2}),
    ("all", "plain", "ulysses", "selective", {"cp": 4}),
    ("blocked", "plain", "ring", "selective", {"cp": 3}),
    ("mqa", "sequence", "ulysses", "none", {"cp": 2, "tp": 2}),
    ("mqa", "plain", "gather", "full", {"cp": 4}),
    ("width", "sequence", "ulysses", "selective", {"cp": 2, "tp": 2}),
    ("capped", "plain", "ring", "none", {"cp": 2}),
    ("capped", "sequence", "gather", "full", {"cp": 2, "tp": 2}),
    ("capped", "plain", "ulysses", "selective", {"cp": 4}),
    ("sinks", "plain", "ring", "selective", {"cp": 3}),
    ("sinks", "sequence", "gather", "none", {"cp": 2, "tp": 2}),
    ("sinks", "plain", "ulysses", "full", {"cp": 4}),
    ("all-variants", "sequence", "ulysses", "selective", {"cp": 2, "tp": 2}),
    ("places", "plain", "ring", "none", {"cp": 2}),
    ("places", "sequence", "ulysses", "selective", {"cp": 2, "tp": 2}),
]


@pytest.mark.parametrize(("name", "mode", "way", "again", "axes"), CASES, ids=str)
@pytest.mark.by_turns(6)
def test_every_gradient_is_that_of_whole_rows(
    name: str, mode: str, way: str, again: str, axes: dict[str, int]
) -> None:
    loss, want = on_one(name)
    ranks = spawn(gradients, name, mode, way, again, **axes)
    assert all(rank[0] == pytest.approx(loss, rel=1e-5) for rank in ranks)
    got = complete(ranks)
    assert set(got) == set(want)
    for path, tensor in want.items():
        deviation = (got[path] - tensor).abs().max() / tensor.abs().max()
        assert deviation < 2e-5, path


@pytest.mark.parametrize(("name", "axis"), [("width", "tp"), ("capped", "cp"), ("sinks", "tp")])
def test_compiled_layers_have_the_same_gradients(name: str, axis: str) -> None:
    loss, want = on_one(name)
    ranks = spawn(gradients, name, "plain", "ring", "none", True, **{axis: 2})
    assert ranks[0][0] == pytest.approx(loss, rel=1e-5)
    for path, tensor in complete(ranks).items():
        assert (tensor - want[path]).abs().max() / want[path].abs().max() < 2e-5, path


def cut_context(**more: object) -> Context:
    whole = positions(15)
    cut = SequenceCut(Axis("cp", 0, (0, 1)), whole)
    return Context(whole[:, :8], cut=cut, **more)


def test_a_part_that_needs_whole_rows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = LayerStack(build_decoder(SPECS["mqa"], Build(Axis.solo("tp"), device=None)))
    block = stack.get_submodule("layers.0")
    assert isinstance(block, Block) and block.cuts_sequence
    with pytest.raises(ValueError, match="over 2 ranks of cp, and a key-value cache keeps whole"):
        block(torch.zeros(24, 24), cut_context(cache=KVCache(16)))
    monkeypatch.setattr(type(block.get_submodule("attention")), "cuts_sequence", False)
    with pytest.raises(ValueError, match="attention or mlp needs whole ones: do not cut them"):
        block(torch.zeros(24, 24), cut_context())


def test_padding_is_no_token_of_the_rows() -> None:
    cut = SequenceCut(Axis("cp", 0, (0, 1)), positions(15))
    assert len(cut.places_S) == 8 and int(cut.places_S.max()) == 15  # place 15 is padding
    real = cut.real_tokens(torch.device("cpu"))
    assert len(real) == 3 * 7
    assert (cut.places_S.repeat(3)[real] < 15).all()
