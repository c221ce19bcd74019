"""Muon over whole matrices, AdamW for the rest: as torch on one process, for every dp and stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Mesh, declare_roles
from kenotron_dist.placement import (
    Chunk,
    Fused,
    Shard,
    TensorLayout,
    named_parameters,
    parameter_layouts,
)
from kenotron_dist.testing import on_ranks
from kenotron_optim import (
    GlobalNorm,
    GradAccumulator,
    LRMultiplier,
    MuonConfig,
    SlicedOptimizer,
    clip_,
    matrix_parts,
    parameter_groups,
    update_rule,
)

MUON = MuonConfig(momentum=0.9, ns_steps=3)
ROWS, STEPS, DECAY = 10, 4, 0.1


class Net(nn.Module):
    """A table, matrices of uneven shapes, a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(5, 7), nn.LayerNorm(7)
        self.up, self.mid, self.down = nn.Linear(7, 20), nn.Linear(20, 3), nn.Linear(3, 7)
        self.head = nn.Linear(7, 5, bias=False)
        declare_roles(self.head, weight="output")

    def forward(self, rows: Tensor) -> Tensor:
        x = self.norm(self.table(rows))
        x = x + self.down(torch.tanh(self.mid(torch.tanh(self.up(x)))))
        return self.head(x).square().sum() / ROWS


def data(step: int) -> Tensor:
    return torch.randint(5, (ROWS,), generator=torch.Generator().manual_seed(step))


def trained(mesh: Mesh, stage: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], float, int]:
    """Parameters after some steps, the last norm, and elements of state on this rank."""
    model = Net().to(dtype)
    layouts = parameter_layouts(model, mesh.sizes)
    assert matrix_parts(layouts).keys() == {"up.weight", "mid.weight", "down.weight"}
    grads = GradAccumulator(named_parameters(model), layouts, mesh)
    groups = parameter_groups(
        grads.names,
        DECAY,
        exclude=[".*bias"],
        lr_multipliers=[LRMultiplier(pattern="mid.*", multiplier=0.5)],
    )
    optimizer = SlicedOptimizer(grads, update_rule(MUON, layouts), groups, stage)
    norm = GlobalNorm(grads)
    total = 0.0
    for step in range(STEPS):
        grads.start(backwards=2)
        own = data(step)[mesh.rank :: mesh["dp"].size]
        for micro in own.chunk(2):
            model(micro).backward()
        slices = grads.finish()
        total = norm(slices).item()
        clip_(slices, 0.5, norm(slices))
        optimizer.step(slices, 0.02 / (step + 1))
    state = optimizer.state()
    assert all(layout.flat is not None for _, layout in state.values())
    own_state = sum(x.numel() for x, _ in optimizer.wanted().values())
    return {name: p.detach() for name, p in model.named_parameters()}, total, own_state


def expected() -> tuple[dict[str, Tensor], float]:
    """torch.optim.Muon and torch.optim.AdamW in a plain loop."""
    model = Net()
    named = dict(model.named_parameters())
    optimizers = []
    for factor, prefix in ((0.5, "mid"), (1.0, "")):
        own = {n: p for n, p in named.items() if n.startswith("mid") is bool(prefix)}
        matrices = [p for n, p in own.items() if n in ("up.weight", "mid.weight", "down.weight")]
        optimizers.append((factor, torch.optim.Muon(
            matrices, lr=0.0, weight_decay=DECAY, momentum=0.9, ns_steps=3,
            adjust_lr_fn="match_rms_adamw",
        )))  # fmt: skip
        for decay in (DECAY, 0.0):
            rest = [
                p for n, p in own.items()
                if all(p is not m for m in matrices) and n.endswith("bias") is (decay == 0)
            ]  # fmt: skip
            if rest:
                optimizers.append((factor, torch.optim.AdamW(
                    rest, lr=0.0, weight_decay=decay, betas=(0.9, 0.95), foreach=False
                )))  # fmt: skip
    total = 0.0
    for step in range(STEPS):
        model.zero_grad()
        model(data(step)).backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        for factor, optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * 0.02 / (step + 1)
            optimizer.step()
    return {name: p.detach() for name, p in named.items()}, total


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_it_is_torchs_muon_and_adamw(dp: int) -> None:
    want, total = expected()
    runs = {stage: on_ranks(trained, stage, torch.float32, dp=dp) for stage in (0, 1)}
    elements = sum(p.numel() for p in want.values())
    for ranks in runs.values():
        for found, norm, _ in ranks:
            assert norm == pytest.approx(total, rel=1e-5)
            for name, value in want.items():  # its iterations are in bf16: bits of it may turn
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-4)
    for a, b in zip(runs[0], runs[1], strict=True):
        assert all(torch.equal(a[0][name], b[0][name]) for name in want)
        assert a[2] > 2 * elements
    assert sum(rank[2] for rank in runs[1]) == runs[0][0][2]  # each element of state once


def test_half_precision_has_masters() -> None:
    runs = [on_ranks(trained, stage, torch.bfloat16, dp=2)[0] for stage in (0, 1)]
    assert all(torch.equal(runs[0][0][name], runs[1][0][name]) for name in runs[0][0])
    assert all(value.isfinite().all() for value in runs[0][0].values())


def test_matrices_are_found_by_role_and_cut_in_their_chunks() -> None:
    cut = Shard("tp", 0, (Chunk(6, parts=3), Chunk(2)))
    layouts = {"a.weight": TensorLayout("a.weight", (8, 4), (cut,), role="hidden")}
    layouts["b.weight"] = TensorLayout("b.weight", (2, 2), role="residual")
    layouts["lm_head.weight"] = TensorLayout("lm_head.weight", (2, 2), role="output")
    layouts["e"] = TensorLayout("e", (2, 4, 3), (Shard("ep", 0), Fused(1, (3, 1))), role="hidden")
    layouts["filter"] = TensorLayout("filter", (2, 4, 3), role="hidden")
    found = matrix_parts(layouts)
    assert found.keys() == {"a.weight", "b.weight", "e"}
    assert [(part.start, part.shape) for part in found["a.weight"]] == [
        ((0, 0), (6, 4)), ((6, 0), (2, 4))
    ]  # fmt: skip
    assert [(part.start, part.shape) for part in found["e"]] == [
        ((0, 0, 0), (1, 3, 3)), ((0, 3, 0), (1, 1, 3)),
        ((1, 0, 0), (1, 3, 3)), ((1, 3, 0), (1, 1, 3)),
    ]  # fmt: skip
    heads = matrix_parts(layouts, per_head=True)["a.weight"]
    assert [(part.rows, part.columns) for part in heads] == [(2, 4)] * 4
    assert matrix_parts(layouts, [r"a\..*", "e"]).keys() == {"b.weight"}
    with pytest.raises(ValueError, match=r"no parameter is named by 'hed.\*', which shall be left"):
        matrix_parts(layouts, ["hed.*"])
    with pytest.raises(ValueError, match="no matrix is left for Muon: take AdamW, or exclude less"):
        matrix_parts(layouts, [".*"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 1.0}, "momentum: 1.0 was given; it must be at least 0, below 1"),
        ({"ns_steps": 0}, "ns_steps: 0 was given; it must be from 1 to 99"),
        ({"adam_eps": 0.0}, "adam_eps: 0.0 was given; it must be finite and above 0"),
        ({"adamw_named_params": ("(",)}, r"adamw_named_params: '\(' was given"),
        ({"name": "lion"}, "name: 'lion' was given; Muon's is 'muon'"),
    ],
)
def test_bad_settings_are_named(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MuonConfig(**options)
