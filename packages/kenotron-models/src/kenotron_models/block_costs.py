"""Operations, memory and messages of a block and of the ends of a model, for planners."""

from kenotron_models.block_kernels import Kernels, KernelWork, block_kernels
from kenotron_models.block_memory import head_bytes, kept_bytes, kept_sizes, norm_bytes
from kenotron_models.communication import sent_bytes, sequence_bytes
from kenotron_models.end_communication import Messages, end_messages
from kenotron_models.flops import block_flops, expert_parameters
from kenotron_models.meta_block import MetaMicroBatch
from kenotron_models.transformers_block import TransformersBlock, transformers_blocks
from kenotron_models.working_memory import Working, working_bytes

__all__ = [
    "KernelWork",
    "Kernels",
    "Messages",
    "MetaMicroBatch",
    "TransformersBlock",
    "block_flops",
    "block_kernels",
    "end_messages",
    "expert_parameters",
    "head_bytes",
    "kept_bytes",
    "kept_sizes",
    "norm_bytes",
    "sent_bytes",
    "sequence_bytes",
    "transformers_blocks",
    "Working",
    "working_bytes",
]
