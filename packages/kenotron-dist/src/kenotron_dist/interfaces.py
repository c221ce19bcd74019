"""The network interfaces at which ranks listen: named by variables that gloo and NCCL read."""

from __future__ import annotations

import socket
from collections.abc import Mapping, MutableMapping

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_NOT, _EXACT = "^", "="


def listen_locally(environ: MutableMapping[str, str]) -> None:
    """Let gloo and NCCL listen on the loopback interface, unless the user names another one."""
    for loopback in {"lo", "lo0"} & {*interfaces()}:
        for variable in (GLOO, NCCL):
            environ.setdefault(variable, loopback)


def interfaces() -> list[str]:
    """Return the names of this host's network interfaces."""
    return sorted(name for _, name in socket.if_nameindex())


def check_interfaces(environ: Mapping[str, str]) -> None:
    """Raise ValueError for a variable that names no interface of this host.

    gloo takes names, with commas between. NCCL takes the beginnings of names, whole names after
    ``=``, and after ``^`` those that are left out.
    """
    there = interfaces()
    for variable in (GLOO, NCCL):
        given = environ.get(variable, "")
        names = [name for name in given.lstrip(_EXACT).split(",") if name]
        whole = variable == GLOO or given.startswith(_EXACT)
        fits = str.__eq__ if whole else str.startswith
        found = [name for name in names if any(fits(each, name) for each in there)]
        if given and not given.startswith(_NOT) and not found:
            raise ValueError(
                f"{variable}={given}: this host has no such network interface, but "
                f"{', '.join(there)}: name one of these, or unset the variable"
            )
