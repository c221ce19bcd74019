"""Twenty clipped AdamW steps on every layout of 4 and 8 ranks: as torch on whole tensors."""

from __future__ import annotations

import optim_pieces as model
import pytest
import torch
from torch import Tensor

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_optim import GlobalNorm, SlicedOptimizer, clip_, decay_groups

STEPS, LIMIT, DECAY = 20, 30.0, 0.1
ADAMW = {"lr": 0.0, "betas": (0.9, 0.95), "foreach": False}
LAYOUTS = [
    (pp, dp, tp)
    for ranks in (4, 8)
    for pp in (1, 2)
    for tp in (1, 2, 4)
    for dp in [ranks // (pp * tp)]
    if dp
]


def scale(step: int) -> float:
    return 2.0 ** -(step % 4)  # exact


def trained(mesh: Mesh) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Norms of all steps, and this rank's parameters after them, of stages 0, 1 and 2."""
    norms, found = [], []
    for stage in (0, 1, 2):
        # Both micro-batches have half of a gradient: sums in any order have the same bits.
        held = model.hold(mesh, reduce="micro_batch" if stage > 1 else "step")
        norm = GlobalNorm(held.grads)
        groups = decay_groups(held.grads.names, DECAY, exclude=["norm", "one"])
        optimizer = SlicedOptimizer(
            held.grads, lambda g: torch.optim.AdamW(g, **ADAMW), groups, stage
        )
        for step in range(STEPS):
            slices = model.backward(held, mesh, scale=scale(step))
            norms.append(norm(slices).item())
            clip_(slices, LIMIT, norm(slices))
            optimizer.step(slices, 0.05 / (step + 1))
        found.append({path: p.detach() for path, p in held.parameters.items()})
    return norms, found


def reference(dp: int, tp: int) -> tuple[list[float], dict[str, Tensor]]:
    """torch on whole tensors, with the gradients of all ranks added up."""
    gradients = model.expected(dp, tp)
    whole = {name: torch.ones(shape, requires_grad=True) for name, shape in model.SHAPES.items()}
    free = [whole[name] for name in ("norm", "one")]
    rest = [x for name, x in whole.items() if name not in ("norm", "one")]
    groups = [{"params": rest, "weight_decay": DECAY}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    norms = []
    for step in range(STEPS):
        for name, x in whole.items():
            x.grad = gradients[name] * scale(step)
        norms.append(torch.nn.utils.clip_grad_norm_(whole.values(), LIMIT).item())
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (step + 1)
        optimizer.step()
    return norms, {name: x.detach() for name, x in whole.items()}


@pytest.mark.parametrize(("pp", "dp", "tp"), LAYOUTS)
def test_a_layout_trains_as_torch_does(pp: int, dp: int, tp: int) -> None:
    norms, whole = reference(dp, tp)
    assert min(norms) < LIMIT < max(norms)  # some steps are clipped, some are not
    ranks = on_ranks(trained, pp=pp, dp=dp, tp=tp)
    for rank, (found, (zero, *others)) in enumerate(ranks):
        assert found == pytest.approx(norms * 3, rel=1e-6)
        assert all(zero.keys() == other.keys() for other in others)
        for path, values in zero.items():
            assert all(torch.equal(values, other[path]) for other in others), path
            name = "embed" if path == "head" else path
            if path == "frozen":
                assert values.eq(1).all()
                continue
            for local, rows in model.pieces(name, tp, rank % tp):
                torch.testing.assert_close(values[local], whole[name][rows], rtol=2e-6, atol=1e-7)
