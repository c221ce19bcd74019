"""In fine-tuning the answers are learned, each example by itself, and nothing else."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from kenotron_data import Loader, validation_batches
from kenotron_data.chat import Chat
from kenotron_data.config import SFTDatasetsConfig
from kenotron_data.hub import data_pieces, dataset_pieces
from kenotron_data.sft import PromptCompletion, SupervisedExamples, supervised
from kenotron_data.tokenizer import ByteTokens

BYTES = ByteTokens()
END = 256
HELLO = [
    {"role": "user", "content": "the alpha"},
    {"role": "assistant", "content": "beta"},
    {"role": "user", "content": "of"},
    {"role": "assistant", "content": "gamma delta"},
]
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{% generation %}{{ m['content'] }}"
    "<|im_end|>{% endgeneration %}{% else %}Q:{{ m['content'] }}{% endif %}{% endfor %}"
)


@pytest.fixture
def chat(chat_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(chat_folder)


def examples(path, s, **more):
    pieces = data_pieces(str(path), ("prompt", "completion"))
    return SupervisedExamples(pieces, PromptCompletion(BYTES), s, **more)


def pairs(*texts):
    return [{"prompt": prompt, "completion": completion} for prompt, completion in texts]


def test_a_padded_sample_by_hand(jsonl):
    path = jsonl(pairs(("ab", "cd"), ("x", "y")))
    data = examples(path, 7, pack=False, pad_token=9)
    batch = next(validation_batches(data, micro_batch_size=2, microbatches=1))[0]
    a, b, c, d, x, y = b"abcdxy"
    assert batch.tokens_BS.tolist() == [[a, b, c, d, END, 9, 9], [x, y, END, 9, 9, 9, 9]]
    no = -100
    assert batch.labels_BS.tolist() == [[no, c, d, END, no, no, no], [y, END, no, no, no, no, no]]
    assert batch.documents_BS.tolist() == [[0, 0, 0, 0, 0, -1, -1], [0, 0, 0, -1, -1, -1, -1]]
    assert batch.positions_BS[0, :5].tolist() == [0, 1, 2, 3, 4]
    assert data.describe(1) == f"{str(path)!r}, line 2"


def test_a_packed_sample_by_hand(jsonl):
    data = examples(jsonl(pairs(("ab", "cd"), ("x", "y"))), 7, pack=True)
    assert (len(data), data.examples) == (1, 2)
    batch = next(validation_batches(data, micro_batch_size=1, microbatches=1))[0]
    a, b, c, d, x, y = b"abcdxy"
    assert batch.tokens_BS.tolist() == [[a, b, c, d, END, x, y]]
    assert batch.labels_BS.tolist() == [[-100, c, d, END, -100, y, END]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert batch.documents_BS.tolist() == [[0, 0, 0, 0, 0, 1, 1]]


def learned(data):
    """The labels of all samples, each example's by itself, in order."""
    found = []
    rows = data.rows(np.arange(len(data)))
    for tokens, documents, targets in zip(rows.tokens, rows.documents, rows.targets, strict=True):
        for number in range(int(documents.max()) + 1):
            inside = documents == number
            found.append((tokens[inside].tolist(), tokens[inside & targets].tolist()))
    return sorted(found)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12),
    s=st.integers(3, 12),
    pack=st.booleans(),
)
def test_every_example_comes_once_and_its_completion_alone_is_learned(lengths, s, pack):
    texts = [("p" * p, chr(97 + i) * c) for i, (p, c) in enumerate(lengths)]
    rows = Dataset.from_list(pairs(*texts))
    pieces = dataset_pieces(rows, ("prompt", "completion"), name="x")
    ids = [([*p.encode(), *c.encode(), END], [*c.encode(), END]) for p, c in texts]
    fitting = sorted((i, t) for i, t in ids if len(i) <= s + 1 and len(i) > 1)
    if not fitting:
        with pytest.raises(ValueError, match="no example is left"):
            SupervisedExamples(pieces, PromptCompletion(BYTES), s, pack=pack)
        return
    data = SupervisedExamples(pieces, PromptCompletion(BYTES), s, pack=pack)
    assert learned(data) == fitting
    assert data.too_long == sum(len(i) > s + 1 for i, _ in ids)
    assert data.too_long + data.not_learned + data.examples == len(texts)
    assert len(data) <= data.examples


def test_only_completions_change_the_loss_and_padding_does_not(jsonl):
    """A model that looks at each token alone: the loss is that of the labels that are kept."""
    torch.manual_seed(0)
    logits = torch.randn(257, 257)

    def loss(completion, pad=0):
        data = examples(jsonl(pairs(("ab", completion), ("x", "y"))), 9, pack=False, pad_token=pad)
        batch = next(validation_batches(data, micro_batch_size=2, microbatches=1))[0]
        return cross_entropy(logits[batch.tokens_BS].flatten(0, 1), batch.labels_BS.flatten())

    def by_hand(*steps):
        return -logits.log_softmax(-1)[tuple(zip(*steps, strict=True))].mean()

    a, b, c, x, y = b"abcxy"
    expected = by_hand((b, c), (c, END), (x, y), (y, END))
    assert loss("c").item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss("c") == loss("c", pad=77)
    assert abs(loss("c") - loss("d")) > 1e-6


def test_samples_go_through_a_loader(jsonl):
    data = examples(jsonl(pairs(*((str(i), "abc") for i in range(9)))), 20)
    with Loader(data, micro_batch_size=2, microbatches=2, vocab_size=257) as loader:
        batch = next(loader)
    assert batch.tokens_MBS.shape == (2, 2, 20)
    kept = batch.labels_MBS[batch.labels_MBS != -100]
    assert set(kept.tolist()) == {*b"abc", END}


def test_a_chat_by_hand(chat):
    ids, mask = Chat(chat).encode([(HELLO,)])[0][0]
    theirs = chat.apply_chat_template(HELLO, return_dict=True)  # a list by default before 5
    assert ids.tolist() == theirs["input_ids"]
    assert chat.decode(ids[mask]) == "beta<|im_end|>\ngamma delta<|im_end|>\n"
    rest = "<|im_start|>user\nthe alpha<|im_end|>\n<|im_start|>assistant\n"
    assert chat.decode(ids[~mask]).startswith(rest)
    asked, mask = Chat(chat).encode([(HELLO[:3],)])[0][0]
    assert chat.decode(asked[mask]) == "beta<|im_end|>\n"


def test_a_template_may_mark_the_answers(chat):
    chat.chat_template = MARKED
    ids, mask = Chat(chat).encode([(HELLO,)])[0][0]
    assert chat.decode(ids[mask]) == "beta<|im_end|>gamma delta<|im_end|>"
    assert chat.decode(ids) == "Q:the alphaA:beta<|im_end|>Q:ofA:gamma delta<|im_end|>"


def test_the_end_is_appended_where_the_template_has_none(chat):
    chat.chat_template = MARKED.replace("<|im_end|>", "")
    ids, mask = Chat(chat).encode([(HELLO,)])[0][0]
    assert chat.decode(ids[mask]) == "betagamma delta<|im_end|>"
    assert ids[-1] == chat.eos_token_id and mask[-1]


def test_a_configuration_of_chats_and_of_prompts(chat, jsonl):
    path = str(jsonl([{"messages": HELLO}, {"messages": HELLO[:2]}, {"messages": HELLO[:1]}]))
    data = supervised(SFTDatasetsConfig(hf_dataset_or_datasets=path), chat, 200)
    assert (data.examples, data.not_learned, len(data)) == (2, 1, 1)
    answers = [chat.decode(label) for _, label in learned(data)]
    assert sorted(answers) == ["beta<|im_end|>\n", "beta<|im_end|>\ngamma delta<|im_end|>\n"]
    path = str(jsonl(pairs(("alpha", "beta"), ("of", "gamma"), ("the", "a"))))
    config = SFTDatasetsConfig(hf_dataset_or_datasets=path, debug_max_samples=2)
    data = supervised(config, chat, 200, pack=False)
    assert sorted(chat.decode(label) for _, label in learned(data)) == [
        "beta<|im_end|>",
        "gamma<|im_end|>",
    ]
    assert supervised(config, BYTES, 200).examples == 2


def test_wrong_examples_are_named(chat, jsonl, chat_folder):
    def read(rows, tokenizer=chat):
        config = SFTDatasetsConfig(hf_dataset_or_datasets=str(jsonl(rows)))
        return supervised(config, tokenizer, 100)

    good = {"messages": HELLO}
    turns = "there is no role|has no role"
    for wrong, words in (
        ("hello", "messages is str: needed is a list"),
        ([], "messages is list: needed is a list of at least one"),
        ([{"content": "x"}], turns),
        ([{"role": "user"}], "message 0 has no content"),
        (HELLO[1:], "the first message is of the assistant"),
    ):
        with pytest.raises(ValueError, match=rf"a\.jsonl', line 2: this is no example \(.*{words}"):
            read([good, {"messages": wrong}])
    with pytest.raises(ValueError, match=r"line 2: this is no example \(completion is int"):
        read([*pairs(("a", "b")), {"prompt": "x", "completion": 1}])
    for more, words in (
        ({"tools": [{"name": "add"}]}, r"tools is \[\{'name': 'add'\}\]: a prompt and its"),
        ({"weight": 0}, "weight is 0: a prompt and its completion have none; write them as mess"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs is "),
    ):
        with pytest.raises(ValueError, match=rf"line 1: this is no example \({words}"):
            read([{**pairs(("a", "b"))[0], **more}])
    empty = {"tools": [], "weight": 1, "chat_template_kwargs": None}
    assert read([{**pairs(("a", "b"))[0], **empty}]).examples == 1
    with pytest.raises(ValueError, match="examples need the column messages, or prompt and"):
        read([{"text": "x"}])
    with pytest.raises(ValueError, match="no example is left: 1 have more than 101 tokens"):
        read(pairs(("x" * 100, "y" * 100)), BYTES)
    with pytest.raises(ValueError, match="need a tokenizer of transformers with a chat template"):
        read([good], BYTES)
    with pytest.raises(ValueError, match="sequence_length must be at least 1"):
        examples(jsonl(pairs(("a", "b"))), 0)
