"""The reproducible mode: each layout has the bits of one process with micro-batches of one sample.

Losses, norms, the held-out loss, gradients by name, weights and moments are compared with ``==``,
of a run and of its resumption on another layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import grid_run
import pytest
from grid import Row, Sizes
from grid_check import changed, continued, unequal
from grid_run import Measured, measure, saved_after, write_documents

from kenotron_models import virtual_shards, whole_row_part

GLOBAL_BATCH, STEPS, LONG = 12, 4, 40
KEYS = {"general.reproducible": "true"}
Run = Callable[..., Measured]


@dataclass(frozen=True)
class Cut:
    """One way to compute a training."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    engine: str = "1f1b"
    zero: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    saver: str = "torch"
    mode: str = "plain"
    most: int = 2
    """``general.reproducible_max_tp``"""
    ep: int = 1
    cp: int = 1
    most_cp: int = 1
    """``general.reproducible_max_cp``"""
    way: str = "ring"

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))

    def row(self, model: Row) -> Row:
        """This cut of a model of the grid."""
        sizes: Sizes = (self.pp, self.dp, self.tp)
        return replace(
            model, sizes=sizes, engine=self.engine, zero=self.zero, recompute=self.recompute,
            saver=self.saver, mode=self.mode, ep=self.ep,
            cp=self.cp, way=self.way,
        )  # fmt: skip

    @property
    def keys(self) -> dict[str, str]:
        """Keys of the config that the grid has other values of."""
        passes = GLOBAL_BATCH // self.dp // self.micro_batch
        return {
            "tokens.micro_batch_size": str(self.micro_batch),
            "tokens.batch_accumulation_per_replica": str(passes),
            "general.reproducible_max_tp": str(self.most),
            "general.reproducible_max_cp": str(self.most_cp),
        }


ALONE = Cut()
CUTS = (
    Cut(micro_batch=4, zero=0, recompute="full"),
    Cut(dp=2, zero=0, micro_batch=2),
    Cut(dp=2, zero=2, micro_batch=3, saver="datastates"),
    Cut(dp=3, zero=1, micro_batch=4, recompute="selective"),
    Cut(dp=3, zero=3, micro_batch=2),
    Cut(dp=4, zero=3, recompute="full", saver="datastates"),
    Cut(dp=4, zero=0, micro_batch=3),
    Cut(pp=2, micro_batch=2, zero=0),
    Cut(pp=2, engine="afab", micro_batch=4, recompute="selective"),
    Cut(pp=2, engine="interleaved", zero=3, micro_batch=6),
    Cut(pp=2, engine="zb-h1", recompute="full"),
    Cut(pp=2, engine="zb-v", micro_batch=3, zero=2),
    Cut(pp=3, engine="zb-h1", micro_batch=2),
    Cut(pp=2, dp=2, zero=2, micro_batch=2),
    Cut(pp=2, dp=2, engine="interleaved", zero=1, micro_batch=3, saver="datastates"),
    Cut(pp=2, dp=2, engine="zb-v", zero=3, recompute="selective"),
    Cut(pp=2, dp=3, engine="zb-h1", zero=0, micro_batch=2),
    Cut(pp=4, dp=1, engine="afab", micro_batch=12),
    Cut(tp=2, zero=0, micro_batch=3, recompute="selective"),
    Cut(tp=2, dp=2, zero=3, mode="sp", recompute="full"),
    Cut(tp=2, pp=2, zero=2, mode="sp+overlap", engine="zb-v", micro_batch=2),
    Cut(tp=4, zero=1, micro_batch=2, saver="datastates", most=8),
    Cut(tp=4, mode="sp", recompute="mixer", most=8),
    Cut(tp=2, pp=2, engine="zb-h1", zero=0, recompute="selective", most=8),
    Cut(tp=8, mode="sp", micro_batch=4, recompute="full", most=8),
    Cut(dp=2, ep=2, zero=0, micro_batch=3),
    Cut(dp=4, ep=2, zero=3, recompute="full", saver="datastates"),
    Cut(dp=4, ep=4, zero=1, micro_batch=3, recompute="selective"),
    Cut(pp=2, dp=2, ep=2, zero=2, engine="zb-v", micro_batch=2),
    Cut(cp=2, most=1, most_cp=2, zero=0, micro_batch=3, recompute="full"),
    Cut(cp=4, most=1, most_cp=4, way="gather", recompute="selective"),
    Cut(dp=2, cp=2, most=1, most_cp=4, zero=3, way="ulysses", micro_batch=2, recompute="mixer"),
    Cut(pp=2, cp=2, most=1, most_cp=2, zero=2, engine="zb-v", saver="datastates"),
    Cut(dp=3, most=1, most_cp=4, zero=1, micro_batch=2),
)
MODELS = (
    Row(arch="qwen2", documents="separate", tied=True),
    Row(arch="llama", tied=True, layers=6, vocab=264, attention="plain"),
    Row(arch="mistral", attention="blocked"),
    Row(arch="qwen3", dtype="bf16", tied=True),
    Row(arch="starcoder2", dtype="bf16"),
    Row(arch="hybrid", layers=6, documents="separate"),
    Row(arch="mamba", dtype="bf16", tied=True, documents="separate"),
    Row(arch="qwen2_moe_limited", layers=6),
    Row(arch="deepseek", dtype="bf16"),
)
"""Windows, biases, norms of heads, state spaces, a z-loss; experts with balance losses, biases that
follow their load, a capacity, jitter and shared experts."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a cut of a model, or resumes one; each is run once."""
    folder, known = tmp_path_factory.mktemp("reproducible"), dict[str, Measured]()
    write_documents(folder)

    def measured(
        model: Row, cut: Cut, *, after: Cut | None = None, steps: int = STEPS, mode: bool = True
    ) -> Measured:
        name = f"{model}-{cut}-{after}-{steps}-{mode}"
        if name not in known:
            begun = f"{model}-{after}-None-{steps}-{mode}"
            resume = None if after is None else folder / begun / str(saved_after(steps))
            keys = cut.keys | (KEYS if mode else {})
            known[name] = measure(cut.row(model), folder, name, steps, resume, keys)
        return known[name]

    return measured


def differing(got: Measured, want: Measured) -> list[str]:
    """What is not the same bits."""
    found = [f"gradient of {name}" for name in unequal(got.gradients, want.gradients)]
    return found + [f"first {n}" for n in unequal(got.first, want.first)] + changed(got, want)


def cases() -> list[tuple[Row, Cut]]:
    """Every cut with two of the models, and every model with several cuts."""
    found = []
    for i, cut in enumerate(CUTS):
        fit = [model for model in MODELS if fitting(cut, model) == cut]
        found += [(fit[(i + k) % len(fit)], cut) for k in (0, len(fit) // 2)]
    return found


def fitting(cut: Cut, model: Row) -> Cut:
    """The cut without an axis that the model does not have."""
    spec = grid_run.model_of(model).decoder
    tp = 1 if virtual_shards(spec, cut.most) % cut.tp else cut.tp
    most_cp = 1 if whole_row_part(spec) else cut.most_cp
    cp = 1 if most_cp % cut.cp else cut.cp
    return replace(cut, tp=tp, ep=cut.ep if spec.routes else 1, cp=cp, most_cp=most_cp)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("model", "cut"), cases(), ids=str)
def test_a_cut_has_the_bits_of_one_process(model: Row, cut: Cut, run: Run) -> None:
    alone = replace(ALONE, most=cut.most, most_cp=cut.most_cp)
    want, got = run(model, alone), run(model, cut)
    assert got.gradients and not differing(got, want)
    number = CUTS.index(cut)
    other = CUTS[(number * 7 + 7) % len(CUTS)]
    other = replace(other, most=cut.most, most_cp=cut.most_cp)
    other = fitting(other, model)  # resumed elsewhere
    again = run(model, other, after=cut)
    assert len(again.losses) == STEPS - saved_after(STEPS)
    assert not changed(continued(got, again), want)


def test_rounding_grows_and_in_the_mode_there_is_none(run: Run) -> None:
    model, cut = Row(arch="llama", tied=True), Cut(pp=2, dp=2, engine="zb-h1", micro_batch=2)
    usual = [run(model, each, steps=LONG, mode=False) for each in (ALONE, cut)]
    losses = zip(usual[0].losses, usual[1].losses, strict=True)
    assert max(abs(a / b - 1) for a, b in losses) > 0
    exact = [run(model, each, steps=LONG) for each in (ALONE, cut)]
    assert not differing(exact[1], exact[0])


def test_models_and_cuts_are_those_of_the_grid(tmp_path: Path) -> None:
    for model, cut in cases():
        config = grid_run.configure(cut.row(model), tmp_path, "run", 2, None, KEYS | cut.keys)
        assert config.global_batch_size == GLOBAL_BATCH and config.general.reproducible
