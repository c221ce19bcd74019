"""Experts of transformers cut over ep: their own code computes a rank's experts.

They are found by structure: a module that is called with tokens, chosen experts and weights, or
with all tokens for each expert (Llama-4), and whose parameters are stacks of all experts.

Shapes: T tokens, n of this rank of tp, D features, E experts, e of this rank, K experts of a token,
R rows of this rank's experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist.placement import Fused, Placement, Placements, Shard
from kenotron_ep import mix_experts
from kenotron_models.build import Build
from kenotron_models.stacked_linear import expert_of_rows
from kenotron_tp import join_tokens, split_tokens

ARGUMENTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
"""Arguments of experts of transformers: (T, D), (T, K) and (T, K)."""
SCALED = ("hidden_states",)
"""The argument of experts that get a row of each token for every expert, times its weight."""
FUSED = {"packed_colwise": 1, "packed_rowwise": 2}
"""Styles of stacks of two matrices that are joined, and the dimension that they are joined in."""


class ExchangedExperts(nn.Module):
    """Stands in front of the class of a module of experts; of (E, ...) it has (e, ...).

    Each rank of tp sends its share of the tokens. Collective over ep and tp.
    """

    build: Build
    whole_experts: int
    placements: Placements

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts (T, D)."""
        tp = self.build.tp
        own = split_tokens(x_TD, tp)  # (n, D)
        missing, start = len(own) * tp.size - len(x_TD), tp.rank * len(own)
        chosen = F.pad(experts_TK, (0, 0, 0, missing), value=-1)[start : start + len(own)]
        y = mix_experts(
            own, chosen, split_tokens(weights_TK, tp), self.whole_experts, self.build.ep,
            self._own_experts, chunks=self.build.ep_chunks,
        )  # fmt: skip
        return join_tokens(y, tp, len(x_TD))

    def _own_experts(self, rows_RD: Tensor, counts: Tensor) -> Tensor:
        """Return the results of rows that are grouped by this rank's experts: (R, D)."""
        expert = expert_of_rows(rows_RD, counts)[:, None]
        y: Tensor = super().forward(rows_RD, expert, torch.ones_like(expert, dtype=rows_RD.dtype))
        return y


class ScaledExperts(ExchangedExperts):
    """The same for experts that are called with rows (E * T, D), grouped by expert.

    A row is the token times its weight of the expert: zero where it has not chosen this one, and so
    is the result, because there is no bias. Such rows are not sent.
    """

    top_k: int
    """K."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return the experts' results (E * T, D)."""
        # Rows that are not zero, K of each token, are sent as tokens with one expert each.
        x_ETD = x.unflatten(0, (self.whole_experts, -1))
        chosen_ET = x_ETD.ne(0).any(-1).to(torch.float32)
        chosen_KT, expert_KT = chosen_ET.topk(self.top_k, dim=0)
        places = expert_KT, torch.arange(x_ETD.shape[1], device=x.device)
        rows = x_ETD[places].flatten(0, 1)  # (K * T, D)
        experts = expert_KT.where(chosen_KT > 0, -1).flatten()[:, None]
        y = super().forward(rows, experts, torch.ones_like(experts, dtype=x.dtype))
        whole = y.new_zeros(*chosen_ET.shape, y.shape[-1])
        return whole.index_put(places, y.unflatten(0, expert_KT.shape)).flatten(0, 1)

    def _own_experts(self, rows_RD: Tensor, counts: Tensor) -> Tensor:
        """Return the results of rows that are grouped by this rank's experts: (R, D)."""
        # Their code takes equally many rows of each expert: zeros follow those that came.
        rows, own = len(rows_RD), len(counts)
        most = -(-rows // own) if counts.is_meta else max(int(counts.max()), 1)  # with padding
        expert, first = expert_of_rows(rows_RD, counts), counts.cumsum(0) - counts
        place = torch.arange(rows, device=expert.device) + expert * most - first[expert]
        padded = rows_RD.new_zeros(own * most, rows_RD.shape[-1])
        y: Tensor = super(ExchangedExperts, self).forward(padded.index_put((place,), rows_RD))
        return y[place]


def exchange_experts(model: nn.Module, plan: dict[str, str], build: Build) -> dict[str, str]:
    """Cut all experts of a model over ``build.ep`` in place; return the rest of its tp plan.

    Args:
        model: of transformers, on meta.
        plan: styles by full names, with ``*`` for one word.
        build: with both axes. On one rank of ep nothing is done.

    Raises:
        ValueError: there are no experts; ep does not divide them, or they are called in another
            way, or have parameters that are no stacks of them.
    """
    if build.ep.size == 1:
        return plan
    paths = [path for path, module in model.named_modules() if is_experts(path, module)]
    if not paths:
        raise ValueError(f"ep {build.ep.size} was given, and the model has no experts: set it to 1")
    rest = dict(plan)
    for path in paths:
        module = model.get_submodule(path)
        choices = getattr(model.get_submodule(path.rpartition(".")[0]), "top_k", None)
        if problem := _problem(module, build.ep.size, choices):
            raise ValueError(f"{path}: {problem}")
        inside = {name: s for name, s in plan.items() if _fits(name, path)}
        _cut(module, {name.rpartition(".")[2]: s for name, s in inside.items()}, build)
        if isinstance(module, ScaledExperts):
            assert isinstance(choices, int)
            module.top_k = choices
        rest = {name: style for name, style in rest.items() if name not in inside}
    return rest


def declare_stacks(model: nn.Module) -> None:
    """Declare experts that ep does not cut to be a matrix each, as they are where it does."""
    for path, module in model.named_modules():
        if not is_experts(path, module):
            continue
        placements: Placements = getattr(module, "placements", {})
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and not isinstance(module, ExchangedExperts):
                cuts = placements.get(name, ())
                cuts = cuts if isinstance(cuts, tuple) else (cuts,)
                placements[name] = (*cuts, Fused(0, (1,) * len(parameter)))
        vars(module)["placements"] = placements


def is_experts(path: str, module: nn.Module) -> bool:
    """Return True for stacks of matrices in a module that is named so."""
    stacks = any(p.ndim == 3 for p in module.parameters(recurse=False))
    return path.rpartition(".")[2] == "experts" and stacks


def _fits(pattern: str, path: str) -> bool:
    """Return True for a name of a module, or of something in it."""
    words, parts = pattern.split("."), path.split(".")
    return len(words) >= len(parts) and all(map(fnmatchcase, parts, words))


def _problem(module: nn.Module, ranks: int, choices: object) -> str | None:
    """Return why experts cannot be cut; ``choices``: K, where it is known."""
    kind, found = type(module).__name__, _arguments(module)
    without_bias = all(p.ndim == 3 for p in module.parameters())
    scaled = found == SCALED and isinstance(choices, int) and without_bias
    if found not in ARGUMENTS and not scaled:
        return f"a {kind} is called with {', '.join(found)}: its experts cannot be cut over ep"
    count = vars(module).get("num_experts", 0)
    for name, parameter in module.named_parameters():
        if "." in name or len(parameter) != count:
            return f"{name} of a {kind} is no stack of all its experts: they cannot be cut over ep"
    if count % ranks:
        return f"{ranks} ranks of ep cannot share its {count} experts: choose an ep that divides"
    return None


def _arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def _cut(module: nn.Module, styles: dict[str, str], build: Build) -> None:
    """Give a module this rank's experts, and the class that exchanges tokens."""
    ep, own, placements = build.ep, type(module), Placements()
    for name, whole in [*module.named_parameters(recurse=False)]:
        part = whole.detach().chunk(ep.size)[ep.rank].clone()
        module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        placements[name] = (Shard(ep.name, 0), *_joined(whole, styles.get(name)))
    count = module.num_experts
    assert isinstance(count, int)
    front = ScaledExperts if _arguments(module) == SCALED else ExchangedExperts
    module.__class__ = type(f"Exchanged{own.__name__}", (front, own), {})
    values = {"build": build, "placements": placements, "whole_experts": count}
    for name, value in (values | {"num_experts": count // ep.size}).items():
        setattr(module, name, value)


def _joined(whole: Tensor, style: str | None) -> Iterator[Placement]:
    """The matrices that each expert's matrix is joined of: optimizers of matrices ask for them."""
    if style in FUSED and whole.ndim == 3:
        dim = FUSED[style]
        yield Fused(dim, (whole.shape[dim] // 2,) * 2)
