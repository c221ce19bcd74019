"""torch's optimizers, without the import of its compiler.

torch marks some of their methods as not to be compiled, and the first call of each imports
``torch._dynamo``, which takes every rank more than a second at the start. The methods themselves
are the same here; none is compiled.
"""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer


class Uncompiled(Optimizer):
    """``torch.optim.Optimizer``."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class AdamW(Uncompiled, torch.optim.AdamW):
    """``torch.optim.AdamW``."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(Uncompiled, torch.optim.SGD):
    """``torch.optim.SGD``."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))
