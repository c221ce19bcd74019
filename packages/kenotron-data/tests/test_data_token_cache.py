"""A shared cache of tokens: damage and strangers are found, and a read-only one is enough."""

import importlib
import json
import os

import pytest

import kenotron_data.token_cache as token_cache
from kenotron_data.config import PretrainDatasetsConfig
from kenotron_data.hub import cached_tokens
from kenotron_data.token_cache import check_owner, check_sums
from kenotron_data.tokenise import NOTE
from kenotron_data.tokenizer import ByteTokens


@pytest.fixture
def cache(tmp_path):
    """Make and use an entry; a function that uses it, and its folder."""
    text = tmp_path / "a.txt"
    text.write_text("alpha beta\n" * 100)
    config = PretrainDatasetsConfig(hf_dataset_or_datasets=str(text))

    def use():
        return cached_tokens(config, ByteTokens(), tmp_path / "cache")

    return use, use().path


def test_the_note_has_the_sums_of_all_files(cache):
    _, folder = cache
    files = json.loads((folder / NOTE).read_text())["done"]["files"]
    assert set(files) == {path.name for path in folder.iterdir()} - {NOTE}
    assert all(size == (folder / name).stat().st_size for name, (size, _) in files.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-2]), "bytes, but had"),
        (lambda file: file.write_bytes(b"\0" * file.stat().st_size), "has other bytes than when"),
        (lambda file: file.unlink(), "is missing: delete the folder to have it made again"),
    ],
)
def test_damage_is_found(cache, change, said):
    use, folder = cache
    change(next(folder.glob("*.ds")))
    with pytest.raises(ValueError, match=said):
        use()


def test_of_a_large_folder_the_sizes_are_compared(cache, monkeypatch):
    use, folder = cache
    file = next(folder.glob("*.ds"))
    file.write_bytes(b"\0" * file.stat().st_size)
    monkeypatch.setattr(token_cache, "ALWAYS_READ", 100)
    use()
    sums = json.loads((folder / NOTE).read_text())["done"]["files"]
    with pytest.raises(ValueError, match="has other bytes than when it was made"):
        check_sums(folder, sums, all_bytes=True)


def test_a_finished_cache_may_be_read_only(cache, monkeypatch):
    use, folder = cache

    def refused(*given, **options):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(importlib.import_module("kenotron_data.tokenise"), "locked", refused)
    assert len(use()) > 0 and not list(folder.parent.glob("*.lock"))


def test_a_note_of_an_earlier_release_is_enough(cache):
    use, folder = cache
    note = json.loads((folder / NOTE).read_text())
    del note["done"]["files"]
    (folder / NOTE).write_text(json.dumps(note))
    assert len(use()) > 0


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no POSIX")
def test_a_folder_of_a_stranger_is_refused(cache, monkeypatch):
    use, folder = cache
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    check_owner(folder)  # of the owner of the cache, or of root
    real = os.stat(folder)

    class Strange:
        st_uid, st_mode = owner + 2, real.st_mode

    monkeypatch.setattr(type(folder), "lstat", lambda path: Strange)
    words = f"belongs to user {owner + 2}, who is neither you, nor the owner of the cache, nor root"
    with pytest.raises(ValueError, match=words):
        use()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no POSIX")
def test_what_everybody_may_write_is_refused(cache):
    use, folder = cache
    next(folder.glob("*.ds")).chmod(0o666)
    with pytest.raises(ValueError, match=r"can be written by everybody: .* \(chmod o-w\)"):
        use()
