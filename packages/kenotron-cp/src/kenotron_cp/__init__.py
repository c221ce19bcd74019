"""Context parallelism: attention over a sequence that is cut over ranks."""

from kenotron_cp.attend import AttentionWay, attend
from kenotron_cp.kernels import EFFICIENT, FLASH_CPU, PLAIN, Kernel, Tile
from kenotron_cp.layout import Cut, Layout
from kenotron_cp.partial import PartialAttention
from kenotron_cp.scoring import Dropout, Scoring
from kenotron_cp.sequence_cut import cut_sequence, join_sequence
from kenotron_cp.traffic import AttentionSize, AttentionTraffic, attention_traffic
from kenotron_cp.visibility import Visibility

__all__ = [
    "EFFICIENT",
    "FLASH_CPU",
    "PLAIN",
    "AttentionSize",
    "Cut",
    "Dropout",
    "Kernel",
    "Layout",
    "PartialAttention",
    "Scoring",
    "Visibility",
    "Tile",
    "AttentionTraffic",
    "AttentionWay",
    "attend",
    "attention_traffic",
    "cut_sequence",
    "join_sequence",
]
