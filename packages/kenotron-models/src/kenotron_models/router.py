"""The router of a mixture of experts: which experts each token is sent to, and with what weights.

Scores are fp32 whatever the model's format. The choice is stable: of equal scores the lower index
wins. Group-limited choice and the choice bias are DeepSeek-V3's (arXiv 2412.19437).

Shapes: T tokens, D hidden, E experts, K experts of a token, N groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from kenotron_dist import Roles
from kenotron_dist.placement import Partial, Placements
from kenotron_models.build import Build
from kenotron_tp import matmul

Scoring = Literal["softmax", "sigmoid"]
Balance = Literal["sample", "micro_batch", "all_layers"]
"""Tokens that a balance loss is computed over; see ``kenotron_models.router_losses.balance``."""
TINY = 1e-20
"""Added to a sum of weights, which may be 0 where scores are sigmoids."""
GROUP_BEST = 2
"""Experts whose scores make the score of a group."""


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Options for choosing experts; the config of a family has checked its sizes."""

    experts: int
    """E, experts of the layer."""
    top_k: int
    """K, experts that each token is sent to."""
    scoring: Scoring = "softmax"
    """Function from logits to scores: a softmax over all experts, or a sigmoid of each."""
    normalize: bool = False
    """Weights of a token are divided by their sum."""
    scale: float = 1.0
    """Factor of the final routing weights."""
    groups: int = 1
    """N, groups of neighbouring experts; divides E."""
    top_groups: int = 1
    """Groups that the experts of a token are chosen from."""
    bias: bool = False
    """Logits have a bias, which is trained as the weight is."""
    choice_bias: bool = False
    """Experts have a bias that is added to their scores for the choice alone."""
    bias_rate: float = 0.0
    """Number that an update adds to the choice bias of an expert with too few tokens, and subtracts
    from one with too many; 0: nothing."""
    force_balance: bool = False
    """Experts are dealt to tokens in turn, for measurements; weights are still those of scores."""
    jitter: float = 0.0
    """In a training, the features that a router reads are multiplied by uniform random numbers from
    1 - jitter to 1 + jitter; experts read them as they are."""
    balance_loss: float = 0.0
    """Weight of the loss that spreads tokens over experts (``router_losses.balance``)."""
    balance: Balance = "sample"
    """Over which tokens: those of each sample, those of a micro-batch, or those of a micro-batch in
    all layers together."""
    layers: int = 1
    """Layers of the model that have experts; ``all_layers`` divides by it."""
    z_loss: float = 0.0
    """Weight of the squared log of the sum of exponentials of a token's logits."""

    @property
    def balances_all_layers(self) -> bool:
        """True where there is a balance loss that needs the layers before this one."""
        return self.balance == "all_layers" and self.balance_loss > 0


class Choice(NamedTuple):
    """A router's decision for some tokens."""

    experts_TK: Tensor
    """Chosen experts, int64."""
    weights_TK: Tensor
    """Their weights, fp32, in the same order."""
    scores_TE: Tensor
    """Scores of all experts, fp32."""
    logits_TE: Tensor
    """Logits of all experts, fp32."""


class Router(nn.Module):
    """``weight`` (E, D): each rank routes its own tokens, so the gradient is partial over tp.

    With virtual shards (``Build.shards``) each rank routes all tokens.

    With ``bias`` there is a ``bias`` (E,), which is added to the logits.

    With ``choice_bias`` there is a ``choice_bias`` (E,), fp32 and without gradient: it is added to
    the scores for the choice alone, and moved after an update by ``move_bias`` (loss-free
    balancing: Wang et al., arXiv 2408.15664).
    """

    def __init__(self, spec: RouterSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.experts, width, **build.storage))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)
        own: Placements = {"weight": Partial(build.tp.name)} if build.shards == 1 else {}
        self.placements: Placements = own
        self.roles: Roles = {"weight": "router"}
        self.bias: nn.Parameter | None = None
        if spec.bias:
            self.bias = nn.Parameter(torch.zeros(spec.experts, **build.storage))  # (E,)
            if build.shards == 1:
                self.placements["bias"] = Partial(build.tp.name)
            self.roles["bias"] = "bias"
        self.choice_bias: nn.Parameter | None = None
        if spec.choice_bias:
            zeros = torch.zeros(spec.experts, device=build.device)
            self.choice_bias = nn.Parameter(zeros, requires_grad=False)
            self.roles["choice_bias"] = "bias"
        self.load: Tensor | None = None
        """Choices of each expert (E,) that this rank made since ``take_load``, int64."""
        self.drops: Tensor | None = None
        """Choices that were dropped of them, int64, a scalar."""

    def forward(
        self, x: Tensor, chosen: Tensor | None = None, noise: Tensor | None = None
    ) -> Choice:
        """Choose the experts of each token.

        Args:
            x: tokens (T, D).
            chosen: experts (T, K) that were chosen before, where a layer is computed again.
            noise: factors (T, D) of the tokens, fp32 (``router_jitter``); None: 1.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        x = x.to(wide) if noise is None else x.to(wide) * noise
        logits = matmul(x, self.weight.to(wide))
        if self.bias is not None:
            logits = logits + self.bias.to(wide)
        scores = logits.softmax(-1) if self.spec.scoring == "softmax" else logits.sigmoid()
        experts = self._choose(scores.detach()) if chosen is None else chosen
        weights = scores.gather(1, experts)
        if self.spec.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        return Choice(experts, weights * self.spec.scale, scores, logits)

    def _choose(self, scores: Tensor) -> Tensor:
        if self.spec.force_balance:
            turns = torch.arange(len(scores) * self.spec.top_k, device=scores.device)
            return (turns % self.spec.experts).view(len(scores), -1)
        bias = self.choice_bias
        return choose(scores if bias is None else scores + bias, self.spec)

    def count(self, experts: Tensor, kept: Tensor) -> None:
        """Add choices to the load, and to the drops.

        Args:
            experts: (T, K); -1 is none.
            kept: the same without those that were dropped.
        """
        every = torch.arange(self.spec.experts, device=experts.device)
        own = (experts.flatten()[:, None] == every).sum(0)
        self.load = own if self.load is None else self.load + own
        dropped = (experts != kept).sum()
        self.drops = dropped if self.drops is None else self.drops + dropped

    def take_load(self) -> Tensor:
        """Return the load (E,), and begin again at 0."""
        load, self.load = self.load, None
        zeros = torch.zeros(self.spec.experts, dtype=torch.int64, device=self.weight.device)
        return zeros if load is None else load

    def take_drops(self) -> Tensor:
        """Return the number of dropped choices, a scalar, and begin again at 0."""
        drops, self.drops = self.drops, None
        return torch.zeros((), device=self.weight.device).long() if drops is None else drops

    @torch.no_grad()
    def move_bias(self, load: Tensor, blocked: Tensor) -> None:
        """Move the choice bias towards an even load, if there is one; its mean stays 0.

        Args:
            load: choices of each expert (E,) in the global batch.
            blocked: whether nothing may change, a bool scalar.
        """
        if self.choice_bias is None or not self.spec.bias_rate:
            return
        load = load.double()
        moved = self.choice_bias + self.spec.bias_rate * (load.mean() - load).sign()
        moved = (moved - moved.mean()).to(self.choice_bias.dtype)
        self.choice_bias.copy_(torch.where(blocked, self.choice_bias, moved))

    def extra_repr(self) -> str:
        """Sizes."""
        return f"experts={self.spec.experts}, top_k={self.spec.top_k}"


def choose(scores: Tensor, spec: RouterSpec) -> Tensor:
    """Return the K experts of each token, int64 (T, K), best first.

    Args:
        scores: (T, E) by which experts are chosen.
        spec: sizes and groups.
    """
    if spec.groups > 1:
        scores = scores.masked_fill(~_in_best_groups(scores, spec), -torch.inf)
    return top_k(scores, spec.top_k)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Return the places (..., k) of the k largest of scores (..., E), int64, largest first.

    Of equal scores the lower place is taken, on every device: ``torch.topk`` promises nothing.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def _in_best_groups(scores: Tensor, spec: RouterSpec) -> Tensor:
    """Return True for each expert (T, E) that is in one of the groups with the best two experts."""
    grouped = scores.unflatten(-1, (spec.groups, -1))  # (T, N, E/N)
    best = grouped.topk(min(GROUP_BEST, grouped.shape[-1]), dim=-1).values.sum(-1)  # (T, N)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, top_k(best, spec.top_groups), True)
    return kept.repeat_interleave(grouped.shape[-1], dim=-1)
