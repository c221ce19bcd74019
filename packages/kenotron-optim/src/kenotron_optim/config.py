"""The arguments of the optimizer, as plain dataclasses (no torch, no YAML here)."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from kenotron_dist import Role
from kenotron_optim.config_fields import INFINITY, choice, not_negative, raise_all, regex
from kenotron_optim.loss_scale_config import LossScaleConfig
from kenotron_optim.rule_config import UpdateRule
from kenotron_optim.spikes import SpikeConfig
from kenotron_optim.weight_average_config import WeightAverageConfig
from kenotron_optim.zero_stage import ZeroStage

WarmupStyle = Literal["linear", "constant"]
DecayStyle = Literal["linear", "cosine", "1-sqrt", "inverse-sqrt", "constant"]
StateDtype = Literal["float32", "bfloat16"]
Reduce = Literal["step", "micro_batch"]
"""Time at which gradients are summed over data ranks."""
Regather = Literal["layer", "step"]
"""layer: a unit is freed after its forward and gathered again for its backward; step: it is kept
until the update."""
Kind = Literal["norms", "biases", "embeddings"]
NonFinitePolicy = Literal["error", "skip", "rollback", "continue"]
"""Reaction to a loss or a gradient that is nan or inf."""


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
    """A factor for the learning rate of some parameters, named by a pattern or by their role.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    pattern: str | None = None
    """Regular expression; holds for a parameter whose whole name matches it."""
    role: Role | None = None
    """Role of the parameters, instead of a pattern: `embedding`, `output` (the head), `hidden` and
    `residual` (matrices; the second are added to the residual stream), `norm`, `bias`, `router`,
    `filter`, `state`."""
    multiplier: float
    """The parameter's learning rate is that of the schedule times this."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [] if self.pattern is None else regex("pattern", self.pattern)
        found += not_negative("multiplier", self.multiplier)
        if (self.pattern is None) == (self.role is None):
            found.append(
                f"pattern: {self.pattern!r} was given, and role {self.role!r}; one of the two must "
                "say which parameters are meant: keep one"
            )
        if self.role is not None:
            found += choice("role", self.role, get_args(Role))
        raise_all(found)


def shard_ranks_problems(shard_ranks: int | None, dp: int | None = None) -> list[str]:
    """Describe why ranks cannot be cut into blocks: a line, or none.

    Args:
        shard_ranks: ranks of dp in a block; None: all.
        dp: ranks of dp; None: it is not known yet.
    """
    if shard_ranks is None or (shard_ranks > 0 and (dp is None or dp % shard_ranks == 0)):
        return []
    among = "dp" if dp is None else f"dp ({dp})"
    return [
        f"shard_ranks: {shard_ranks} was given; it must divide {among}, whose ranks it cuts into "
        "blocks: choose a divisor"
    ]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Everything between the last backward and the updated parameters.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    optimizer_factory: UpdateRule = field(metadata={"discriminator": "name"})
    """The update rule and its constants; `name` says which."""
    zero_stage: int
    """Stage of ZeRO: what data-parallel ranks share out among them. 0: nothing; 1: the optimizer's
    state; 2: gradients, too; 3: parameters, too, which a layer gathers where it uses them."""
    reduce: Reduce = "micro_batch"
    """Time at which stages 2 and 3 add gradients over data ranks. `micro_batch`: after each, and
    slices of them are kept; `step`: once, from whole gradients, in the order of stages 0 and 1 to
    the bit."""
    regather: Regather = "layer"
    """Time at which stage 3 frees the parameters of a layer. `layer`: after its forward, and they
    are gathered again for its backward; `step`: after the update, for speed."""
    shard_ranks: int | None = None
    """Hybrid sharding: so many consecutive ranks of dp own all slices, such as those of a machine;
    other blocks of them own the same. None: all of dp does. Slices of experts stay on all ranks."""
    state_dtype: StateDtype = "float32"
    """Number format of moments and momentum between updates. `bfloat16` takes half the memory; they
    are rounded up or down at random, so that small changes add up. Masters stay float32."""
    offload: bool = False
    """True: masters and the optimizer's state are in host memory, of one bucket at a time on the
    GPU, where they are updated: the same bits, and 24 bytes a parameter are copied in each step. On
    a CPU it saves nothing."""
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
    """Reaction to a loss or gradient that is nan or inf: `error` ends the run and names parameter
    and rank, `skip` leaves the step out on all ranks, `rollback` returns to the newest checkpoint
    and leaves the batch out, `continue` updates all the same."""
    max_rollbacks: int = 3
    """So often a run may go back; the next step that is not finite ends it."""
    weight_average: WeightAverageConfig | None = None
    """An exponential moving average of the weights, kept in checkpoints; None: none is taken."""
    spikes: SpikeConfig | None = None
    """Leave out steps whose loss or gradient norm is far above that of the last ones; None: update
    whatever is finite."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Dynamic loss scaling; for `model.dtype: float16` only."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = not_negative("weight_decay", self.weight_decay)
        found += choice("nonfinite", self.nonfinite, get_args(NonFinitePolicy))
        found += choice("state_dtype", self.state_dtype, get_args(StateDtype))
        found += not_negative("max_rollbacks", self.max_rollbacks)
        if self.zero_stage not in range(4):
            found.append(f"zero_stage: {self.zero_stage} was given; it must be 0, 1, 2 or 3")
        found += choice("reduce", self.reduce, get_args(Reduce))
        found += choice("regather", self.regather, get_args(Regather))
        if self.regather != "layer" and self.zero_stage != ZeroStage.PARAMETERS:
            found.append(
                f"regather: {self.regather} was given; zero_stage {self.zero_stage} keeps all "
                "parameters: leave it out, or set zero_stage to 3"
            )
        found += shard_ranks_problems(self.shard_ranks)
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

    @property
    def zero(self) -> ZeroStage:
        """Stage of ZeRO, as code asks for it."""
        return ZeroStage(self.zero_stage)
