"""The command ``kenotron``: its words are entry points of the programs that are installed."""

from kenotron_command.command import main
from kenotron_command.word import GROUP, Word, called, installed_words

__all__ = ["GROUP", "Word", "called", "installed_words", "main"]
