"""Settings as dataclasses: each field declares an option of the command line.

A class of options derives from `RunOptions` (training/cli.py). Each field is declared once by `option`, with its
default, help and accepted values. Its annotation is the type: int, float, str or bool; `| None` accepts the word none.
A derived class changes a default by a plain assignment, and other attributes by `changed`.

Example:
    @dataclass(kw_only=True)
    class MyOptions(RunOptions):
        GROUP = "the network"
        hidden: int = option(128, "hidden units")
        rank: int | None = option(None, "factorized: columns of U and V")
        batch: int = 20  # declared in a base class, with another default
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

from orthokern.commandline import Parser, Settings, integer, one_of, real
from orthokern.errors import InputError


@dataclass(frozen=True)
class Option:
    """The declaration of an option in a field.

    Attributes:
        help: text of the help, without the default.
        choices: accepted names; (): any value of the type.
        convert: an argparse type that replaces the type of the annotation.
        low, high: smallest and largest accepted number; for integers low is 1 by default.
        above, below: excluded bounds.
        metavar: name of the value in the help.
        shown: text of the default in the help; None: its value; "": none.
        basic: whether --help shows the option; --help-all shows all.
        only: the values of another setting with which the option has an effect, by the name of that setting; empty:
            always. If there are several settings, one suffices. The help starts with the values of the first.
        off: a value that is accepted even if the option has no effect, like none and a switch that is off.
    """

    help: str
    choices: tuple[str, ...] = ()
    convert: Callable[[str], Any] | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    metavar: str | None = None
    shown: str | None = None
    basic: bool = False
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    off: float | None = None

    def argument(self, name: str, kind: type, none: bool) -> tuple[Callable[[str], Any], str]:
        """The argparse type and the metavar, for the annotation `kind` or `kind` | None."""
        if self.choices:
            return _or_none(one_of(name.replace("_", "-"), self.choices), none), self.metavar or "NAME"
        if self.convert is not None:
            return self.convert, self.metavar or "X"
        if kind is int:
            low = 1 if self.low is None else int(self.low)
            return integer(low, None if self.high is None else int(self.high), none=none), self.metavar or "N"
        bounds = {"low": self.low, "high": self.high, "above": self.above, "below": self.below}
        if kind is float:
            return real(none=none, **bounds), self.metavar or "X"
        if kind is not str:
            raise TypeError(f"option {name} must have the type int, float, str or bool, got {kind}")
        return _or_none(str, none), self.metavar or "X"


def _or_none(convert: Callable[[str], Any], none: bool) -> Callable[[str], Any]:
    """An argparse type that gives None for the word none, with `none`."""
    return lambda text: None if none and text.lower() == "none" else convert(text)


def option(default: Any, help: str, **attributes: Any) -> Any:
    """A field for an option; for attributes see `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **attributes)})


def changed(base: type[Options], name: str, **attributes: Any) -> Any:
    """A field for an option of a base class with another `default` or other attributes of `Option`."""
    default = attributes.pop("default", defaults(base)[name])
    declared = dataclasses.replace(declarations(base)[name][1], **attributes)
    return dataclasses.field(default=default, metadata={"option": declared})


@dataclass(kw_only=True)
class Options:
    """The complete settings of a run."""

    GROUP: ClassVar[str] = "options"  # heading in the help for the options declared in this class
    HIDDEN: ClassVar[frozenset[str]] = frozenset()  # inherited options that are not on the command line of this class

    def fill(self, **usual: Any) -> None:
        """Sets the given settings that are None."""
        for name, value in usual.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def complete(self) -> None:
        """Sets defaults that depend on other settings, and checks combinations (InputError). A subclass that overrides
        it calls that of its base class."""


def declarations(options: type[Options]) -> dict[str, tuple[str, Option]]:
    """The options of a class by name, each with the heading of the class that declares it first and its declaration in
    the most derived class that has one."""
    result: dict[str, tuple[str, Option]] = {}
    for base in reversed(options.__mro__):
        for name in vars(base).get("__annotations__", {}):
            field = vars(base).get("__dataclass_fields__", {}).get(name)
            if field is not None and "option" in field.metadata:
                heading = result[name][0] if name in result else base.GROUP  # type: ignore[attr-defined]
                result[name] = heading, field.metadata["option"]
    return {name: declared for name, declared in result.items() if name not in options.HIDDEN}


def defaults(options: type[Options]) -> Settings:
    """The defaults of a command line, by name."""
    names = declarations(options)
    return {field.name: field.default for field in dataclasses.fields(options) if field.name in names}


def types(options: type[Options]) -> dict[str, tuple[type, bool]]:
    """The annotations of the options by name: the type, and whether it is | None."""
    hints = get_type_hints(options)
    parts = {name: get_args(hints[name]) or (hints[name],) for name in declarations(options)}
    return {name: (next(part for part in of if part is not NoneType), NoneType in of) for name, of in parts.items()}


def check_effect(settings: Options, names: Iterable[str]) -> None:
    """InputError if one of these options has no effect with the other settings, unless its value requests no effect."""
    declared = {name: each for name, (_, each) in declarations(type(settings)).items()}
    only = {
        name: {other: values for other, values in each.only.items() if other in declared}
        for name, each in declared.items()
    }

    def acts(name: str) -> bool:
        return not only[name] or any(
            getattr(settings, other) in values and acts(other) for other, values in only[name].items()
        )

    for name in names:
        value = getattr(settings, name, None)
        if name not in declared or value in (None, declared[name].off) or value is False or acts(name):
            continue
        needed = " or ".join(_with(other, values) for other, values in only[name].items())
        shown = "" if isinstance(value, bool) else f" {value:g}" if isinstance(value, float) else f" {value}"
        first = getattr(settings, next(iter(only[name])))
        rest = "" if first is None or isinstance(first, bool) else f", not {first}"
        raise InputError(f"{dashed(name)}{shown}: only {needed}{rest}")


def _with(name: str, values: tuple[Any, ...]) -> str:
    """The text for a setting that has one of these values."""
    if values == (None,):
        return f"without {dashed(name)}"
    return f"with {dashed(name)}" if values == (True,) else f"with {dashed(name)} {' or '.join(values)}"


def dashed(name: str) -> str:
    """An option as it is typed."""
    return f"--{name.replace('_', '-')}"


def _scope(options: type[Options], declared: Option) -> str:
    """The start of the help of an option that does not always have an effect."""
    for other, values in declared.only.items():
        if not isinstance(values[0], str):
            return f"{_with(other, values)}: "
        rest = [name for name in declarations(options)[other][1].choices if name not in values]
        return f"not {rest[0]}: " if len(rest) == 1 else f"{', '.join(values)}: "
    return ""


def add_options(
    parser: Parser, options: type[Options], presets: Iterable[str] = (), preset_help: Mapping[str, str] | None = None
) -> None:
    """Adds the options of a class to a parser."""
    usual, annotations = defaults(options), types(options)
    titles = dict.fromkeys(base.GROUP for base in options.__mro__ if issubclass(base, Options))
    groups = {title: parser.add_argument_group(title) for title in titles}
    for name, (title, declared) in declarations(options).items():
        default, (kind, none) = usual[name], annotations[name]
        typed, shown = dashed(name), declared.shown
        help = _scope(options, declared) + declared.help
        if shown is None or (name == "iterations" and default is not None):
            shown = "none" if default is None else f"{default:g}" if isinstance(default, float) else str(default)
        if declared.basic:
            parser.basic.add(name)
        if kind is bool:  # the help shows the switch that changes the default
            for flag, value, action in ((typed, True, "store_true"), (dashed(f"no_{name}"), False, "store_false")):
                text = argparse.SUPPRESS if value == default else help.replace("%", "%%")
                groups[title].add_argument(flag, dest=name, action=action, help=text)
        else:
            convert, metavar = declared.argument(name, kind, none)
            text = (help + (f" (default {shown})" if shown else "")).replace("%", "%%")
            groups[title].add_argument(typed, type=convert, metavar=metavar, help=text)
    if presets:
        lines = "; ".join(f"{name}: {text}" for name, text in (preset_help or {}).items()).replace("%", "%%")
        parser.add_argument("--preset", type=one_of("preset", presets), metavar="NAME", help=lines)
        parser.basic.add("preset")
