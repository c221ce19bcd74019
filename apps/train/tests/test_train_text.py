"""Text of every shape through a tokenizer and the cache, and what is wrong with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import own_runs
import pytest
import runs
from own_runs import DATASET, configure, documents, jsonl, run

from kenotron_ckpt import read_manifest
from kenotron_config import ignored_keys
from kenotron_data import Corpus, TokenFolder, open_tokenizer
from kenotron_dist import RankError, spawn
from kenotron_train.assemble import build_training, data_plan
from kenotron_train.data.data_settings import tokenizer_state
from kenotron_train.data.stage_dataset import open_corpus, prepare
from kenotron_train.data.vocabulary import check_vocabulary, text_tokenizer
from kenotron_train.run.resume import resume

NAME = "tokenizer.tokenizer_name_or_path"
VOCABULARY = "model.model_config.vocab_size"


def tokenizer_of(config):
    return text_tokenizer(config.tokenizer, config.model.model_config.vocab_size)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return own_runs.tokenizer(tmp_path_factory.mktemp("bpe"))


@pytest.fixture
def texts(tmp_path):
    return jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents()])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(folder: Path, *given: dict[str, object]) -> Corpus:
    return open_corpus(data_plan(configure(folder, *given)), 0)


def stream(corpus: Corpus) -> list[int]:
    """All tokens of samples that follow one another."""
    samples = [corpus.training.sample(i).tolist() for i in range(len(corpus.training))]
    return samples[0][:1] + [token for sample in samples for token in sample[1:]]


def test_a_tokenizer_makes_the_tokens_and_the_cache_keeps_them(tmp_path, bpe, texts, cache):
    changes = {NAME: bpe, VOCABULARY: 300}
    section = {"hf_dataset_or_datasets": str(texts)}
    first = run(tmp_path / "1", section, changes)
    (folder,) = [path for path in (cache / "tokens").iterdir() if path.is_dir()]
    wanted = [token for ids in open_tokenizer(str(bpe)).encode(documents()) for token in ids]
    assert [int(token) for document in TokenFolder(folder) for token in document] == wanted
    made = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert run(tmp_path / "2", section, changes) == first
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == made
    assert first[-1][0] < first[0][0]


@pytest.mark.parametrize("layout", own_runs.LAYOUTS)
def test_several_ranks_read_what_one_reads(tmp_path, bpe, texts, cache, layout):
    changes = {NAME: bpe, VOCABULARY: 300, "model.make_vocab_size_divisible_by": 8}
    section = {"hf_dataset_or_datasets": [str(texts)]}
    one = run(tmp_path / "1", section, changes)
    for path in (cache / "tokens").iterdir():  # so that ranks compete for making it
        path.rename(path.with_name(f"{path.name}-gone"))
    many = run(tmp_path / "2", section, changes | own_runs.LAYOUTS[layout])
    for (loss, norm), (want, want_norm) in zip(many, one, strict=True):
        assert loss == pytest.approx(want, rel=1e-5)
        assert norm == pytest.approx(want_norm, rel=1e-4)


def test_text_as_bytes_is_the_same_from_a_text_file_and_from_rows(tmp_path, cache):
    body = "\n".join(documents())
    (tmp_path / "a.txt").write_text(body)
    rows = jsonl(tmp_path / "b.jsonl", [{"body": body}])
    plain = opened(tmp_path, {"hf_dataset_or_datasets": f"{tmp_path}/a.txt"})
    assert not cache.exists()
    section = {"hf_dataset_or_datasets": str(rows), "text_column_name": "body"}
    kept = opened(tmp_path, section)
    assert (cache / "tokens").is_dir()
    assert stream(kept) == stream(plain)


def test_several_sets_are_all_read_and_fractions_take_the_first_rows(tmp_path):
    a, b, c = (
        jsonl(tmp_path / f"{name}.jsonl", [{"text": name * 99} for _ in range(4)]) for name in "abc"
    )
    # 400 tokens each: 12 samples of 32, three ends among them, and a first token.
    listed = opened(tmp_path, {"hf_dataset_or_datasets": [str(a), str(b)]})
    assert [stream(listed).count(ord(name)) for name in "abc"] == [382, 381, 0]
    shares = {str(a): 0.5, str(b): 1, str(c): 0}
    some = opened(tmp_path, {"hf_dataset_or_datasets": shares})
    tokens = stream(some)
    assert tokens.count(ord("a")) == 6 * 32 + 1 - 1  # of 200 tokens
    assert tokens.count(ord("c")) == 0
    assert list(some.training.sources) == [str(a), str(b)]


def test_a_split_to_validate_on_is_used_and_not_trained_on(tmp_path):
    jsonl(tmp_path / "set/train.jsonl", [{"text": "a" * 400}])
    jsonl(tmp_path / "set/validation.jsonl", [{"text": "b" * 400}])
    section = {
        "hf_dataset_or_datasets": f"{tmp_path}/set",
        "hf_dataset_splits": ["train", "validation"],
    }
    corpus = opened(tmp_path, section, {"tokens.limit_val_batches": 1})
    (held,) = corpus.validation.values()
    assert set(stream(corpus)) == {ord("a")}
    assert {t for i in range(len(held)) for t in held.sample(i).tolist()} == {ord("b")}
    without = opened(tmp_path, section)
    assert (set(stream(without)), without.validation) == ({ord("a")}, {})


def test_without_a_split_the_last_tenth_is_held_out(tmp_path, texts):
    config = configure(
        tmp_path, {"hf_dataset_or_datasets": [str(texts)]}, {"tokens.limit_val_batches": 1}
    )
    corpus = open_corpus(data_plan(config), 0)
    (held,) = corpus.validation.values()
    total = len(corpus.training) + len(held)
    assert len(held) == round(total / 10)
    first, last = corpus.training.sample(len(corpus.training) - 1), held.sample(0)
    assert first[-1] == last[0]  # they follow one another


def test_saved_sets_of_hugging_face_are_read_with_their_split(tmp_path):
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list([{"text": "c" * 99}])
    DatasetDict(train=rows, other_test=rows.map(lambda row: {"text": "d" * 99})).save_to_disk(
        tmp_path / "set"
    )
    section = {"hf_dataset_or_datasets": f"{tmp_path}/set", "hf_dataset_splits": "other_test"}
    assert set(stream(opened(tmp_path, section))) == {ord("d")}


def test_processes_tokenise_in_the_program_and_overwriting_happens_once(tmp_path, texts, cache):
    section = {
        "hf_dataset_or_datasets": [str(texts)],
        "dataset_processing_num_proc_per_process": 2,
        "dataset_overwrite_cache": True,
    }
    twice = [
        {"name": name, "start_training_step": step, "data": {"seed": 1, "dataset": section}}
        for name, step in (("one", 1), ("two", 3))
    ]
    config = configure(tmp_path, None, {"data_stages": json.dumps(twice)})
    prepare(data_plan(config))
    (note,) = (cache / "tokens").glob("*/tokenize.json")
    before = note.stat().st_mtime_ns
    open_corpus(data_plan(config), 0)
    assert note.stat().st_mtime_ns == before
    prepare(data_plan(config))
    assert note.stat().st_mtime_ns > before


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/none"])
def test_a_cache_that_cannot_be_written_says_what_to_set(folder, tmp_path, texts, monkeypatch):
    (tmp_path / "file").write_text("")
    cache = tmp_path / folder
    monkeypatch.setenv("KENOTRON_CACHE", str(cache))
    config = configure(tmp_path, {"hf_dataset_or_datasets": str(texts)})
    said = f"^the cache {cache}/tokens cannot be written .*set KENOTRON_CACHE to one that can be"
    for read in (prepare, lambda data: open_corpus(data, 0)):
        with pytest.raises(ValueError, match=said):
            read(data_plan(config))


def test_keys_of_the_cache_have_no_effect_in_memory_and_it_is_said(tmp_path):
    section = {
        "hf_dataset_or_datasets": str(runs.write_text(tmp_path)),
        "dataset_overwrite_cache": True,
    }
    assert "dataset_overwrite_cache" in opened(tmp_path, section).about


def test_documents_are_cut_at_tokenizer_max_length(tmp_path, texts):
    section = {"hf_dataset_or_datasets": str(texts)}
    config = configure(tmp_path, section, {"tokenizer.tokenizer_max_length": 5})
    tokens = stream(open_corpus(data_plan(config), 0))
    wanted = [t for text in documents() for t in [*text.encode()[:4], 256]]
    assert tokens == wanted[: len(tokens)]
    assert len(wanted) - len(tokens) < 32


def test_a_tokenizer_without_an_end_is_used_without(tmp_path):
    name = own_runs.tokenizer(tmp_path / "t", eos=None)
    assert tokenizer_of(configure(tmp_path, None, {NAME: name})).end is None


def test_bytes_end_documents_where_the_vocabulary_has_room(tmp_path):
    for name in ("bytes", "null"):
        for size, end in ((256, None), (257, 256)):
            changes = {NAME: name, VOCABULARY: size}
            assert tokenizer_of(configure(tmp_path, None, changes)).end == end


def test_a_revision_without_a_name_is_ignored_aloud(tmp_path, texts):
    section = {"hf_dataset_or_datasets": str(texts)}
    config = configure(tmp_path, section, {"tokenizer.tokenizer_revision": "v1"})
    (line,) = ignored_keys(config)
    assert line.startswith("tokenizer.tokenizer_revision: v1 has no effect")
    assert len(open_corpus(data_plan(config), 0).training) > 0


def test_a_checkpoint_names_its_tokenizer(tmp_path, bpe, texts, monkeypatch):
    changes = {
        NAME: bpe, VOCABULARY: 300, "checkpoints.save_final_state": "true",
        "checkpoints.checkpoint_interval": 2,
    }  # fmt: skip
    section = {"hf_dataset_or_datasets": str(texts)}
    whole = run(tmp_path / "1", section, changes)
    state = read_manifest(tmp_path / "1/checkpoints/4").state
    assert state["tokenizer"] == {"name": str(bpe), "revision": None, "max_length": None}
    resumed = {"checkpoints.resume_checkpoint_path": tmp_path / "1/checkpoints/2"}
    assert run(tmp_path / "2", section, changes | resumed) == whole[2:]
    monkeypatch.chdir(bpe.parent)
    near = configure(tmp_path, section, {NAME: bpe.name, VOCABULARY: 300})
    assert tokenizer_state(near.tokenizer)["name"] == str(bpe)
    assert tokenizer_state(configure(tmp_path, section).tokenizer) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({NAME: "no/such/tokenizer"}, f"{NAME}: tokenizer 'no/such/tokenizer': transformers cann"),
        ({NAME: "gone.json"}, f"{NAME}: tokenizer 'gone.json': there is no such file"),
        ({NAME: "bytes", "tokenizer.tokenizer_revision": "v1"}, f"{NAME}: .* has no revisions"),
    ],
)
def test_a_tokenizer_that_cannot_be_opened_names_the_key(tmp_path, changes, sentence, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = configure(tmp_path, {"hf_dataset_or_datasets": "a.txt"}, changes)
    with pytest.raises(ValueError, match=sentence):
        check_vocabulary(data_plan(config))
        tokenizer_of(config)


def test_a_tokenizer_larger_than_the_model_names_both_keys(tmp_path, bpe, texts):
    section = {"hf_dataset_or_datasets": str(texts)}
    said = rf"{VOCABULARY}: 257 was given; {NAME} \(.*\) has 300 ids; raise vocab_size to at least"
    with pytest.raises(ValueError, match=said):
        check_vocabulary(data_plan(configure(tmp_path, section, {NAME: bpe})))
    with pytest.raises(RankError, match=said):
        run(tmp_path / "1", section, {NAME: bpe, "parallelism.dp": 2})
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"hf_dataset_or_datasets": "gone.txt"}, "hf_dataset_or_datasets: no data at 'gone.txt'"),
        ({"hf_dataset_or_datasets": ["A", "gone.txt"]}, "no data at 'gone.txt'"),
        ({"hf_dataset_or_datasets": "A", "text_column_name": "body"}, "has no key 'body'|'body'"),
        (
            {"hf_dataset_or_datasets": "A", "hf_dataset_splits": "tset"},
            "'tset' was given",
        ),
        ({"hf_dataset_or_datasets": "A", "hf_dataset_splits": ["test", "validation"]}, "no split"),
    ],
)
def test_what_is_wrong_with_a_corpus_names_the_key(tmp_path, texts, section, sentence):
    text = json.dumps(section).replace('"A"', json.dumps(str(texts)))
    config = configure(tmp_path, json.loads(text), {"tokens.limit_val_batches": 1})
    for read in (prepare, lambda data: open_corpus(data, 0)):
        with pytest.raises(ValueError, match=sentence) as caught:
            read(data_plan(config))
        assert str(caught.value).startswith(f"{DATASET}.hf_dataset_or_datasets: ")


def test_the_program_says_so_before_it_starts_ranks(tmp_path: Path) -> None:
    flags = ["--set", f"{DATASET}.hf_dataset_or_datasets=gone.txt"]
    done = runs.train(tmp_path, *flags)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {DATASET}.hf_dataset_or_datasets: no data at 'gone.txt'")


def test_ranks_that_a_launcher_started_make_the_cache_once(tmp_path, texts, cache):
    flags = runs.arguments(tmp_path, tokens__train_steps=1, parallelism__dp=2)
    section = f"{{hf_dataset_or_datasets: [{texts}], dataset_overwrite_cache: true}}"
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(runs.APP))
    pairs = zip(flags[::2], flags[1::2], strict=True)
    kept = [part for pair in pairs if "hf_dataset" not in pair[1] for part in pair]
    done = runs.start(
        sys.executable, *command, *kept, "--set", f"{DATASET}={section}", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (folder,) = [path for path in (cache / "tokens").iterdir() if path.is_dir()]
    assert f"kept in {folder}" in done.stdout
    assert len(runs.metrics(tmp_path)) == 1
    broken = f"{DATASET}={{hf_dataset_or_datasets: gone.txt}}"
    done = runs.start(sys.executable, *command, *kept, "--set", broken, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("error: data_stages.0") == 1


def test_the_program_tokenises_with_several_processes_and_then_starts_ranks(tmp_path, cache):
    text = " ".join(documents(200)) * 10
    path = jsonl(tmp_path / "big.jsonl", [{"text": text}] * (9_500_000 // len(text)))
    flags = runs.arguments(tmp_path, tokens__train_steps=1, parallelism__dp=2)
    pairs = zip(flags[::2], flags[1::2], strict=True)
    kept = [part for pair in pairs if "hf_dataset" not in pair[1] for part in pair]
    section = f"{{hf_dataset_or_datasets: {path}, dataset_processing_num_proc_per_process: 2}}"
    given = ("--set", f"{DATASET}={section}")
    done = runs.start(sys.executable, str(runs.APP), *kept, *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(cache.glob("tokens/*/*.ds"))) == 3
    assert len(runs.metrics(tmp_path)) == 1


def remark(mesh, config) -> str:
    return resume(build_training(config, mesh))[1]


def test_how_tokens_are_made_is_no_change_of_the_data(tmp_path, texts):
    section = {"hf_dataset_or_datasets": str(texts)}
    run(tmp_path / "1", section, {"checkpoints.checkpoint_interval": 2})
    folder = {"checkpoints.resume_checkpoint_path": tmp_path / "1/checkpoints/2"}
    several = section | {"dataset_processing_num_proc_per_process": 4}
    for given, change, twice in (
        (several, {}, False),
        (section, {"tokenizer.tokenizer_max_length": 900}, True),
        (section, {"data_stages.0.data.seed": 1}, True),
    ):
        config = configure(tmp_path / "2", given, folder | change)
        (said,) = spawn(remark, config, preload=own_runs.PRELOAD)
        assert said.startswith("Resumed after step 2")
        assert ("samples may come twice" in said) == twice
