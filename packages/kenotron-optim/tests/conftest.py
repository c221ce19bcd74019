"""One thread a process, as ranks have: LayerNorm's weight gradient adds up by thread."""

import torch

torch.set_num_threads(1)
