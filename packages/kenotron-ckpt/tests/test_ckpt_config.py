"""Every sentence that the checkpoints' config can say."""

import pytest

from kenotron_ckpt.config import CheckpointsConfig


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
