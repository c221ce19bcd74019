"""Stages of a pipeline as a model's text says them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from engine_cases import ADAMW, batches_of
from test_engine_hybrid import HYBRID, NEXT

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters
from kenotron_dist.testing import on_ranks
from kenotron_engine import ModelPlan, build_training, training_step
from kenotron_models import DecoderSpec
from kenotron_pp import SCHEDULES


def first_steps(
    mesh: Mesh, spec: DecoderSpec, schedule: str = "1f1b", dtype: torch.dtype = torch.float32
) -> tuple[list[float], list[str]]:
    """Losses and norms of two steps, and the layers of this rank."""
    plan = ModelPlan(
        spec=spec, draws=(0.1, "NUM_LAYERS"), schedule=SCHEDULES[schedule], dtype=dtype
    )
    training = build_training(plan, ADAMW, mesh, train_steps=2)
    (batch,) = batches_of(mesh, 1, spec.vocab_size)
    results = [training_step(training, batch, step) for step in (1, 2)]
    layers = {
        path.split(".")[1] for path in named_parameters(training.model.stack) if "layers" in path
    }
    return [x for each in results for x in (each.loss, each.grad_norm)], sorted(layers)


@pytest.mark.parametrize(
    ("text", "schedule", "stages"),
    [
        ("M|E*-ME*M", "1f1b", ["0", "1234567"]),
        ("ME*-ME*|M", "1f1b", ["0123456", "7"]),
        ("ME|*|-M|E*M", "zb-v", ["01567", "234"]),
        ("ME|*|-M|E*M", "interleaved", ["0134", "2567"]),
    ],
)
def test_the_text_cuts_the_pipeline_and_changes_no_number(
    text: str, schedule: str, stages: list[str]
) -> None:
    spec = replace(HYBRID, layers=text).decoder
    [(whole, all_of_it)] = on_ranks(first_steps, spec)  # one stage is not cut
    assert "".join(all_of_it) == "01234567"
    ranks = on_ranks(first_steps, spec, schedule, pp=2)
    assert ["".join(layers) for _, layers in ranks] == stages
    for found, _ in ranks:
        assert found == pytest.approx(whole, rel=1e-5)


def test_a_stream_in_fp32_passes_from_stage_to_stage_of_a_bf16_hybrid() -> None:
    spec = replace(HYBRID, residual_in_fp32=True, layers="ME|*-").decoder
    (whole, _), *_ = on_ranks(first_steps, spec, "1f1b", torch.bfloat16)
    for found, _ in on_ranks(first_steps, spec, "1f1b", torch.bfloat16, pp=2):
        assert found == pytest.approx(whole, rel=1e-6)  # norms are added up in another order


def refused(mesh: Mesh, spec: DecoderSpec) -> str:
    try:
        build_training(ModelPlan(spec=spec), ADAMW, mesh, train_steps=2)
    except ValueError as error:
        return str(error)
    return ""


def test_another_number_of_parts_than_stages_is_refused() -> None:
    spec = replace(NEXT, layers="L|L|*L").decoder
    said = r"layers: 3 parts between '|' were given; the pipeline has 2 stages (pp 2 x 1 parts"
    assert all(re.match(re.escape(said), each) for each in on_ranks(refused, spec, pp=2))
