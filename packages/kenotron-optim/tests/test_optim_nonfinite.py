"""nan and inf in loss or gradient: found by name and rank, and met alike on every rank."""

from __future__ import annotations

import optim_pieces as model
import pytest
import torch

from kenotron_dist import Mesh, RankError
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import (
    GlobalNorm,
    GradAccumulator,
    NonFinite,
    SlicedOptimizer,
    allows_update,
    clip_,
    decay_groups,
    find_nonfinite,
)

NAN, INF = float("nan"), float("inf")


def search(mesh: Mesh, rank: int, poison: dict[str, float], kind: float) -> NonFinite | None:
    """What every rank finds when one of them poisons some gradients."""
    held = model.hold(mesh)
    slices = model.backward(held, mesh, poison if mesh.rank == rank else None)
    norm = GlobalNorm(held.grads, kind)
    return find_nonfinite(norm, slices, norm(slices), 2.5)


@pytest.mark.parametrize("kind", [1.0, 2.0, INF])
@pytest.mark.parametrize(
    ("sizes", "rank", "poison", "held", "name", "owners", "others"),
    [
        ({}, 0, {"whole": NAN}, "nan", "whole", (0,), 0),
        ({}, 0, {"whole": INF, "mix": -INF}, "inf", "mix", (0,), 1),
        # the last element lies in the last data rank's slice, whoever it came from
        ({"dp": 2}, 0, {"whole": NAN, "norm": INF}, "inf", "norm", (1,), 1),
        # every tp rank has a nan of its own in its part of the replicated sum
        ({"tp": 2}, 1, {"norm": NAN}, "nan", "norm", (0,), 0),
        # padding is no element: what it holds is nobody's business
        ({"tp": 4}, 3, {"embed": NAN}, None, None, (), 0),
        # both owners of a tied tensor get the sum, its first stage counts it
        ({"pp": 2}, 1, {"head": INF}, "inf", "embed", (0,), 0),
        ({"pp": 2, "dp": 2}, 2, {"one": NAN, "whole": NAN}, "nan", "one", (2,), 1),
    ],
    ids=str,
)
def test_all_ranks_find_the_same_first_parameter(
    sizes: dict, rank: int, poison: dict, held: str | None, name: str, owners: tuple, others: int,
    kind: float,
) -> None:  # fmt: skip
    found = on_ranks(search, rank, poison, kind, **sizes)
    want = None if held is None else NonFinite(2.5, name, held, owners, others)
    assert found == [want] * len(found)


def numbered(mesh: Mesh) -> str:
    layers = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(1, 1) for i in (1, 2, 10)})
    layouts = parameter_layouts(layers, mesh.sizes)
    grads = GradAccumulator(named_parameters(layers), layouts, mesh)
    grads.start()
    for name in ("layer10", "layer2"):
        layers[name].weight.backward(torch.full((1, 1), NAN))
    slices, norm = grads.finish(), GlobalNorm(grads)
    return str(find_nonfinite(norm, slices, norm(slices), NAN))


def test_numbers_in_names_are_compared_as_numbers() -> None:
    assert numbered(Mesh.connect()) == (
        "the gradient of 'layer2.weight' holds nan on rank 0, and 1 more are not finite (loss nan)"
    )


@pytest.mark.parametrize("loss", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_is_found_where_gradients_are(loss: float) -> None:
    held = model.hold(Mesh.connect())
    slices, norm = model.backward(held, Mesh.connect()), GlobalNorm(held.grads)
    found = find_nonfinite(norm, slices, norm(slices), loss)
    assert str(found) == f"the loss is {loss}, though every gradient is finite"
    assert not allows_update(found, "skip", 3)


def test_a_finite_step_is_allowed_by_every_policy() -> None:
    assert all(allows_update(None, policy, 1) for policy in ("error", "skip", "continue"))


def test_the_error_names_step_parameter_ranks_and_what_to_do() -> None:
    found = NonFinite(1.5, "a.weight", "inf", tuple(range(9)), 0)
    with pytest.raises(FloatingPointError) as caught:
        allows_update(found, "error", 7)
    assert str(caught.value) == (
        "step 7: the gradient of 'a.weight' holds inf on ranks 0, 1, 2, 3, 4, 5, 6, 7, ... "
        "(loss 1.5): lower the learning rate, look at the data of this step, or resume from an "
        "earlier checkpoint; `nonfinite: skip` leaves such steps out"
    )


def train(mesh: Mesh, stage: int, policy: str, steps: list[dict]) -> tuple[list, list, int]:
    """Steps of a poison each (empty: none), met by a policy; all that an optimizer keeps."""
    held = model.hold(mesh)
    grads, norm = held.grads, GlobalNorm(held.grads)
    optimizer = SlicedOptimizer(
        grads, lambda g: torch.optim.AdamW(g, foreach=False), decay_groups(grads.names, 0.1), stage
    )
    updates = []
    for step, poison in enumerate(steps, start=1):
        slices = model.backward(held, mesh, poison if mesh["dp"].rank == 1 else None)
        value = norm(slices)
        updates.append(allows_update(find_nonfinite(norm, slices, value, 1.0), policy, step))
        if updates[-1]:
            clip_(slices, 1.0, value)
            optimizer.step(slices, 0.01)
    state = {key: tensor.tolist() for key, (tensor, _) in optimizer.wanted().items()}
    values = {path: p.tolist() for path, p in held.parameters.items()}
    return updates, [state, values], optimizer.steps


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_skipped_step_leaves_no_trace(stage: int, sizes: dict) -> None:
    clean = on_ranks(train, stage, "skip", [{}, {}], **sizes)
    poisoned = [{}, {"whole": NAN}, {"embed": INF}, {}]
    skipped = on_ranks(train, stage, "skip", poisoned, **sizes)
    for rank, want in zip(skipped, clean, strict=True):
        assert rank[0] == [True, False, False, True]
        assert rank[1:] == want[1:] and rank[2] == 2


def test_continue_updates_all_the_same() -> None:
    updates, (state, _), steps = on_ranks(train, 1, "continue", [{"one": NAN}], dp=2)[0]
    assert updates == [True] and steps == 1
    masters = torch.tensor(state["master.one.0"])
    assert masters.isnan().all()  # clipped with a norm of nan, as torch does


def test_error_ends_every_rank() -> None:
    with pytest.raises(RankError, match="step 2: the gradient of 'whole' holds nan on rank 1 "):
        on_ranks(train, 1, "error", [{}, {"whole": NAN}], dp=2)
