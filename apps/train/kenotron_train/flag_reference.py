"""The reference of all flags, from the parsers that read them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

HEAD = """\
# Every flag of apps/train

This page is made from the parsers of the command line; a test fails when it is stale:

```bash
python apps/train flag-reference > flags.md
```

What a config says is changed with `--set`; [configuration.md](configuration.md) has its keys.
"""


def flag_reference(parsers: Sequence[argparse.ArgumentParser]) -> str:
    """A table of flags for each command, in Markdown."""
    return "\n".join([HEAD, *(_table(parser) for parser in parsers)]).rstrip()


def _table(parser: argparse.ArgumentParser) -> str:
    lines = [f"## {parser.prog}", "", parser.description or "", "", "| flag | what it does |"]
    lines.append("|---|---|")
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            lines.append(f"| `{_shown(action)}` | {action.help or ''}{_more(action)} |")
    return "\n".join([*lines, ""])


def _shown(action: argparse.Action) -> str:
    """``--set KEY.PATH=VALUE``."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    return " ".join([*action.option_strings[-1:], *([str(value)] if value else [])])


def _more(action: argparse.Action) -> str:
    """Return what argparse checks, so that the help need not repeat it."""
    remarks = []
    if action.choices:
        remarks.append(f"one of {', '.join(f'`{choice}`' for choice in action.choices)}")
    if action.required and action.option_strings:
        remarks.append("must be given")
    if isinstance(action, argparse._AppendAction):
        remarks.append("may be given several times")
    return f" ({'; '.join(remarks)})" if remarks else ""
