"""Command line flags from typed dataclasses: one field, one flag.

`--bucket-bytes` is the field `bucket_bytes`; its type, default, help and group stand at the field.
Built on argparse alone, so that help is there at once and every error is a sentence of our own
that names flag, value and what is allowed.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeVar, Union

from jaxdp.errors import BadUse, ConfigError

Config = TypeVar("Config")

_NUMBERS: dict[type, tuple[Callable[[str], Any], str]] = {int: (int, "an integer"), float: (float, "a number")}


@dataclasses.dataclass(frozen=True)
class Flag:
    """Marks a field (`Annotated[int, Flag("...")] = 8`) and holds its help, its group and its value's name."""

    help: str
    group: str = "options"
    metavar: str | None = None
    positional: bool = False  # a required argument without a flag
    short: str | None = None  # such as "-o"


def flag_name(field: str) -> str:
    """The flag of a field: `bucket_bytes` is `--bucket-bytes`."""
    return "--" + field.replace("_", "-")


def parse(config: type[Config], program: str, arguments: Sequence[str]) -> Config:
    """The `config` that the arguments describe.

    Prints help and exits for `--help`. Raises `BadUse` (a `ConfigError` named by flag where the
    dataclass refused a value) with one sentence. A boolean flag takes no value: `--json`,
    `--no-json`; `--json False` is `--no-json`.
    """
    fields = _fields(config)
    given, unknown = _parser(config, program).parse_known_args(_normalize(arguments, fields))
    if unknown:
        raise BadUse(_unknown_message(unknown[0], fields, program))
    values = {field.name: _convert(field, getattr(given, field.name)) for field in fields if field.name in given}
    try:
        return config(**values)
    except ConfigError as error:
        raise named_by_flag(error, config) from None


def named_by_flag(error: ConfigError, config: type) -> ConfigError:
    """`error` with its field written as the flag it came from, where it is a field of `config`."""
    if error.field not in {field.name for field in dataclasses.fields(config)}:
        return error
    return ConfigError(flag_name(error.field), error.value, error.allowed)


@dataclasses.dataclass(frozen=True)
class _Field:
    name: str
    kind: Any  # without its None
    default: Any
    flag: Flag


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadUse(f"{message.removeprefix('argument ')}. See: {self.prog} --help")


def _parser(config: type, program: str) -> argparse.ArgumentParser:
    fields = _fields(config)
    positionals = [field.name.upper() for field in fields if field.flag.positional]
    parser = _Parser(prog=program, usage=" ".join([program, *positionals, "[flags]"]), description=_description(config),
                     allow_abbrev=False, argument_default=argparse.SUPPRESS, formatter_class=_formatter)
    groups: dict[str, Any] = {}
    for field in fields:
        if field.flag.positional:
            parser.add_argument(field.name, help=field.flag.help, metavar=field.name.upper())
            continue
        title = field.flag.group
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        _add_flag(group, field)
    return parser


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=36, width=110)


def _description(config: type) -> str:
    return (config.__doc__ or "").split("\n\n")[0].replace("\n    ", " ")


def _add_flag(group: Any, field: _Field) -> None:
    default = "" if field.default is None else f" (default: {_shown(field.default)})"
    text = (field.flag.help + default).replace("%", "%%")
    if field.kind is bool:
        group.add_argument(flag_name(field.name), action=argparse.BooleanOptionalAction, help=text)
    else:
        names = [flag_name(field.name)] if field.flag.short is None else [field.flag.short, flag_name(field.name)]
        group.add_argument(*names, help=text, metavar=field.flag.metavar or _metavar(_element(field.kind)),
                           nargs=None if field.kind is _element(field.kind) else "+")


def _shown(default: Any) -> str:
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _element(kind: Any) -> Any:
    """What one word of a flag is: `int` of the kind `tuple[int, ...]`, which takes several, and of `int`."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(typing.get_args(kind)) + "}"
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _fields(config: type) -> list[_Field]:
    hints = typing.get_type_hints(config, include_extras=True)
    found = []
    for field in dataclasses.fields(config):
        kind, flag = typing.get_args(hints[field.name])
        found.append(_Field(field.name, _without_none(kind), field.default, flag))
    return found


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) not in (Union, types.UnionType):
        return kind
    return next(member for member in typing.get_args(kind) if member is not type(None))


def _convert(field: _Field, text: Any) -> Any:
    if isinstance(text, list):
        one = dataclasses.replace(field, kind=_element(field.kind))
        return tuple(_convert(one, word) for word in text)
    if typing.get_origin(field.kind) is Literal:
        choices = typing.get_args(field.kind)
        if text not in choices:
            raise ConfigError(flag_name(field.name), text, "one of " + ", ".join(choices))
        return text
    if field.kind not in _NUMBERS:
        return text
    convert, allowed = _NUMBERS[field.kind]
    try:
        return convert(text)
    except ValueError:
        raise ConfigError(flag_name(field.name), text, allowed) from None


def _normalize(arguments: Sequence[str], fields: Sequence[_Field]) -> list[str]:
    """Folds the value of a boolean flag into it, and a negative number into its flag."""
    booleans = {flag_name(field.name) for field in fields if field.kind is bool}
    valued = {flag_name(field.name) for field in fields if field.kind is _element(field.kind)} - booleans
    words: list[str] = []
    for word in _split_booleans(arguments, booleans):
        previous = words[-1] if words else ""
        if previous in booleans and word.lower() in ("true", "false"):
            words[-1] = previous if word.lower() == "true" else previous.replace("--", "--no-", 1)
        elif previous in valued and _is_number(word):
            words[-1] = f"{previous}={word}"
        else:
            words.append(word)
    return words


def _split_booleans(arguments: Sequence[str], booleans: set[str]) -> list[str]:
    words: list[str] = []
    for word in arguments:
        name, equals, value = word.partition("=")
        words += [name, value] if equals and name in booleans else [word]
    return words


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unknown_message(word: str, fields: Sequence[_Field], program: str) -> str:
    close = difflib.get_close_matches(word.partition("=")[0], [flag_name(field.name) for field in fields], 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"unknown argument {word!r}.{hint} See: {program} --help"
