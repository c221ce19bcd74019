"""Every sentence that the optimizer's config can say."""

import pytest

from kenotron_optim import (
    AdamWConfig,
    LRMultiplier,
    LRSchedulerConfig,
    OptimizerConfig,
    SGDConfig,
)

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
        ({"name": "sgd"}, "name: 'sgd' was given; AdamW's is 'adamW'"),
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
        ({"name": "adamW"}, "name: 'adamW' was given; SGD's is 'sgd'"),
        ({"momentum": 1.5}, "momentum: 1.5 was given; it must be from 0 to 1"),
        ({"dampening": float("nan")}, "dampening: nan was given; it must be from 0 to 1"),
        ({"nesterov": True}, "nesterov: true was given; it needs momentum above 0 (0.0) and"),
        (
            {"nesterov": True, "momentum": 0.9, "dampening": 0.5},
            "nesterov: true was given; it needs momentum above 0 (0.9) and dampening 0 (0.5)",
        ),
    ],
)
def test_sgd_names_what_is_wrong(change, sentence):
    with pytest.raises(ValueError) as caught:
        SGDConfig(**change)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"pattern": "("}, "pattern: '(' was given; it must be a regular expression"),
        ({"multiplier": -1.0}, "multiplier: -1.0 was given; it must be finite and not negative"),
        ({"multiplier": float("inf")}, "multiplier: inf was given"),
    ],
)
def test_a_multiplier_names_what_is_wrong(change, sentence):
    with pytest.raises(ValueError) as caught:
        LRMultiplier(**{"pattern": ".*", "multiplier": 1.0} | change)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"lr_decay_style": "inverse-sqrt", "lr_decay_steps": 3},
            "lr_decay_steps: 3 was given; lr_decay_style 'inverse-sqrt' has none; leave it out or",
        ),
        ({"lr_decay_style": "constant", "min_decay_lr": 0.0}, "min_decay_lr: 0.0 was given; lr_d"),
        ({"lr_decay_style": "constant", "lr_decay_starting_step": 1}, "lr_decay_starting_step: 1"),
        ({"min_decay_lr": 2e-3}, "min_decay_lr: 0.002 was given; it must not be above learning_ra"),
        ({"lr_warmup_style": "cosine"}, "lr_warmup_style: 'cosine' was given; it must be one of"),
        ({"lr_decay_style": "wsd"}, "it must be one of linear, cosine, 1-sqrt, inv"),
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
        ({"zero_stage": 4}, "zero_stage: 4 was given; it must be 0, 1, 2 or 3"),
        ({"reduce": "never"}, "reduce: 'never' was given"),
        ({"regather": "step"}, "regather: step was given; zero_stage 0 keeps all parameters"),
        (
            {"nonfinite": "stop"},
            "nonfinite: 'stop' was given; it must be one of error, skip, rollback",
        ),
        ({"weight_decay": -1.0}, "weight_decay: -1.0 was given"),
        (
            {"state_dtype": "float16"},
            "state_dtype: 'float16' was given; it must be one of float32, bfloat16",
        ),
        ({"clip_grad": 0.0}, "clip_grad: 0.0 was given; it must be a finite number above 0, or"),
        (
            {"weight_decay_exclude_named_params": ("ok", "(")},
            "weight_decay_exclude_named_params: '(' was given; it must be a regular expression",
        ),
        (
            {"weight_decay_exclude_kinds": ("norm",)},
            "weight_decay_exclude_kinds: 'norm' was given; it must be one of norms, biases, embedd",
        ),
    ],
)
def test_optimizer_names_what_is_wrong(change, sentence):
    with pytest.raises(ValueError) as caught:
        OptimizerConfig(**OPTIMIZER | change)
    assert sentence in str(caught.value)


def test_all_problems_come_together():
    with pytest.raises(ValueError) as caught:
        OptimizerConfig(**OPTIMIZER | {"zero_stage": 4, "clip_grad": -1.0})
    assert len(str(caught.value).splitlines()) == 2
