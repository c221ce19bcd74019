"""Match sends with receives: same pair of ranks, order, tag, dtype and size.

Pure, as ``divergence``. NCCL ignores tags: the k-th send between two ranks meets the k-th receive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from kenotron_dist.in_flight import Entry

SEND, RECEIVE = TRANSFERS = ("send", "receive")
Lines = dict[str, dict[str, list[Entry]]]
"""By axis and pair of ranks (``pp:0>4``): sends and receives, in the order of their rank."""


def unmatched_transfer(records: Mapping[int, Sequence[Entry]]) -> str:
    """Describe in one line the first send or receive without its counterpart.

    Args:
        records: what ranks communicate, in their order. Transfers with ranks that are not among
            them are not looked at.

    Returns:
        Pair of ranks, number, and the two calls with their lines; empty where all match.
    """
    lines: Lines = {}
    for entries in records.values():
        for entry in entries:
            if entry.ticket.operation in TRANSFERS:
                line = lines.setdefault(_line(entry), {SEND: [], RECEIVE: []})
                line[entry.ticket.operation].append(entry)
    for name, line in lines.items():
        source, to = (line[SEND] or line[RECEIVE])[0].ticket.ranks
        if source not in records or to not in records:
            continue
        for number, (sent, taken) in enumerate(zip_longest(line[SEND], line[RECEIVE]), 1):
            place = f"ranks diverge at communication {number} on {name}"
            if sent is None or taken is None:
                alone, silent = (taken, source) if sent is None else (sent, to)
                assert alone is not None  # one of them is there
                caller = to if sent is None else source
                verb = SEND if sent is None else RECEIVE
                elsewhere = {each: line for each, line in lines.items() if each != name}
                other = _instead(verb, records[silent], elsewhere, records)
                did = f"rank {caller} called {_text(alone)}"
                return f"{place}: {did}; rank {silent} did not {verb}{other}"
            if _agreed(sent) != _agreed(taken):
                return (
                    f"{place}: rank {source} called {_text(sent)}; rank {to} called {_text(taken)}"
                )
    return ""


def _instead(
    verb: str, entries: Sequence[Entry], lines: Lines, records: Mapping[int, Sequence[Entry]]
) -> str:
    """Describe what a rank with these entries did in place of a transfer that it does not make."""
    for entry in entries:
        if entry.ticket.operation != verb or (line := lines.get(_line(entry))) is None:
            continue
        ranks = entry.ticket.ranks
        if len(line[SEND]) != len(line[RECEIVE]) or not all(each in records for each in ranks):
            return f", but called {_text(entry)}, with rank {ranks[verb == SEND]}"
    transfers = [entry for entry in entries if entry.ticket.operation in TRANSFERS]
    return f"; its last transfer is {_text(transfers[-1])}" if transfers else ""


def _line(entry: Entry) -> str:
    return entry.ticket.channel.rpartition("#")[0]


def _agreed(entry: Entry) -> tuple[object, ...]:
    """Return what must be equal on both sides."""
    size = max(entry.gives or (0,)) or max(entry.takes or (0,))
    return entry.ticket.channel, entry.dtype, size


def _text(entry: Entry) -> str:
    ticket = entry.ticket
    tag = ticket.channel.rpartition("#")[2]
    return f"{ticket.operation} of {entry.dtype} {entry.shape}, tag {tag}, at {ticket.site}"
