"""A thousand broken files: each loads, and then survives its own text, or is refused in words."""

import random
import re
from pathlib import Path

import pytest
import yaml

from kenotron_config import ConfigError, dump_config, parse_config

TEXT = Path(__file__).with_name("tiny_llama.yaml").read_text(encoding="utf-8")
VALUES = [
    None, True, False, 0, -1, 3, 2.5, 1e400, float("nan"), 10**40, "", "x", "1e-5", "null", "é\n",
    [], [1], ["a", None], {}, {"a": 1}, {1: 2}, [[]], {"name": "sgd"}, {"path": ""}, "%date",
]  # fmt: skip
PROBLEM = re.compile(r"c\.yaml: (.+: .{8,}|this is not YAML .+|.+ was given; a config is .+)")


def places(data, path=()):
    """Every place in a tree of mappings and lists."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in list(items):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def mutated(seed):
    """The file's text with one to four changes of its tree, or of its characters."""
    rng = random.Random(seed)
    if seed % 5 == 0:
        text = list(TEXT)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(text))
            text[at] = rng.choice(
                ["", ":", "\n", "\t", "-", "&a", "*a", "{", "]", '"', "#", "\x00"]
            )
        return "".join(text)
    data = yaml.safe_load(TEXT)
    for _ in range(rng.randint(1, 4)):
        *parents, last = rng.choice(list(places(data)))
        owner = data
        for key in parents:
            owner = owner[key]
        change = rng.randrange(4)
        if change == 0:
            del owner[last]
        elif change == 1 and isinstance(owner, dict):
            owner[f"{last}s"] = owner.pop(last)
        elif change == 2 and isinstance(owner, dict):
            owner[rng.choice(["new", "_" + str(last), 7])] = owner[last]
        else:
            owner[last] = rng.choice(VALUES)
    return yaml.safe_dump(data, allow_unicode=True)


@pytest.mark.parametrize("block", range(10))
def test_a_broken_file_loads_or_is_refused_in_words(block):
    loaded = 0
    for seed in range(100 * block, 100 * block + 100):
        try:
            config = parse_config(mutated(seed), "c.yaml", warn=print)
        except ConfigError as error:
            assert error.problems, seed
            for problem in error.problems:
                assert PROBLEM.fullmatch(problem), (seed, problem)
        else:
            loaded += 1
            assert parse_config(dump_config(config), "again") == config, seed
    assert 0 < loaded < 100
