"""Transfers are under way while products are computed, and no buffer outlives its use."""

import pytest
import torch
from cp_cases import Case
from cp_dense import normal

import kenotron_cp.gather
import kenotron_cp.returned_gradients
import kenotron_cp.ring
from kenotron_cp import PLAIN, Visibility, attend, cut_sequence
from kenotron_cp.block_backward import add, hold, is_part
from kenotron_cp.fixed_tree import FixedTree
from kenotron_dist.testing import on_ranks

MODULES = {
    "keys": (kenotron_cp.ring, "all_to_all"),
    "gradients": (kenotron_cp.returned_gradients, "all_to_all"),
    "heads": (kenotron_cp.gather, "all_gather"),
}


class Logged:
    """A handle that says when it is waited for."""

    def __init__(self, handle, say):
        self.handle, self.say = handle, say

    def wait(self):
        self.say()
        return self.handle.wait()


def log_of(mesh, way):
    """Events of forward and of backward on this rank: transfers and products, in order."""
    log, patch = [], pytest.MonkeyPatch()

    def logged(what, run):
        count = 0

        def start(*args, **options):
            nonlocal count
            number, count = count, count + 1
            log.append(f"start {what} {number}")
            handle = run(*args, **options)
            return Logged(handle, lambda: log.append(f"wait {what} {number}"))

        return start

    def product(run):
        return lambda *args: log.append("product") or run(*args)

    kernel = PLAIN.__class__("logged", product(PLAIN.forward), product(PLAIN.backward), PLAIN.dtype)
    with patch.context() as inside:
        for what, (module, name) in MODULES.items():
            inside.setattr(module, name, logged(what, getattr(module, name)))
        axis, case = mesh["cp"], Case(Visibility(64), 4, 2)
        q, k, v, grad = (cut_sequence(x, axis) for x in case.tensors())
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, axis, case.sight, way=way, kernel=kernel)
        forward, log[:] = list(log), []
        out.backward(grad)
    return forward, log


def hidden(log, what):
    """Products between the start of each transfer and the wait for it."""
    numbers = [each.split()[-1] for each in log if each.startswith(f"start {what}")]
    spans = [(log.index(f"start {what} {n}"), log.index(f"wait {what} {n}")) for n in numbers]
    return [log[begin:end].count("product") for begin, end in spans]


def test_a_ring_sends_the_next_keys_before_it_uses_those_at_hand():
    for forward, backward in on_ranks(log_of, "ring", cp=4):
        assert forward[0] == "start keys 0" and forward[1] == "product"
        for log in (forward, backward):
            products = hidden(log, "keys")
            assert len(products) == 3 and min(products) > 0
            # The next keys are on their way before the present ones are multiplied.
            waits = [at for at, each in enumerate(log) if each.startswith("wait keys")]
            assert all(log[at + 1].startswith("start keys") for at in waits[:-1])
        assert len(hidden(backward, "gradients")) == 6  # two pairs of chunks a step
        assert min(hidden(backward, "gradients")[:-1]) > 0  # the last has nothing left to hide it
        # Gradients are added before the next ones are sent.
        first = backward.index("wait gradients 0")
        assert first < backward.index("start gradients 1")


def test_gathered_keys_of_the_next_heads_arrive_while_heads_are_computed():
    for forward, backward in on_ranks(log_of, "gather", cp=2):
        for log in (forward, backward):
            assert hidden(log, "heads")[0] == 0 and min(hidden(log, "heads")[1:]) > 0
        assert min(hidden(backward, "gradients")) > 0  # own keys are differentiated meanwhile
        assert backward.index("wait gradients 0") < backward.index("start gradients 1")


def test_a_sum_keeps_no_buffer_that_holds_more():
    buffer = normal(4, 1, 1, 6, 5, seed=0)
    want = (buffer[0] + buffer[1]) + (buffer[2] + buffer[3])
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        tree = FixedTree(range(4), (2, 0), add, hold)
        for index in order:
            part = buffer.clone()[index]
            assert is_part(part)
            tree.add(0, index, part)
            assert not any(map(is_part, tree._waiting.values()))
        found = tree.take()
        assert torch.equal(found, want) and not is_part(found)
    assert hold(want) is want
