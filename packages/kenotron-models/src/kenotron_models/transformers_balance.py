"""The balance loss of a transformers model with experts, as one process computes it.

transformers' ``load_balancing_loss_func`` takes the router logits of all layers of a micro-batch.
It is a product of two sums over them, so layers add to the sums, which travel through the pipeline
next to the hidden features, and the head multiplies.

Shapes: T tokens of this rank, E experts, K experts of a token.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist.autograd import reduce_from
from kenotron_models.context import Context
from kenotron_models.experts import Collects
from kenotron_models.transformers_plan import base_of

FUNCTION = "load_balancing_loss_func"
"""Name that all families give their function."""
ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Its arguments; a family with others has a loss of its own."""
WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Attributes of a model that hold the weight of this loss."""


@dataclass(frozen=True)
class BalanceLoss:
    """``E * sum_i f_i P_i`` over the tokens of all routers: transformers' ``aux_loss``.

    f_i is the number of tokens that chose expert i over all tokens, P_i the mean of its softmax.
    """

    weight: float
    """Factor of it in the loss."""
    experts: int
    """E."""
    top_k: int
    """K."""

    def zeros(self, device: torch.device) -> Tensor:
        """Return the sums of no layers: fp32 (2, E)."""
        return torch.zeros(2, self.experts, device=device)

    def add(self, sums: Tensor, logits: Sequence[Tensor], context: Context) -> Tensor:
        """Add to sums (2, E) choices and softmax of routers: their ``logits`` are (T, E) each."""
        real = _real_tokens(context)
        for logits_TE in logits:
            scores = logits_TE.softmax(-1)
            chosen = scores.detach().topk(self.top_k).indices  # (T, K)
            counts = torch.zeros_like(sums[0]).scatter_add_(
                0, chosen.flatten(), real.repeat_interleave(self.top_k)
            )
            sums = sums + torch.stack([counts, (scores.float() * real[:, None]).sum(0)])
        return sums

    def of(self, sums: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return the loss of a micro-batch without its weight, and its tokens: two scalars.

        Collective over cp where rows are cut. The gradient is that of this rank's tokens.
        """
        own = torch.cat([sums.flatten(), _real_tokens(context).sum()[None]])
        if context.cut is not None:
            own = reduce_from(own, context.cut.axis)
        counts, mass = own[:-1].detach()[: self.experts], own[self.experts : -1]
        routed = (counts.sum() / self.top_k).clamp(min=1)  # tokens of all layers
        return self.experts * (counts * mass).sum() / routed.square(), own[-1].detach()


class AddsBalance(nn.Module):
    """The last layer of a model with a balance loss; one without has ``balance`` None."""

    balance: BalanceLoss | None = None
    auxiliary_losses: Collects | None = None
    _found: Tensor | None = None

    @property
    def adds_loss(self) -> bool:
        """Return True where it adds a loss; see ``kenotron_pp``."""
        return self.balance is not None

    def add_balance(self, sums: Tensor, context: Context) -> None:
        """Add the loss of sums (2, E) to that of the micro-batch: its gradient, and 0 to the value.

        A micro-batch counts by its share of the tokens of the global batch.
        """
        assert self.balance is not None
        loss, tokens = self.balance.of(sums, context)
        found = torch.stack([loss.detach() * tokens, tokens])
        self._found = found if self._found is None else self._found + found
        if self.auxiliary_losses is not None and context.loss_weight is not None:
            loss = loss * (self.balance.weight * tokens * context.loss_weight)
            self.auxiliary_losses.add(loss - loss.detach())

    def take_balance(self) -> Tensor | None:
        """Return the sum of losses times tokens, and of tokens, (2,), and begin again at 0."""
        found, self._found = self._found, None
        return found


class RouterLogits:
    """Logits (T, E) that the routers below a module computed in its last forward."""

    def __init__(self, model: Any, path: str, inside: nn.Module) -> None:
        self._found: list[Tensor] = []
        for name, module in inside.named_modules():
            for recorder in _recorders(model):
                where = (recorder.layer_name or "").strip(".")
                fits = not where or f".{where}." in f".{path}.{name}."
                if isinstance(module, recorder.target_class) and fits:
                    module.register_forward_hook(_Keep(self._found, recorder.index))

    def take(self) -> list[Tensor]:
        """Return the logits, and forget them."""
        found = [logits.flatten(0, -2) for logits in self._found]
        self._found.clear()
        return found


class _Keep:
    """A forward hook that keeps one of a module's results."""

    def __init__(self, found: list[Tensor], index: int) -> None:
        self.found, self.index = found, index

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.found.append(output[self.index])


def balance_of(model: Any) -> BalanceLoss | None:
    """Return the balance loss that a model adds with ``output_router_logits``; None: none.

    Raises:
        ValueError: it is computed in another way than that of all other families.
    """
    function = getattr(sys.modules[type(model).__module__], FUNCTION, None)
    if function is None or not _recorders(model):
        return None
    weight = next((w for name in WEIGHTS if (w := getattr(model, name, None)) is not None), None)
    experts, top_k = (getattr(model, n, None) for n in ("num_experts", "num_experts_per_tok"))
    known = tuple(inspect.signature(function).parameters) == ARGUMENTS
    if weight is None or experts is None or top_k is None or not known:
        raise ValueError(
            f"config.json of a {model.config.model_type}: output_router_logits is true, and its "
            "balance loss is computed in a way that is not known here: set it to false"
        )
    return BalanceLoss(float(weight), int(experts), int(top_k))


def _recorders(model: Any) -> list[Any]:
    """Return transformers' ``OutputRecorder`` of router logits."""
    known = getattr(base_of(model), "_can_record_outputs", None) or {}
    given = known.get("router_logits", [])
    return given if isinstance(given, list) else [given]


def _real_tokens(context: Context) -> Tensor:
    """Return 1 for each token (T,) of this rank, fp32, and 0 for padding."""
    if context.padding_BS is None:
        return torch.ones(context.tokens, device=context.positions_BS.device)
    return (~context.padding_BS).flatten().float()
