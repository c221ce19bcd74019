"""The arguments of the optimizer, as plain dataclasses (no torch, no YAML here)."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from kenotron_optim.config_fields import INFINITY, choice, not_negative, raise_all, regex
from kenotron_optim.loss_scale_config import LossScaleConfig

WarmupStyle = Literal["linear", "constant"]
DecayStyle = Literal["linear", "cosine", "1-sqrt", "inverse-sqrt", "constant"]
StateDtype = Literal["float32", "bfloat16"]
Kind = Literal["norms", "biases", "embeddings"]
NonFinitePolicy = Literal["error", "skip", "rollback", "continue"]
"""What follows when the loss or a gradient is nan or inf."""


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
            found.append(f"name: {self.name!r} was given; AdamW's is 'adamW'")
        if not 0 < self.adam_eps < INFINITY:
            found.append(f"adam_eps: {self.adam_eps} was given; it must be finite and above 0")
        for name, beta in (("adam_beta1", self.adam_beta1), ("adam_beta2", self.adam_beta2)):
            if not 0 <= beta < 1:
                found.append(f"{name}: {beta} was given; it must be at least 0 and below 1")
        raise_all(found)


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent; weight decay is added to the gradient.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    momentum: float = 0.0
    """Share of the velocity that each update keeps; 0: plain descent, which has no state."""
    dampening: float = 0.0
    """Share of the gradient that is kept out of the velocity."""
    nesterov: bool = False
    """True: the gradient is looked at one step of the velocity ahead (Nesterov, 1983)."""
    name: Literal["sgd"] = "sgd"
    """Marks a YAML mapping as this class."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if self.name != "sgd":
            found.append(f"name: {self.name!r} was given; SGD's is 'sgd'")
        for name, share in (("momentum", self.momentum), ("dampening", self.dampening)):
            if not 0 <= share <= 1:
                found.append(f"{name}: {share} was given; it must be from 0 to 1")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            found.append(
                f"nesterov: true was given; it needs momentum above 0 ({self.momentum}) and "
                f"dampening 0 ({self.dampening})"
            )
        raise_all(found)


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon for matrices inside the model (Jordan et al., 2024), AdamW for everything else.

    Updates of matrices are scaled to the size of AdamW's (Liu et al., 2025), so that both take the
    same learning rate and weight decay. Each matrix is updated by one data rank, whole.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    momentum: float = 0.95
    """Share of the velocity that each update keeps."""
    nesterov: bool = True
    """True: the gradient is looked at one step of the velocity ahead (Nesterov, 1983)."""
    ns_steps: int = 5
    """Newton-Schulz iterations that make an update orthogonal."""
    adamw_named_params: tuple[str, ...] = ()
    """Regular expressions; a matrix whose whole name matches one is left to AdamW, as are embedding
    tables and the output layer, by the roles that modules declare."""
    adam_eps: float = 1e-8
    """AdamW's: added to the root of the second moment."""
    adam_beta1: float = 0.9
    """AdamW's: share of the first moment that each update keeps."""
    adam_beta2: float = 0.95
    """AdamW's: share of the second moment that each update keeps."""
    torch_adam_is_fused: bool = False
    """AdamW's: whether one fused kernel updates all tensors."""
    name: Literal["muon"] = "muon"
    """Marks a YAML mapping as this class."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if self.name != "muon":
            found.append(f"name: {self.name!r} was given; Muon's is 'muon'")
        if not 0 <= self.momentum < 1:
            found.append(f"momentum: {self.momentum} was given; it must be at least 0, below 1")
        if not 1 <= self.ns_steps < 100:
            found.append(f"ns_steps: {self.ns_steps} was given; it must be from 1 to 99")
        for pattern in self.adamw_named_params:
            found += regex("adamw_named_params", pattern)
        try:
            self.adamw()
        except ValueError as error:
            found += str(error).splitlines()
        raise_all(found)

    def adamw(self) -> AdamWConfig:
        """What updates everything that is no matrix."""
        return AdamWConfig(
            adam_eps=self.adam_eps,
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            torch_adam_is_fused=self.torch_adam_is_fused,
        )


UpdateRule = AdamWConfig | SGDConfig | MuonConfig


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    """Warm-up, plateau and decay of the learning rate; steps are counted from 1.

    `kenotron_optim.lr` fills in what is None, once the number of training steps is known. A plateau
    (`lr_decay_starting_step` above `lr_warmup_steps`) makes any decay a warm-up-stable-decay (WSD).

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
    """Shape of the decay: a line, half a cosine wave, one minus a square root; `inverse-sqrt`:
    one over the square root of the step, which has no end; `constant`: no decay."""
    lr_decay_steps: int | None = None
    """Steps of the decay; None: from its beginning to the end of training."""
    lr_decay_starting_step: int | None = None
    """Last step with the full learning rate; None: the last step of the warm-up."""
    min_decay_lr: float | None = None
    """Lowest learning rate, which the decay ends with; None: learning_rate, that is, no decay."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = choice("lr_warmup_style", self.lr_warmup_style, get_args(WarmupStyle))
        found += choice("lr_decay_style", self.lr_decay_style, get_args(DecayStyle))
        found += not_negative("learning_rate", self.learning_rate)
        found += not_negative("lr_warmup_steps", self.lr_warmup_steps)
        found += not_negative("lr_decay_steps", self.lr_decay_steps)
        found += not_negative("min_decay_lr", self.min_decay_lr)
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
        raise_all(found + self._without_meaning())

    def _without_meaning(self) -> list[str]:
        """Values that this style of decay could only ignore."""
        unused = {
            "inverse-sqrt": ("lr_decay_steps",),
            "constant": ("lr_decay_steps", "lr_decay_starting_step", "min_decay_lr"),
        }
        return [
            f"{name}: {value} was given; lr_decay_style {self.lr_decay_style!r} has none; leave it "
            "out or choose another style"
            for name in unused.get(self.lr_decay_style, ())
            if (value := getattr(self, name)) is not None
        ]


@dataclass(frozen=True, kw_only=True)
class LRMultiplier:
    """A factor for the learning rate of some parameters, as maximal update parametrisation needs.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    pattern: str
    """Regular expression; holds for a parameter whose whole name matches it."""
    multiplier: float
    """The parameter's learning rate is that of the schedule times this."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        raise_all(regex("pattern", self.pattern) + not_negative("multiplier", self.multiplier))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Everything between the last backward and the updated parameters.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    optimizer_factory: UpdateRule = field(metadata={"discriminator": "name"})
    """The update rule and its constants; `name` says which."""
    zero_stage: int
    """0: every data-parallel rank keeps all optimizer state; 1: each keeps its share (ZeRO-1)."""
    state_dtype: StateDtype = "float32"
    """Number format of moments and momentum between updates. `bfloat16` takes half the memory; they
    are rounded up or down at random, so that small changes add up. Masters stay float32."""
    weight_decay: float
    """Share of a weight taken off at each step, as a multiple of its learning rate."""
    clip_grad: float | None
    """Largest norm of the gradient of all parameters together; None: no limit."""
    accumulate_grad_in_fp32: bool
    """True: gradients of micro-batches are added in float32."""
    learning_rate_scheduler: LRSchedulerConfig
    """The learning rate of every step."""
    weight_decay_exclude_named_params: tuple[str, ...] = ()
    """Regular expressions; a parameter whose whole name matches one has no weight decay."""
    weight_decay_exclude_kinds: tuple[Kind, ...] = ()
    """Kinds of parameters without weight decay: those of norms, biases, those of embeddings."""
    lr_multipliers: tuple[LRMultiplier, ...] = ()
    """Factors of learning rates; a parameter has that of the first pattern that matches."""
    nonfinite: NonFinitePolicy = "error"
    """What follows when loss or gradient is nan or inf: `error` ends the run and names parameter
    and rank, `skip` leaves the step out on all ranks, `rollback` returns to the newest checkpoint
    and leaves the batch out, `continue` updates all the same."""
    max_rollbacks: int = 3
    """So often a run may go back; the next step that is not finite ends it."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Dynamic loss scaling; for `model.dtype: float16` only."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = not_negative("weight_decay", self.weight_decay)
        found += choice("nonfinite", self.nonfinite, get_args(NonFinitePolicy))
        found += choice("state_dtype", self.state_dtype, get_args(StateDtype))
        found += not_negative("max_rollbacks", self.max_rollbacks)
        if self.zero_stage not in (0, 1):
            found.append(f"zero_stage: {self.zero_stage} was given; it must be 0 or 1")
        if self.clip_grad is not None and not 0 < self.clip_grad < INFINITY:
            found.append(
                f"clip_grad: {self.clip_grad} was given; it must be a finite number above 0, or "
                "null for no limit"
            )
        for pattern in self.weight_decay_exclude_named_params:
            found += regex("weight_decay_exclude_named_params", pattern)
        for kind in self.weight_decay_exclude_kinds:
            found += choice("weight_decay_exclude_kinds", kind, get_args(Kind))
        raise_all(found)
