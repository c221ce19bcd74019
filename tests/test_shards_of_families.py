"""ZeRO stage 3 on every architecture: the numbers of stage 0, however layers compute again."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import hf_cases
import pytest
from transformers import LlamaConfig, Mamba2Config, MambaConfig

from kenotron_data import Batch, Loader, RandomTokens
from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    LayerMetrics,
    ModelPlan,
    Piece,
    build_training,
    evaluate,
    join_pieces,
    slice_pieces,
    training_step,
    weight_pieces,
)
from kenotron_models import (
    FAMILIES,
    AnyConfig,
    Mup,
    Recompute,
    TransformersSpec,
    config_from_json,
    expert_layers,
    family_of,
    multipliers_of,
    mup_scales,
)
from kenotron_models.families import TransformersConfig
from kenotron_models.hf import config_from_hf
from kenotron_optim import (
    AdamWConfig,
    LRSchedulerConfig,
    OptimizerConfig,
    Regather,
    Slices,
    WeightAverageConfig,
)

STEPS, SEQUENCE, VOCABULARY, PARTS = 2, 8, 257, 3
OPTIMIZER = OptimizerConfig(
    optimizer_factory=AdamWConfig(
        adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True
    ),
    zero_stage=0,
    weight_decay=0.1,
    clip_grad=1.0,
    accumulate_grad_in_fp32=True,
    learning_rate_scheduler=LRSchedulerConfig(learning_rate=1e-2, min_decay_lr=1e-3),
    weight_average=WeightAverageConfig(decay=0.5),
)
BOUND = 1e-6
"""Of losses and norms, and of a gradient in units of its largest element."""
WEIGHT_BOUND = 1e-4
"""Of a weight after the last step: Adam divides small gradients by their size."""
FIGURE_BOUND = 1e-4
"""Of a statistic of a layer: some are differences of sums."""
Run = tuple[list[float], dict[str, float], list[list[Piece]]]


def configs() -> dict[str, AnyConfig]:
    """Every family, in the first of its variations."""
    found: dict[str, AnyConfig] = {}
    first = {kind: name for name, (kind, _) in reversed(hf_cases.CASES.items())}
    for name in first.values():
        kind, changes = hf_cases.CASES[name]
        recurrent = kind in (MambaConfig, Mamba2Config)
        sizes = hf_cases.RECURRENT if recurrent else hf_cases.SIZES
        text = kind(**{**sizes, **changes}).to_json_string(use_diff=False)
        found[name] = config_from_hf(json.loads(text))
    text = LlamaConfig(**hf_cases.SIZES).to_json_string(use_diff=False)
    found["transformers"] = TransformersConfig(config_json=text)
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    experts = {"is_llamoe_config": True, "moe_num_experts": 4, "num_experts_per_tok": 2}
    small = {name: hf_cases.SIZES[name] for name in kept}
    found["llamoe"] = config_from_json({**small, "intermediate_size": 24, **experts})
    return found


def variants(config: AnyConfig) -> Iterator[tuple[str, ModelPlan]]:
    """A model alone, under µP, and with a module that predicts a further token."""
    spec, draws = config.decoder, (0.1, "NUM_LAYERS")
    yield "plain", ModelPlan(spec=spec, draws=draws)
    if isinstance(spec, TransformersSpec):
        return
    mup = Mup(base=spec)
    try:
        scales = mup_scales(spec, mup, "adamw", 0.1)
    except ValueError as error:
        assert "no width" in str(error)  # its constants begin by a rule of their own
    else:
        scaled = multipliers_of(spec, mup, output=0.3).applied(spec)
        yield "mup", ModelPlan(spec=scaled, draws=draws, scales=scales)
    if not any(each.router.balances_all_layers for each in expert_layers(spec).values()):
        yield "mtp", ModelPlan(spec=replace(spec, mtp_weight=0.3, logit_scale=0.7), draws=draws)


def batches(mesh: Mesh) -> list[Batch]:
    with Loader(
        RandomTokens(VOCABULARY, SEQUENCE, seed=3, samples=64),
        seed=5,
        microbatches=2,
        micro_batch_size=1,
        dp_rank=mesh["dp"].rank,
        dp_size=mesh["dp"].size,
    ) as loader:
        return [next(loader) for _ in range(STEPS)]


def train(mesh: Mesh, plan: ModelPlan, data: list[Batch], **optim: Any) -> Run:
    """What reads parameters: losses and norms, figures of layers, gradients and last weights.

    The held-out loss is that of averaged weights.
    """
    training = build_training(plan, replace(OPTIMIZER, **optim), mesh, train_steps=STEPS)
    numbers, pieces = list[float](), list[list[Piece]]()
    for step, batch in enumerate(data, start=1):
        figures = LayerMetrics(training)

        def look(gradient: Slices, figures: LayerMetrics = figures) -> None:
            figures.look(gradient)
            pieces.append(slice_pieces(training, gradient))

        with figures.during():
            result = training_step(training, batch, step, look=look)
        numbers += [result.loss, result.grad_norm, result.figures.get("mtp_loss", 0.0)]
    assert training.averages is not None
    with training.averages.in_place():
        numbers.append(evaluate(training, data, ("random",)).loss)
    pieces.append(weight_pieces(training))
    training.check_replicas()
    return numbers, figures.collect(), pieces


def ways(plan: ModelPlan, turn: int) -> list[tuple[Recompute, Regather]]:
    """All that layers may compute again where logits are scaled, else each at its turn.

    With ``regather: step``, where nothing is freed between passes, another one.
    """
    again: tuple[Recompute, ...] = get_args(Recompute)
    if isinstance(plan.spec, TransformersSpec):
        again = ("none", "full")
    scaled = plan.spec.logit_scale != 1 and not plan.spec.mtp_weight
    layer = again if scaled else (again[turn % len(again)],)
    return [*((each, "layer") for each in layer), (again[(turn + 1) % len(again)], "step")]


def walk(mesh: Mesh, part: int, turn: int) -> list[str]:
    """Compare every third family, from a turn of ``ways`` on; names of what was run."""
    data, ran = batches(mesh), list[str]()
    for name, config in list(configs().items())[part::PARTS]:
        for variant, plan in variants(config):
            numbers, figures, tensors = train(mesh, plan, data)
            whole = [join_pieces([each]) for each in tensors]
            for recompute, regather in ways(plan, turn := turn + 1):
                what = f"{name}, {variant}, {recompute}, {regather}"
                try:
                    found = train(
                        mesh, replace(plan, recompute=recompute), data,
                        zero_stage=3, regather=regather, reduce="step",
                    )  # fmt: skip
                except RuntimeError as error:
                    raise AssertionError(what) from error
                assert found[0] == pytest.approx(numbers, rel=BOUND), what
                assert found[1] == pytest.approx(figures, rel=FIGURE_BOUND, abs=BOUND), what
                for pieces, want in zip(found[2], whole, strict=True):
                    for tensor, start, values, _ in pieces:
                        place = tuple(
                            slice(a, a + n) for a, n in zip(start, values.shape, strict=True)
                        )
                        own = want[tensor]
                        far = abs(values - own[place]).max(initial=0.0)
                        bound = BOUND if want is not whole[-1] else WEIGHT_BOUND
                        assert far <= bound * abs(own).max(), f"{what}: {tensor}"
                ran.append(what)
    return ran


def test_every_family_is_walked_over() -> None:
    assert {family_of(config).marker for config in configs().values()} == {
        family.marker for family in FAMILIES
    }


@pytest.mark.parametrize("part", range(PARTS))
def test_stage_3_has_the_numbers_of_stage_0_on_every_architecture(part: int) -> None:
    """Each meets every ``recompute`` and both of ``regather`` in five runs, one every third day."""
    turn = datetime.date.today().toordinal() // PARTS
    ran = on_ranks(walk, part, turn, seconds=600.0)[0]
    assert len(ran) > 50
    assert all(any(word in name for name in ran) for word in ("mup", "mtp", "step", "mixer"))
