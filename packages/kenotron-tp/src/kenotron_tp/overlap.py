"""Matrix products whose communication travels while other pieces are multiplied.

The pieces are the ranks' own tokens: what a rank needs from, or owes to, another one is a transfer
of its own, waited for only where it is used. The order is that of a ring (Wang et al., "Overlap
communication with dependent computation via decomposition", ASPLOS 2023).

Shapes: T tokens, n tokens of a rank (T/t, rounded up), I input features, O output features.
"""

from __future__ import annotations

from torch import Tensor

from kenotron_dist import Axis, Handle, shift, tree_sum
from kenotron_tp.products import product


def gather_product(
    x: Tensor, w: Tensor, axis: Axis, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every rank's rows x (n, I), times w (I, O): the product (t n, O) and the rows (t n, I).

    The own rows are multiplied while the others' arrive.
    """
    n, parts = len(x), [slice(r * len(x), (r + 1) * len(x)) for r in range(axis.size)]
    rows = x.new_empty(axis.size * n, x.shape[1])
    rows[parts[axis.rank]] = x
    arriving: list[tuple[int, Handle]] = []
    for by in range(1, axis.size):
        source = (axis.rank - by) % axis.size
        arriving.append((source, shift(x, axis, by, out=rows[parts[source]], async_op=True)))
    y = x.new_empty(axis.size * n, w.shape[1])
    _multiply(x, w, y[parts[axis.rank]], bias)
    for source, handle in arriving:
        _multiply(handle.wait(), w, y[parts[source]], bias)
    return y, rows


def start_product_scatter(x: Tensor, w: Tensor, axis: Axis, n: int) -> Handle:
    """Start the sum over ranks of x (T, I) times w (I, O), of which each keeps n rows in turn.

    What belongs to other ranks is multiplied first and travels while the next is multiplied.
    The handle's result is this rank's (n, O); rows beyond T are zero. The sum is the tree of
    ``reduce_scatter``, on every backend.
    """
    parts = [x.new_empty(n, w.shape[1]) for _ in range(axis.size)]  # what ranks owe this one
    handles = []
    for by in range(1, axis.size):
        owed = x.new_empty(n, w.shape[1])
        to = (axis.rank + by) % axis.size
        _multiply(x[to * n : (to + 1) * n], w, owed)
        source = (axis.rank - by) % axis.size
        handles.append(shift(owed, axis, by, out=parts[source], async_op=True))
    _multiply(x[axis.rank * n : (axis.rank + 1) * n], w, parts[axis.rank])

    def finish() -> Tensor:
        for handle in handles:
            handle.wait()
        return tree_sum(parts)

    return Handle(None, finish)


def _multiply(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Write x (m, I) times w (I, O) to the first m rows of ``out``, and zero to the others."""
    target = out[: x.shape[0]]
    product(x, w, bias, out=target)
    if x.shape[0] < out.shape[0]:
        out[x.shape[0] :] = 0
