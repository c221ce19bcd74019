"""The command ``kenotron``: its words are entry points of the programs that are installed."""

from kenotron_command.command import main
from kenotron_command.config_flags import add_config_flags
from kenotron_command.count import count, count_from_0
from kenotron_command.figures import or_null, short, with_nulls
from kenotron_command.frame import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    OK,
    fail,
    framed,
    printable,
)
from kenotron_command.layout_flags import LAYOUT, add_layout, layout_sizes
from kenotron_command.owner_file import TAKEN, OwnerFile, refused
from kenotron_command.word import GROUP, Word, called, installed_words

__all__ = [
    "with_nulls",
    "short",
    "or_null",
    "count",
    "count_from_0",
    "add_config_flags",
    "BAD_INPUT",
    "FAILED",
    "GROUP",
    "INTERRUPTED",
    "LAYOUT",
    "OK",
    "TAKEN",
    "OwnerFile",
    "Word",
    "add_layout",
    "called",
    "fail",
    "framed",
    "installed_words",
    "layout_sizes",
    "main",
    "printable",
    "refused",
]
