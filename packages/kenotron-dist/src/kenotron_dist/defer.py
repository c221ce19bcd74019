"""Weight-gradient products put off: what zero-bubble pipelines move out of the backward pass.

A layer that declares ``defers_weight_grad = True`` has an attribute ``weight_queue``, None at
first. When someone puts a ``WeightQueue`` there, the layer's backward computes the gradient of its
input at once and pushes the products that give the gradients of its parameters
(Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from kenotron_dist.weight_products import Factors, taker_of

Product = Callable[[], Tensor]
"""Computes one contribution to a parameter's gradient, in the parameter's shape and dtype."""
_Put = tuple[nn.Parameter, Product, Factors | None]


class WeightQueue:
    """Collects the products of one backward pass; ``take`` hands them over and empties the queue.

    Products are kept in the order of the pushes, and a parameter's are added in that order.
    """

    def __init__(self) -> None:
        self._products: list[_Put] = []

    def push(
        self, parameter: nn.Parameter, product: Product, factors: Factors | None = None
    ) -> None:
        """Put off one contribution to the gradient of ``parameter``, a leaf.

        Args:
            parameter: the leaf.
            product: computes the contribution.
            factors: what it is the product of; given, it goes to the parameter's taker, if there
                is one (see ``weight_products``).
        """
        self._products.append((parameter, product, factors))

    def take(self) -> DeferredGradients:
        """Everything pushed since the last call."""
        products, self._products = self._products, []
        return DeferredGradients(products)


class DeferredGradients:
    """The products of one backward pass, to be computed once by ``run``."""

    def __init__(self, products: list[_Put]) -> None:
        self._products = products

    def __len__(self) -> int:
        return len(self._products)

    def run(self) -> None:
        """Compute every gradient and deliver it by ``backward`` on its leaf, which fires hooks.

        A parameter's taker gets the factors instead, all of the backward pass at once. Products are
        freed as they are used; a second call does nothing.
        """
        products, self._products = self._products, []
        by_parameter: dict[int, list[_Put]] = {}
        for put in products:
            by_parameter.setdefault(id(put[0]), []).append(put)
        products.clear()
        for puts in by_parameter.values():
            parameter = puts[0][0]
            taker = taker_of(parameter)
            factors = [pair for _, _, pair in puts if pair is not None]
            if taker is not None and len(factors) == len(puts):
                puts.clear()
                taker(factors)
                continue
            factors.clear()
            total: Tensor | None = None
            while puts:
                part = puts.pop(0)[1]()
                total = part if total is None else total.add_(part)
            assert total is not None  # a parameter is listed because it has a product
            parameter.backward(total)


def deferring(module: nn.Module) -> Iterator[nn.Module]:
    """The submodules of ``module``, itself included, that declare ``defers_weight_grad``."""
    return (each for each in module.modules() if getattr(each, "defers_weight_grad", False))
