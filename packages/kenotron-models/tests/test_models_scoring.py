"""Every field of a scoring with every back end: as the reference has it, or refused by name."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest
import torch
from attention_cases import deviation, inputs, positions, sight_of, with_gradients
from torch import Tensor

from kenotron_cp import Scoring
from kenotron_dist.rng import counter_key
from kenotron_models import Context, attention_flash, attention_varlen
from kenotron_models.attention_backends import BACKENDS, AttentionBackend, attend, attend_kept
from kenotron_models.attention_mask import AttentionMask
from kenotron_models.attention_reference import attend_plain, dropout_of

SINKS = torch.linspace(-1, 2, 4)
SETTINGS = {"scale": {}, "cap": {"cap": 0.9}, "sinks": {"sinks": SINKS}, "dropout": {}}
TABLE = [(backend, field) for backend in BACKENDS for field in SETTINGS]
SIGHT = sight_of(torch.arange(15).expand(3, 15))


def scoring_with(field: str, sinks: Tensor | None = None) -> Scoring:
    """A scoring with that field, and ``sinks`` if they are given."""
    context = Context(positions(15), torch.arange(3) + 7, counter_key(1))
    dropout = dropout_of(context, 0.2, 0, 0) if field == "dropout" else None
    more = SETTINGS[field] | ({} if sinks is None else {"sinks": sinks})
    return Scoring(0.7, dropout=dropout, **more)


def by_reference(q, k, v, softmax_scale, softcap=0.0, **how) -> Tensor:
    """What flash-attn computes of whole rows."""
    assert how == {"causal": True, "window_size": (-1, -1), "deterministic": False}
    sight = sight_of(torch.arange(q.shape[1])[None])
    return attend_plain(q, k, v, sight, Scoring(softmax_scale, softcap or None))


def of_lengths(
    q, k, v, begins, begins_of_keys, longest, longest_of_keys, *, scale, **how
) -> Tensor:
    """What torch's kernel for sequences of several lengths computes, rows of 15 tokens here."""
    assert how == {"window_size": (-1, 0)} and begins.tolist() == [0, 15, 30, 45]
    rows = [x.unflatten(0, (3, 15)) for x in (q, k, v)]
    return attend_plain(*rows, SIGHT, Scoring(scale)).flatten(0, 1)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back ends of other devices, computed by the reference."""
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=by_reference))
    monkeypatch.setattr(attention_flash, "installed", lambda: True)
    monkeypatch.setattr(attention_flash, "problem", lambda q: None)
    accepted = frozenset({"scale"})
    monkeypatch.setattr(attention_varlen, "_kernel", lambda: (of_lengths, accepted))


def test_the_table_has_every_field_and_no_other() -> None:
    names = {field.name for field in fields(Scoring)}
    assert names == set(SETTINGS) == BACKENDS["plain"].supports
    for backend in BACKENDS.values():
        assert "scale" in backend.supports <= names


def computed(backend: AttentionBackend, field: str, dtype: torch.dtype) -> list[Tensor]:
    """Output, and gradients of q, k, v and of sinks where there are some."""
    tensors = inputs(3, 15, 4, 4) + ([SINKS.clone()] if field == "sinks" else [])

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return BACKENDS[backend].attend(q, k, v, SIGHT, scoring_with(field, sinks))

    return with_gradients(function, tensors, dtype)


@pytest.mark.parametrize(("backend", "field"), TABLE)
def test_a_back_end_applies_a_field_or_refuses_it(
    everywhere: None, backend: AttentionBackend, field: str
) -> None:
    if field in BACKENDS[backend].supports:
        want, got = computed("plain", field, torch.float64), computed(backend, field, torch.float32)
        assert len(want) == len(got) == 4 + (field == "sinks")
        for ours, right in zip(got, want, strict=True):
            assert deviation(ours, right) <= 1e-5
    elif field == "dropout":  # a model may train with dropout and be evaluated without it
        plain = attend_plain(*inputs(3, 15, 4, 4), SIGHT, scoring_with(field))
        assert torch.equal(attend(*inputs(3, 15, 4, 4), SIGHT, scoring_with(field), backend), plain)
    else:
        with pytest.raises(ValueError, match=f"attention back end {backend} has no {field}: choos"):
            attend(*inputs(3, 15, 4, 4), SIGHT, scoring_with(field), backend)


@pytest.mark.parametrize("field", SETTINGS)
def test_auto_takes_a_back_end_that_applies_it(everywhere: None, field: str) -> None:
    tensors, want = inputs(3, 15, 4, 4), computed("plain", field, torch.float64)[0]
    assert deviation(attend(*tensors, SIGHT, scoring_with(field)).double(), want) <= 1e-5


@pytest.mark.parametrize("field", SETTINGS)
def test_a_cache_applies_a_field_or_refuses_it(field: str) -> None:
    q, k, v = inputs(3, 15, 4, 4)
    kept, scoring = (k.transpose(1, 2), v.transpose(1, 2)), scoring_with(field)
    if field == "dropout":
        with pytest.raises(ValueError, match="attention to a cache has no dropout: remove it, or"):
            attend_kept(q[:, -2:], *kept, None, scoring)
        return
    mask = AttentionMask(SIGHT.context).full_mask_BSS[:, None, -2:]
    want = attend_plain(q, k, v, SIGHT, scoring)[:, -2:]
    torch.testing.assert_close(attend_kept(q[:, -2:], *kept, mask, scoring), want)


@dataclass(frozen=True, eq=False)
class Tempered(Scoring):
    """A further field, as a variant of attention would add it."""

    temperature: Tensor | None = None


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_a_new_field_is_refused_by_every_back_end(backend: AttentionBackend) -> None:
    scoring, (q, k, v) = Tempered(0.7, temperature=torch.ones(4)), inputs(3, 15, 4, 4)
    named = "plain" if backend == "auto" else backend
    message = f"attention back end {named} has no temperature: no back end supports it"
    with pytest.raises(ValueError, match=message):
        attend(q, k, v, SIGHT, scoring, backend)
    with pytest.raises(ValueError, match="attention to a cache has no temperature"):
        attend_kept(q, k.transpose(1, 2), v.transpose(1, 2), None, scoring)
