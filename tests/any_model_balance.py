"""The balance loss of families of transformers, cut over ranks, against their plain models."""

from __future__ import annotations

import logging
import warnings

import torch
from any_model import largest_share, part_of, whole_model
from tiny_transformers import SEQUENCE, VOCAB, tiny_json
from torch import Tensor

from kenotron_dist import DATA_AXES, Mesh, all_reduce, sum_gradients
from kenotron_dist.boxes import scatter
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_models import Context, transformers_names
from kenotron_models.families import TransformersConfig


class Collected:
    """Losses that layers add to a micro-batch."""

    def __init__(self) -> None:
        self.total = torch.zeros(())

    def add(self, scalar: Tensor) -> None:
        """Add one."""
        self.total = self.total + scalar


def balance_deviations(mesh: Mesh, kind: str) -> dict[str, float] | None:
    """Compare a family's balance loss and all its gradients; None: transformers has none for it.

    Raises ValueError where the family is refused.
    """
    text = tiny_json(kind, output_router_logits=True)
    spec = TransformersConfig(config_json=text).decoder
    stack = part_of(whole := whole_model(kind), spec, mesh)
    last = [*stack][-1]
    if getattr(last, "balance", None) is None:
        return None
    ids = torch.randint(3, VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    due = whole(input_ids=ids, use_cache=False, output_router_logits=True).aux_loss
    (due * last.balance.weight).backward()
    last.auxiliary_losses = losses = Collected()
    places, weight = torch.arange(SEQUENCE).expand(2, -1), torch.tensor(1 / ids.numel())
    stack(ids.flatten(), Context(places, loss_weight=weight))
    total, tokens = last.take_balance().tolist()
    assert tokens == ids.numel() and losses.total == 0
    losses.total.backward()
    sum_gradients(stack, mesh)
    found = {"loss": abs(total / tokens - float(due)) / float(due)}
    layouts, held = parameter_layouts(stack, mesh.axis_sizes), named_parameters(stack)
    grads = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    most = max(float(grad.abs().max()) for grad in grads.values() if grad is not None)
    for name, (theirs, *_) in transformers_names(spec).items():
        path = next(path for path, layout in layouts.items() if layout.name == name)
        layout, expected = layouts[path], grads.get(theirs)
        own = held[path].grad if held[path].grad is not None else torch.zeros_like(held[path])
        total = all_reduce(own, mesh[DATA_AXES[layout.grid]])
        expected = torch.zeros(layout.shape) if expected is None else expected
        found[name] = largest_share(total, scatter(expected, layout, mesh.view(layout)), most)
    return found


def compare_balance(mesh: Mesh, kinds: list[str]) -> dict[str, float | str]:
    """Return the largest deviation of each family that has a balance loss, or why it is refused."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: dict[str, float | str] = {}
    for kind in kinds:
        try:
            if (apart := balance_deviations(mesh, kind)) is not None:
                found[kind] = max(apart.values())
        except ValueError as error:
            found[kind] = str(error)
    return found
