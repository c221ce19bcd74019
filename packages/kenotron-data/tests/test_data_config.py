"""Every shape that the data's config takes, and every sentence that it can say."""

from dataclasses import asdict

import pytest

from kenotron_data.config import (
    DataConfig,
    DatasetStageConfig,
    NanosetDatasetsConfig,
    PretrainDatasetsConfig,
    SFTDatasetsConfig,
)

HUB = (PretrainDatasetsConfig, SFTDatasetsConfig)


@pytest.mark.parametrize("kind", HUB)
@pytest.mark.parametrize(
    ("given", "fractions"),
    [
        ("a", {"a": 1.0}),
        (["b", "a"], {"b": 1.0, "a": 1.0}),
        ({"b": 0.5, "a": 1}, {"b": 0.5, "a": 1}),
    ],
)
def test_data_sets_come_in_three_shapes_and_keep_theirs(kind, given, fractions):
    config = kind(hf_dataset_or_datasets=given, hf_dataset_splits=["train", "test"])
    assert list(config.fractions.items()) == list(fractions.items())
    assert config.splits == ("train", "test")
    assert config.hf_dataset_or_datasets == given
    assert kind(**asdict(config)) == config
    assert kind(hf_dataset_or_datasets=given).splits == ("train",)


@pytest.mark.parametrize(
    ("given", "weights", "want"),
    [
        ("f", None, (("f",), None)),
        ("f", [2], (("f",), (2,))),
        (["f", "g"], None, (("f", "g"), None)),
        (["f", "g"], [0, 1.5], (("f", "g"), (0, 1.5))),
        ({"f": 0.3, "g": 0.7}, None, (("f", "g"), (0.3, 0.7))),
    ],
)
def test_folders_come_in_three_shapes_and_keep_theirs(given, weights, want):
    config = NanosetDatasetsConfig(dataset_folder=given, dataset_weights=weights)
    assert (config.folders, config.weights) == want
    assert config.dataset_folder == given
    assert NanosetDatasetsConfig(**asdict(config)) == config
    assert config.read_paths is None
    if len(config.folders) == 1:
        assert NanosetDatasetsConfig(dataset_folder="f", dataset_read_path="x").read_paths == ("x",)


@pytest.mark.parametrize("kind", HUB)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"hf_dataset_or_datasets": ""},
            "hf_dataset_or_datasets: '' was given; it must name at le",
        ),
        ({"hf_dataset_or_datasets": []}, "[] was given; it must name at least one data set"),
        ({"hf_dataset_or_datasets": {}}, "{} was given; it must name at least one data set"),
        ({"hf_dataset_or_datasets": ["a", " "]}, "and none is empty"),
        ({"hf_dataset_or_datasets": 3}, "3 was given; it must name at least one data set"),
        ({"hf_dataset_or_datasets": ["a", "a"]}, "each data set is named once"),
        ({"hf_dataset_or_datasets": {"a": 1.5}}, "1.5 was given for 'a'; a fraction is a number"),
        ({"hf_dataset_or_datasets": {"a": -1}}, "-1 was given for 'a'; a fraction is a number"),
        ({"hf_dataset_or_datasets": {"a": 0}}, "all fractions are 0; at least one"),
        (
            {"hf_dataset_splits": []},
            "hf_dataset_splits: [] was given; it must name at least one sp",
        ),
        ({"hf_dataset_config_name": ""}, "hf_dataset_config_name: '' was given; name a configurat"),
        ({"dataset_processing_num_proc_per_process": 0}, "0 was given; it must be at least 1"),
    ],
)
def test_text_names_what_is_wrong(kind, change, sentence):
    with pytest.raises(ValueError) as caught:
        kind(**{"hf_dataset_or_datasets": "corpus"} | change)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(next(iter(change)))
    assert sentence in line


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        (PretrainDatasetsConfig, {"text_column_name": ""}, "text_column_name: '' was given; name"),
        (SFTDatasetsConfig, {"debug_max_samples": 0}, "debug_max_samples: 0 was given; it must be"),
        (SFTDatasetsConfig, {"sft_dataloader": False}, "sft_dataloader: false was given; it must"),
    ],
)
def test_each_kind_of_text_names_what_is_wrong_with_its_own(kind, change, sentence):
    with pytest.raises(ValueError) as caught:
        kind(hf_dataset_or_datasets="corpus", **change)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dataset_folder": []}, "dataset_folder: [] was given; it must name at least one folder"),
        ({"dataset_folder": ["a", "a"]}, "each folder is named once"),
        ({"dataset_folder": {"a": -1}}, "-1 was given for 'a'; a weight is a finite number"),
        ({"dataset_folder": {"a": 0}}, "dataset_folder: all weights are 0"),
        ({"dataset_weights": [0]}, "dataset_weights: all weights are 0"),
        ({"dataset_weights": [1, 2]}, "dataset_weights: 2 were given; it needs one for each of 1"),
        ({"dataset_weights": [float("nan")]}, "dataset_weights: nan was given; a weight is a fini"),
        ({"dataset_folder": {"f": 1}, "dataset_weights": [1]}, "dataset_folder gives the weights"),
        ({"dataset_read_path": ["a", "b"]}, "dataset_read_path: 2 were given; it needs one for"),
        ({"dataset_max_tokens": [0]}, "dataset_max_tokens: 0 was given; it must be at least 1"),
        ({"tokenizer_name": ""}, "tokenizer_name: '' was given"),
        ({"vocab_size": 0}, "vocab_size: 0 was given; it must be at least 1, or -1"),
        ({"token_size_in_bytes": 3}, "token_size_in_bytes: 3 was given; it is 2 or 4"),
    ],
)
def test_a_nanoset_names_what_is_wrong(change, sentence):
    with pytest.raises(ValueError) as caught:
        NanosetDatasetsConfig(**{"dataset_folder": "f"} | change)
    assert sentence in str(caught.value)


def test_data_names_all_that_is_wrong():
    with pytest.raises(ValueError) as caught:
        DataConfig(dataset=None, seed=-1, num_loading_workers=-2)
    assert str(caught.value).splitlines() == [
        "seed: -1 was given; it must not be negative",
        "num_loading_workers: -2 was given; it must not be negative",
    ]


def test_a_stage_names_all_that_is_wrong():
    data = DataConfig(dataset=None, seed=1)
    with pytest.raises(ValueError) as caught:
        DatasetStageConfig(name="a", start_training_step=0, data=data, sequence_length=0)
    assert str(caught.value).splitlines() == [
        "start_training_step: 0 was given; steps are counted from 1",
        "sequence_length: 0 was given; it must be at least 1",
    ]
