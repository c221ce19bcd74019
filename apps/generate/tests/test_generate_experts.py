"""Models with experts: the texts of transformers and of one process on every layout with ep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from kenotron_command import layout_sizes
from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_generate.cli import generate_parser, main
from kenotron_generate.load import describe, load_model
from kenotron_models.layers import StackedLinear

PROMPTS = ["a", "the second is longer", "def main(argv): "]
COUNT = 12
LAYOUTS = [
    {"tp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "ep": 4},
    {"dp": 2, "pp": 2, "ep": 2},
    {"dp": 4, "ep": 2},  # the last replica has no prompt
    {"cp": 2, "tp": 2, "ep": 4},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.write_model(folder / name, name) for name in tiny.expert_configs()}


def run(folder: Path, out: Path, *flags: str, **sizes: int) -> list[dict[str, Any]]:
    given = ["--ckpt-path", str(folder), "--max-new-tokens", str(COUNT), "--jsonl", str(out)]
    given += ["--no-check"]
    given += [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    layout = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    assert main([*given, *layout, *flags]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", tiny.expert_configs())
def test_greedy_texts_are_those_of_transformers(
    name: str, sizes: dict[str, int], models: dict[str, Path], tmp_path: Path
) -> None:
    """One text at a time: dp replicas then make different numbers of passes."""
    flags = ("--temperature", "0", "--batch-size", "1")
    for prompt, result in zip(
        PROMPTS, run(models[name], tmp_path / "out", *flags, **sizes), strict=True
    ):
        assert result["tokens"] == tiny.continued(models[name], prompt, COUNT)[1]


@pytest.mark.parametrize("name", tiny.expert_configs())
def test_draws_and_ends_are_those_of_one_process(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    flags = ["--temperature", "0.9", "--top-k", "40"]
    free = run(models[name], tmp_path / "out", *flags)
    flags += [word for i in (0, 2) for word in ("--stop", free[i]["completion"][3 + i : 5 + i])]
    one = run(models[name], tmp_path / "out", *flags)
    assert len({len(result["tokens"]) for result in one}) > 1  # they end at different times
    for more, sizes in [
        ([], {"dp": 2, "ep": 2}),
        (["--no-cache"], {"dp": 2, "ep": 2}),
        (["--batch-size", "1"], {"dp": 2, "tp": 2, "ep": 4}),
        ([], {"pp": 2, "tp": 2, "ep": 2}),
    ]:
        assert run(models[name], tmp_path / "out", *flags, *more, **sizes) == one


def test_ranks_of_experts_are_those_of_training_on_request(models: dict[str, Path]) -> None:
    described = replace(describe(models["qwen3_moe"]), sizes={"dp": 4, "ep": 4})
    for asked, trained, ep in [("0", described.sizes, 4), ("2", described.sizes, 2), ("0", {}, 1)]:
        given = generate_parser().parse_args(["--ckpt-path", "a", "--ep", asked])
        assert layout_sizes(given, trained)["ep"] == ep


def stacks(mesh: Mesh, folder: Path) -> set[int]:
    """How many experts this rank has of each layer."""
    layers = load_model(describe(folder), mesh).layers
    parts = [part for layer in layers for part in layer.modules()]
    return {len(part.weight) for part in parts if isinstance(part, StackedLinear)}


def test_each_rank_has_its_experts_only(models: dict[str, Path]) -> None:
    assert on_ranks(stacks, models["qwen3_moe"], dp=2, tp=2, ep=4) == [{2}] * 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep", "2"], "--ep 2: it must divide dp x cp x tp (1), the ranks of a pipeline stage"),
        (["--ep", "3", "--dp", "3"], "--ep 3: it must divide the 8 experts of a layer"),
        (["--ep", "-1"], "--ep -1: give a number of ranks, or 0 for the checkpoint's"),
    ],
)
def test_sizes_of_ep_that_do_not_fit(
    flags: list[str],
    message: str,
    models: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--ckpt-path", str(models["qwen3_moe"]), "--prompt", "a", *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_dense_model_has_no_ep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.write_model(tmp_path / "model", "llama")
    assert main(["--ckpt-path", str(model), "--prompt", "a", "--tp", "2", "--ep", "2"]) == 1
    assert f"--ep 2: {model} has no experts; leave --ep out" in capsys.readouterr().err
