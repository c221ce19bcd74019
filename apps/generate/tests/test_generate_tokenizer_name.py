"""A tokenizer that the run took from a variable of its environment."""

from pathlib import Path

import pytest

from kenotron_generate.load import _tokenizer


def test_a_variable_names_the_tokenizer(monkeypatch):
    state = {"tokenizer": {"name": "!env KENOTRON_WORDS"}}
    monkeypatch.setenv("KENOTRON_WORDS", "a/tokenizer.json")
    assert _tokenizer(Path("run/10"), state) == "a/tokenizer.json"
    monkeypatch.delenv("KENOTRON_WORDS")
    words = "the tokenizer that KENOTRON_WORDS named in the environment: set KENOTRON_WORDS, or"
    with pytest.raises(ValueError, match=words):
        _tokenizer(Path("run/10"), state)
    other = {"tokenizer": {"name": "!env KENOTRON_WORDS a name"}}
    assert _tokenizer(Path("run/10"), other) == "a name"
