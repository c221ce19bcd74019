"""A plain module and its optimizer: saved beside the training, resumed bit for bit."""

import random

import pytest
import torch
from torch import nn

from kenotron_ckpt import Saver, load_plain, plain_state, plain_tensors, random_state
from kenotron_dist import Mesh

torch.set_num_threads(1)


class Net(nn.Module):
    """Shared weights, a buffer that the forward changes, one that is not saved."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.head(self.norm(self.embedding(x)) * self.weight)


def step(net, optimizer, number, before_update=lambda: None):
    x = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(number))
    loss = nn.functional.cross_entropy(net(x), x.roll(1))
    optimizer.zero_grad()
    loss.backward()
    before_update()
    optimizer.step()
    return loss.item()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, make):
    mesh, net = Mesh.connect(), Net(0)
    optimizer = make(net.parameters())
    losses = []
    with Saver(tmp_path, mesh, every=4) as saver:
        for number in range(1, 11):
            losses.append(step(net, optimizer, number, saver.wait))
            optimizer.param_groups[0]["lr"] *= 0.9
            state = {"options": plain_state(optimizer)}
            saver.maybe_save(number, plain_tensors(net, optimizer), state)
    again = Net(1)
    fresh = make(again.parameters())
    loaded = load_plain(tmp_path / "4", again, fresh)
    for group, options in zip(fresh.param_groups, loaded.state["options"], strict=True):
        group.update(options)
    assert loaded.unused == loaded.missing == []
    resumed = []
    for number in range(5, 11):
        resumed.append(step(again, fresh, number))
        fresh.param_groups[0]["lr"] *= 0.9
    assert resumed == losses[4:]
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def noisy(net, optimizer):
    """A step that draws its input."""
    optimizer.zero_grad()
    loss = net(torch.randn(8, 4) + random.random()).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.param_groups[1]["lr"] *= 0.5
    return loss.item()


def two_groups(net):
    groups = [{"params": [net.weight]}, {"params": [net.bias], "betas": (0.5, 0.6)}]
    return torch.optim.AdamW(groups, lr=0.02)


def test_rates_and_random_streams_come_back_with_the_rest(tmp_path):
    net = nn.Linear(4, 2)
    optimizer = two_groups(net)
    with Saver(tmp_path, Mesh.connect()) as saver:
        noisy(net, optimizer)
        state = {"optimizer_groups": plain_state(optimizer)}
        saver.save(1, plain_tensors(net, optimizer), state, rank_state=random_state())
        saver.wait()
        losses = [noisy(net, optimizer) for _ in range(3)]
    again = nn.Linear(4, 2)
    fresh = two_groups(again)
    load_plain(tmp_path, again, fresh)
    assert fresh.param_groups[1]["lr"] == 0.01 and fresh.param_groups[1]["betas"] == (0.5, 0.6)
    assert [noisy(again, fresh) for _ in range(3)] == losses
    one = torch.optim.AdamW(again.parameters())
    weight = again.weight.clone()
    with pytest.raises(ValueError, match="options of 2 groups of parameters, but the optimizer ha"):
        load_plain(tmp_path, again, one)
    assert torch.equal(weight, again.weight)
    load_plain(tmp_path, again)  # parameters alone
    assert not torch.equal(weight, again.weight)


def test_buffers_may_change_before_the_wait(tmp_path):
    net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256))
    with Saver(tmp_path, Mesh.connect(), pool_bytes=4096) as saver:  # not all copies fit
        saver.save(1, plain_tensors(net), {})
        net(torch.randn(8, 64) + 5)  # changes running_mean
        saver.wait()
    again = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256))
    load_plain(tmp_path, again)
    assert net[1].running_mean.count_nonzero() == 256
    assert again[1].running_mean.count_nonzero() == 0
    assert again[1].num_batches_tracked == 0


def test_what_has_two_names_is_kept_once():
    net = Net(0)
    names = {*plain_tensors(net)}
    assert "embedding.weight" in names
    assert "head.weight" not in names
    assert "scratch" not in names


def test_parameters_alone_are_read_from_a_checkpoint_with_an_optimizer(tmp_path):
    net = Net(0)
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer, 1)
    with Saver(tmp_path, Mesh.connect()) as saver:
        saver.save(1, plain_tensors(net, optimizer), {})
    loaded = load_plain(tmp_path, other := Net(1))
    assert torch.equal(other.weight, net.weight)
    assert all(name.startswith("optimizer.") for name in loaded.unused)
    assert len(loaded.unused) == 3 * len([*net.parameters()])


def test_an_optimizer_of_another_module_is_refused():
    net, other = Net(0), Net(1)
    with pytest.raises(ValueError, match=r"group 0 of the optimizer has a parameter of shape "):
        plain_tensors(net, torch.optim.SGD(other.parameters(), lr=1.0))


def test_state_that_is_no_tensor_is_refused():
    net = Net(0)
    optimizer = torch.optim.LBFGS(net.parameters())
    optimizer.state[net.weight]["func_evals"] = 3
    with pytest.raises(ValueError, match="the optimizer's func_evals of weight is a int: only ten"):
        plain_tensors(net, optimizer)
    tensor_lr = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.1), foreach=False)
    with pytest.raises(ValueError, match="the optimizer's lr is a tensor: give it a number"):
        plain_state(tensor_lr)


def test_a_module_of_another_shape_is_refused_before_anything_changes(tmp_path):
    with Saver(tmp_path, Mesh.connect()) as saver:
        saver.save(1, plain_tensors(nn.Linear(3, 4)), {})
    other = nn.Linear(5, 4)
    before = other.bias.clone()
    with pytest.raises(ValueError, match=r"weight: the record has shape \[4, 3\], the model \[4, "):
        load_plain(tmp_path, other)
    assert torch.equal(other.bias, before)
