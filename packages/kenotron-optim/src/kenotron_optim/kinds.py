"""What kind of parameter each one is, from the modules that own them.

Layers are known by what they are, not by where they come from: a norm by the name of its class, an
embedding by its attribute ``num_embeddings``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from kenotron_dist import TensorLayout
from kenotron_optim.config import Kind

ANY_SHAPE = (nn.LayerNorm, nn.RMSNorm)
"""Norms whose parameters may have more than one dimension."""
NORM_CLASS = re.compile(r"norm(\dd)?$", re.IGNORECASE)


def parameter_kinds(
    model: nn.Module, layouts: Mapping[str, TensorLayout]
) -> dict[str, frozenset[Kind]]:
    """The kinds of every logical tensor of a *whole* model (it may be on meta) that has any.

    - ``norms``: parameters with at most one dimension of a module whose class, or a base of it, is
      named ...Norm, ...Norm1d or the like; all parameters of ``nn.LayerNorm`` and ``nn.RMSNorm``.
    - ``biases``: named ``bias``, ``bias_...`` or ``..._bias``.
    - ``embeddings``: tables (two dimensions or more) of a module that has ``num_embeddings``.

    A norm's bias is of two kinds; a tied tensor has the kinds of all its owners. Parameters that
    stand alone (positions as a plain ``nn.Parameter``) have none: name them by regular expressions.

    Arguments: the model; its layouts, by parameter name. Pure: the same on every rank. Raises
    ValueError for a parameter without layout.
    """
    found: dict[str, frozenset[Kind]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            path = ".".join(part for part in (*prefix.split("."), name) if _is_real(part))
            if path not in layouts:
                raise ValueError(
                    f"no layout for parameter {path!r}: layouts are of the whole model"
                )
            if kinds := _kinds(module, name, parameter.ndim):
                logical = layouts[path].name
                found[logical] = found.get(logical, frozenset()) | kinds
    return found


def _is_real(part: str) -> bool:
    """Whether a part of a name is the model's own: torch.compile's wrapper adds ``_orig_mod``."""
    return part not in ("", "_orig_mod")


def _kinds(module: nn.Module, name: str, dims: int) -> set[Kind]:
    kinds: set[Kind] = set()
    named_norm = any(NORM_CLASS.search(cls.__name__) for cls in type(module).__mro__)
    if isinstance(module, ANY_SHAPE) or (named_norm and dims <= 1):
        kinds.add("norms")
    if name == "bias" or name.startswith("bias_") or name.endswith("_bias"):
        kinds.add("biases")
    if dims >= 2 and hasattr(module, "num_embeddings"):
        kinds.add("embeddings")
    return kinds
