"""Memory of a rank and bytes that it sends, by arithmetic: for plans of runs that do not exist.

Everything is a pure function of layouts and of the optimizer's config. N elements of a tensor on a
rank are owned by d ranks, ceil(N / d) by each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor, nn

from kenotron_dist import GridView, MeshConfig, views_of
from kenotron_dist.boxes import GradientSum, gradient_sums
from kenotron_dist.placement import TensorLayout
from kenotron_optim.config import OptimizerConfig
from kenotron_optim.frozen_slices import zero3_cuts
from kenotron_optim.muon_params import matrix_parts
from kenotron_optim.partition import BUCKET_ELEMENTS, HOST_BUCKET_BYTES, RANK_ELEMENTS
from kenotron_optim.rule_config import MuonConfig, SGDConfig, UpdateRule
from kenotron_optim.sample_leaves import SampleLeaves

STATE_DTYPES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element of the optimizer's state by ``OptimizerConfig.state_dtype``."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor of a rank, or several of the same kind."""

    count: int
    """Elements on this rank, N."""
    expert: bool = False
    """True where its gradients are summed over edp, not over dp and cp."""
    whole: bool = False
    """True where stages 2 and 3 keep its gradient whole; see ``GradAccumulator``."""
    owners: int = 1
    """Parameters of this rank that are tied to it, itself included."""
    matrix: bool = False
    """True where Muon updates it."""
    learns: bool = True
    """True where it is not frozen."""
    cut: bool = True
    """True where stage 3 cuts it; see ``zero3_cuts``."""
    summed: tuple[tuple[int, int], ...] = ()
    """Ranks of tp, and elements, of sums that make its gradient whole."""
    gathers: int = 2
    """So often stage 3 gathers it for a micro-batch, with ``regather`` by layer."""


def held_tensors(
    parameters: Mapping[str, Tensor],
    layouts: Mapping[str, TensorLayout],
    mesh: MeshConfig,
    rank: int,
    rule: UpdateRule,
) -> list[Held]:
    """Describe the tensors of a rank.

    An output layer is taken for one that leaves its product to the loss, as kenotron-models' does:
    its matrix is gathered once for forward and backward.

    Args:
        parameters: those of the rank's stage by their global names, of any shape; they may be on
            meta.
        layouts: of the whole model.
        mesh: sizes of the axes.
        rank: global number of the rank.
        rule: the update rule.
    """
    view, owned = views_of(mesh, rank), dict[str, list[str]]()
    for path in parameters:
        owned.setdefault(layouts[path].name, []).append(path)
    by_muon = isinstance(rule, MuonConfig)
    matrices = matrix_parts(layouts, rule.adamw_named_params) if by_muon else {}
    found = []
    for name, paths in owned.items():
        layout, parameter = layouts[paths[0]], parameters[paths[0]]
        tied = len(layout.owners) > 1
        alone = len(layout.stages) == 1 and len(layout.owners) == 2
        learns = not isinstance(parameter, nn.Parameter) or parameter.requires_grad
        sums = gradient_sums(layout, view(layout))
        found.append(
            Held(
                count=parameter.numel(),
                expert=layout.grid == "expert",
                whole=bool(sums) or (tied and not alone),
                summed=_over_tp(sums, view(layout)),
                owners=len(paths),
                matrix=name in matrices,
                learns=learns,
                cut=zero3_cuts(parameter, learns=learns),
                gathers=sum(_gathers(layouts[path].role, learns) for path in paths),
            )
        )
    return found


def _over_tp(sums: Iterable[GradientSum], view: GridView) -> tuple[tuple[int, int], ...]:
    """Return the ranks and elements of those sums that are over tp."""
    return tuple(
        (view.sizes["tp"] // each.parts, sum(math.prod(box.shape) for box in each.boxes))
        for each in sums
        if each.axis == "tp"
    )


def _gathers(role: str | None, learns: bool) -> int:
    """Uses of a parameter in a micro-batch, a forward and a backward, for which it is gathered.

    A head stays from the one to the other; a frozen embedding has no backward.
    """
    return 1 if role == "output" or (role == "embedding" and not learns) else 2


def state_bytes(
    tensors: Iterable[Held],
    config: OptimizerConfig,
    mesh: MeshConfig,
    itemsize: int,
    leaves: SampleLeaves | None = None,
) -> dict[str, int]:
    """Return the bytes that a rank keeps between steps, by class.

    Buffers of gradients and parameters that are in use, of a bucket or a layer, come in addition.

    Args:
        tensors: those of the rank.
        config: of the optimizer.
        mesh: sizes of the axes.
        itemsize: bytes of an element of a parameter.
        leaves: of ``SampleGradients``; None: it is a ``GradAccumulator``.

    Returns:
        Bytes of ``parameters``, ``gradients``, ``fp32 masters``, ``optimizer`` (state) and, where
        there are some, ``weight averages`` and ``sums of samples``, the most that are kept until
        gradients are exchanged. With ``offload`` all after gradients are in host memory
        where ranks compute on an accelerator.
    """
    found = dict.fromkeys(("parameters", "gradients", "fp32 masters", "optimizer"), 0)
    state, stage = STATE_DTYPES[config.state_dtype], config.zero
    summed = 4 if config.accumulate_grad_in_fp32 else itemsize
    for each in tensors:
        ranks = slice_ranks(each, config, mesh)
        cut = -(-each.count // ranks)
        if not each.learns:
            kept = cut if stage.cuts_parameters and each.cut else each.count
            found["parameters"] += kept * itemsize
            continue
        owned = cut if stage.cuts_states else each.count
        if not stage.cuts_parameters:
            found["parameters"] += each.count * itemsize
        elif config.offload:  # what is gathered, next to masters that are elsewhere
            found["parameters"] += owned * itemsize
        kept = cut if _leaves(each, config, ranks) else each.count * each.owners
        if leaves is not None:  # a whole buffer, and trees of each owner until the exchange
            kept = each.count
            sums = _most_nodes(*_of_sources(each, leaves, mesh)) * kept * each.owners * summed
            found["sums of samples"] = found.get("sums of samples", 0) + sums
        found["gradients"] += kept * summed
        apart = itemsize != 4 or stage.cuts_parameters or config.offload
        if apart:  # else they are the parameters' memory
            found["fp32 masters"] += owned * 4
        if config.weight_average is not None:
            found["weight averages"] = found.get("weight averages", 0) + owned * 4
        found["optimizer"] += _moments(each, config.optimizer_factory) * owned * state
    return found


def data_bytes(
    tensors: Iterable[Held],
    config: OptimizerConfig,
    mesh: MeshConfig,
    itemsize: int,
    backwards: int,
    leaves: SampleLeaves | None = None,
) -> dict[str, int]:
    """Return the bytes that a rank sends in a step for gradients and parameters, by axes.

    They are those of ``kenotron_dist.diagnosis.record`` on the rank that owns the first elements.
    Muon's exchange, sums of tied owners over stages, and the few bytes of norms are left out.

    Args:
        tensors: those of the rank.
        config: of the optimizer.
        mesh: sizes of the axes.
        itemsize: bytes of an element of a parameter.
        backwards: micro-batches of a step.
        leaves: of ``SampleGradients``; None: it is a ``GradAccumulator``.

    Returns:
        Bytes over ``dp`` (with cp), ``edp`` and ``tp``, where there are any.
    """
    found = {"dp": 0, "edp": 0, "tp": 0}
    summed = 4 if config.accumulate_grad_in_fp32 else itemsize
    for each in tensors:
        ranks = slice_ranks(each, config, mesh)
        cut = -(-each.count // ranks)
        by_layer = config.zero.cuts_parameters and config.regather == "layer"
        times = each.gathers * backwards if by_layer else 1
        axis = "edp" if each.expert else "dp"
        if not each.learns:
            gathers = config.zero.cuts_parameters and each.cut
            found[axis] += times * (ranks - 1) * cut * itemsize if gathers else 0
            continue
        found["tp"] += sum(2 * (n - 1) * count * summed // n for n, count in each.summed)
        sums = backwards if _leaves(each, config, ranks) else 1
        if leaves is not None:
            own, sources = _of_sources(each, leaves, mesh)
            sums = each.owners * len(own.nodes(sources))
        sent = sums * (ranks - 1) * cut * summed
        if not each.expert and config.shard_ranks is not None:
            replicas = mesh.dp // config.shard_ranks
            sent += 2 * (replicas - 1) * cut * summed // replicas
        sent += times * (ranks - 1) * cut * (itemsize if config.zero.cuts_states else 4)
        found[axis] += sent
    return {axis: sent for axis, sent in found.items() if sent}


def bucket_bytes(
    tensors: Iterable[Held],
    config: OptimizerConfig,
    mesh: MeshConfig,
    itemsize: int,
    backwards: int,
    cap_mb: float | None = None,
    *,
    gloo: bool,
) -> int:
    """Return the bytes of buckets of gradients that are filled or sent, next to ``state_bytes``.

    Stages 2 and 3 fill a bucket while two others travel. On gloo others' slices arrive in memory of
    their own, of two buckets at a time. Buckets of experts, over edp, take turns with all others.

    Args:
        tensors: those of the rank.
        config: of the optimizer.
        mesh: sizes of the axes.
        itemsize: bytes of an element of a parameter.
        backwards: micro-batches of a step.
        cap_mb: MiB of a bucket; None: see ``GradAccumulator``.
        gloo: whether they are reduced by gloo on CPUs.
    """
    summed, most, arriving, many = 4 if config.accumulate_grad_in_fp32 else itemsize, 0, 0, 0
    held = [each for each in tensors if each.learns and slice_ranks(each, config, mesh) > 1]
    for group in ([x for x in held if x.expert], [x for x in held if not x.expert]):
        if not group:
            continue
        ranks, sizes = slice_ranks(group[0], config, mesh), [x.count * summed for x in group]
        cap = HOST_BUCKET_BYTES if gloo else max(BUCKET_ELEMENTS, RANK_ELEMENTS * ranks) * itemsize
        cap = int(cap if cap_mb is None else cap_mb * 2**20) * summed // itemsize
        bucket = min(sum(sizes), max(cap, *sizes))
        most, many = max(most, bucket), many + -(-sum(sizes) // cap)
        arriving = max(arriving, bucket * (ranks - 1) // ranks if gloo else 0)
    if config.zero.cuts_gradients and config.reduce == "micro_batch":
        many *= backwards
        return min(3, many) * most + min(2, many) * arriving
    return min(2, many) * arriving


def _of_sources(tensor: Held, leaves: SampleLeaves, mesh: MeshConfig) -> tuple[SampleLeaves, range]:
    """Return the leaves of a tensor's gradient, and the sources that a rank has."""
    return (leaves.of_experts, range(mesh.ep)) if tensor.expert else (leaves, range(1))


@lru_cache(maxsize=256)
def _most_nodes(leaves: SampleLeaves, sources: range) -> int:
    return leaves.most_nodes(sources)


def slice_ranks(tensor: Held, config: OptimizerConfig, mesh: MeshConfig) -> int:
    """Return d, the ranks that own the slices of a tensor."""
    if tensor.expert:
        return mesh.expert_sizes["edp"]
    return (config.shard_ranks or mesh.dp) * mesh.cp


def _leaves(tensor: Held, config: OptimizerConfig, ranks: int) -> bool:
    """Return whether only slices of a gradient outlive a backward."""
    sliced = config.zero.cuts_gradients and config.reduce == "micro_batch"
    return sliced and ranks > 1 and not tensor.whole


def _moments(tensor: Held, rule: UpdateRule) -> int:
    """Values that the optimizer's state has for each element."""
    if isinstance(rule, SGDConfig):
        return int(rule.momentum > 0)
    return 1 if tensor.matrix and isinstance(rule, MuonConfig) else 2
