"""Activations and gradients between ranks, over ordered sends and receives.

Batched operations hang on gloo outside simple rings. A form (dtypes, shapes, names) travels once
for every boundary and token shape, before the first activation that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from kenotron_dist import Axis, Handle, Route, to_device
from kenotron_pp.activation import Form
from kenotron_pp.comm_plan import Transfer

Pairs = Mapping[tuple[int, int], Axis]
"""Value that ``Mesh.pairs`` returns."""


class Links:
    """The transfers of one rank. Both ends make the same calls in the order of the plan.

    Args:
        axis: the pp axis; its own group carries all transfers where ``pairs`` is None.
        pairs: (source, to), indices along the axis -> an axis of the two ranks, source first.
        n_stages: stages of all ranks.
        device: where activations live.
    """

    def __init__(
        self, axis: Axis, pairs: Pairs | None, n_stages: int, device: torch.device
    ) -> None:
        _check_pairs(axis, pairs)
        self._axis, self._pairs, self._device = axis, pairs, device
        self._n_stages = n_stages
        self._forms: dict[tuple[int, Hashable], Form] = {}
        self._routes: dict[Transfer, Route] = {}

    def touch(self, used: Sequence[tuple[int, int]]) -> None:
        """Let the backend make the communicators of the pairs in ``used`` that have this rank.

        NCCL makes one at the first transfer of two ranks, and both processes wait there. In one
        order of all pairs there is no circular wait; in that of a schedule there is (interleaved,
        3 ranks, one micro-batch). Collective over the pp axis.

        Args:
            used: (source, to), in the same order on all ranks.
        """
        for source, to in used:
            if self._axis.rank in (source, to):
                route = self._route_between(source, to, 0)
                route.start(torch.zeros(1, device=self._device)).wait()

    def begin(
        self,
        queues: dict[int, tuple[Transfer, ...]],
        keys: Sequence[Hashable],
        form_of: Callable[[Transfer], Form] | None = None,
    ) -> None:
        """Start a run: everything that will come, in order, and what fixes each form.

        ``form_of``: makes forms whose values do not arrive; see ``Pipeline``.
        """
        self._queues, self._keys, self._form_of = queues, keys, form_of
        self._posted: dict[Transfer, list[Handle]] = {}
        self._sent: dict[Transfer, list[tuple[Handle, int]]] = {}
        self._place = dict.fromkeys(queues, 0)

    def form(self, transfer: Transfer) -> Form:
        """Return the form of what travels, once it is known."""
        return self._forms[transfer.boundary, self._keys[transfer.microbatch]]

    def send(self, transfer: Transfer, tensors: Sequence[Tensor], form: Form | None = None) -> None:
        """Start sending tensors of any shape; ``form`` comes with activations.

        Raises ValueError when an activation has another form than those before it.
        """
        found = []
        route = self._route(transfer)
        if form is not None:
            key = (transfer.boundary, self._keys[transfer.microbatch])
            known = self._forms.setdefault(key, form)
            if known is form:
                text = torch.frombuffer(bytearray(form.encode()), dtype=torch.uint8)
                size = torch.tensor([len(text)])
                for part in (size, text):
                    there = to_device(part, self._device)
                    found.append((self._form_route(transfer).start(there), 0))
            elif known != form:
                raise ValueError(
                    f"stage {transfer.stage} sends {form.tensors} for micro-batch "
                    f"{transfer.microbatch}, but {known.tensors} before for tokens of the same "
                    "shape"
                )
        found += [(route.start(x), _version(x)) for x in tensors]
        self._sent[transfer] = found

    def post(self, transfer: Transfer, *, ahead: bool) -> None:
        """Start receiving everything up to ``transfer``; ahead: only while forms are known."""
        queue = self._queues[transfer.source]
        while transfer not in self._posted and self._place[transfer.source] < len(queue):
            coming = queue[self._place[transfer.source]]
            key = (coming.boundary, self._keys[coming.microbatch])
            if key not in self._forms:
                if ahead:
                    return
                self._forms[key] = self._receive_form(coming)
            room = self._forms[key].empty(self._device, gradients=coming.direction == "up")
            route = self._route(coming)
            self._posted[coming] = [route.start(out) for out in room]
            self._place[transfer.source] += 1

    def take(self, transfer: Transfer) -> list[Tensor]:
        """Wait for what was posted, of the shapes of its form."""
        return [handle.wait() for handle in self._posted.pop(transfer)]

    def release(self, transfers: Sequence[Transfer]) -> None:
        """Wait until these have left, and free them.

        Raises ValueError when one was changed meanwhile: what has arrived is unknown.
        """
        for transfer in transfers:
            for handle, version in self._sent.pop(transfer):
                if _version(handle.wait()) > version:
                    raise ValueError(
                        f"what stage {transfer.stage} returned for micro-batch "
                        f"{transfer.microbatch} was changed in place while it was being sent: "
                        "change a copy, x = x.clone()"
                    )

    def finish(self) -> None:
        """Wait until everything has left."""
        self.release(list(self._sent))

    def _receive_form(self, transfer: Transfer) -> Form:
        known = None if self._form_of is None else self._form_of(transfer)
        route = self._form_route(transfer)
        size = route.start(torch.zeros(1, dtype=torch.int64, device=self._device)).wait()
        length = int(size) if known is None else len(known.encode())
        text = route.start(torch.zeros(length, dtype=torch.uint8, device=self._device)).wait()
        return known or Form.decode(bytes(text.tolist()))

    def _route(self, transfer: Transfer) -> Route:
        route = self._routes.get(transfer)
        if route is None:
            route = self._routes[transfer] = self._new_route(transfer, 0)
        return route

    def _form_route(self, transfer: Transfer) -> Route:
        return self._new_route(transfer, 1)

    def _new_route(self, transfer: Transfer, more: int) -> Route:
        up = transfer.direction == "up"
        tag = 4 * (transfer.microbatch * self._n_stages + transfer.stage) + 2 * up + more
        return self._route_between(transfer.source, transfer.to, tag)

    def _route_between(self, source: int, to: int, tag: int) -> Route:
        sends = source == self._axis.rank
        if self._pairs is None:
            return Route(self._axis, to if sends else source, tag, sends=sends)
        return Route(self._pairs[source, to], int(sends), tag, sends=sends)


def _version(x: Tensor) -> int:
    """Grows when x is changed in place, where anybody counts."""
    return 0 if x.is_inference() else x._version


def _check_pairs(axis: Axis, pairs: Pairs | None) -> None:
    if axis.size == 1 or pairs is not None:
        return
    if axis.on_device:
        raise ValueError(
            f"over {axis.backend} the two directions of a pipeline need a group each, or they wait "
            f'for one another: pass pairs=mesh.pairs("{axis.name}")'
        )
    if axis.counts_transfers:
        raise ValueError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL compares how much each rank of a group has sent: "
            f'transfers need groups of their own, pass pairs=mesh.pairs("{axis.name}")'
        )
