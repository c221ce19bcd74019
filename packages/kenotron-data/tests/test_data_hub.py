"""A corpus is tokenised once; what changes it makes another entry of the cache."""

import os
import threading
from unittest import mock

import datasets
import huggingface_hub
import pytest
import transformers
from datasets import Dataset, DatasetDict, concatenate_datasets, config
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from kenotron_data import PackedTokens
from kenotron_data.config import PretrainDatasetsConfig
from kenotron_data.file_lock import locked
from kenotron_data.hub import cached_tokens, chosen_splits, data_pieces, dataset_pieces
from kenotron_data.tokenise import read_note
from kenotron_data.tokenizer import ByteTokens, open_tokenizer

BYTES = ByteTokens()


def tokens(cache, name, tokenizer=BYTES, validation=False, **fields):
    config = PretrainDatasetsConfig(hf_dataset_or_datasets=name, **fields)
    return cached_tokens(config, tokenizer, cache, validation=validation)


def texts(source):
    return [bytes(document[:-1].tolist()).decode() for document in source]


def rows(*names):
    return [{"text": name} for name in names]


def entries(cache):
    return sorted(name for name in os.listdir(cache) if not name.endswith(".lock"))


def test_the_second_call_finds_the_first_ones_files(tmp_path, jsonl):
    path, cache = str(jsonl(rows("a", "é", "c"))), tmp_path / "cache"
    first = tokens(cache, path)
    stamps = [(file.path, file.path.stat().st_mtime_ns) for file in first.files]
    second = tokens(cache, path)
    assert texts(first) == texts(second) == ["a", "é", "c"]
    assert [(file.path, file.path.stat().st_mtime_ns) for file in second.files] == stamps
    assert len(PackedTokens(second, 3)) == 2
    assert entries(cache) == [first.path.name]


def test_whatever_changes_the_tokens_makes_a_new_entry(tmp_path, jsonl, bpe_file):
    path, cache = jsonl([{"text": "alpha", "body": "beta"}]), tmp_path / "cache"
    calls = [
        lambda: tokens(cache, str(path)),
        lambda: tokens(cache, str(path), ByteTokens(end=None)),
        lambda: tokens(cache, str(path), open_tokenizer(str(bpe_file))),
        lambda: tokens(cache, str(path), open_tokenizer(str(bpe_file), eos_token="<|im_end|>")),
        lambda: tokens(cache, str(path), text_column_name="body"),
        lambda: tokens(cache, [str(path), str(jsonl(rows("x"), "b.jsonl"))]),
    ]
    found = [call().path for call in calls]
    assert len(set(found)) == len(calls)
    assert [call().path for call in calls[:5]] == found[:5]
    jsonl([{"text": "other"}])
    assert texts(tokens(cache, str(path))) == ["other"]
    assert len(entries(cache)) == len(calls) + 1


def test_processes_of_tokenising_are_no_part_of_the_key(tmp_path, jsonl):
    path, cache = str(jsonl(rows("a", "b"))), tmp_path / "cache"
    first = tokens(cache, path)
    more = tokens(cache, path, dataset_processing_num_proc_per_process=2)
    assert first.path == more.path


def test_overwriting_makes_it_anew_once(tmp_path, jsonl):
    path, cache = str(jsonl(rows("a"))), tmp_path / "cache"
    first = tokens(cache, path)
    made = (first.path / "tokenize.json").stat()
    os.utime(first.path / "tokenize.json", (1, 1))
    again = tokens(cache, path, dataset_overwrite_cache=True)
    assert (again.path / "tokenize.json").stat().st_mtime >= made.st_mtime
    assert texts(again) == ["a"]
    assert entries(cache) == [first.path.name]


def test_one_makes_it_and_the_others_wait(tmp_path, jsonl):
    path, cache = str(jsonl(rows(*"abc"))), tmp_path / "cache"
    reference = tokens(tmp_path / "other", path).path.name
    found, started = [], threading.Event()

    def call():
        started.set()
        found.append(tokens(cache, path))

    with locked(cache / f"{reference}.lock"):
        thread = threading.Thread(target=call)
        thread.start()
        started.wait()
        thread.join(0.2)
        assert thread.is_alive() and not found
    thread.join(30)
    assert texts(found[0]) == ["a", "b", "c"]
    done = read_note(found[0].path)["done"]
    assert (done["documents"], done["tokens"]) == (3, 6)


def test_a_lock_is_refused_or_waited_for_and_leaves_no_file(tmp_path):
    path = tmp_path / "a" / "x.lock"
    with locked(path):
        with pytest.raises(ValueError, match=r"x\.lock is being written by another run"):
            with locked(path, wait=False):
                pass
        assert path.exists()
    assert not path.exists()
    with locked(path, wait=False):
        pass


def test_fractions_take_the_first_rows_of_each(tmp_path, jsonl):
    a, b = jsonl(rows(*"abcdefg"), "a.jsonl"), jsonl(rows(*"vwxyz"), "b.jsonl")
    named = {str(a): 0.5, str(b): 1.0}
    assert texts(tokens(tmp_path / "cache", named)) == [*"abc", *"vwxyz"]
    assert texts(tokens(tmp_path / "cache", {str(a): 0.0, str(b): 0.4})) == ["v", "w"]
    assert texts(tokens(tmp_path / "cache", [str(b), str(a)])) == [*"vwxyz", *"abcdefg"]


def test_splits_of_a_folder(tmp_path, jsonl):
    jsonl(rows("t1", "t2"), "data/train.jsonl")
    jsonl(rows("v1", "v2"), "data/test.jsonl")
    folder, cache = str(tmp_path / "data"), tmp_path / "cache"
    both = {"hf_dataset_splits": ["train", "test"]}
    assert texts(tokens(cache, folder)) == ["t1", "t2"]
    assert texts(tokens(cache, folder, hf_dataset_splits="test")) == ["v1", "v2"]
    assert texts(tokens(cache, folder, **both)) == ["t1", "t2"]
    assert texts(tokens(cache, {folder: 0.5}, **both)) == ["t1"]
    assert texts(tokens(cache, {folder: 0.5}, **both, validation=True)) == ["v1", "v2"]
    with pytest.raises(ValueError, match="train was given; there is no split to validate on"):
        tokens(cache, folder, validation=True)
    with pytest.raises(ValueError, match="'extra' was given; the name of a split must contain"):
        tokens(cache, folder, hf_dataset_splits="extra")
    assert chosen_splits(["train[:10%]", "test"], validation=False) == ["train[:10%]"]


def test_saved_data_sets_of_hugging_face(tmp_path):
    train = Dataset.from_list(rows(*"abcde") + [{"text": ""}, {"text": "été"}])
    DatasetDict(train=train, test=Dataset.from_list(rows("z"))).save_to_disk(tmp_path / "saved")
    train.select(range(2)).save_to_disk(tmp_path / "plain")
    cache = tmp_path / "cache"
    saved, plain = str(tmp_path / "saved"), str(tmp_path / "plain")
    assert texts(tokens(cache, saved)) == train["text"][:]
    assert texts(tokens(cache, {saved: 0.5, plain: 1.0})) == [*"abc", *"ab"]
    assert texts(tokens(cache, saved, hf_dataset_splits="test")) == ["z"]
    assert tokens(cache, saved).path == tokens(cache, saved).path
    assert len(entries(cache)) == 3
    with pytest.raises(ValueError, match="has no split 'validation', but train, test"):
        tokens(cache, saved, hf_dataset_splits="validation")
    with pytest.raises(ValueError, match="there is no column 'body'; the data set has 'text'"):
        tokens(cache, plain, text_column_name="body")


def test_rows_of_a_data_set_cut_and_selected(tmp_path):
    whole = Dataset.from_list(rows(*map(str, range(100))))
    shuffled = concatenate_datasets([whole, whole]).shuffle(seed=42)
    piece = dataset_pieces(shuffled, ["text"], name="x")[0]
    parts = piece.cut(piece.size // 7)
    assert len(parts) >= 7
    assert [text for part in parts for _, (text,) in part] == shuffled["text"][:]
    assert [text for _, (text,) in piece.first(3)] == shuffled["text"][:3]
    assert parts[3].describe(5) == "data set 'x', row 5"


def test_a_folder_loaded_by_datasets(tmp_path, jsonl, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    jsonl(rows(*"abcdefghij"), "data/train.jsonl")
    folder = str(tmp_path / "data")
    source = tokens(tmp_path / "cache", folder, hf_dataset_splits="train[:30%]")
    assert texts(source) == ["a", "b", "c"]


def test_what_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="no data at"):
        tokens(tmp_path / "cache", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"'some/name' .*split 'train'\) cannot be loaded: "):
        tokens(tmp_path / "cache", "some/name")
    stream = Dataset.from_list(rows("a")).to_iterable_dataset()
    with pytest.raises(ValueError, match="a streaming data set has no length"):
        dataset_pieces(stream, ["text"], name="x")
    with pytest.raises(ValueError, match=r"several splits \(train\): choose one"):
        dataset_pieces(DatasetDict(train=Dataset.from_list(rows("a"))), ["text"], name="x")


@pytest.mark.parametrize("kind", ["file", "saved", "embedded"])
def test_a_configuration_of_what_has_none_is_refused(kind, tmp_path, jsonl):
    saved = tmp_path / "saved"
    Dataset.from_list(rows("a")).save_to_disk(saved)
    file = jsonl(rows("a"))
    name = {"file": str(file), "saved": str(saved), "embedded": "python-stdlib"}[kind]
    with pytest.raises(ValueError, match="hf_dataset_config_name: 'en' was given, but .* has no"):
        data_pieces(name, ["text"], config_name="en")


def test_without_the_libraries_paths_work_and_names_say_what_to_install(
    tmp_path, jsonl, monkeypatch
):
    for name in ("datasets", "transformers", "tokenizers", "pyarrow", "zstandard"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert texts(tokens(tmp_path / "cache", str(jsonl(rows("a"))))) == ["a"]
    with pytest.raises(ImportError, match="'name' needs datasets: install it"):
        data_pieces("name", ["text"])
    for name in ("gpt2", str(tmp_path / "x.json")):
        with pytest.raises(ImportError, match=r"transformers: install|install tokenizers"):
            open_tokenizer(name)
    for name in ("a.parquet", "a.jsonl.zst"):
        (tmp_path / name).write_text("x")
        with pytest.raises(ImportError, match="install (pyarrow|zstandard), or kenotron-data"):
            tokens(tmp_path / "cache", str(tmp_path / name))


def test_a_fraction_that_is_no_row_names_the_data_set(tmp_path, jsonl):
    path = str(jsonl(rows("a", "b")))
    with pytest.raises(ValueError, match=r"a.jsonl': 0.3 of its 2 rows is less than one"):
        tokens(tmp_path, {path: 0.3})


class Hub:
    """Stands for the hub's interface: what it answers."""

    answer = None

    def dataset_info(self, name, timeout):
        if Hub.answer is not None:
            raise Hub.answer

    model_info = dataset_info


@pytest.fixture
def hub(monkeypatch):
    """Whether the hub's libraries were told to stay away from it, of each load."""
    offline = []

    def load(name, config_name, split):
        offline.append((constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE))
        return Dataset.from_list(rows("x"))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(datasets, "load_dataset", load)
    yield offline
    Hub.answer = None


def test_a_hub_that_does_not_answer_is_asked_once(hub, monkeypatch):
    before = (constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE)
    assert data_pieces("some/one", ("text",))[0].count() == 1
    Hub.answer = OSError("nobody there")
    assert data_pieces("some/one", ("text",))[0].count() == 1  # from the cache
    Hub.answer = HfHubHTTPError("busy", response=mock.Mock())
    data_pieces("some/one", ("text",))
    assert hub == [before, (True, True), before]
    assert (constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE) == before


def test_a_name_that_the_hub_does_not_know_is_said_at_once(hub):
    Hub.answer = RepositoryNotFoundError("404", response=mock.Mock())
    with pytest.raises(ValueError, match="data set 'some/one' .* the hub has no data set of this"):
        data_pieces("some/one", ("text",))
    assert hub == []


def test_a_name_of_a_tokenizer_is_asked_for_once(hub, monkeypatch):
    def load(name, **options):
        hub.append(constants.HF_HUB_OFFLINE)
        raise OSError("not in the cache")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    before = constants.HF_HUB_OFFLINE
    for Hub.answer, said in (
        (OSError("nobody there"), "not in the cache"),
        (RepositoryNotFoundError("404", response=mock.Mock()), "the hub has no tokenizer of this"),
    ):
        with pytest.raises(ValueError, match=f"tokenizer 'some/one': .*{said}"):
            open_tokenizer("some/one")
    assert hub == [True] and constants.HF_HUB_OFFLINE == before


def test_a_lock_file_that_is_a_symbolic_link_is_not_followed(tmp_path):
    (tmp_path / "x.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"), locked(tmp_path / "x.lock"):
        pass
    assert not (tmp_path / "elsewhere").exists()
