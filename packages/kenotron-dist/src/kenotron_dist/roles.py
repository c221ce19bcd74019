"""Roles of parameters: what first values, weight decay, Muon and statistics ask for.

A module declares the roles of its own parameters next to their placements, in an attribute
``roles`` (``module.roles = {"weight": "norm"}``). The layers of torch have the roles of
``torch_roles``. A parameter without a declared role gets one by ``role_of_shape``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from torch import nn

Role = Literal[
    "embedding",
    "hidden",
    "residual",
    "output",
    "norm",
    "norm_offset",
    "norm_bias",
    "bias",
    "router",
    "filter",
    "state",
    "other",
]
"""Role of a parameter.

- ``embedding``: a table of which rows are looked up (tokens, positions).
- ``hidden``: a matrix, or a stack of matrices, between hidden features.
- ``residual``: a hidden matrix whose product is added to the residual stream.
- ``output``: the matrix that makes logits.
- ``norm``, ``norm_bias``: scale and shift of a norm.
- ``norm_offset``: scale of a norm, stored as its difference from 1.
- ``bias``: the bias of a matrix product.
- ``router``: the matrix that makes the scores of experts.
- ``filter``: the taps of a convolution of each channel by itself.
- ``state``: decay, step and skip constants of a state-space layer, which never decay.
- ``other``: none of these.
"""
Roles = dict[str, Role]
"""A module's ``roles``: name of its parameter -> role."""
MATRICES: frozenset[Role] = frozenset({"hidden", "residual"})
"""Roles of the matrices inside the model."""
_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)


def declare_roles(module: nn.Module, **roles: Role) -> None:
    """Declare the roles of a module's own parameters; other declared roles stay.

    Args:
        module: the owner of the parameters.
        roles: a role for each named parameter, such as ``weight="output"``.

    Raises:
        ValueError: the module has no such parameter, or there is no such role.
    """
    for name, role in roles.items():
        if module._parameters.get(name) is None:
            raise ValueError(
                f"role without a parameter: {type(module).__name__} has no parameter {name!r}; "
                "declare roles on the module that owns it"
            )
        _check_role(role, name)
    declared: Roles = {**getattr(module, "roles", {}), **roles}
    setattr(module, "roles", declared)  # noqa: B010 (a module's own attributes are typed)


def named_roles(module: nn.Module) -> Roles:
    """Return the role of every parameter below ``module`` by its full name.

    ``torch.compile``'s ``_orig_mod.`` is stripped from names.

    Raises:
        ValueError: a module declares an unknown role, or one of a parameter that it does not have.
    """
    found: Roles = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        if "_orig_mod" in child._modules:  # torch.compile's wrapper shows what its module declares
            continue
        declared: Mapping[str, Role] = getattr(child, "roles", {})
        folders = [part for part in prefix.split(".") if part not in ("", "_orig_mod")]
        for name in declared:
            if child._parameters.get(name, child) is child:
                path = ".".join((*folders, name))
                raise ValueError(
                    f"role without a parameter: {path!r} is declared in roles, but "
                    f"{type(child).__name__} has no parameter {name!r}"
                )
        known = {**torch_roles(child), **declared}
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            path = ".".join((*folders, name))
            role = known.get(name) or role_of_shape(name, parameter.ndim)
            _check_role(role, path)
            found[path] = role
    return found


def torch_roles(module: nn.Module) -> Roles:
    """Return the roles of a layer of torch that is an embedding or a norm, else nothing."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return {"weight": "embedding"}
    if isinstance(module, _NORMS):
        return {"weight": "norm", "bias": "norm_bias"}
    return {}


def role_of_shape(name: str, dims: int) -> Role:
    """Return the role of a parameter that no module declares.

    ``bias`` when it is named ``bias``, ``bias_...`` or ``..._bias``, as torch's layers name theirs;
    else ``hidden`` with two dimensions or more, and ``other`` with fewer.

    Args:
        name: name of the parameter in its module.
        dims: number of its dimensions.
    """
    if name == "bias" or name.startswith("bias_") or name.endswith("_bias"):
        return "bias"
    return "hidden" if dims >= 2 else "other"


def role_of_tie(tie: str, roles: Iterable[Role]) -> Role:
    """Return the role of a logical tensor from those of all its owners.

    A table that is also a matrix is an embedding; an output that is also a hidden matrix stays an
    output.

    Raises:
        ValueError: the owners' roles contradict one another.
    """
    own = set(roles)
    if len(own) == 1:
        return own.pop()
    for role in ("embedding", "output"):
        if role in own and own <= {role, "output", "hidden"}:
            return role
    raise ValueError(
        f"tied parameters of {tie!r} have the roles {', '.join(sorted(own))}: declare one role for "
        "all of them"
    )


def _check_role(role: str, path: str) -> None:
    if role not in get_args(Role):
        raise ValueError(
            f"role {role!r} was declared for {path!r}; it must be one of "
            f"{', '.join(get_args(Role))}"
        )
