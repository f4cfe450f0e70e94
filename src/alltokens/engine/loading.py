"""From YAML to frozen dataclasses and back, strictly: an unknown key, a doubled key or a wrong type is an error.

The same reader serves every file of settings: recipes, run folders, studies.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import yaml

from alltokens.errors import UserError, unknown

T = TypeVar("T")

MOST_NODES = 100_000  # values in a file of settings
MOST_BYTES = 10_000_000


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, but a key that stands twice is an error instead of the later one winning silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise UserError(
                    f"line {key_node.start_mark.line + 1}: the key {key!r} is not a word; quote it if meant"
                )
            if key in seen:
                raise UserError(f"line {key_node.start_mark.line + 1}: the key {key!r} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, where: str) -> Any:
    """What a YAML text says: plain values alone, nothing executed, and never more than MOST_NODES of them."""
    loader = None
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded(node, {}) > MOST_NODES:
            raise UserError(f"more than {MOST_NODES:,} values; settings are smaller, so this is no file of settings")
        return loader.construct_document(node)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(
            f"{where}{line}: not valid YAML: {_one_line(getattr(error, 'problem', None) or error)}"
        ) from None
    except RecursionError:
        raise UserError(f"{where}: nested too deeply") from None
    except ValueError as error:  # a date or a number that is none, a sign that YAML does not allow
        raise UserError(f"{where}: not valid YAML: {_one_line(error)}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _one_line(words: object) -> str:
    return " ".join(str(words).split())[:300]


def _expanded(node: yaml.Node, known: dict[int, int]) -> int:
    """Values in a node, with everything that aliases repeat: a few lines of those can stand for billions."""
    if id(node) not in known:
        known[id(node)] = MOST_NODES + 1  # for whoever comes here again from inside: an alias of itself has no end
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = (part for child in children for part in (child if isinstance(child, tuple) else (child,)))
        known[id(node)] = 1 + sum(_expanded(part, known) for part in pairs)
    return known[id(node)]


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    try:
        with path.open("rb") as file:
            read = file.read(MOST_BYTES + 1)
        if len(read) > MOST_BYTES:
            raise UserError(f"{path} is larger than any file of settings ({MOST_BYTES:,} bytes)")
        text = read.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"cannot read {path}: {reason}") from None
    content = parse_yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected settings as 'key: value', got {type(content).__name__}")
    return content


def build(cls: type[T], values: Mapping[str, Any], where: str, default: T | None = None) -> T:
    """An instance of dataclass `cls` from a mapping; what the mapping leaves out comes from `default` or the class."""
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            raise unknown("key", key, names, hint=f"(in {where})")
    given: dict[str, Any] = {}
    for key, value in values.items():
        kind = hints[key]
        inner = getattr(default, key) if default is not None else None
        place = f"{where}: {key}" if ":" not in where else f"{where}.{key}"
        if dataclasses.is_dataclass(kind):
            if isinstance(value, str) and any(field.name == "name" for field in dataclasses.fields(kind)):
                value = {"name": value}  # `mixer: cutmix` says what `mixer: {name: cutmix}` says
            if not isinstance(value, Mapping):
                raise UserError(f"{place}: expected settings as 'key: value', got {value!r}")
            given[key] = build(typing.cast(type, kind), value, place, inner)
        else:
            given[key] = _convert(kind, value, place)
    if default is not None:
        return dataclasses.replace(default, **given)  # type: ignore[type-var]
    return cls(**given)


def to_mapping(value: Any) -> Any:
    """The mapping that `build` turns back into the same dataclass."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_mapping(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_mapping(item) for item in value]
    if isinstance(value, dict):
        return {key: to_mapping(item) for key, item in value.items()}
    return value


def to_yaml(value: Any) -> str:
    return yaml.safe_dump(to_mapping(value), sort_keys=False, allow_unicode=True, width=100)


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'train': {'epochs': 3}} -> {'train.epochs': 3}"""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _convert(kind: Any, value: Any, place: str) -> Any:
    """`value` as the type `kind`, or an error that says what is allowed."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):  # in a list
        if not isinstance(value, Mapping):
            raise UserError(f"{place}: expected settings as 'key: value', got {value!r}")
        return build(typing.cast(type, kind), value, place)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        errors = []
        for option in arguments:
            if option is not type(None):
                try:
                    return _convert(option, value, place)
                except UserError as error:
                    errors.append(error)
        raise errors[-1]
    if origin is Literal:
        if value in arguments and type(value) in {type(option) for option in arguments}:
            return value
        spoken = {True: "on", False: "off"}.get(value) if isinstance(value, bool) else None
        if spoken in arguments:  # YAML 1.1 reads a bare on or off as a truth value
            return spoken
        raise unknown(f"value of {place}:", value, map(str, arguments))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{place}: expected a list, got {value!r}")
        if arguments[-1] is Ellipsis:
            return tuple(_convert(arguments[0], item, place) for item in value)
        if len(value) != len(arguments):
            raise UserError(f"{place}: expected a list of {len(arguments)}, got {value!r}")
        return tuple(_convert(option, item, place) for option, item in zip(arguments, value, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise UserError(f"{place}: expected settings as 'key: value', got {value!r}")
        return {key: _convert(arguments[1], item, f"{place}.{key}") for key, item in value.items()}
    return _convert_plain(kind, value, place)


def _convert_plain(kind: type, value: Any, place: str) -> Any:
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-3 as a word
        except ValueError:
            pass
    if kind is int and isinstance(value, float | str) and not isinstance(value, bool):
        try:
            if float(value) == int(float(value)):
                return int(float(value))
        except (ValueError, OverflowError):
            pass
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word or text"}
    raise UserError(f"{place}: expected {names.get(kind, kind.__name__)}, got {value!r}")
