"""One thread a process, and the same examples on every machine."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("house", derandomize=True, deadline=None, max_examples=200)
settings.load_profile("house")
