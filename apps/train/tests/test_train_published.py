"""A published configuration for Nanotron, unchanged: its names are local folders here."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import own_runs
import pytest
import runs

DATA, TOKENIZER = "stas/openwebtext-10k", "robot-test/dummy-tokenizer-wordlevel"
YAML = runs.TINY_LLAMA.read_text(encoding="utf-8")


def words(folder: Path) -> None:
    """A tokenizer of whole words that names no end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[UNK]", *own_runs.WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]").save_pretrained(folder)


@pytest.mark.parametrize("kind", ["rows", "saved"])
def test_it_trains_with_its_tokenizer_and_its_data_set(tmp_path, kind):
    text = YAML.replace("hf_dataset_or_datasets: corpus.txt", f"hf_dataset_or_datasets: {DATA}")
    text = text.replace("tokenizer_name_or_path: null", f"tokenizer_name_or_path: {TOKENIZER}")
    assert (text.count(DATA), text.count(TOKENIZER)) == (2, 1)
    (tmp_path / "config_tiny_llama.yaml").write_text(text)
    words(tmp_path / TOKENIZER)
    rows = [{"text": text} for text in own_runs.documents(600)]
    if kind == "rows":
        own_runs.jsonl(tmp_path / DATA / "train.jsonl", rows)
    else:
        from datasets import Dataset

        Dataset.from_list(rows).save_to_disk(tmp_path / DATA)
    done = runs.start(
        "env", f"KENOTRON_CACHE={tmp_path}/cache", sys.executable, str(runs.APP),
        "--config-file", "config_tiny_llama.yaml", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = runs.metrics(tmp_path)
    assert [step["step"] for step in steps] == list(range(1, 16))
    assert [step["consumed_tokens"] for step in steps] == [512 * n for n in range(1, 16)]
    assert steps[0]["lm_loss"] == pytest.approx(math.log(256), abs=0.5)
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"]
    assert [steps[n]["lr"] for n in (0, 1, 14)] == pytest.approx([1.5e-4, 3e-4, 1e-5])
    assert "[Training Stage: Annealing Phase]" in done.stdout
    assert (tmp_path / "checkpoints/10/manifest.json").is_file()
    checked = runs.start(
        "env", f"KENOTRON_CACHE={tmp_path}/cache", sys.executable, str(runs.APP),
        "--config-file", "config_tiny_llama.yaml", "--check", cwd=tmp_path,
    )  # fmt: skip
    assert checked.returncode == 0
    assert "Cannot be run" not in checked.stdout
    assert "Warning" not in checked.stdout
