"""Sizes that follow: dp from the processes that are there, micro-batches from the batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from kenotron_config import ConfigError, dump_config, for_processes, load_config, parse_config
from kenotron_config.elastic import with_sizes

FILE = Path(__file__).with_name("tiny_llama.yaml")
AUTO = ("parallelism.dp=auto", "tokens.global_batch_size=14", "tokens.micro_batch_size=2")
NAMES = ("pp", "cp", "tp", "ep")


def sizes(*overrides: str, world: int | None) -> tuple[int, int, int]:
    """dp, micro-batches of a rank, and samples of a batch."""
    config = load_config(FILE, [*AUTO, *overrides], world=world)
    assert config.batches.microbatches(0, 0) == config.tokens.batch_accumulation_per_replica
    assert config.global_batch_size == config.batches.at(0, 0) == 14
    return config.parallelism.dp, config.tokens.batch_accumulation_per_replica, config.world_size


@pytest.mark.parametrize(
    ("layout", "world", "expected"),
    [
        ((1, 1, 1, 1), None, (1, 7, 1)),
        ((1, 1, 1, 1), 1, (1, 7, 1)),
        ((1, 1, 1, 1), 3, (3, 3, 3)),
        ((1, 1, 1, 1), 9, (9, 1, 9)),
        ((2, 1, 1, 1), 5, (2, 4, 4)),
        ((1, 2, 1, 1), 3, (1, 7, 2)),
        ((1, 1, 2, 1), None, (1, 7, 2)),
    ],
)
def test_dp_is_what_the_processes_are_enough_for(
    layout: tuple[int, ...], world: int | None, expected: tuple[int, int, int]
) -> None:
    given = [f"parallelism.{n}={size}" for n, size in zip(NAMES, layout, strict=True)]
    assert sizes(*given, world=world) == expected


@pytest.mark.parametrize(
    ("tp", "ep", "world", "dp"),
    [(1, 2, 2, 2), (1, 2, 3, 2), (1, 2, 5, 4), (2, 4, 7, 2), (2, 2, 6, 3)],
)
def test_experts_take_a_part_of_the_data_ranks(tp: int, ep: int, world: int, dp: int) -> None:
    problems: list[str] = []
    given = {
        "parallelism": {"dp": "auto", "pp": 1, "tp": tp, "ep": ep},
        "tokens": {"global_batch_size": 8, "micro_batch_size": 1},
    }
    found = with_sizes(given, world, lambda path, sentence: problems.append(sentence))
    assert found["parallelism"]["dp"] == dp and not problems
    with_sizes(given, tp, lambda path, sentence: problems.append(sentence))
    assert [f"with ep {ep}: {max(tp, ep)} processes" in each for each in problems] == [True] * (
        ep > tp
    )


def test_a_saved_config_follows_again_and_keeps_its_numbers_where_nothing_is_started() -> None:
    config = load_config(FILE, [*AUTO, "parallelism.tp=1"], world=3)
    text = dump_config(config)
    assert parse_config(text, "saved", saved=True) == config
    again = parse_config(text, "saved", world=2)
    assert again.parallelism.dp == 2 and again.tokens.batch_accumulation_per_replica == 4
    assert for_processes(config, 2) == again
    with pytest.raises(ValueError, match=r"auto was given, with 0 processes; one is pp 1 x cp 1 x"):
        for_processes(config, 0)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["parallelism.dp=auto"],
            "dp: auto was given; then the batch must not change with dp: give",
        ),
        ([*AUTO, "parallelism.tp=2"], "dp: auto was given, with 1 processes; one is pp"),
        (
            ["tokens.global_batch_size=14", "tokens.batch_accumulation_per_replica=3"],
            "per_replica: 3 was given; a global_batch_size of 14 with dp 1",
        ),
        (["tokens.global_batch_size=0"], "global_batch_size: 0 was given; it must be at least 1"),
        (
            ["tokens.global_batch_size=many"],
            'global_batch_size: "many" was given; it must be a whole number',
        ),
        (
            [*AUTO, "data_stages.0.batch_accumulation_per_replica=2"],
            "0.batch_accumulation_per_replica: 2 was given; with tokens.global_batch_size every",
        ),
    ],
)
def test_sizes_that_contradict_one_another_are_named(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(FILE, overrides, world=1)
    assert sentence in str(error.value)


def test_a_ramp_need_not_be_divided_where_the_batch_is_given() -> None:
    ramp = "tokens.batch_ramp={start: 3, increment: 3, samples: 30}"
    config = load_config(FILE, [*AUTO, ramp, "parallelism.tp=1"], world=2)
    found = [config.batches.at(0, n) for n in (0, 10, 20, 30)]
    assert found == sorted(found) and found[0] == 3 and found[-1] == 14
    assert [config.batches.microbatches(0, n) for n in (0, 30)] == [1, 4]
