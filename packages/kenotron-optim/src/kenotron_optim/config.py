"""The arguments of the optimizer, as plain dataclasses (no torch, no YAML here)."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

WarmupStyle = Literal["linear", "constant"]
DecayStyle = Literal["linear", "cosine", "1-sqrt"]
INFINITY = float("inf")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, 2019), under the names that Nanotron gives its arguments.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    adam_eps: float
    """Added to the root of the second moment."""
    adam_beta1: float
    """Share of the first moment that each update keeps."""
    adam_beta2: float
    """Share of the second moment that each update keeps."""
    torch_adam_is_fused: bool
    """True: one fused kernel updates all tensors; the rounding may differ in the last bit."""
    name: Literal["adamW"] = "adamW"
    """Marks a YAML mapping as this class."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if self.name != "adamW":
            found.append(f"name: {self.name!r} was given; only 'adamW' is available yet")
        if not 0 < self.adam_eps < INFINITY:
            found.append(f"adam_eps: {self.adam_eps} was given; it must be finite and above 0")
        for name, beta in (("adam_beta1", self.adam_beta1), ("adam_beta2", self.adam_beta2)):
            if not 0 <= beta < 1:
                found.append(f"{name}: {beta} was given; it must be at least 0 and below 1")
        _raise(found)


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    """Warm-up, plateau and decay of the learning rate; steps are counted from 1.

    `kenotron_optim.lr` fills in what is None, once the number of training steps is known.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    learning_rate: float
    """Highest learning rate, after the warm-up."""
    lr_warmup_steps: int = 0
    """Steps of the warm-up; the last of them has the full learning rate."""
    lr_warmup_style: WarmupStyle = "linear"
    """`linear`: step i has the share i / lr_warmup_steps; `constant`: the full learning rate."""
    lr_decay_style: DecayStyle = "linear"
    """Shape of the decay: a line, half a cosine wave, or one minus a square root."""
    lr_decay_steps: int | None = None
    """Steps of the decay; None: from its beginning to the end of training."""
    lr_decay_starting_step: int | None = None
    """Last step with the full learning rate; None: the last step of the warm-up."""
    min_decay_lr: float | None = None
    """Learning rate after the decay; None: learning_rate, that is, no decay."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = _choice("lr_warmup_style", self.lr_warmup_style, get_args(WarmupStyle))
        found += _choice("lr_decay_style", self.lr_decay_style, get_args(DecayStyle))
        found += _not_negative("learning_rate", self.learning_rate)
        found += _not_negative("lr_warmup_steps", self.lr_warmup_steps)
        found += _not_negative("lr_decay_steps", self.lr_decay_steps)
        found += _not_negative("min_decay_lr", self.min_decay_lr)
        if self.min_decay_lr is not None and self.min_decay_lr > self.learning_rate:
            found.append(
                f"min_decay_lr: {self.min_decay_lr} was given; it must not be above learning_rate "
                f"({self.learning_rate})"
            )
        start = self.lr_decay_starting_step
        if start is not None and start < self.lr_warmup_steps:
            found.append(
                f"lr_decay_starting_step: {start} was given; it must not come before the end of "
                f"the warm-up (lr_warmup_steps: {self.lr_warmup_steps})"
            )
        _raise(found)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Everything between the last backward and the updated parameters.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    optimizer_factory: AdamWConfig
    """The update rule and its constants."""
    zero_stage: int
    """0: every data-parallel rank keeps all optimizer state; 1: each keeps its share (ZeRO-1)."""
    weight_decay: float
    """Share of a weight taken off at each step, as a multiple of the learning rate."""
    clip_grad: float | None
    """Largest norm of the gradient of all parameters together; None: no limit."""
    accumulate_grad_in_fp32: bool
    """True: gradients of micro-batches are added in float32."""
    learning_rate_scheduler: LRSchedulerConfig
    """The learning rate of every step."""
    weight_decay_exclude_named_params: tuple[str, ...] = ()
    """Regular expressions; a parameter whose whole name matches one has no weight decay."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = _not_negative("weight_decay", self.weight_decay)
        if self.zero_stage not in (0, 1):
            found.append(f"zero_stage: {self.zero_stage} was given; it must be 0 or 1")
        if self.clip_grad is not None and not 0 < self.clip_grad < INFINITY:
            found.append(
                f"clip_grad: {self.clip_grad} was given; it must be a finite number above 0, or "
                "null for no limit"
            )
        for pattern in self.weight_decay_exclude_named_params:
            try:
                re.compile(pattern)
            except re.error as error:
                found.append(
                    f"weight_decay_exclude_named_params: {pattern!r} was given; it must be a "
                    f"regular expression ({error})"
                )
        _raise(found)


def _raise(found: list[str]) -> None:
    if found:
        raise ValueError("\n".join(found))


def _choice(name: str, given: str, known: tuple[str, ...]) -> list[str]:
    if given in known:
        return []
    return [f"{name}: {given!r} was given; it must be one of {', '.join(known)}"]


def _not_negative(name: str, given: float | None) -> list[str]:
    if given is None or 0 <= given < INFINITY:
        return []
    return [f"{name}: {given} was given; it must be finite and not negative"]
