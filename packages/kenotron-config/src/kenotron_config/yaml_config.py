"""A training config from a YAML file, and back; every problem of a file in one error."""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import yaml

from kenotron_config.checks import all_problems
from kenotron_config.config import Config
from kenotron_config.elastic import with_sizes
from kenotron_config.home_paths import expand_home
from kenotron_config.legacy import before_nanotron, modern_path, modernise, without_former
from kenotron_config.masking import TAG, EnvText, keep_tags, masked
from kenotron_config.other_sections import without_others
from kenotron_config.yaml_build import sections, shown
from kenotron_config.yaml_loader import YamlLoader, read_yaml

OVERRIDE = "--set"
NO_VARIABLES: Mapping[str, str] = {}
_BRRR = (
    "is a key of BRRR, the system before Nanotron, whose files have other sections: write a config "
    "in today's keys (docs/configuration.md)"
)
SHOWN_PROBLEMS = 50
"""Problems that an error shows."""
FLOAT_TAG, TIMESTAMP_TAG = "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"
FLOAT = re.compile(
    r"""^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
             |[0-9][0-9_]*[eE][-+]?[0-9]+
             |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
             |\.(?:inf|Inf|INF))
      |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
DEFAULT_CONFIG = Path(__file__).with_name("default.yaml")
"""The training of a program that is given no file."""


class ConfigError(ValueError):
    """A config that cannot be used.

    Its text has the first of many problems.

    Attributes:
        problems: one line for each problem, `file: key.path: what was given; rule; fix`.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        shown = self.problems[:SHOWN_PROBLEMS]
        if rest := len(self.problems) - len(shown):
            shown = (*shown, f"... and {rest} more problems")
        super().__init__("\n".join(shown))


def _environment(loader: YamlLoader, node: yaml.Node) -> EnvText:
    """`!env NAME` or `!env NAME other`: the variable's text, or the other where it is not set."""
    written = str(loader.construct_scalar(cast(yaml.ScalarNode, node)))
    name, *other = written.split(" ", 1)
    if (text := loader.environment.get(name, *other)) is None:
        fix = "set it" if loader.environment else "pass environment=os.environ"
        rule = f"!env {name}: there is no such environment variable; {fix}, or add a default"
        raise yaml.constructor.ConstructorError(problem=rule, problem_mark=node.start_mark)
    return EnvText(text, written)


YamlLoader.add_constructor(TAG, _environment)


class _Dumper(yaml.SafeDumper):
    """Quotes the text that `Loader` would not read as text, and writes `!env` again."""


_Dumper.add_representer(EnvText, lambda dumper, text: dumper.represent_scalar(TAG, text.written))


for _kind in (YamlLoader, _Dumper):
    _kind.yaml_implicit_resolvers = {
        first: [rule for rule in rules if rule[0] not in (FLOAT_TAG, TIMESTAMP_TAG)]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver(FLOAT_TAG, FLOAT, list("-+.0123456789"))


def load_config(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    environment: Mapping[str, str] = NO_VARIABLES,
    world: int | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> Config:
    """Read a training config from a YAML file; needs no network and no accelerator.

    Args:
        path: the YAML file, in UTF-8.
        overrides: changes of single values, `section.key=value`, with the value in YAML; items of
            a list are named by their number (`data_stages.0.data.seed=1`).
        environment: the variables that `!env NAME` reads, for instance `os.environ`.
        world: processes that are there, which `parallelism.dp: auto` follows (None: one data rank).
        warn: called with each warning, for instance about a key that is given twice.

    Returns:
        The checked config.

    Raises:
        ConfigError: there is no such file, or anything in it is wrong; names every problem.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            [f"{path}: there is no such file; give the path of a YAML file"]
        ) from None
    except IsADirectoryError:
        raise ConfigError([f"{path}: this is a folder; give the path of a YAML file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: this cannot be read as UTF-8 text ({error})"]) from None
    return parse_config(text, str(path), overrides, environment=environment, world=world, warn=warn)


def parse_config(
    text: str,
    source_name: str,
    overrides: Iterable[str] = (),
    *,
    saved: bool = False,
    environment: Mapping[str, str] = NO_VARIABLES,
    world: int | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> Config:
    """Read a training config from the text of a YAML file.

    Args:
        text: the YAML.
        source_name: what problems call the text, for instance the file's path.
        overrides: changes of single values, `section.key=value`; see `load_config`.
        saved: the text is that of a checkpoint, perhaps of an older release: keys of the model
            that its family no longer has are left out.
        environment, world, warn: see `load_config`.

    Returns:
        The checked config.

    Raises:
        ConfigError: anything is wrong; names every problem.
    """
    problems: list[str] = []
    changed: list[str] = []

    def report(path: str, sentence: str) -> None:
        words = set(re.findall(r"\w+", sentence))
        mine = any(
            f"{path}.".startswith(f"{each}.") or each.rpartition(".")[2] in words
            for each in changed
        )
        problems.append(f"{OVERRIDE if mine else source_name}: {path}: {sentence}")

    def read(text: str, name: str) -> Any:
        return _parse_yaml(text, name, environment, warn)

    # The text, in the spelling of today, with the overrides.
    given = _plain(read(text, source_name), source_name)
    if mark := before_nanotron(given):
        raise ConfigError([f"{source_name}: {mark} {_BRRR}"])
    data = modernise(without_former(given) if saved else given, report)
    for override in overrides:
        try:
            changed.append(_override(data, override, read))
        except ConfigError as error:
            problems += error.problems
    # Values: paths from home, without what concerns no training; then sections, one by one.
    data = expand_home(data, environment, report)
    data = without_others(data, lambda line: warn(f"{source_name}: {line}"))
    built = sections(Config, with_sizes(modernise(data, report), world, report), report)
    for line in all_problems(built):
        path, _, sentence = line.partition(": ")
        report(path, sentence)
    if problems:
        raise ConfigError(problems)
    return Config(**built)


def dump_config(config: Config) -> str:
    """Write a config as YAML that `parse_config` reads back to an equal one.

    Values from the environment are written as their `!env` tag; credentials in URLs are masked.
    """
    plain = _masked(_copied(asdict(config)))
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _masked(value: Any) -> Any:
    """Mask credentials in URLs, but leave tags."""
    if isinstance(value, dict):
        return {key: _masked(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_masked(each) for each in value]
    return masked(value) if type(value) is str else value


def _copied(data: Any) -> Any:
    """Copy what JSON has; other values become text, and tags stay."""
    return keep_tags(data, json.loads(json.dumps(data, default=str)))


def _parse_yaml(
    text: str, source_name: str, environment: Mapping[str, str], warn: Callable[[str], None]
) -> Any:
    try:
        data, remarks = read_yaml(text, environment)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        why = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError([f"{source_name}: {place}this is not YAML ({why})"]) from None
    except (yaml.YAMLError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ConfigError([f"{source_name}: this is not YAML ({why})"]) from None
    for remark in remarks:
        warn(f"{source_name}: {remark}")
    return data


def _plain(data: Any, source_name: str) -> dict[str, Any]:
    """The mapping with nothing in it but what JSON has, and without shared parts."""
    if not isinstance(data, dict):
        what = "nothing" if data is None else shown(data)
        rule = "a config is a mapping of sections (general:, parallelism:, model:, ...)"
        raise ConfigError([f"{source_name}: {what} was given; {rule}"])
    try:
        plain: dict[str, Any] = _copied(data)
    except (TypeError, ValueError) as error:
        raise ConfigError([f"{source_name}: this cannot be a config ({error})"]) from None
    return plain


def _override(data: dict[str, Any], override: str, read: Callable[[str, str], Any]) -> str:
    """Change one value in place; returns the dotted path of all that is new."""
    path, equals, text = override.partition("=")
    source = f"{OVERRIDE} {override}"
    if not equals or not all(path.split(".")):
        raise ConfigError([f"{source}: a change is written section.key=value"])
    value = _copied(read(text, source))
    path = modern_path(path)
    *parents, name = path.split(".")
    owner: Any = data
    new = path
    for depth, part in enumerate(parents, start=1):
        if isinstance(owner, dict) and owner.get(part) is None:
            owner[part] = {}
            new = min(new, ".".join(parents[:depth]), key=len)
        owner = _item(owner, part, source)
    if isinstance(owner, list):
        _item(owner, name, source)
        owner[int(name)] = value
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        raise ConfigError([f"{source}: {parents[-1]} is {shown(owner)} and has no keys to change"])
    return new


def _item(owner: Any, part: str, source: str) -> Any:
    if isinstance(owner, dict):
        return owner[part]
    if isinstance(owner, list) and part.isdigit() and int(part) < len(owner):
        return owner[int(part)]
    if isinstance(owner, list):
        raise ConfigError([f"{source}: {part} was given; the list has items 0 to {len(owner) - 1}"])
    raise ConfigError([f"{source}: {part} was given; {shown(owner)} has no keys"])
