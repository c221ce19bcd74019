"""Names, shapes and order of rows of a Mamba's tensors in Nanotron's files.

Shapes: h hidden, C channels, N features of a state, R rank of the steps, W width of the
convolution. There row 2j of ``in_proj`` is that of x of channel j, row 2j + 1 that of its z; here
all rows of x come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kenotron_nanotron.expert_names import Due, whole_numbers

_SIZES = {"d_state": 16, "d_conv": 4, "expand": 2}
"""Sizes of ``ssm_cfg`` that may be left out."""


def _x_then_z(rows: Tensor) -> Tensor:
    """(2 C, ...) with rows of x and z by turns -> all of x, then all of z."""
    return torch.cat([rows[0::2], rows[1::2]])


def mamba_layer(config: Mapping[str, Any], where: str) -> dict[str, Due]:
    """Return the tensors of a Mamba's layer by their name in the layer.

    Args:
        config: the values of ``model_config.json``.
        where: what errors begin with.

    Raises:
        ValueError: a size is missing, or no whole number.
    """
    (hidden,) = whole_numbers(config, ("d_model",), where)
    ssm = {**_SIZES, **(config.get("ssm_cfg") or {})}
    state, taps, expand = whole_numbers(ssm, tuple(_SIZES), f"{where}: ssm_cfg")
    rank = ssm.get("dt_rank", "auto")
    if rank == "auto":
        rank = -(-hidden // 16)
    elif type(rank) is not int:
        raise ValueError(f"{where}: ssm_cfg.dt_rank is {rank!r}; it must be a whole number or auto")
    channels = expand * hidden
    found = {
        "norm.weight": Due("mamba_norm.weight", (hidden,)),
        "mixer.in_proj.weight": Due("mamba.in_proj.weight", (2 * channels, hidden), _x_then_z),
        "mixer.conv1d.weight": Due("mamba.conv.weight", (channels, 1, taps)),
        "mixer.x_proj.weight": Due("mamba.x_proj.weight", (rank + 2 * state, channels)),
        "mixer.dt_proj.weight": Due("mamba.dt_proj.weight", (channels, rank)),
        "mixer.dt_proj.bias": Due("mamba.dt_proj.bias", (channels,)),
        "mixer.A_log": Due("mamba.A_log", (channels, state)),
        "mixer.D": Due("mamba.D", (channels,)),
        "mixer.out_proj.weight": Due("mamba.out_proj.weight", (hidden, channels)),
    }
    if ssm.get("conv_bias", True):
        found["mixer.conv1d.bias"] = Due("mamba.conv.bias", (channels,))
    if not config.get("rms_norm", True):
        found["norm.bias"] = Due("mamba_norm.bias", (hidden,))
    return found


def mamba_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model configuration of a Mamba as a program here has it.

    Nanotron reads no ``ssm_cfg.bias``: its projections have none. ``fused_add_norm`` and ``dtype``
    change nothing.
    """
    found = {name: value for name, value in config.items() if not name.startswith("_")}
    if found.get("ssm_cfg"):
        found["ssm_cfg"] = {**found["ssm_cfg"], "bias": False}
    return found
