"""The most memory that tensors took at once, counted at every operation."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Bytes of the storages made inside this context: the most that were alive together."""

    def __init__(self):
        super().__init__()
        self.peak, self._alive, self._known = 0, {}, set()

    def ignore(self, *tensors):
        """Leave out what was there before."""
        self._known |= {t.untyped_storage()._cdata for t in tensors}
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in self._alive:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: v for key, v in self._alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out
