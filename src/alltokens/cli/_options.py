"""Command lines from frozen dataclasses: tyro finds the options and writes the help, the YAML reader converts.

tyro never converts a value itself: it hands the words over, and `loading.build` judges them as it judges a file. So a
value is right or wrong alike in YAML, on the command line and in Python, and every error has one voice.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import re
import sys
import types
import typing
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from itertools import zip_longest
from typing import Annotated, Any, Literal, TextIO, TypeVar

import tyro
import yaml
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from alltokens.engine.loading import build, parse_yaml
from alltokens.errors import UserError

T = TypeVar("T")
WHERE = "command line"


@dataclasses.dataclass(frozen=True)
class _Words:
    """What stood behind an option, and the type it must become."""

    words: tuple[str, ...]
    kind: Any


# A switch takes no value, so that `--json PATTERN` leaves the pattern alone.
Switch = Annotated[
    bool,
    PrimitiveConstructorSpec(
        nargs=0,
        metavar="",
        instance_from_str=lambda words: typing.cast(bool, _Words(("true",), bool)),
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: ["off"],
    ),
]


def shown_as(value: str) -> Any:
    """For `Annotated`: what the help writes for an option's value."""
    return tyro.conf.arg(metavar=value)


Hidden = tyro.conf.Suppress
Positional = tyro.conf.Positional


def given(defaults: Any, words: Sequence[str], program: str) -> dict[str, Any]:
    """The options that were given, as `build` wants them: {'train': {'epochs': '3'}}."""
    kinds = option_kinds(defaults)
    parsed, rest = tyro.cli(
        type(defaults),
        args=_with_values(words, kinds),
        default=defaults,
        prog=program,
        registry=_registry(),
        use_underscores=True,
        add_help=False,
        return_unknown_args=True,
        config=(tyro.conf.FlagConversionOff,),
    )
    if rest:
        raise _not_understood(rest[0], list(kinds), program)
    return _collect(parsed, "")


def read(defaults: T, words: Sequence[str], program: str) -> T:
    """`defaults` with the given options laid over them."""
    return build(type(defaults), given(defaults, words, program), WHERE, defaults)


def show_help(defaults: Any, program: str, description: str) -> None:
    """Print every option with its meaning and its default."""
    with redirect_stdout(_Hyphens(sys.stdout)), suppress(SystemExit):  # tyro ends the program after its help
        tyro.cli(
            type(defaults),
            args=["--help"],
            default=defaults,
            prog=program,
            description=description,
            registry=_registry(),
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )


def asks_for_help(words: Sequence[str]) -> bool:
    return "--help" in words or "-h" in words


def option_kinds(defaults: Any, group: str = "") -> dict[str, Any]:
    """{'--run-dir': str | None, '--train.epochs': int, ...}: every option as the help writes it, and its type."""
    kinds: dict[str, Any] = {}
    hints = typing.get_type_hints(type(defaults), include_extras=True)
    for field in dataclasses.fields(defaults):
        hint, value = hints[field.name], getattr(defaults, field.name)
        marks = getattr(hint, "__metadata__", ())
        if Positional in marks or Hidden in marks:
            continue
        if dataclasses.is_dataclass(value):
            kinds |= option_kinds(value, f"{group}{field.name}.")
        else:
            kinds[f"--{group}{field.name}" if group else "--" + field.name.replace("_", "-")] = hint
    return kinds


class _Hyphens(io.TextIOBase):
    """Writes on with hyphens in a verb's own options (--run-dir); settings keep the names they have in YAML."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        return self._out.write(re.sub(r"--[a-z_]+(?![a-z_.])", lambda found: found[0].replace("_", "-"), text))

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._out.encoding

    def isatty(self) -> bool:
        return self._out.isatty()


def _with_values(words: Sequence[str], kinds: dict[str, Any]) -> list[str]:
    """The words as tyro takes them: a group that has a name stands for it; behind a bare yes-or-no option comes `true`.

    Another option without a value is an error.
    """
    by_name = {_same(name): (name, kind) for name, kind in kinds.items()}
    whole: list[str] = []
    for word, following in zip_longest(words, words[1:], fillvalue="--"):
        option, equals, value = word.partition("=")
        named = by_name.get(_same(option) + ".name")  # `--supervision.mixer cutmix`, as YAML says `mixer: cutmix`
        whole.append(named[0] + equals + value if named else word)
        name, kind = (option, named[1]) if named else by_name.get(_same(option), ("", Switch))
        if kind is Switch or equals or not following.startswith("--"):
            continue
        if kind is not bool and "on" not in typing.get_args(kind):
            raise UserError(f"{name} wants a value: {_metavar(kind)}")
        whole.append("true" if kind is bool else "on")
    return whole


def _registry() -> ConstructorRegistry:
    registry = ConstructorRegistry()
    registry.primitive_rule(_hand_over)
    return registry


def _hand_over(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    kind = info.type
    if dataclasses.is_dataclass(kind) or info._primitive_spec is not None:
        return None
    return PrimitiveConstructorSpec(
        nargs="*" if typing.get_origin(_plain(kind)) is tuple else 1,
        metavar=_metavar(kind),
        instance_from_str=lambda words: _Words(tuple(words), kind),
        is_instance=lambda value: True,
        str_from_instance=_as_typed,
    )


def _plain(kind: Any) -> Any:
    """X of X | None."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(option for option in typing.get_args(kind) if option is not type(None))
    return kind


def _metavar(kind: Any) -> str:
    plain = _plain(kind)
    arguments = typing.get_args(plain)
    if typing.get_origin(plain) is Literal:
        name = "{" + ",".join(map(str, arguments)) + "}"
    elif typing.get_origin(plain) is tuple:
        inner = [_metavar(option) for option in arguments if option is not Ellipsis]
        name = f"[{inner[0]} ...]" if Ellipsis in arguments else " ".join(inner)
    elif typing.get_origin(plain) is dict:
        name = "YAML"
    else:
        name = {int: "INT", float: "NUMBER", bool: "{true,false}", str: "TEXT"}.get(plain, "VALUE")
    return name if plain is kind else f"{name}|null"


def _as_typed(value: Any) -> list[str]:
    """A default as one would type it."""
    if isinstance(value, tuple):
        return [word for item in value for word in _as_typed(item)] or ["[]"]
    if isinstance(value, bool) or value is None:
        return [{True: "true", False: "false", None: "null"}[value]]
    if isinstance(value, dict):
        return [yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1_000).strip()]
    return [f"{value:g}" if isinstance(value, float) else str(value)]


def _collect(parsed: Any, prefix: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(parsed):
        value = getattr(parsed, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, _Words):
            inner = _collect(value, f"{prefix}{field.name}.")
            if inner:
                values[field.name] = inner
        elif isinstance(value, _Words):
            values[field.name] = _as_yaml(value, prefix + field.name)
    return values


def _as_yaml(given: _Words, name: str) -> Any:
    """The words of one option as YAML would have read them, for the type that they must become."""
    kind, words = _plain(given.kind), given.words
    if given.kind is not kind and words in (("null",), ("None",)):
        return None
    if typing.get_origin(kind) is tuple:
        return parse_yaml(words[0], f"{WHERE}: {name}") if len(words) == 1 and words[0].startswith("[") else list(words)
    if kind is bool or typing.get_origin(kind) is dict:
        return parse_yaml(words[0], f"{WHERE}: {name}")
    return words[0]


def _not_understood(word: str, names: list[str], program: str) -> UserError:
    if not word.startswith("-"):
        return UserError(f"unexpected argument {word!r}; `{program} --help` shows what may stand there")
    option = word.split("=", 1)[0]
    same = {_same(name): name for name in names}
    near = difflib.get_close_matches(_same(option), same, n=1, cutoff=0.5)
    guess = f" Did you mean {same[near[0]]}?" if near else ""
    group = option.rpartition(".")[0] + "."
    inside = [name for name in names if name.startswith(group) and "." not in name[len(group) :]]
    groups = sorted({name.split(".")[0] + ".*" for name in names if "." in name})
    allowed = inside or [name for name in names if "." not in name] + groups
    return UserError(f"unknown option {option}.{guess} Allowed: {', '.join(allowed)}. `{program} --help` lists them.")


def _same(name: str) -> str:
    return name.replace("-", "_").lower()
