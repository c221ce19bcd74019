"""Answers of a chat are found by the characters that the template writes for them."""

import pyarrow as pa
import pytest
from pyarrow import parquet

from kenotron_data.chat import Chat
from kenotron_data.config import SFTDatasetsConfig
from kenotron_data.sft import supervised

USER, ASSISTANT = "user", "assistant"
VICUNA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}USER: {{ m['content'] }} "
    "{% elif m['role'] == 'system' %}{{ m['content'] }}\n"
    "{% else %}ASSISTANT: {{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>' + (m.reasoning_content or '') + '</think>' }}
        {%- endif %}
        {{- m.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
TOOLS = (
    "{% if tools %}{{ tools|tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} "
    "{{ c.function.arguments|tojson }}]{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}\n    {% if m['role'] == 'assistant' %}\nA: {% generation %}\n"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}\n{% else %}Q:{{ m['content'] }}{% endif %}"
    "{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def say(role, content, **more):
    return {"role": role, "content": content} | more


SUMS = [
    say(USER, "the alpha"),
    say(ASSISTANT, "beta", reasoning_content="alpha"),
    say(USER, "of"),
    say(ASSISTANT, "gamma delta", reasoning_content="a beta"),
]
PLAIN = [say(message["role"], message["content"]) for message in SUMS]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer whose words begin with the space before them, so that they straddle prompts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "</s>", "USER:", "▁ASSISTANT:", "ASSISTANT:", "▁four", "four", "▁two", "▁"]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Metaspace(prepend_scheme="never")
    made.add_special_tokens(["</s>"])
    folder = tmp_path_factory.mktemp("words")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    tokenizer.chat_template = VICUNA
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture
def chat(chat_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(chat_folder)


def answers(tokenizer, messages, *options):
    """The text of each example, and what of it is learned."""
    (found,) = Chat(tokenizer).encode([(messages, *options)])
    return [(tokenizer.decode(ids), tokenizer.decode(ids[learned])) for ids, learned in found]


def test_a_token_that_straddles_prompt_and_answer_is_learned(words):
    messages = [say(USER, "two two"), say(ASSISTANT, "four")]
    ((ids, learned),) = Chat(words).encode([(messages,)])[0]
    assert words.convert_ids_to_tokens(ids[learned]) == ["▁four", "</s>"]
    messages += [say(USER, "two"), say(ASSISTANT, "two two")]
    ((ids, learned),) = Chat(words).encode([(messages,)])[0]
    tokens = words.convert_ids_to_tokens(ids[learned])
    assert tokens == ["▁four", "</s>", "▁two", "▁two", "</s>"]
    assert (
        ids.tolist()
        == words(words.apply_chat_template(messages, tokenize=False), add_special_tokens=False)[
            "input_ids"
        ]
    )


def test_marked_answers_may_begin_within_a_token(words):
    words.chat_template = VICUNA.replace(
        "{{ m['content'] }}</s>", "{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
    )
    try:
        messages = [say(USER, "two"), say(ASSISTANT, "four")]
        ((ids, learned),) = Chat(words).encode([(messages,)])[0]
    finally:
        words.chat_template = VICUNA
    assert words.convert_ids_to_tokens(ids[learned]) == ["▁four", "</s>"]


def test_the_text_around_marks_is_the_template_s(chat):
    chat.chat_template = MARKED
    whole = chat.apply_chat_template(PLAIN, tokenize=False)
    ((text, learned),) = answers(chat, PLAIN)
    assert (text, learned) == (whole, " beta<|im_end|> gamma delta<|im_end|>")
    first = [PLAIN[0], PLAIN[1] | {"weight": 0}, *PLAIN[2:]]
    assert answers(chat, first) == [(whole, " gamma delta<|im_end|>")]
    last = [*PLAIN[:3], PLAIN[3] | {"weight": 0}]
    assert answers(chat, last) == [(whole, " beta<|im_end|>")]
    chat.chat_template = MARKED.replace("{% generation %}", "{% if loop.last %}{% generation %}")
    chat.chat_template = chat.chat_template.replace(
        "{% endgeneration %}", "{% endgeneration %}{% endif %}"
    )
    with pytest.raises(ValueError, match="weight: 0 cannot be kept: the chat template marks other"):
        answers(chat, first)


def test_marks_that_change_the_text_are_refused(chat):
    chat.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}" + (
        "{% endgeneration %}{{ 'a\U000f5b01' }}"
    )
    with pytest.raises(ValueError, match="marks .* of the chat template change its text"):
        answers(chat, PLAIN)


def test_a_message_of_weight_0_is_read_and_not_learned(chat):
    whole = chat.apply_chat_template(PLAIN, tokenize=False)
    first = [PLAIN[0], PLAIN[1] | {"weight": 0}, PLAIN[2], PLAIN[3] | {"weight": 1}]
    assert answers(chat, first) == [(whole, "gamma delta<|im_end|>\n")]
    last = [PLAIN[0] | {"weight": 0}, *PLAIN[1:3], PLAIN[3] | {"weight": 0}]
    assert answers(chat, last) == [(whole, "beta<|im_end|>\n")]
    none = [message | {"weight": 0} for message in PLAIN]
    assert answers(chat, none) == [(whole, "")]


def test_answers_whose_thoughts_go_later_are_learned_as_they_were_given(chat):
    chat.chat_template = THINKING
    ask, end = "<|im_start|>user\n", "<|im_end|>\n"
    one = f"{ask}the alpha{end}<|im_start|>assistant\n<think>alpha</think>beta{end}"
    two = (
        f"{ask}the alpha{end}<|im_start|>assistant\nbeta{end}{ask}of{end}<|im_start|>assistant\n"
        f"<think>a beta</think>gamma delta{end}"
    )
    assert answers(chat, SUMS) == [
        (one, f"<think>alpha</think>beta{end}"),
        (two, f"<think>a beta</think>gamma delta{end}"),
    ]
    last = [*SUMS[:3], SUMS[3] | {"weight": 0}]
    assert answers(chat, last) == [(one, f"<think>alpha</think>beta{end}")]
    steps = [SUMS[0], SUMS[1], say("tool", "naïve"), say(ASSISTANT, "of")]
    ((_, learned),) = answers(chat, steps)
    assert learned == f"<think>alpha</think>beta{end}<think></think>of{end}"
    chat.chat_template = THINKING.replace("assistant\\n' }}{% endif", "robot\\n' }}{% endif")
    with pytest.raises(ValueError, match="otherwise than its generation prompt says"):
        answers(chat, SUMS)


def test_samples_are_counted_by_rows_and_each_answer_comes_once(chat, jsonl):
    chat.chat_template = THINKING
    path = str(jsonl([{"messages": SUMS}] * 3))
    config = SFTDatasetsConfig(hf_dataset_or_datasets=path, debug_max_samples=2)
    data = supervised(config, chat, 200)
    assert (data.rows_read, data.examples) == (2, 4)
    assert "line 1" in data.describe(0)


def test_tools_and_their_calls_are_written_and_learned(chat):
    chat.chat_template = TOOLS
    called = say(ASSISTANT, None, tool_calls=[CALL])
    messages = [say(USER, "a"), called, say("tool", "of"), say(ASSISTANT, "beta")]
    ((text, learned),) = answers(chat, messages, [TOOL])
    assert text.startswith('[{"type": "function"')
    assert learned == '[add {"a": 1}]<|im_end|>beta<|im_end|>'
    kept = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    as_json = [say(USER, "a"), say(ASSISTANT, None, tool_calls=[kept]), *messages[2:]]
    assert answers(chat, as_json, '[{"type": "function", "function": {"name": "add", '
                   '"parameters": {}}}]') == [(text, learned)]  # fmt: skip
    for nothing in ({}, "{}", "", None):
        now = {"type": "function", "function": {"name": "now", "arguments": nothing}}
        called = [say(USER, "a"), say(ASSISTANT, None, tool_calls=[now])]
        assert answers(chat, called, [TOOL])[0][1] == "[now {}]<|im_end|>"
    parts = [say(USER, [{"type": "text", "text": "a"}]), *messages[1:]]
    assert answers(chat, parts, [TOOL]) == [(text, learned)]


def test_what_a_template_leaves_out_is_refused_by_name(chat):
    called = [say(USER, "a"), say(ASSISTANT, "", tool_calls=[CALL])]
    for messages, options, words in (
        (called, (), "message 1: the chat template does not write tool_calls of the role 'assis"),
        (SUMS, (), "message 1: the chat template does not write reasoning_content"),
        (called, ([TOOL],), "the row has tools, but the chat template does not write them"),
        (called, (None, [{"text": "x"}]), "the row has documents, but the chat template"),
        (called, ({"a": 1},), "tools is dict: needed is a list"),
        (called, ("{",), "tools: this is no JSON"),
        (called, (None, None, [1]), "chat_template_kwargs is list: needed is a mapping"),
        (called, (None, None, {"tools": [1]}), "chat_template_kwargs: 'tools' cannot be given"),
    ):
        with pytest.raises(ValueError, match=words):
            answers(chat, messages, *options)
    chat.chat_template = VICUNA.replace("{% else %}", "{% elif m['role'] == 'assistant' %}")
    with pytest.raises(ValueError, match="message 0: the chat template does not write content of"):
        answers(chat, [say("developer", "x"), say(USER, "a"), say(ASSISTANT, "b")])


@pytest.mark.parametrize(
    "messages, words",
    [
        (
            [say(USER, "x", name="eve"), say(ASSISTANT, "b")],
            "message 0: .* name of the role 'user'",
        ),
        ([say(USER, "x"), say(ASSISTANT, None, refusal="no")], "message 1: .* write refusal of"),
        (
            [say(USER, "x"), say(ASSISTANT, "I look", function_call="f")],
            "message 1: .* content next to function_call of the role 'assistant'",
        ),
    ],
)
def test_what_stands_beside_a_content_is_written_or_refused(chat, messages, words):
    """This template writes a call of a function, and then no content."""
    chat.chat_template = VICUNA.replace(
        "m['content']", "(m['function_call'] if 'function_call' in m else m['content'])"
    )
    with pytest.raises(ValueError, match=words):
        answers(chat, messages)


def test_a_template_must_write_what_the_user_says(chat):
    chat.chat_template = (
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}\n{% endfor %}"
    )
    with pytest.raises(ValueError, match="message 0: .* write content of the role 'user'"):
        answers(chat, [say(USER, "a"), say(ASSISTANT, "b")])


def test_the_name_of_a_tool_is_that_of_its_call(chat):
    chat.chat_template = TOOLS
    called = [say(USER, "a"), say(ASSISTANT, None, tool_calls=[CALL])]
    messages = [*called, say("tool", "of", name="add"), say(ASSISTANT, "beta")]
    assert answers(chat, messages, [TOOL])[0][1].endswith("beta<|im_end|>")


@pytest.mark.parametrize(
    "message, words",
    [
        (say(USER, 3), "content of message 1 is int: needed is a text"),
        (say(USER, [{"type": "image"}]), "has a part of type 'image': only parts of text"),
        (say(ASSISTANT, "a", weight=0.5), "weight of message 1 is 0.5: 1 learns an answer"),
        (say(ASSISTANT, "a", weight=True), "weight of message 1 is True"),
        (say(USER, "a", weight=1), "weight of message 1 is 1, but its role is 'user'"),
        (say(ASSISTANT, "a", train=False), "message 1 has the key 'train', which is not read"),
        (say(ASSISTANT, "a", tool_calls="x"), "tool_calls of message 1 are no list of mappings"),
        (say(ASSISTANT, "a", tool_calls=[{"arguments": "[1]"}]), "message 1 are list: needed"),
        (say(ASSISTANT, "a", tool_calls=[{"arguments": "{"}]), "message 1: this is no JSON"),
        (say(ASSISTANT, "a", tool_calls=[{"arguments": []}]), "message 1 are list: needed"),
        (say(ASSISTANT, None), "message 1 has no content"),
        (say("Assistant", "a"), "the role of message 1 is 'Assistant': write assistant"),
    ],
)
def test_a_message_that_cannot_be_read_says_why(chat, message, words):
    with pytest.raises(ValueError, match=words):
        answers(chat, [say(USER, "a"), message, say(ASSISTANT, "b")])


def test_options_of_a_row_reach_the_template(chat):
    chat.chat_template = chat.chat_template + "{% if mood %}{{ mood }}{% endif %}"
    ((text, _),) = answers(chat, [say(USER, "a")], None, None, {"mood": "naïve", "other": None})
    assert text.endswith("naïve")


def test_nulls_of_a_table_do_not_reach_the_text(chat, tmp_path):
    chat.chat_template = TOOLS
    more = {"type": "function", "function": {"name": "of", "arguments": {"b": 2}}}
    called = say(ASSISTANT, None, tool_calls=[CALL, more])
    rows = [{"messages": [say(USER, "a"), m]} for m in (called, say(ASSISTANT, "beta"))]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    data = supervised(SFTDatasetsConfig(hf_dataset_or_datasets=str(path)), chat, 60, pack=False)
    texts = [chat.decode(data.sample(i)) for i in range(len(data))]
    assert texts[0].startswith('<user>a<|im_end|><assistant>[add {"a": 1}][of {"b": 2}]<|im_end|>')
    assert texts[1].startswith("<user>a<|im_end|><assistant>beta<|im_end|>")
    assert not any("null" in text or "None" in text for text in texts)
