"""An optimizer as PyTorch's users know it, over a whole module and a mesh.

It puts the parts of this package together: ``zero_grad``, backwards, ``step``. Programs that need
more (pipelines, non-finite policies, schedules of their own) call the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.diagnosis import check_replicas
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_optim.accumulate import GradAccumulator
from kenotron_optim.clip import GlobalNorm, clip_coefficient
from kenotron_optim.groups import ParameterGroup, decay_groups
from kenotron_optim.parameter_shards import Regather
from kenotron_optim.sliced_optimizer import SlicedOptimizer
from kenotron_optim.torch_groups import MakeOptimizer
from kenotron_optim.zero_stage import ZeroStage


class ZeroOptimizer(torch.optim.Optimizer):
    """A ``torch.optim`` rule with ZeRO stage 0 to 3, fp32 masters and clipping.

    Use it as any optimizer: ``zero_grad()``, one or more backwards, ``step()``. Gradients are taken
    by hooks: ``parameter.grad`` stays None. Schedulers of torch set the rate of its one group.

    Args:
        module: the model; its parameters are equal on all data ranks, or cut by placements.
        mesh: the mesh, without a pipeline.
        rule: makes the update rule of parameter groups: an elementwise class of ``torch.optim``, or
            ``update_rule(...)``.
        lr: learning rate.
        stage: ZeRO stage, 0 to 3.
        max_norm: gradients are scaled down to this norm; None: they are not.
        mean: whether gradients are averaged over the data ranks, as DDP and FSDP do, for a loss
            that is the mean of a rank's own tokens. False: they are summed, for a loss that was
            divided by the count of the global batch.
        groups: ``parameter_groups``, ``decay_groups``; None: all have ``weight_decay``.
        weight_decay: of all parameters, without ``groups``.
        units: with stage 3, the modules that are gathered one at a time, in the order of the
            forward; None: the children of ``module``.
        regather: with stage 3, ``layer`` or ``step``.
        backwards: so many backwards precede each ``step``: sums over ranks start during the last.
            None: any number, and sums start in ``step``.
        options: further arguments of ``rule``.

    Attributes:
        accumulator, sliced: the parts that do the work, for checkpoints on other layouts.
        grad_norm: fp64 scalar, the norm before clipping in the last step; None without
            ``max_norm``.

    Raises:
        ValueError: a mesh with a pipeline, parameters that differ between replicas, two names of
            one Parameter (``placement.Tie`` of kenotron-dist), and what the parts refuse.
            Collective over the mesh.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        rule: Callable[..., Any] = torch.optim.AdamW,
        *,
        lr: float = 1e-3,
        stage: int = 1,
        max_norm: float | None = None,
        mean: bool = True,
        groups: Sequence[ParameterGroup] | None = None,
        weight_decay: float = 0.0,
        units: Iterable[nn.Module] | None = None,
        regather: Regather = "layer",
        backwards: int | None = None,
        **options: Any,
    ) -> None:
        if mesh["pp"].size > 1:
            raise ValueError(
                f"the mesh has {mesh['pp'].size} pipeline stages: a stage's module has no layouts "
                "of the whole model; create GradAccumulator and SlicedOptimizer with them"
            )
        clip_coefficient(torch.ones(()), max_norm)  # refuses a bound that is none
        layouts = parameter_layouts(module, mesh.sizes)
        parameters = named_parameters(module)
        check_replicas({path: p.detach() for path, p in parameters.items()}, layouts, mesh)
        cut = ZeroStage(stage)
        reduce = "micro_batch" if cut.cuts_gradients else "step"
        self.accumulator = GradAccumulator(parameters, layouts, mesh, reduce=reduce)
        if groups is None:
            groups = decay_groups(self.accumulator.names, weight_decay, exclude=())
        make: MakeOptimizer = (lambda given: rule(given, **options)) if options else rule
        regather = regather if cut.cuts_parameters else "layer"
        self.sliced = SlicedOptimizer(self.accumulator, make, groups, cut, regather=regather)
        if cut.cuts_parameters:
            self.sliced.overlap_forward(units_of(module) if units is None else list(units))
        self._norm = None if max_norm is None else GlobalNorm(self.accumulator)
        self._max_norm, self._backwards = max_norm, backwards
        self._scale = 1 / (mesh["dp"].size * mesh["cp"].size) if mean else 1.0
        self.grad_norm: Tensor | None = None
        super().__init__(list(self.accumulator.parameters.values()), {"lr": lr})
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients. ``step`` does so, too."""
        self.accumulator.start(backwards=self._backwards)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sum gradients over ranks, clip them and update. Collective over the mesh.

        Args:
            closure: calls ``zero_grad`` and backward, and returns the loss; may be left out.

        Returns:
            The loss of ``closure``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        slices = self.accumulator.finish()
        coefficient = None
        if self._norm is not None:
            self.grad_norm = self._norm(slices) * self._scale
            coefficient = clip_coefficient(self.grad_norm, self._max_norm)
        if self._scale != 1:
            whole = torch.ones((), device=self.accumulator.mesh.device)
            coefficient = self._scale * (whole if coefficient is None else coefficient)
        self.sliced.step(slices, self.param_groups[0]["lr"], coefficient=coefficient)
        self.zero_grad()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's masters and state, for the same layout and stage.

        ``sliced.state()`` is what kenotron-ckpt saves once, for any layout and stage.
        """
        held = self.sliced.wanted(started=self.sliced.steps > 0)
        rates = [{"lr": group["lr"]} for group in self.param_groups]
        slices = {key: tensor.detach().clone() for key, (tensor, _) in held.items()}
        return {"steps": self.sliced.steps, "param_groups": rates, "slices": slices}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` returned; parameters become its masters. Collective.

        Raises:
            ValueError: it is of another model, layout or stage.
        """
        steps, saved = state_dict["steps"], state_dict["slices"]
        held = self.sliced.wanted(started=steps > 0)
        given = {key: list(tensor.shape) for key, tensor in saved.items()}
        needed = {key: list(tensor.shape) for key, (tensor, _) in held.items()}
        if given != needed:
            key = min(k for k in {*given, *needed} if given.get(k) != needed.get(k))
            raise ValueError(
                f"state_dict: {key} has shape {given.get(key)}, this rank holds {needed.get(key)}: "
                "a state_dict fits its own model, layout and ZeRO stage; save sliced.state() with "
                "kenotron-ckpt for others"
            )
        for key, (tensor, _) in held.items():
            tensor.copy_(saved[key])
        for group, rates in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group["lr"] = rates["lr"]
        self.sliced.steps = steps
        self.sliced.publish()

    def wait_for_parameters(self) -> None:
        """Complete all parameters before they are read outside of a forward. See the parts."""
        self.sliced.wait_for_parameters()


def units_of(module: nn.Module) -> list[nn.Module]:
    """Return the children of a module that have parameters, those of containers one by one."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            found += units_of(child)
        elif next(child.parameters(), None) is not None:
            found.append(child)
    return found
