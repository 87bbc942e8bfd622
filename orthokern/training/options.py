"""Settings as dataclasses: each field declares an option of the command line.

A class of options derives from `RunOptions` (training/cli.py). Each field is declared once, by `option`, `named` or
`switch`, with its default, its accepted values, its help and the conditions under which it has an effect. The parser,
the help text and the check for options without effect are generated from the fields. A derived class changes a default
by a plain assignment.

Example:
    @dataclass(kw_only=True)
    class Options(RunOptions):
        GROUP = "the network"
        hidden: int = option(128, integer(1), "hidden units", "N")
        batch: int = 20  # declared in a base class, with another default
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from orthokern.commandline import Needs, Parser, Settings, one_of

Ways = tuple[tuple[Needs, ...], ...]


@dataclass(frozen=True)
class Option:
    """The declaration of an option in a field."""

    convert: Callable[[str], Any] | tuple[str, ...] | None  # argparse type, or accepted names; None for a switch
    help: str  # without the default
    metavar: str = ""
    ways: Ways = ()  # it has an effect if all conditions of one alternative are met; (): always
    shown: str | None = None  # text of the default in the help; None: its value; "": none
    optional: Any = None  # the value if the option is given without one; None: a value is required


def option(
    default: Any,
    convert: Callable[[str], Any] | tuple[str, ...],
    help: str,
    metavar: str = "X",
    *,
    needs: Needs | tuple[Needs, ...] = (),
    shown: str | None = None,
    optional: Any = None,
) -> Any:
    """A field for an option with a value, which has an effect if all `needs` are met."""
    return _field(default, Option(convert, help, metavar, _ways(needs), shown, optional))


def named(default: str | None, choices: Iterable[str], help: str, **more: Any) -> Any:
    """A field for an option whose value is one of some names."""
    return option(default, tuple(choices), help, "NAME", **more)


def switch(default: bool, help: str, *, needs: Needs | tuple[Needs, ...] = ()) -> Any:
    """A field for an option without a value: --name for a default of False, --no-name for a default of True."""
    return _field(default, Option(None, help, "", _ways(needs), ""))


def redeclared(base: type[Options], name: str, *, or_needs: Needs | tuple[Needs, ...] = (), **changes: Any) -> Any:
    """A field for an option of a base class with another `default`, another attribute of `Option`, or one more way."""
    field = next(field for field in dataclasses.fields(base) if field.name == name)
    declared: Option = field.metadata["option"]
    ways = (*declared.ways, *_ways(or_needs))
    default = changes.pop("default", field.default)
    return _field(default, dataclasses.replace(declared, ways=ways, **changes))


def _ways(needs: Needs | tuple[Needs, ...]) -> Ways:
    """The one alternative in which all needs are met."""
    return ((needs,) if isinstance(needs, Needs) else needs,) if needs else ()


def _field(default: Any, declared: Option) -> Any:
    return dataclasses.field(default=default, metadata={"option": declared})


@dataclass(kw_only=True)
class Options:
    """The complete settings of a run."""

    GROUP: ClassVar[str] = "options"  # heading in the help for the options declared in this class
    HIDDEN: ClassVar[frozenset[str]] = frozenset()  # inherited options that are not on the command line of this class


Chosen = TypeVar("Chosen", bound=Options)


def _declared(options: type[Options]) -> dict[str, tuple[str, Option]]:
    """Name of each option of a command line -> title of its group, and its declaration in the most derived class.

    In the order of the help: groups of derived classes come first, and within a group the options of base classes.
    """
    found: dict[str, tuple[str, Option]] = {}
    titles: list[str] = []
    for base in options.__mro__:
        if not issubclass(base, Options):
            continue
        titles.append(base.GROUP)
        fields = {field.name: field for field in dataclasses.fields(base)}
        for name in vars(base).get("__annotations__", {}):
            if name in fields and "option" in fields[name].metadata and name not in options.HIDDEN:
                _, declared = found.get(name, ("", fields[name].metadata["option"]))
                found[name] = (base.GROUP, declared)  # the group of the class that declares it first
    place = {field.name: index for index, field in enumerate(dataclasses.fields(options))}
    return dict(sorted(found.items(), key=lambda each: (titles.index(each[1][0]), place[each[0]])))


def defaults(options: type[Options]) -> Settings:
    """The defaults of a command line, by name."""
    declared = _declared(options)
    return {field.name: field.default for field in dataclasses.fields(options) if field.name in declared}


def first_defaults(options: type[Options]) -> Settings:
    """The defaults in the classes that declare the options first, by name.

    A new option is declared with a default that has no effect; a task may assign another one. The JSON files of
    docs/results hold runs that are older than some options: their settings have to be read with the former.
    """
    found: Settings = {}
    for base in options.__mro__:  # from derived to base classes
        found |= {name: vars(base)[name] for name in vars(base).get("__annotations__", {}) if name in vars(base)}
    return {name: found[name] for name in defaults(options)}


def complete(options: type[Chosen], settings: Mapping[str, Any]) -> Chosen:
    """Settings as an object. Names that the class does not have (from other versions) are left out."""
    known = {field.name for field in dataclasses.fields(options)}
    return options(**{name: value for name, value in settings.items() if name in known})


def add_options(
    parser: Parser,
    options: type[Options],
    presets: Mapping[str, object] | None = None,
    preset_help: Mapping[str, str] | None = None,
) -> None:
    """Adds the options of a class to a parser, with the conditions under which they have an effect.

    Args:
        parser: the parser of a task.
        options: the class of options of the task.
        presets: presets by name; --preset is added if there are any.
        preset_help: name, or several names in one string -> a line of help.
    """
    usual = defaults(options)
    groups: dict[str, Any] = {}
    for name, (title, declared) in _declared(options).items():
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        value = usual[name]
        told = declared.shown
        if told is None or (name == "iterations" and value is not None):
            told = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        text = (declared.help + (f" (default {told})" if told else "")).replace("%", "%%")
        dashed = name.replace("_", "-")
        if declared.convert is None:
            action = "store_false" if value else "store_true"
            groups[title].add_argument(
                f"--no-{dashed}" if value else f"--{dashed}", dest=name, action=action, help=text
            )
        else:
            more = {} if declared.optional is None else {"nargs": "?", "const": declared.optional}
            kind = one_of(dashed, declared.convert) if isinstance(declared.convert, tuple) else declared.convert
            groups[title].add_argument(f"--{dashed}", type=kind, metavar=declared.metavar, help=text, **more)
        if declared.ways:
            parser.needs[name] = declared.ways
    if presets:
        lines = "; ".join(f"{name}: {text}" for name, text in (preset_help or {}).items()).replace("%", "%%")
        parser.add_argument("--preset", type=one_of("preset", presets), metavar="NAME", help=lines)
