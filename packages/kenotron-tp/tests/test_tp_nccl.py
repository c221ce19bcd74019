"""The layers over NCCL against whole ones; without a GPU over the fake NCCL, on the CPU."""

import pytest
import test_tp_cross_entropy as cross_entropy
import test_tp_embedding as embedding
import test_tp_linear as linear
import test_tp_logits as logits
import test_tp_losses as losses
import test_tp_model as model
import torch

from kenotron_dist.testing import on_nccl


def layers(mesh):
    assert mesh["tp"].on_device
    linear.check_grid(mesh)
    embedding.check_grid(mesh)


@pytest.mark.parametrize("tp", [2, 4])
def test_cut_layers_are_whole_layers(tp):
    on_nccl(layers, tp=tp)


def all_losses(mesh):
    cross_entropy.check_grid(mesh)
    losses.check_all(mesh)


def test_losses_are_those_of_whole_logits():
    on_nccl(all_losses, tp=2)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_cut_decoder_trains_as_the_whole_one(tp):
    on_nccl(model.check_modes, tp=tp)


def test_every_cut_chooses_the_same():
    one, two = (on_nccl(logits.choices, tp=tp)[0] for tp in (1, 2))
    assert torch.equal(one, two)
