"""Mixtures that are compared between layouts, ways and one process with a plain loop."""

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.functional import silu

from kenotron_ep import mix_experts

WIDTH, HIDDEN, OUT = 6, 4, 5
SHARES = {1: [1], 2: [3, 2], 4: [4, 0, 1, 3], 8: [3, 0, 1, 2, 0, 5, 1, 1]}
VARIANTS = {
    "plain": {},
    "once": {"way": "once_per_rank"},
    "gathered": {"way": "allgather"},
    "two chunks": {"chunks": 2},
    "three chunks, once": {"chunks": 3, "way": "once_per_rank"},
    "two chunks, gathered": {"chunks": 2, "way": "allgather"},
    "padded": {"pad_to": 70},
    "padded, once": {"pad_to": 70, "way": "once_per_rank"},
    "padded, chunks, gathered": {"pad_to": 70, "chunks": 3, "way": "allgather"},
}


def normal(*shape, seed, dtype=torch.float32):
    """Draws that every rank can repeat."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routed(kind, tokens, experts, top_k):
    """Chosen experts (T, K)."""
    generator = torch.Generator().manual_seed(5)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k]
    if kind == "one":
        return torch.full_like(chosen, 5)
    if kind == "few":
        return torch.tensor([1, 6])[chosen % 2]
    if kind == "dropped":
        return chosen.masked_fill(torch.rand(chosen.shape, generator=generator) < 0.4, -1)
    return chosen


class Case(NamedTuple):
    """A mixture of whole tensors."""

    routing: str = "random"
    top_k: int = 2
    tokens: int = 29
    gated: bool = False
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    experts: int = 8

    def tensors(self):
        """Tokens, choices, weights, the gradient of the output."""
        out = OUT if self.gated else WIDTH
        return (
            normal(self.tokens, WIDTH, seed=1, dtype=self.dtype),
            routed(self.routing, self.tokens, self.experts, self.top_k),
            normal(self.tokens, self.top_k, seed=2, dtype=self.weight_dtype).abs() + 0.1,
            normal(self.tokens, out, seed=3, dtype=self.dtype),
        )

    def parameters(self):
        """Those of all experts."""
        shapes = [(2 * HIDDEN, WIDTH), (OUT, HIDDEN)] if self.gated else [(WIDTH,), (WIDTH,)]
        return [
            normal(self.experts, *shape, seed=10 + i, dtype=self.dtype)
            for i, shape in enumerate(shapes)
        ]


def expert(rows, first, second, gated):
    """One expert: gated matrices, or what treats each number apart (exact in any order of rows)."""
    if not gated:
        return rows * first + second
    gate, value = (rows @ first.T).chunk(2, -1)
    return (silu(gate) * value) @ second.T


def by_expert(parameters, gated):
    """What ``mix_experts`` is given: a loop over the experts of this rank."""

    def compute(rows, counts):
        parts = rows.split(counts.tolist())
        return torch.cat([expert(x, *ws, gated) for x, *ws in zip(parts, *parameters, strict=True)])

    return compute


def cases():
    """All of them, by name."""
    bf16 = torch.bfloat16
    return {
        "random": Case(),
        "gated": Case(gated=True, top_k=3),
        "one choice": Case(top_k=1),
        "every expert": Case(top_k=8),
        "all on one": Case("one", 1),
        "twice the same": Case("one", 2),
        "experts without tokens": Case("few"),
        "dropped": Case("dropped", 3),
        "a token": Case(tokens=1),
        "no token": Case(tokens=0),
        "bf16": Case(top_k=4, dtype=bf16),
        "bf16 weights": Case(top_k=3, dtype=bf16, weight_dtype=bf16),
        "gated bf16": Case(gated=True, dtype=bf16),
        "fp64": Case(dtype=torch.float64, weight_dtype=torch.float64),
    }


def ends(tokens, n):
    """Where each rank's tokens end: uneven, some have none."""
    total = sum(SHARES[n])
    return [0, *(tokens * sum(SHARES[n][: i + 1]) // total for i in range(n))]


def own(x, axis):
    """This rank's tokens."""
    begin, end = list(pairwise(ends(len(x), axis.size)))[axis.rank]
    return x[begin:end].clone()


def share(parameters, axis):
    """This rank's experts, as leaves."""
    return [x.chunk(axis.size)[axis.rank].clone().requires_grad_() for x in parameters]


def run(case, axis, device="cpu", **options):
    """Output, gradients of tokens, of weights, and of this rank's experts."""
    x, chosen, weights, grad = (own(each, axis).to(device) for each in case.tensors())
    x.requires_grad_()
    weights.requires_grad_()
    parameters = share([each.to(device) for each in case.parameters()], axis)
    compute = by_expert(parameters, case.gated)
    out = mix_experts(x, chosen, weights, case.experts, axis, compute, **options)
    out.backward(grad)
    return [out.detach(), x.grad, weights.grad, *(each.grad for each in parameters)]


def combinations():
    """Names of cases and variants: all variants of a few cases, one or two of the others."""
    every = ("random", "dropped", "all on one", "no token", "gated bf16")
    names = list(VARIANTS)
    for i, name in enumerate(cases()):
        chosen = names if name in every else {"plain", names[1 + i % 8]}
        yield from ((name, variant) for variant in names if variant in chosen)


def on_this_rank(mesh, pairs=None):
    """Results by name of case and variant."""
    axis = mesh["ep"]
    return {
        (name, variant): run(cases()[name], axis, **VARIANTS[variant])
        for name, variant in pairs or combinations()
    }


class Dense:
    """The same by a plain loop over experts and choices, on one process in fp64."""

    def __init__(self, case):
        self.case = case

    @cached_property
    def found(self):
        x, chosen, weights, grad = self.case.tensors()
        x, weights = (each.double().requires_grad_() for each in (x, weights))
        parameters = [each.double().requires_grad_() for each in self.case.parameters()]
        out = grad.new_zeros(grad.shape, dtype=torch.float64)
        for k in range(self.case.top_k):
            for e, each in enumerate(zip(*parameters, strict=True)):
                here = chosen[:, k] == e
                y = expert(x[here], *each, self.case.gated)
                out = out.index_put((here,), weights[here, k, None] * y, accumulate=True)
        grads = torch.autograd.grad(
            out, (x, weights, *parameters), grad.double(), materialize_grads=True
        )
        return [out.detach(), *grads]
