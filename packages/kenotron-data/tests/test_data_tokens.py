"""Byte tokens go from text to ids and back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron_data import END_OF_DOCUMENT, decode, encode


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=5))
def test_text_comes_back(documents):
    assert decode(encode(documents, 257)) == "".join(documents)
    assert decode(encode(documents, 256)) == "".join(documents)


def test_a_document_ends_with_256_where_there_is_room():
    assert encode(["a", "", "é"], 257).tolist() == [97, 256, 256, 195, 169, 256]
    assert encode(["a", "", "é"], 256).tolist() == [97, 195, 169]
    assert encode([], 300).tolist() == []
    assert encode(["a"], 300).dtype == np.uint16
    assert END_OF_DOCUMENT == 256


def test_broken_bytes_and_unknown_ids_are_replaced():
    assert decode([104, 0xC3, 300, 105]) == "h\ufffd\ufffdi"
    assert decode([0xE2, END_OF_DOCUMENT, 0x82, 0xAC]) == "\ufffd\ufffd\ufffd"
    assert decode(np.array([104, 105], dtype=np.uint32)) == "hi"


def test_a_small_vocabulary_is_named():
    with pytest.raises(ValueError, match="at least 256 ids, but vocab_size is 255: raise"):
        encode(["a"], 255)


def test_a_document_that_is_no_utf8_is_named():
    with pytest.raises(ValueError, match="document 1 cannot be written as UTF-8 at character 2"):
        encode(["fine", "ab\ud800"], 257)


def test_ids_that_cannot_be_decoded_are_named():
    with pytest.raises(ValueError, match="ids are 0 or more, but -100 was given"):
        decode([1, -100])
    with pytest.raises(ValueError, match=r"one dimension, but their shape is \(1, 2\)"):
        decode(np.zeros((1, 2), dtype=np.int64))
