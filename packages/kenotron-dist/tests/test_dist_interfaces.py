"""A variable that names no network interface is an error before gloo or NCCL look at it."""

import pytest
from test_dist_launch import variables

from kenotron_dist import from_env, spawn
from kenotron_dist.interfaces import GLOO, NCCL, check_interfaces, interfaces
from kenotron_dist.testing import free_port

HERE = interfaces()[0]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {GLOO: ""},
        {GLOO: HERE, NCCL: HERE},
        {GLOO: f"wrong0,{HERE}"},
        {NCCL: HERE[:1]},
        {NCCL: f"={HERE}"},
        {NCCL: "^docker0"},
    ],
)
def test_interfaces_of_this_host_are_taken(environ):
    check_interfaces(environ)


@pytest.mark.parametrize(
    ("variable", "given"), [(GLOO, "wrong0"), (NCCL, "wrong0,wrong1"), (NCCL, f"={HERE}0")]
)
def test_others_are_named_with_those_that_are_there(variable, given):
    words = rf"{variable}={given}: this host has no such network interface, but .*{HERE}.*: name"
    with pytest.raises(ValueError, match=words.replace("^", r"\^")):
        check_interfaces({variable: given})


def test_programs_refuse_them_before_ranks_connect(monkeypatch):
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=wrong0: this host has no such netw"):
        from_env({**variables(0, 2, free_port()), GLOO: "wrong0"})
    monkeypatch.setenv(GLOO, "wrong0")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=wrong0: this host has no such netw"):
        spawn(len, dp=2)
