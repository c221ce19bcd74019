"""A dry run matches what 16,384 ranks would communicate, and names the lines of a planted fault."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from torch import Tensor

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Axis, all_reduce, send
from kenotron_dist.diagnosis import Diverged
from kenotron_engine import step
from kenotron_pp.activation import Form
from kenotron_pp.p2p import Links
from kenotron_train.config_file import load_config
from kenotron_train.run.dry_run import dry_run_of

SIZES = {"pp": 4, "dp": 512, "tp": 8}
STAGE = 512 * 8
MODEL = ("num_attention_heads=8", "num_key_value_heads=8", "num_hidden_layers=4")
FILE = Path(__file__).name


def config(*more: str, **sizes: int) -> Config:
    """The embedded config on a layout, of few layers, whose data do not exist."""
    given = [f"parallelism.{axis}={size}" for axis, size in (sizes or SIZES).items()]
    model = [f"model.model_config.{each}" for each in MODEL]
    data = ["data_stages.0.data.dataset.hf_dataset_or_datasets=/no/data"]
    return load_config(DEFAULT_CONFIG, [*given, *model, *data, *more])


def line(mark: str) -> str:
    """Place in this file that ends with a mark."""
    lines = Path(__file__).read_text().splitlines()
    [number] = [i for i, text in enumerate(lines, 1) if text.endswith(f"# {mark}")]
    return f"{FILE}:{number}"


def me(axis: Axis) -> int:
    return axis.ranks[axis.rank]


def another(change: Any, mark: str) -> Any:
    """A plant on tp rank 1 of stage 2: it sums the loss after a change."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
        def planted(x: Tensor, axis: Axis) -> Tensor:
            if me(axis) == 2 * STAGE + 1 and axis.name == "dp_cp":
                return change(x, axis)
            return all_reduce(x, axis)  # others

        monkeypatch.setattr(step, "all_reduce", planted)
        return line(mark), line("others")

    return plant


def no_sum(x: Tensor, axis: Axis) -> Tensor:
    return x


def wide(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce(torch.stack([x, x]), axis)[0]  # wide


def double(x: Tensor, axis: Axis) -> Tensor:
    return all_reduce(x.double(), axis).float()  # double


def in_other_order(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Tp rank 1 of stage 2 calls the broadcast over the world before the sum over dp."""
    real = step.broadcast
    kept: dict[str, Axis] = {}

    def first(x: Tensor, axis: Axis) -> Tensor:
        if me(axis) == 2 * STAGE + 1 and axis.name == "dp_cp":
            kept["axis"] = axis
            return x
        return all_reduce(x, axis)  # first

    def second(x: Tensor, axis: Axis, *args: Any) -> Tensor:
        found = real(x, axis, *args)  # second
        if me(axis) == 2 * STAGE + 1 and kept:
            found = all_reduce(found, kept.pop("axis"))  # late
        return found

    monkeypatch.setattr(step, "all_reduce", first)
    monkeypatch.setattr(step, "broadcast", second)
    return line("late"), line("first")


def one_stage(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """All ranks of stage 2 leave out the broadcast over the world."""
    real = step.broadcast

    def planted(x: Tensor, axis: Axis, *args: Any) -> Tensor:
        return x if me(axis) // STAGE == 2 else real(x, axis, *args)  # stages

    monkeypatch.setattr(step, "broadcast", planted)
    return "ranks 8192, 8193, 8199, 8200, 12280, 12287 did not call it", line("stages")


def without_receive(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Rank 0 of stage 1 sends once more than stage 2 receives."""
    real = Links.finish

    def planted(links: Links) -> None:
        real(links)
        if links._axis.rank == 1 and me(links._axis) == STAGE:
            send(torch.empty(3, device="meta"), links._pairs[1, 2], 1, tag=7).wait()  # more

    monkeypatch.setattr(Links, "finish", planted)
    return line("more"), "p2p.py:"


def other_peer(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Rank 0 of stage 1 sends its activations back to stage 0."""
    real = Links._route_between

    def planted(links: Links, source: int, to: int, tag: int) -> Any:
        if me(links._axis) == STAGE and (source, to) == (1, 2) and tag:
            return real(links, 1, 0, tag)  # back
        return real(links, source, to, tag)

    monkeypatch.setattr(Links, "_route_between", planted)
    return "rank 4096 called send of int64 (1,), tag 5", "rank 0 called receive of float32"


def other_dtype(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """All ranks of stages receive fp16 where fp32 is sent."""
    real = Form.empty

    def planted(form: Form, device: torch.device, *, gradients: bool) -> list[Tensor]:
        return [x.half() for x in real(form, device, gradients=gradients)]

    monkeypatch.setattr(Form, "empty", planted)
    return "receive of float16", "send of float32"


PLANTS = {
    "skipped sum": another(no_sum, "others"),
    "other size": another(wide, "wide"),
    "other dtype": another(double, "double"),
    "other order": in_other_order,
    "skipped by one stage": one_stage,
    "send without receive": without_receive,
    "other peer": other_peer,
    "dtype of a receive": other_dtype,
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_plant_at_full_size_is_found_with_both_lines(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = PLANTS[name](monkeypatch)
    with pytest.raises(Diverged) as told:
        dry_run_of(config(), 1)
    text = str(told.value)
    assert one in text and other in text


def test_ranks_that_agree_are_described_with_their_bytes(tmp_path: Path) -> None:
    said = dry_run_of(config(), 1)
    assert said.startswith("Dry run of 16,384 ranks, pp 4 x dp 512 x tp 8: agreed\n")
    plain = " ".join(said.split())
    assert "in each stage those at places 0, 1, 7, 8, 4088, 4095: the first" in plain
    assert "Simulated: 24 of 16,384 ranks" in plain
    assert "All simulated ranks of a stage make equal calls" in plain
    assert "Not needed: data_stages.0.data.dataset.hf_dataset_or_datasets: /no/data" in said
    stages = re.findall(r"^ +(\S+) +6 +4,096 +[\d,]+ +\d+  \S+ [\d.]+", said, re.MULTILINE)
    assert stages == ["0", "1-2", "3"]
    assert max(map(len, said.splitlines())) <= 100


def test_types_of_parameters_are_listed() -> None:
    """Norms of cut tokens are summed over tp; a tied head is listed once."""
    said = dry_run_of(config("model.model_config.tie_word_embeddings=true", dp=2, tp=2), 1)
    tail = said.split("Parameters over axes")[1].split("Not needed")[0]
    rows = dict(re.findall(r"^  (\S.*?)  (.*(?:\n {4}.*)*)", tail, re.MULTILINE))
    names = {types: re.findall(r"[\w.*]+", found) for types, found in rows.items()}
    assert names.keys() == {"dp R, tp V", "dp R, tp R"}
    assert names["dp R, tp R"] == [
        "layers.*.attention_norm.weight", "layers.*.mlp_norm.weight", "norm.weight",
    ]  # fmt: skip
    assert len(names["dp R, tp V"]) == 5  # the head is the embedding
    assert "Parameters over axes" not in dry_run_of(config(pp=2, dp=1, tp=1), 1)


def test_a_rank_that_calls_more_brings_the_lines_through_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of tp rank 1 sum once more over dp: it fits, and its own line is simulated too."""

    def planted(x: Tensor, axis: Axis) -> Tensor:
        if me(axis) % 8 == 1 and axis.name == "dp_cp":
            all_reduce(x, axis)
        return all_reduce(x, axis)

    monkeypatch.setattr(step, "all_reduce", planted)
    said = dry_run_of(config(pp=1, dp=512, tp=8), 1)
    plain = " ".join(said.split())
    assert "at places 0, 1, 7, 8, 9, 15, 4088, 4089, 4095:" in plain
    assert "Simulated ranks of a stage make different calls, which match, in stages 0" in plain


def test_the_command_writes_nothing(tmp_path: Path) -> None:
    flags = [flag for each in ("dp=64", "tp=4") for flag in ("--set", f"parallelism.{each}")]
    done = runs.train(tmp_path, "--dry-run", *flags)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.startswith("Dry run of 256 ranks, pp 1 x dp 64 x tp 4: agreed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        "parallelism.tp=3",
        "parallelism.ep=2",
        "model.init_method={path: no/model}",
        "parallelism.recompute_memory_gb=0.000001",
        "checkpoints.resume_checkpoint_path=no/run",
    ],
)
def test_what_cannot_be_run_is_refused_as_in_a_training(change: str, tmp_path: Path) -> None:
    key = change.split("=")[0].removeprefix("model.")
    for flags in (["--dry-run"], []):
        done = runs.train(tmp_path, *flags, "--set", change)
        assert done.returncode, done.stdout
        assert key in done.stderr, done.stderr
