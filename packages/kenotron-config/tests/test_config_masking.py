"""What variables and URLs hold in secret is in no text that is made of a config."""

import copy
import json
import pickle
from dataclasses import asdict
from pathlib import Path

import pytest

from kenotron_config import EnvText, Mask, credentials, dump_config, masked, parse_config, public
from kenotron_config.masking import keep_tags

SECRET = "hunter2-from-the-environment"
ENVIRONMENT = {"KENOTRON_SECRET": SECRET}
URL = "s3://me:hunter3@host/bucket"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("https://me:pass@host/a?b=c", "https://me:***@host/a?b=c"),
        ("https://me:p@ss@host/a", "https://me:***@host/a"),
        ("see https://hf_token@host/a, and s3://b/c", "see https://***@host/a, and s3://b/c"),
        ("git+ssh://git@host/a", "git+ssh://git@host/a"),
        ("ssh://me:pass@host", "ssh://me:***@host"),
        ("https://h/a?token=abc&x=1", "https://h/a?token=***&x=1"),
        ("https://h/?X-Amz-Signature=abc", "https://h/?X-Amz-Signature=***"),
        ("me@host and a:b@c", "me@host and a:b@c"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_credentials_in_urls_are_masked(text, want):
    assert masked(text) == want


def test_a_tagged_text_is_a_text_that_remembers_its_tag():
    text = EnvText("value", "NAME other")
    for other in (text, copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert other == "value" and other.written == "NAME other"
    given = {"a": [text, "b"], "c": {"d": text}, "e": 1}
    kept = keep_tags(given, json.loads(json.dumps(given)))
    assert kept == given and public(kept) == {
        "a": ["!env NAME other", "b"],
        "c": {"d": "!env NAME other"},
        "e": 1,
    }
    assert keep_tags(text, "changed") == "changed"
    assert keep_tags([text], ["value", "more"]) == ["value", "more"]


def test_credentials_are_found_by_their_path():
    value = {"a": {"b": [URL, "x"]}, "c": EnvText(URL, "NAME"), "d": 1}
    assert credentials(value) == ["a.b.0"]


def test_a_terminal_gets_no_escape_sequences():
    assert Mask().line("a\x1b[31m\tb\n" + URL) == "a\ufffd[31m\tb\ns3://me:***@host/bucket"


def secret_config(*overrides):
    text = Path(__file__).with_name("tiny_llama.yaml").read_text(encoding="utf-8")
    overrides = (
        "general.run=!env KENOTRON_SECRET",
        "data_stages.0.data.dataset={hf_dataset_or_datasets: !env KENOTRON_SECRET}",
        *overrides,
    )
    return parse_config(text, "c.yaml", overrides, environment=ENVIRONMENT)


def test_the_tag_stays_in_what_is_written():
    config = secret_config(f"s3_upload.upload_s3_path={URL}")
    assert config.data_stages[0].data.dataset.hf_dataset_or_datasets == SECRET
    text = dump_config(config)
    assert SECRET not in text and "hunter3" not in text and "upload_s3_path: s3://me:***@" in text
    assert text.count("!env 'KENOTRON_SECRET'") + text.count("!env KENOTRON_SECRET") == 2
    again = parse_config(text, "again", environment=ENVIRONMENT)
    assert again.data_stages == config.data_stages and again.general.run == SECRET
    for shown in (text, str(public(asdict(config)))):
        assert SECRET not in shown and "hunter3" not in shown
        assert "!env KENOTRON_SECRET" in shown.replace("'", "")


@pytest.mark.parametrize(
    "key", ["tokens.train_steps", "parallelism.tp_mode", "model.model_config", "no_such.key"]
)
def test_a_problem_names_the_variable(key):
    with pytest.raises(ValueError) as error:
        secret_config(f"{key}=!env KENOTRON_SECRET")
    assert SECRET not in str(error.value)


def test_a_problem_masks_urls():
    with pytest.raises(ValueError, match=r'"s3://me:\*\*\*@host/bucket" was given'):
        secret_config(f"tokens.train_steps={URL}")


def test_a_log_has_the_name_of_a_variable():
    mask = Mask(secret_config())
    assert mask.line(f"{SECRET}: 5 tokens") == "!env KENOTRON_SECRET: 5 tokens"
    assert mask.keys({f"val_loss/{SECRET}": 1}) == {"val_loss/!env KENOTRON_SECRET": 1}


def test_credentials_are_masked_without_their_scheme():
    mask = Mask(secret_config(f"s3_upload.upload_s3_path={URL}"))
    path = URL.partition("://")[2]
    assert mask(f"OSError: /{path}/5") == "OSError: /me:***@host/bucket/5"
