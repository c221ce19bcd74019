"""YAML within limits: how deep it may be nested, what aliases may make of it, keys given twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

DEEPEST = 64
"""Levels of lists and mappings."""
LARGEST = 200_000
"""Values, each counted as often as aliases repeat it."""
LONGEST = 16 << 20
"""Characters, each counted as often as aliases repeat it."""
MERGE = "tag:yaml.org,2002:merge"
VALUE = "tag:yaml.org,2002:value"


class YamlLoader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but `1e-5` is a number, a date is text, and `!env` is known."""

    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        super().__init__(text)
        self.environment = environment
        self.remarks: list[str] = []
        self._depth = 0
        self._sizes: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a value. Raises ConstructorError beyond the limits."""
        mark = self.peek_event().start_mark
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > DEEPEST:
            raise _refusal(f"it is nested deeper than {DEEPEST} levels", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not is_alias:
            self._sizes[id(node)] = 1 + sum(self._sizes.get(id(each), 0) for each in _inner(node))
            own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
            inner = sum(self._lengths.get(id(each), 0) for each in _inner(node))
            self._lengths[id(node)] = own + inner
        for found, most, what in (
            (self._sizes, LARGEST, "values"),
            (self._lengths, LONGEST, "characters"),
        ):
            if found.get(id(node), 0) > most:
                raise _refusal(f"it has more than {most} {what}, counting those of aliases", mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compose a mapping and note its keys that are given twice, of which the last one counts.

        This comes before any merge: merged keys are never given twice.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line, name = key.start_mark.line + 1, (key.tag, key.value)
                if name in lines:
                    rule = "the second counts: remove one of them"
                    if key.tag == MERGE:
                        rule = "and both are merged: write one list of aliases"
                    self.remarks.append(
                        f"the key {key.value} is given in line {lines[name]} and again in "
                        f"line {line}, {rule}"
                    )
                lines[name] = line
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put the pairs that are merged before a mapping's own; of equal keys the last one counts.

        Of a list of mappings the first one counts, of two merges the second. It is said here
        because PyYAML 6.0.3 and 6.0.4 disagree.
        """
        merged: list[Any] = []
        own: list[Any] = []
        for key, value in node.value:
            if key.tag == MERGE:
                merged += self._merged(node, value)
                continue
            if key.tag == VALUE:
                key.tag = "tag:yaml.org,2002:str"
            own.append((key, value))
        node.value = merged + own

    def _merged(self, node: yaml.MappingNode, value: Any) -> list[Any]:
        """The pairs that `<<: value` brings into `node`, the ones that count last."""
        given = value.value[::-1] if isinstance(value, yaml.SequenceNode) else [value]
        pairs: list[Any] = []
        for each in given:
            if not isinstance(each, yaml.MappingNode):
                raise yaml.constructor.ConstructorError(
                    "while constructing a mapping", node.start_mark,
                    f"expected a mapping or list of mappings for merging, but found {each.id}",
                    each.start_mark,
                )  # fmt: skip
            self.flatten_mapping(each)
            pairs += each.value
        return pairs


def read_yaml(text: str, environment: Mapping[str, str]) -> tuple[Any, list[str]]:
    """Read YAML.

    Args:
        text: the YAML.
        environment: the variables that `!env` reads.

    Returns:
        The data, and a remark for each key that is given twice.

    Raises:
        yaml.YAMLError: it is no YAML, or exceeds a limit.
        ValueError: it is longer than `LONGEST`, or a value is none.
    """
    if len(text) > LONGEST:
        raise ValueError(f"it has {len(text)} characters, more than {LONGEST}")
    loader = YamlLoader(text, environment)
    try:
        return loader.get_single_data(), loader.remarks
    finally:
        loader.dispose()


def _inner(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _refusal(text: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(problem=text, problem_mark=mark)
