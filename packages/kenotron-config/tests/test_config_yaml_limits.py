"""YAML that is careless or hostile: keys given twice are named, and limits hold."""

import re
import time
from pathlib import Path

import pytest
import yaml

import kenotron_config.yaml_loader as yaml_loader
from kenotron_config import ConfigError, parse_config
from kenotron_config.yaml_loader import DEEPEST, read_yaml

TEXT = Path(__file__).with_name("tiny_llama.yaml").read_text(encoding="utf-8")


def twice():
    """A config with its seed given twice, and the two lines."""
    lines = TEXT.splitlines()
    general = lines.index("general:")
    first = next(n for n in range(general, len(lines)) if lines[n].startswith("  seed:"))
    indent = lines[first][: lines[first].index("seed")]
    lines.insert(first + 1, f"{indent}seed: 77")
    return "\n".join(lines), first + 1, first + 2


def test_a_key_given_twice_is_a_warning_with_both_lines():
    text, first, second = twice()
    warnings = []
    assert parse_config(text, "c.yaml", warn=warnings.append).general.seed == 77
    assert warnings == [
        f"c.yaml: the key seed is given in line {first} and again in line {second}, "
        "the second counts: remove one of them"
    ]
    with pytest.warns(UserWarning, match="the key seed is given in line"):
        parse_config(text, "c.yaml")
    parse_config(TEXT, "c.yaml")


SECTION = """tokens:
  sequence_length: 64
  train_steps: 3
  micro_batch_size: 8
  batch_accumulation_per_replica: 2
"""
FIRST = """    <<: &first
      num_loading_workers: 1
      seed: 6
      seed: 7
"""


@pytest.mark.parametrize(
    ("text", "key", "path", "value"),
    [
        (TEXT + SECTION, "tokens", "tokens.train_steps", 3),
        (
            TEXT.replace("    adam_beta2: 0.95\n", "    adam_beta2: 0.95\n    adam_beta1: 0.8\n"),
            "adam_beta1",
            "optimizer.optimizer_factory.adam_beta1",
            0.8,
        ),
        (
            TEXT.replace("    num_loading_workers: 1\n    seed: 42\n", FIRST, 1).replace(
                "    num_loading_workers: 1\n    seed: 42\n", "    <<: *first\n", 1
            ),
            "seed",
            "data_stages.1.data.seed",
            7,
        ),
    ],
    ids=["top", "nested", "anchor"],
)
def test_a_key_given_twice_is_named_once_at_any_depth(text, key, path, value):
    warnings = []
    found = parse_config(text, "c.yaml", warn=warnings.append)
    for name in path.split("."):
        found = found[int(name)] if name.isdecimal() else getattr(found, name)
    assert found == value
    lines = [n for n, line in enumerate(text.splitlines(), 1) if line.strip().startswith(f"{key}:")]
    assert warnings == [
        f"c.yaml: the key {key} is given in line {lines[0]} and again in line {lines[1]}, "
        "the second counts: remove one of them"
    ]


def test_merged_keys_are_not_given_twice():
    data, remarks = read_yaml("a: &a {x: 1}\nb:\n  <<: *a\n  x: 2\nc: *a\n1: 2\n'1': 3\n", {})
    assert data["b"] == {"x": 2} and data["c"] == {"x": 1} and remarks == []
    deep = "z: &z {x: 1}\nr:\n  q:\n    a: &a\n      <<: *z\n      x: 2\nb:\n  <<: *a\n"
    assert read_yaml(deep, {})[1] == []  # b merges the inner mapping before it is made itself


def test_two_merges_into_one_mapping_are_named():
    text = "a: &a {x: 1, y: 1}\nb: &b {x: 2, z: 2}\nc:\n  <<: *a\n  <<: *b\n"
    data, remarks = read_yaml(text, {})
    assert data["c"] == {"x": 2, "y": 1, "z": 2}
    words = (
        "the key << is given in line 4 and again in line 5, and both are merged: write one list "
        "of aliases"
    )
    assert remarks == [words]


def test_of_a_list_of_merged_mappings_the_first_counts():
    text = "a: &a {name: 1, y: 1}\nb: &b {name: 2, z: 2}\nc:\n  <<: [*a, *b]\n  z: 3\n"
    assert read_yaml(text, {})[0]["c"] == {"name": 1, "y": 1, "z": 3}
    deep = text + "d:\n  <<: *b\n  name: 4\n  x: {<<: [*b, *a]}\n"
    assert read_yaml(deep, {})[0]["d"] == {"name": 4, "z": 2, "x": {"name": 2, "y": 1, "z": 2}}
    with pytest.raises(yaml.YAMLError, match="list of mappings for merging, but found scalar"):
        read_yaml("a:\n  <<: [1]\n", {})


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_nesting_has_a_limit(opening):
    text = "a: " + "\n".join([opening * 2000]) if opening != "- " else "- " * 2000 + "1"
    words = rf"c.yaml: line 1, column \d+: this is not YAML \(it is nested deeper than {DEEPEST} "
    with pytest.raises(ConfigError, match=words):
        parse_config(text, "c.yaml")


def test_aliases_have_a_limit():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for n in range(1, 30):
        lines.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]")
    began = time.monotonic()
    words = re.escape("it has more than 200000 values, counting those of aliases")
    with pytest.raises(ConfigError, match=words):
        parse_config("\n".join(lines), "c.yaml")
    assert time.monotonic() - began < 5


def test_an_alias_of_itself_is_refused():
    with pytest.raises(ConfigError, match=r"c.yaml: this cannot be a config \(Circular"):
        parse_config("a: &a [*a]\n", "c.yaml")


def test_a_text_has_a_limit(monkeypatch):
    monkeypatch.setattr(yaml_loader, "LONGEST", 10)
    with pytest.raises(ConfigError, match=f"it has {len(TEXT)} characters, more than 10"):
        parse_config(TEXT, "c.yaml")


def test_an_alias_of_a_long_text_counts_as_often_as_it_stands():
    text = "a: &a " + "x" * (1 << 14) + "\nb: [" + ", ".join(["*a"] * 190_000) + "]\n"
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="more than 16777216 characters, counting those of alias"):
        parse_config(text, "c.yaml")
    assert time.monotonic() - begun < 60
    few = "a: &a " + "x" * (1 << 14) + "\nb: [*a, *a]\n"
    assert read_yaml(few, {})[0]["b"] == ["x" * (1 << 14)] * 2


def test_many_unknown_keys_are_a_short_error():
    begun = time.monotonic()
    with pytest.raises(ConfigError) as error:
        parse_config(TEXT + "".join(f"unknown{n}: 1\n" for n in range(60_000)), "c.yaml")
    assert time.monotonic() - begun < 60
    lines = str(error.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "c.yaml: unknown20: is not a known key, nor are 59979 others"
    many = "".join(f"- unknown{n}: {{}}\n" for n in range(99))
    with pytest.raises(ConfigError, match="and 351 more problems$"):
        parse_config(TEXT[: TEXT.index("data_stages:")] + "data_stages:\n" + many, "c.yaml")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("general.seed=99999999999999999999999", "it must have 64 bits at most"),
        ("tokens.train_steps=99999999999999999999999", "it must have 64 bits at most"),
        ("data_stages.0.data.seed=99999999999999999999999", "it must have 64 bits at most"),
        ("model.init_method.std=1e39", "it must be at most 3.4e38"),
        ("optimizer.learning_rate_scheduler.learning_rate=1e300", "it must be at most 3.4e38"),
        ("model.model_config.num_hidden_layers=1000000000", "it must be at most 10000"),
    ],
)
def test_numbers_that_nothing_can_compute_with_are_refused(override, sentence):
    path = override.partition("=")[0]
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        parse_config(TEXT, "c.yaml", [override])
    assert any(path in line and sentence in line for line in caught.value.problems)
    assert time.monotonic() - began < 5
