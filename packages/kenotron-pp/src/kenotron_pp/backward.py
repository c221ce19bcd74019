"""The backward pass of a chunk in two parts: gradients of its inputs now, of its weights later.

The graph is read from the outputs down. A node is *active* when it leads to an input of the chunk
or looks rows up (an embedding); a parameter joins where an active node has a branch that leads to
parameters only. The input part runs the active nodes and keeps the gradients that arrive at the
joins; the weight part runs each join's other branches from there. Nothing is computed twice but
what one kernel computes for both (a norm's backward).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kenotron_dist import DeferredGradients, WeightQueue, deferring
from kenotron_pp.engine import accumulate, gradients_at

Node = Any
"""``torch.autograd.graph.Node``, which says too little to type checkers."""

_LOOK_UPS = {"EmbeddingBackward0", "EmbeddingBagBackward0", "IndexSelectBackward0"}
_REENTRANT = "CheckpointFunctionBackward"
_COMPILED = "CompiledFunctionBackward"


class WeightPart:
    """Rest of a backward: ``run`` delivers each parameter's gradient once, to its leaf."""

    def __init__(
        self,
        joins: list[tuple[list[GradientEdge], list[Tensor], list[Tensor]]],
        deferred: DeferredGradients | None,
    ) -> None:
        self._joins, self._deferred = joins, deferred

    def run(self) -> None:
        """Compute and accumulate, which fires the parameters' hooks. A second call does nothing."""
        self._joins.reverse()
        while self._joins:
            edges, gradients, leaves = self._joins.pop()
            accumulate(edges, gradients, leaves)
        if self._deferred is not None:
            self._deferred.run()


class SplitBackward:
    """Splits the backward passes of one chunk.

    Layers that declare ``defers_weight_grad`` split themselves, through their queue. What cannot be
    run a second time gives its weight gradients in the input part: autograd functions written in
    Python, layers inside ``torch.utils.checkpoint``, parameters used at several places, and all of
    a chunk of which a part is compiled (a compiled backward may give away its buffers).
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._own = [layer for each in layers for layer in deferring(each)]
        self._whole = {id(p) for layer in self._own for p in layer.parameters(recurse=False)}
        self._queue = WeightQueue()
        self._saved: dict[type, tuple[str, ...]] = {}

    def attach(self) -> None:
        """Give deferring layers their queue."""
        for layer in self._own:
            setattr(layer, "weight_queue", self._queue)  # noqa: B010 - see defer in kenotron-dist

    def detach(self) -> None:
        """Take it away."""
        self._queue.take()
        for layer in self._own:
            setattr(layer, "weight_queue", None)  # noqa: B010

    def input_part(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        marks: Sequence[Tensor] = (),
    ) -> tuple[list[Tensor | None], WeightPart]:
        """Gradients of ``inputs``, and what computes those of the parameters later.

        Graph and tensors that the weight part does not need are freed.

        Args:
            roots: the outputs.
            gradients: theirs, each of its output's shape.
            inputs: those whose gradients are wanted, of any shapes.
            marks: further leaves at which the graph of activations begins.

        Raises:
            ValueError: reentrant checkpointing.
        """
        ends = [get_gradient_edge(x) for x in inputs]
        graph = _BackwardGraph(
            roots, [*(end.node for end in ends), *(get_gradient_edge(x).node for x in marks)]
        )
        joins, at_once = self._sort(graph)
        edges = [GradientEdge(join, k) for join, _ in joins for k in sorted(graph.used[join])]
        leaves = [GradientEdge(leaf, 0) for leaf in at_once]
        wanted = [*ends, *edges, *leaves]
        found: list[Tensor | None] = []
        if wanted and roots:
            found = gradients_at(wanted, roots, gradients, keep_graph=bool(joins))
        deferred = self._queue.take() if self._own else None
        weights = found[len(ends) + len(edges) :]
        pairs = zip(at_once, weights, strict=True) if found else ()
        for leaf, gradient in pairs:
            if gradient is not None:
                _accumulate(leaf.variable, gradient)
        caught = iter(found[len(ends) : len(ends) + len(edges)])
        parts = []
        for join, own in joins:
            arrived = [(GradientEdge(join, k), next(caught)) for k in sorted(graph.used[join])]
            kept = [(edge, g) for edge, g in arrived if g is not None]
            if kept:
                variables = [leaf.variable for leaf in own]
                parts.append(([e for e, _ in kept], [g for _, g in kept], variables))
        if joins:
            self._free(graph.active - graph.ends - {join for join, _ in joins})
        return found[: len(ends)], WeightPart(parts, deferred)

    def _sort(self, graph: _BackwardGraph) -> tuple[list[tuple[Node, list[Node]]], list[Node]]:
        """Joins with the leaves that are theirs alone, and leaves to be dealt with at once."""
        place: dict[Node, Node | None] = {}
        compiled = any(type(node).__name__ == _COMPILED for node in graph.children)
        own: list[tuple[Node, list[Node]]] = []
        for join, branches in graph.joins():
            leaves, inner = graph.below(branches)
            whole = compiled or any(
                isinstance(node, BackwardCFunction) or self._recomputes(node)
                for node in (join, *inner)
            )
            for leaf in leaves:
                split = not whole and leaf not in place and id(leaf.variable) not in self._whole
                place[leaf] = join if split else None
            own.append((join, leaves))
        joins = []
        for join, leaves in own:
            mine = [leaf for leaf in leaves if place[leaf] is join]
            if mine:
                joins.append((join, mine))
        return joins, [leaf for leaf, join in place.items() if join is None]

    def _raw(self, node: Node) -> list[Any]:
        """Handles of the tensors that a node has saved."""
        kind = type(node)
        if kind not in self._saved:
            self._saved[kind] = tuple(name for name in dir(node) if name.startswith("_raw_saved"))
        found: list[Any] = []
        for name in self._saved[kind]:
            saved = getattr(node, name)
            found += saved if isinstance(saved, list | tuple) else [saved]
        return found

    def _recomputes(self, node: Node) -> bool:
        hooks = (getattr(saved, "unpack_hook", None) for saved in self._raw(node))
        return any(getattr(hook, "__module__", "") == "torch.utils.checkpoint" for hook in hooks)

    def _free(self, nodes: Iterable[Node]) -> None:
        """Drop what nodes have saved that will not run again: joins keep the whole graph alive."""
        for node in nodes:
            for saved in self._raw(node):
                try:
                    saved.register_hooks(_forget, _forgotten)
                except RuntimeError:  # nothing was saved, or its owner has hooks of their own
                    continue


def _accumulate(leaf: Tensor, gradient: Tensor) -> None:
    """Deliver a gradient that the leaf's tensor hooks have seen: only those after it still run."""
    hooks = leaf._backward_hooks
    leaf._backward_hooks = None
    try:
        leaf.backward(gradient)
    finally:
        leaf._backward_hooks = hooks


def refuse_reentrant(roots: Sequence[GradientEdge]) -> None:
    """Raise ValueError when a layer uses reentrant checkpointing, which fires hooks twice."""
    _BackwardGraph(roots, ())


class _BackwardGraph:
    """The nodes below some roots, read once."""

    def __init__(self, roots: Sequence[GradientEdge], inputs: Sequence[Node]) -> None:
        self.roots = roots
        self.children: dict[Node, list[Node]] = {}
        self.used: dict[Node, set[int]] = {}
        """Numbers of a node's outputs that something uses."""
        parents: dict[Node, list[Node]] = {}
        self.ends = set(inputs)
        sources = list(inputs)
        for edge in roots:
            self.used.setdefault(edge.node, set()).add(edge.output_nr)
        stack = [edge.node for edge in reversed(roots)]
        while stack:
            node = stack.pop()
            if node in self.children:
                continue
            own = self.children[node] = []
            if node in self.ends:
                continue  # what is below belongs to others
            kind = type(node).__name__
            if kind in _LOOK_UPS:
                sources.append(node)
            elif kind == _REENTRANT:
                raise ValueError(
                    "a layer uses torch.utils.checkpoint with use_reentrant=True, which runs "
                    "backward inside backward: pass use_reentrant=False"
                )
            for child, number in node.next_functions:
                if child is not None:
                    own.append(child)
                    self.used.setdefault(child, set()).add(number)
                    parents.setdefault(child, []).append(node)
                    stack.append(child)
        self.active: set[Node] = set()
        stack = sources
        while stack:
            node = stack.pop()
            if node not in self.active:
                self.active.add(node)
                stack += parents.get(node, ())

    def joins(self) -> list[tuple[Node, list[Node]]]:
        """Active nodes with branches that lead to parameters only, from the outputs down.

        A root that is not active is one altogether: nothing waits for what is below it.
        """
        found = [(edge.node, [edge.node]) for edge in self.roots if edge.node not in self.active]
        for node, children in self.children.items():
            if node in self.active:
                branches = [child for child in children if child not in self.active]
                if branches:
                    found.append((node, branches))
        return found

    def below(self, branches: Iterable[Node]) -> tuple[list[Node], list[Node]]:
        """The parameters' leaves below some nodes, and the nodes between."""
        leaves: dict[Node, None] = {}
        inner: dict[Node, None] = {}
        stack = list(branches)
        while stack:
            node = stack.pop()
            if node in inner or node in leaves:
                continue
            (leaves if hasattr(node, "variable") else inner)[node] = None
            stack += self.children[node]
        return list(leaves), list(inner)


def _forget(tensor: Tensor) -> None:
    return None


def _forgotten(nothing: None) -> Tensor:
    raise RuntimeError("a tensor was freed after the input part of a split backward")
