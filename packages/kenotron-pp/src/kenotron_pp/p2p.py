"""Activations and gradients between ranks, over ordered sends and receives.

Batched operations hang on gloo outside simple rings. A form (dtypes, shapes, names) travels once
for every boundary and token shape, before the first activation that has it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kenotron_dist import Axis, Handle, receive, send
from kenotron_pp.activation import Form
from kenotron_pp.plan import Transfer


class Links:
    """The transfers of one rank. Both ends make the same calls in the order of the plan.

    Transfers to a later rank go over ``axis``, those to an earlier one over ``upstream``: a group
    carries one direction between two ranks.
    """

    def __init__(self, axis: Axis, upstream: Axis, n_stages: int, device: torch.device) -> None:
        self._axis, self._upstream, self._device = axis, upstream, device
        self._n_stages = n_stages
        self._forms: dict[tuple[int, Hashable], Form] = {}

    def begin(self, queues: dict[int, tuple[Transfer, ...]], keys: Sequence[Hashable]) -> None:
        """Start a run: everything that will come, in order, and what fixes each form."""
        self._queues, self._keys = queues, keys
        self._posted: dict[Transfer, list[Handle]] = {}
        self._sent: dict[Transfer, list[Handle]] = {}
        self._place = dict.fromkeys(queues, 0)

    def form(self, transfer: Transfer) -> Form:
        """What travels, once it is known."""
        return self._forms[transfer.boundary, self._keys[transfer.microbatch]]

    def send(self, transfer: Transfer, tensors: Sequence[Tensor], form: Form | None = None) -> None:
        """Start sending; ``form`` comes with activations.

        Raises ValueError when an activation has another form than those before it.
        """
        axis, tag = self._axis_of(transfer), self._tag(transfer)
        handles = []
        if form is not None:
            key = (transfer.boundary, self._keys[transfer.microbatch])
            known = self._forms.setdefault(key, form)
            if known is form:
                text = torch.frombuffer(bytearray(form.encode()), dtype=torch.uint8)
                size = torch.tensor([len(text)])
                for part in (size, text):
                    handles.append(send(part.to(self._device), axis, transfer.to, tag + 1))
            elif known != form:
                raise ValueError(
                    f"stage {transfer.stage} sends {form.tensors} for micro-batch "
                    f"{transfer.microbatch}, but {known.tensors} before for tokens of the same "
                    "shape"
                )
        handles += [send(x, axis, transfer.to, tag) for x in tensors]
        self._sent[transfer] = handles

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
            axis, tag = self._axis_of(coming), self._tag(coming)
            self._posted[coming] = [receive(out, axis, coming.source, tag) for out in room]
            self._place[transfer.source] += 1

    def take(self, transfer: Transfer) -> list[Tensor]:
        """Wait for what was posted."""
        return [handle.wait() for handle in self._posted.pop(transfer)]

    def release(self, transfers: Sequence[Transfer]) -> None:
        """Wait until these have left, and free them."""
        for transfer in transfers:
            for handle in self._sent.pop(transfer):
                handle.wait()

    def finish(self) -> None:
        """Wait until everything has left."""
        self.release(list(self._sent))

    def _receive_form(self, transfer: Transfer) -> Form:
        axis, tag = self._axis_of(transfer), self._tag(transfer) + 1
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        length = int(receive(size, axis, transfer.source, tag).wait())
        text = torch.zeros(length, dtype=torch.uint8, device=self._device)
        text = receive(text, axis, transfer.source, tag).wait()
        return Form.decode(bytes(text.tolist()))

    def _axis_of(self, transfer: Transfer) -> Axis:
        return self._axis if transfer.source < transfer.to else self._upstream

    def _tag(self, transfer: Transfer) -> int:
        up = transfer.direction == "up"
        return 4 * (transfer.microbatch * self._n_stages + transfer.stage) + 2 * up
