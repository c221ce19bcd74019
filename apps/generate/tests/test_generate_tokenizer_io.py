"""Text as it comes, token by token."""

from __future__ import annotations

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from kenotron_data import decode
from kenotron_generate.tokenizer_io import Writer, open_words


def written(data: bytes, stops: list[str]) -> tuple[list[str], Writer]:
    writer = Writer(decode, [], stops)
    parts = []
    for byte in data:
        parts.append(writer.add(byte))
        if writer.stopped:
            break
    return [*parts, writer.rest()], writer


@given(st.text())
def test_pieces_add_up_to_the_text(text: str) -> None:
    parts, writer = written(text.encode(), [])
    assert "".join(parts) == text == writer.text
    assert not writer.stopped


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_a_stop_cuts_the_text_and_none_of_it_is_shown(text: str, stops: list[str]) -> None:
    parts, writer = written(text.encode(), stops)
    ends = [i for i in range(len(text) + 1) if any(text[:i].endswith(stop) for stop in stops)]
    if not ends:
        assert "".join(parts) == text
        assert not writer.stopped
        return
    heard = text[: ends[0]]
    begin = min(heard.find(stop) for stop in stops if stop in heard)
    assert "".join(parts) == writer.text == text[:begin]
    assert writer.stopped


def test_a_character_of_several_bytes_comes_whole() -> None:
    parts, _ = written("aé€".encode(), [])
    assert parts == ["a", "", "é", "", "", "€", ""]


def test_bytes_are_the_words_of_a_model_without_tokenizer() -> None:
    words = open_words(None, [2, 300], special=True)
    assert words.to_ids("hé") == [104, 195, 169]
    assert words.ends == {256, 300}  # 2 is a byte of text
    assert words.chat is None
    assert (
        words.read("", template=True)
        == [256]
        == open_words(None, [], 2, special=True).read("", template=True)
    )
    with pytest.raises(ValueError, match="the tokenizer has no chat template: give texts"):
        words.read([{"role": "user", "content": "x"}], template=True)


def test_a_template_makes_a_turn_of_a_text(tmp_path) -> None:
    tiny.byte_tokenizer(chat=True).save_pretrained(tmp_path)
    words = open_words(str(tmp_path), [], special=False)
    asked = words.read("hi", template=True)
    assert words.to_text(asked) == "[user]hi\n[assistant]"
    assert words.read([{"role": "user", "content": "hi"}], template=True) == asked
    assert words.to_text(words.read("hi", template=False)) == "hi"
    assert words.ends == set()  # the tokenizer's own end is none of the model's


def test_special_tokens_begin_a_text_where_they_are_wanted(tmp_path) -> None:
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    assert open_words(str(tmp_path), [], special=True).to_ids("a")[0] == 256
    plain = open_words(str(tmp_path), [], special=False).to_ids("a")
    assert 256 not in plain
    assert open_words(str(tmp_path), [], 256, special=False).read("", template=True) == [256]
    with pytest.raises(ValueError, match="the model has no bos_token_id to begin a text"):
        open_words(str(tmp_path), [], special=False).read("", template=True)
    file = open_words(str(tmp_path / "tokenizer.json"), [9], special=False)
    assert file.to_ids("a") == plain
    assert file.to_text(plain) == "a"
    assert file.ends == {9}


@pytest.mark.parametrize("name", ["/nowhere/tokenizer.json", "/nowhere"])
def test_a_tokenizer_that_is_not_there(name: str) -> None:
    with pytest.raises(ValueError, match="/nowhere"):
        open_words(name, [], special=False)
