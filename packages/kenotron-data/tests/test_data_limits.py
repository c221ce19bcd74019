"""Compressed files and lines that would take all memory; names that a terminal would obey."""

import json

import pytest
import zstandard

import kenotron_data.json_lines as json_lines
from kenotron_data.__main__ import main
from kenotron_data.json_lines import JsonLines
from kenotron_data.zstd_file import _decompressed, open_zstd


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_a_line_has_a_limit(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"a{suffix}"
    data = json.dumps({"text": "short"}) + "\n" + json.dumps({"text": "a" * 2000}) + "\n"
    packed = zstandard.compress(data.encode()) if suffix.endswith("zst") else data.encode()
    path.write_bytes(packed)
    assert [text for _, (text,) in JsonLines(path=path, columns=("text",))][0] == "short"
    monkeypatch.setattr(json_lines, "LONGEST_LINE", 1000)
    with pytest.raises(ValueError, match="line 2: the line has more than 1000 bytes: split the do"):
        list(JsonLines(path=path, columns=("text",)))


def test_a_stretch_that_begins_in_a_long_line_has_the_limit_too(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a" * 2000}) + "\n" + json.dumps({"text": "b"}) + "\n")
    monkeypatch.setattr(json_lines, "LONGEST_LINE", 1000)
    with pytest.raises(ValueError, match="the line has more than 1000 bytes"):
        list(JsonLines(path=path, columns=("text",), start=100))


def test_a_block_of_zstd_stays_small(tmp_path):
    path = tmp_path / "bomb.zst"
    size = 1 << 30
    packer = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    block = b"\0" * (1 << 24)
    packed = b"".join(packer.compress(block) for _ in range(size >> 24)) + packer.flush()
    path.write_bytes(packed)
    assert len(packed) < 1 << 17  # one read of the file
    with path.open("rb") as file:
        largest, total = 0, 0
        for found in _decompressed(file, path, zstandard):
            largest, total = max(largest, len(found)), total + len(found)
    assert total == size and largest <= 1 << 25


def test_frames_of_any_length_are_read(tmp_path):
    path = tmp_path / "a.zst"
    parts = [bytes([n % 256]) * (n * 37 % 5000) for n in range(400)]
    path.write_bytes(b"".join(map(zstandard.compress, parts)))
    with open_zstd(path) as file:
        assert file.read() == b"".join(parts)


def test_a_frame_that_asks_for_too_much_memory_is_refused(tmp_path):
    path = tmp_path / "a.zst"
    settings = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    path.write_bytes(packer.compress(b"a" * 1000) + packer.flush())
    with open_zstd(path) as file, pytest.raises(ValueError, match="a.zst': the zstd file is corru"):
        file.read()


def test_an_error_has_no_escape_sequences(tmp_path, capsys):
    hostile = tmp_path / "a\x1b[31m.jsonl"
    assert main(["tokenize", str(hostile), "--output", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "\x1b" not in said and "31m" in said
