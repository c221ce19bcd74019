"""A batch goes to an accelerator through pinned memory, without blocking the thread."""

import pytest
import torch

from kenotron_data.batch import Batch

ZEROS = torch.zeros(2, 1, 4, dtype=torch.int64)


def pretend(monkeypatch, count):
    """Let torch see GPUs."""
    device = torch.device("cuda") if count else None
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: device
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.fixture
def calls(monkeypatch):
    """What is asked of tensors: there is no accelerator here."""
    found = []

    def pin(self):
        found.append("pin")
        return self.clone()

    def to(self, device, non_blocking=False):
        found.append((str(device), non_blocking))
        return self

    pretend(monkeypatch, 2)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return found


def batch():
    return Batch(ZEROS, ZEROS, ZEROS, torch.zeros(2, 1, dtype=torch.int64))


def test_copies_to_an_accelerator_are_queued_from_pinned_memory(calls):
    batch().to("cuda:1")
    assert calls == ["pin"] * 4 + [("cuda:1", True)] * 4


def test_a_micro_batch_goes_the_same_way(calls):
    batch()[0].to(torch.device("cuda", 1))
    assert calls == ["pin"] * 4 + [("cuda:1", True)] * 4


def test_on_a_cpu_nothing_is_pinned(calls):
    batch().to("cpu")
    assert calls == [("cpu", False)] * 4  # values from an accelerator must have arrived


def test_positions_stay_on_the_host_too():
    there = batch().to("meta")
    assert there.positions_MBS.is_meta and there.host_positions_MBS is ZEROS
    assert there.to("meta").host_positions_MBS is ZEROS
    assert there[1].host_positions_BS.equal(ZEROS[1])
    assert there[1].to("meta").host_positions_BS.equal(ZEROS[1])
    assert batch().host_positions_MBS is batch().to("cpu").host_positions_MBS is None


@pytest.mark.parametrize(
    ("device", "count", "seen"),
    [("cuda", 0, "none"), ("cuda:2", 2, "2 of type cuda"), ("xpu", 2, "2 of type cuda")],
)
def test_a_device_that_is_not_there_is_an_error(monkeypatch, device, count, seen):
    pretend(monkeypatch, count)
    for each in (batch(), batch()[0]):
        with pytest.raises(
            ValueError, match=f"cannot move a batch to '{device}': torch .* sees {seen}: give 'cpu'"
        ):
            each.to(device)
