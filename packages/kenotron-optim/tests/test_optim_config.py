"""Every sentence that the optimizer's config can say."""

import pytest

from kenotron_optim.config import AdamWConfig, LRSchedulerConfig, OptimizerConfig

ADAM = {"adam_eps": 1e-8, "adam_beta1": 0.9, "adam_beta2": 0.95, "torch_adam_is_fused": False}
OPTIMIZER = {
    "optimizer_factory": AdamWConfig(**ADAM),
    "zero_stage": 0,
    "weight_decay": 0.01,
    "clip_grad": None,
    "accumulate_grad_in_fp32": True,
    "learning_rate_scheduler": LRSchedulerConfig(learning_rate=1e-3),
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": "sgd"}, "name: 'sgd' was given; only 'adamW' is available yet"),
        ({"adam_eps": -1.0}, "adam_eps: -1.0 was given; it must be finite and above 0"),
        ({"adam_beta1": 1.0}, "adam_beta1: 1.0 was given; it must be at least 0 and below 1"),
        ({"adam_beta2": float("nan")}, "adam_beta2: nan was given"),
    ],
)
def test_adamw_names_what_is_wrong(change, sentence):
    with pytest.raises(ValueError) as caught:
        AdamWConfig(**ADAM | change)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"lr_warmup_style": "cosine"}, "lr_warmup_style: 'cosine' was given; it must be one of"),
        ({"lr_decay_style": "wsd"}, "it must be one of linear, cosine, 1-sqrt"),
        ({"learning_rate": float("inf")}, "learning_rate: inf was given; it must be finite"),
        ({"lr_warmup_steps": -1}, "lr_warmup_steps: -1 was given"),
        ({"lr_decay_steps": -1}, "lr_decay_steps: -1 was given"),
        ({"min_decay_lr": -0.1}, "min_decay_lr: -0.1 was given"),
        (
            {"lr_warmup_steps": 5, "lr_decay_starting_step": 4},
            "lr_decay_starting_step: 4 was given; it must not come before the end of the warm-up",
        ),
    ],
)
def test_schedule_names_what_is_wrong(change, sentence):
    with pytest.raises(ValueError) as caught:
        LRSchedulerConfig(**{"learning_rate": 1e-3} | change)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"zero_stage": 2}, "zero_stage: 2 was given; it must be 0 or 1"),
        ({"weight_decay": -1.0}, "weight_decay: -1.0 was given"),
        ({"clip_grad": 0.0}, "clip_grad: 0.0 was given; it must be a finite number above 0, or"),
        (
            {"weight_decay_exclude_named_params": ("ok", "(")},
            "weight_decay_exclude_named_params: '(' was given; it must be a regular expression",
        ),
    ],
)
def test_optimizer_names_what_is_wrong(change, sentence):
    with pytest.raises(ValueError) as caught:
        OptimizerConfig(**OPTIMIZER | change)
    assert sentence in str(caught.value)


def test_all_problems_come_together():
    with pytest.raises(ValueError) as caught:
        OptimizerConfig(**OPTIMIZER | {"zero_stage": 2, "clip_grad": -1.0})
    assert len(str(caught.value).splitlines()) == 2
