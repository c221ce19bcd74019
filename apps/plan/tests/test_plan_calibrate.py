"""Measuring a machine into a machine file, and what a plan then says of its numbers."""

import json

import pytest

from kenotron_config import DEFAULT_CONFIG
from kenotron_cost.machine_file import NUMBERS, machine_named
from kenotron_plan.cli import main

QUICK = ("--seconds", "0.2", "--width", "32", "--sequence-length", "64")
MEASURED = {
    "peak_flops", "product_efficiency", "attention_efficiency", "memory", "context",
    "memory_bandwidth", "kernel_seconds",
}  # fmt: skip


def calibrate(*flags):
    return main(["calibrate", *flags])


@pytest.mark.parametrize(("ranks", "more"), [(1, set()), (2, {"node_bandwidth", "latency"})])
def test_what_can_be_measured_is_and_the_rest_is_that_of_a_known_machine(
    ranks, more, tmp_path, capfd
):
    file = tmp_path / "mine.json"
    assert calibrate("--write", str(file), "--ranks", str(ranks), *QUICK) == 0
    machine, known = machine_named(str(file)), machine_named("cpu")
    assert (machine.devices, machine.dtype) == (ranks, "float32") and machine.date >= known.date
    for key in NUMBERS:
        number = machine.numbers[key]
        assert number.measured == (key in MEASURED | more) and number.value >= 0
        assert number.measured or number == known.numbers[key]
        assert not number.measured or f"{ranks} rank" in number.source
    assert 0 < machine["product_efficiency"] <= 1 and 0 < machine["context"] < machine["memory"]
    assert machine.proof("peak_flops") == "calibrated here"
    assert machine.sharing >= 1 and (ranks > 1 or machine.sharing == 1)
    runs_there = ("--config-file", str(DEFAULT_CONFIG), "--set", "parallelism.tp=1")
    assert main([*runs_there, "--machine", str(file), "--json", f"{file}.plan"]) == 0
    out, plan = capfd.readouterr().out, json.loads((tmp_path / "mine.json.plan").read_text())
    assert "model.dtype is" not in out and "plan calibrate on" in " ".join(out.split())
    assert plan["own"]["times"] == "calibrated here"
    on_four = (*runs_there, "--machine", str(file), "--ranks", "4", "--json", f"{file}.plan")
    assert main([*on_four]) == 0  # on two nodes, between which nothing was measured
    plan = json.loads((tmp_path / "mine.json.plan").read_text())
    assert all(each["times"] == "not measured here" for each in plan["layouts"])


def test_numbers_that_are_not_measured_are_those_of_the_machine_that_is_given(tmp_path, capfd):
    file = tmp_path / "mine.json"
    assert calibrate("--write", str(file), "--machine", "h100", "--ranks", "1", *QUICK) == 0
    assert machine_named(str(file))["watts"] == machine_named("h100")["watts"]
    before = file.read_text()
    assert calibrate("--write", str(file), *QUICK) == 2
    assert f"--write {file}: there is such a file" in capfd.readouterr().err
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seconds", "0"), "--seconds: 0.0 was given; it must be above 0"),
        (("--machine", "h99"), "there is no machine of this name"),
        (("--write", "there/is/no/folder.json"), "there"),
    ],
)
def test_bad_input_is_status_2_and_writes_nothing(flags, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert calibrate("--write", "mine.json", *QUICK, "--ranks", "1", *flags) == 2
    assert words in capfd.readouterr().err and not [*tmp_path.iterdir()]


def test_a_launcher_has_started_its_ranks(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert calibrate("--write", "mine.json", "--ranks", "2") == 2
    assert "--ranks: 2 was given; a launcher has started the ranks" in capfd.readouterr().err
