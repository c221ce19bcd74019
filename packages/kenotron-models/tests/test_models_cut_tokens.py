"""Layers of transformers that compute their norms and residuals with a part of the tokens."""

import torch
from torch import nn

from kenotron_dist import Axis
from kenotron_dist.placement import parameter_layouts
from kenotron_models.transformers_sequence import cut_tokens


class Scaled(nn.Module):
    """A layer with a norm, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(4), nn.Parameter(torch.ones(4))


def test_own_parameters_of_a_layer_have_gradients_of_a_part_of_the_tokens():
    cut_tokens("layers.0", layer := Scaled(), Axis("tp", 0, (0, 1)))
    found = parameter_layouts(layer, {"tp": 2})
    assert found.keys() == {"scale", "norm.weight", "norm.bias"}
    assert all(each.partial_axes == ("tp",) for each in found.values()), found
