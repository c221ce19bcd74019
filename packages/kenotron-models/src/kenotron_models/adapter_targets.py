"""Targets of adapters: weights of a model that may have one, and those that names and roles mean.

A layer here may be several of Hugging Face's, one below the other (queries, keys and values): each
of these has an adapter of its own, as the peft package gives it.

Shapes: E experts, I input and O output features.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import NamedTuple

from torch import Tensor, nn

from kenotron_models.decoder import LayerStack, build_decoder
from kenotron_models.hf import hf_tensors
from kenotron_models.hf_tensors import TensorPart, Whole
from kenotron_models.registry import AnyConfig, family_of
from kenotron_models.shapes import ONE
from kenotron_models.stacked_linear import StackedLinear
from kenotron_models.transformers_names import transformers_tensors
from kenotron_models.transformers_spec import TransformersSpec
from kenotron_tp import ColumnParallelLinear, RowParallelLinear

LINEAR = (nn.Linear, ColumnParallelLinear, RowParallelLinear)
"""Layers with weights (O, I) that may have an adapter."""
ALL = "all"
"""Target that stands for all linear layers of blocks, as ``all-linear`` of peft."""
ROLES = ("attention", "mixer", "mlp", "experts")
"""Targets that stand for the layers of one role; ``mixer``: state spaces, convolutions and others
in the place of attention; ``experts``: those that tokens are routed to."""
_KINDS = {
    "mixer": re.compile("mamba|mixer|ssm|delta|conv|recurrent|scan|mlstm|rwkv"),
    "attention": re.compile("attn|attention"),
    "mlp": re.compile("mlp|ffn|feed_?forward|moe"),
}
"""Words in names of classes and of modules."""
_ROUTER = re.compile(r"gate|router|.*(_gate|_router)")
_FILED = (".block_sparse_moe.", ".mlp.")
"""Part of Mixtral's names in files, and in transformers: peft uses the latter for stacks."""


class Adaptable(NamedTuple):
    """A weight that may have adapters."""

    parts: tuple[TensorPart, ...]
    """Hugging Face's modules that it is made of, (O, I); a stack of experts is one part (E, O, I).
    """
    role: str
    """One of ``ROLES``; empty for routers."""
    turned: bool = False
    """True for a stack that is stored as (E, I, O)."""

    @property
    def stacked(self) -> bool:
        """True for a stack of experts, which is no linear layer."""
        return len(self.parts[0].shape) == 3


def module_of(part: TensorPart) -> str:
    """Return the name of Hugging Face's module: ``model.layers.0.self_attn.q_proj``."""
    return part.name.removesuffix(".weight")


def key_of(part: TensorPart) -> str:
    """Return the last word of the name of Hugging Face's module: ``q_proj``."""
    return module_of(part).rpartition(".")[2]


def is_conv1d(module: nn.Module) -> bool:
    """Return True for GPT-2's linear layer of transformers, whose weight is (I, O)."""
    return any(each.__name__ == "Conv1D" and hasattr(module, "nf") for each in type(module).__mro__)


def linear_parts(config: AnyConfig) -> dict[str, Adaptable]:
    """Return all weights that may have adapters, by name.

    They are those of linear layers inside blocks, and stacks of experts. A family without names in
    Hugging Face's format has its own. Raises ImportError or ValueError for a model that cannot be
    built.
    """
    stack, known = LayerStack(build_decoder(config.decoder, ONE)), _their_tensors(config)
    found: dict[str, Adaptable] = {}
    for name, module in stack.named_modules():
        if not re.match(r"(layers|model)\.", name):
            continue
        if isinstance(module, LINEAR) or is_conv1d(module):
            if getattr(module, "roles", {}).get("weight") == "output":
                continue
            path = f"{name}.weight"
            found[path] = Adaptable(_parts_of(path, module, known), _role(stack, name))
            continue
        for path, shape in _stacks(name, module):
            part = TensorPart(_stack_name(path, known), shape, (0, 0, 0))
            found[path] = Adaptable((part,), "experts", is_transposed(module))
    return found


def _parts_of(path: str, module: nn.Module, known: Mapping[str, Whole]) -> tuple[TensorPart, ...]:
    """Return the parts (O, I) of a linear layer's weight."""
    parts = known[path].parts if path in known else ()
    if not parts or any(len(part.shape) != 2 for part in parts):
        parts = (TensorPart(path, (*module.get_parameter("weight").shape,), (0, 0)),)
    if is_conv1d(module):
        parts = tuple(replace(part, shape=part.shape[::-1]) for part in parts)
    return parts


def is_transposed(module: nn.Module) -> bool:
    """Return True for stacks of experts' matrices that are (E, I, O), as peft sees them."""
    own = isinstance(module, StackedLinear)
    return bool(getattr(module, "transposed" if own else "is_transposed", False))


def _stacks(name: str, module: nn.Module) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the name of each stack of experts' matrices, and its shape (E, O, I)."""
    if isinstance(module, StackedLinear) or name.rpartition(".")[2] == "experts":
        for each, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3:
                yield f"{name}.{each}", stack_shape(module, parameter)


def stack_shape(module: nn.Module, stack: Tensor) -> tuple[int, int, int]:
    """Return (E, O, I) of a stack of a module, however it is stored."""
    experts, *shape = stack.shape
    rows, width = shape[::-1] if is_transposed(module) else shape
    return experts, rows, width


def _stack_name(path: str, known: Mapping[str, Whole]) -> str:
    """Return the name of a stack in a model of transformers, where files have each matrix alone."""
    if path not in known:
        return path
    names = [part.name for part in known[path].parts]
    # Files have the matrices of each expert, ``experts.0.gate_proj``, and the model of transformers
    # one stack, ``experts.gate_up_proj``.
    single = re.match(r"(.*\.experts)\.\d+\.", names[0])
    if single is None:
        return names[0]
    ours = path.removesuffix(".weight").rpartition(".")[2].removesuffix("_proj")
    return single[1].replace(*_FILED) + f".{ours}_proj"


def _role(stack: nn.Module, name: str) -> str:
    """Return the role of a linear layer, from the names and classes of the modules it is in."""
    *parents, last = name.split(".")
    if "experts" in parents and "shared" not in ".".join(parents):
        return "experts"
    # From the innermost module outwards: the class of a module says more than its name.
    for count in range(len(parents), 2, -1):
        path = ".".join(parents[:count])
        for word in (type(stack.get_submodule(path)).__name__, parents[count - 1]):
            for role, kind in _KINDS.items():
                if kind.search(word.lower()):
                    return "" if role == "mlp" and _ROUTER.fullmatch(last) else role
    return "mlp"


def _their_tensors(config: AnyConfig) -> Mapping[str, Whole]:
    if isinstance(config.decoder, TransformersSpec):
        return transformers_tensors(config.decoder)
    return {} if family_of(config).hf is None else hf_tensors(config)


def targeted(
    parts: Mapping[str, Adaptable], targets: Sequence[str]
) -> dict[str, tuple[TensorPart, ...]]:
    """Return those of ``linear_parts`` that are targets.

    Args:
        parts: of the model.
        targets: ends of names at a dot (``q_proj``, ``mlp.up_proj``) or patterns of them, of
            modules of Hugging Face's or of ours; a role; ``all``: every linear layer. A stack of
            experts is meant by its role, or a name with the word ``experts`` in it.

    Raises:
        ValueError: a line for each target that is no pattern, or names nothing.
    """
    problems, hits = [], set[tuple[str, str]]()
    for target in targets:
        try:
            new = _meant(parts, target)
        except re.error as error:
            problems.append(f"{target!r} is no pattern ({error})")
            continue
        if not new:
            problems.append(_unknown(parts, target))
        hits |= new
    if problems:
        raise ValueError("\n".join(problems))
    chosen = dict[str, tuple[TensorPart, ...]]()
    for weight, own in parts.items():
        if wanted := tuple(part for part in own.parts if (weight, part.name) in hits):
            chosen[weight] = wanted
    return chosen


def _meant(parts: Mapping[str, Adaptable], target: str) -> set[tuple[str, str]]:
    """Return weights, and names of their parts, that a target means."""
    wanted = re.compile("" if target == ALL else rf"(^|.*\.)({target})$")
    return {
        (weight, part.name)
        for weight, own in parts.items()
        for part in own.parts
        if (
            own.role == target
            if target in ROLES
            else (not own.stacked or "experts" in target)
            and (wanted.match(module_of(part)) or wanted.match(weight.removesuffix(".weight")))
        )
    }


def _unknown(parts: Mapping[str, Adaptable], target: str) -> str:
    """Say what there is instead of a target that names nothing."""
    if target in ROLES:
        there = [role for role in ROLES if any(own.role == role for own in parts.values())]
        return f"{target!r} is the role of no layer of this model: there are {', '.join(there)}"
    words = sorted({key_of(part) for own in parts.values() for part in own.parts})
    near = get_close_matches(target.rpartition(".")[2], [*words, *ROLES], n=1, cutoff=0.5)
    hint = f"; is it {near[0]}?" if near else ""
    return f"{target!r} is no linear layer: there are {', '.join(words) or 'none'}{hint}"
