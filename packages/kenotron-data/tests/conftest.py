"""Tiny tokenizers, made here and now: nothing is downloaded."""

import json

import pytest

WORDS = "alpha beta gamma delta the a of été naïve".split()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory):
    """A byte-level BPE of 300 ids that cuts and pads, which tokenising must not do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def chat_folder(bpe_file, tmp_path_factory):
    """A folder of a tokenizer of `transformers` with a ChatML template."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(bpe_file), eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    folder = tmp_path_factory.mktemp("chat")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def jsonl(tmp_path):
    """Write rows as JSON lines."""

    def write(rows, name="a.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
