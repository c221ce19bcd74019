"""One thread a process."""

import os

import torch

torch.set_num_threads(1)
# Collectives that do not match become an error that names them, at some milliseconds each.
os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
