"""Checkpoints of Nanotron and of its fork Kénotron: read, and converted to ``kenotron_ckpt``'s.

``checkpoint`` reads them, from ``shard_files`` and ``metadata``; ``optimizer_state`` reads Adam's
state; ``conversion`` writes an ordinary checkpoint, with the names of ``tensor_names``. No other
package knows their format.
"""

from kenotron_nanotron.checkpoint import NanotronCheckpoint, NanotronTensor, read_nanotron
from kenotron_nanotron.conversion import import_nanotron
from kenotron_nanotron.metadata import NanotronMetadata, is_nanotron
from kenotron_nanotron.tensor_names import model_config

__all__ = [
    "NanotronCheckpoint",
    "NanotronMetadata",
    "NanotronTensor",
    "import_nanotron",
    "is_nanotron",
    "model_config",
    "read_nanotron",
]
