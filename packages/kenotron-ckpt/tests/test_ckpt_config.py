"""Every sentence that the checkpoints' config can say."""

import pytest

from kenotron_ckpt.config import CheckpointsConfig
from kenotron_ckpt.s3_config import S3UploadConfig


def test_usual_checkpoints():
    config = CheckpointsConfig(checkpoints_path="checkpoints", checkpoint_interval=10)
    assert (config.save_initial_state, config.save_final_state) == (False, True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"checkpoints_path": ""}, "checkpoints_path: nothing was given; it must name a folder"),
        (
            {"checkpoint_interval": 0},
            "checkpoint_interval: 0 was given; it must be at least 1 step",
        ),
        ({"resume_checkpoint_path": ""}, "resume_checkpoint_path: nothing was given"),
    ],
)
def test_checkpoints_name_what_is_wrong(change, sentence):
    with pytest.raises(ValueError) as caught:
        CheckpointsConfig(**{"checkpoints_path": "c", "checkpoint_interval": 10} | change)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"upload_s3_path": "bucket/run"},
            "upload_s3_path: bucket/run was given; it must be a URL",
        ),
        (
            {"upload_s3_path": "s3://"},
            "upload_s3_path: s3:// was given; it must be a URL such as s3",
        ),
        (
            {"upload_s3_path": ""},
            "upload_s3_path:  was given; it must be a URL such as s3://bucket",
        ),
        ({"s5cmd_numworkers": 0}, "s5cmd_numworkers: 0 was given; it must be at least 1"),
        ({"s5cmd_concurrency": -1}, "s5cmd_concurrency: -1 was given; it must be at least 1"),
    ],
)
def test_uploads_name_what_is_wrong(change, sentence):
    with pytest.raises(ValueError) as caught:
        S3UploadConfig(**{"upload_s3_path": "s3://bucket/run"} | change)
    assert sentence in str(caught.value)


def test_nothing_is_uploaded_without_a_path():
    assert S3UploadConfig(upload_s3_path=None).remove_after_upload is False
