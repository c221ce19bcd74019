"""Every sentence that the data's config can say."""

import pytest

from kenotron_data.config import DataConfig, DatasetStageConfig, PretrainDatasetsConfig


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hf_dataset_or_datasets": ["a", "b"]}, "mixtures of several are not available yet"),
        ({"hf_dataset_or_datasets": ""}, "it must be one local path or 'python-stdlib'"),
        ({"hf_dataset_splits": "test"}, "hf_dataset_splits: 'test' was given; choosing one is not"),
        ({"hf_dataset_config_name": "en"}, "set it to null or leave it out"),
        ({"text_column_name": "content"}, "set it to text or leave it out"),
    ],
)
def test_corpus_names_what_is_wrong(change, sentence):
    with pytest.raises(ValueError) as caught:
        PretrainDatasetsConfig(**{"hf_dataset_or_datasets": "corpus"} | change)
    assert sentence in str(caught.value)


def test_data_names_what_is_wrong():
    with pytest.raises(ValueError) as caught:
        DataConfig(dataset=None, seed=-1, num_loading_workers=-2)
    assert str(caught.value).splitlines() == [
        "seed: -1 was given; it must not be negative",
        "num_loading_workers: -2 was given; it must not be negative",
    ]


def test_stage_before_the_first_step_is_refused():
    with pytest.raises(ValueError, match="start_training_step: 0 was given; steps are counted"):
        DatasetStageConfig(name="a", start_training_step=0, data=DataConfig(dataset=None, seed=1))
