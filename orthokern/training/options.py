"""Settings as dataclasses: each field declares an option of the command line.

A class of options derives from `RunOptions` (training/cli.py). Each field is declared once by `option`, with its
default, help and accepted values. Its annotation is the type: int, float, str or bool; `| None` accepts the word none.
A derived class changes a default by a plain assignment, and other attributes by `changed`.

Example:
    @dataclass(kw_only=True)
    class MyOptions(RunOptions):
        GROUP = "the network"
        hidden: int = option(128, "hidden units")
        rank: int | None = option(None, "columns of U and V", models=("factorized",))
        batch: int = 20  # declared in a base class, with another default
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from orthokern.commandline import Parser, Settings, integer, one_of, real
from orthokern.errors import InputError


@dataclass(frozen=True)
class Option:
    """The declaration of an option in a field.

    Attributes:
        help: without the default.
        choices: accepted names; (): any value of the type.
        convert: an argparse type in place of that of the annotation.
        low, high: smallest and largest accepted number; for integers low is 1 by default.
        above, below: excluded bounds.
        metavar: name of the value in the help.
        models: values of --model for which the option has an effect; (): all, or there is no such option.
        shown: text of the default in the help; None: its value; "": none.
        optional: the value if the option is given without one; None: a value is required.
        basic: whether --help shows the option; --help-all shows all.
    """

    help: str
    choices: tuple[str, ...] = ()
    convert: Callable[[str], Any] | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    metavar: str | None = None
    models: tuple[str, ...] = ()
    shown: str | None = None
    optional: Any = None
    basic: bool = False

    def argument(self, name: str, annotation: str) -> tuple[Callable[[str], Any], str]:
        """The argparse type and the metavar."""
        kind, none = annotation.split(" ")[0], "None" in annotation
        if self.choices:
            return one_of(name.replace("_", "-"), self.choices), self.metavar or "NAME"
        if self.convert is not None:
            return self.convert, self.metavar or "X"
        if kind == "int":
            low = 1 if self.low is None else int(self.low)
            return integer(low, None if self.high is None else int(self.high), none=none), self.metavar or "N"
        bounds = {"low": self.low, "high": self.high, "above": self.above, "below": self.below}
        return (real(none=none, **bounds) if kind == "float" else str), self.metavar or "X"


def option(default: Any, help: str, **attributes: Any) -> Any:
    """A field for an option; attributes as those of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **attributes)})


def changed(base: type[Options], name: str, **attributes: Any) -> Any:
    """A field for an option of a base class with another `default` or other attributes of `Option`."""
    field = next(field for field in dataclasses.fields(base) if field.name == name)
    default = attributes.pop("default", field.default)
    declared = dataclasses.replace(declaration(base, name), **attributes)
    return dataclasses.field(default=default, metadata={"option": declared})


@dataclass(kw_only=True)
class Options:
    """The complete settings of a run."""

    GROUP: ClassVar[str] = "options"  # heading in the help for the options declared in this class
    HIDDEN: ClassVar[frozenset[str]] = frozenset()  # inherited options that are not on the command line of this class


Chosen = TypeVar("Chosen", bound=Options)


def declaration(options: type[Options], name: str) -> Option:
    """The declaration of an option in the most derived class that has one."""
    for base in options.__mro__:
        fields = vars(base).get("__dataclass_fields__", {})
        if name in vars(base).get("__annotations__", {}) and "option" in fields[name].metadata:
            declared: Option = fields[name].metadata["option"]
            return declared
    raise KeyError(name)


def _groups(options: type[Options]) -> dict[str, list[str]]:
    """Heading in the help -> names of the options that its classes declare first. Derived classes come first."""
    groups: dict[str, list[str]] = {base.GROUP: [] for base in options.__mro__ if issubclass(base, Options)}
    first: dict[str, str] = {}
    for base in reversed(options.__mro__):
        for name in vars(base).get("__annotations__", {}):
            field = vars(base).get("__dataclass_fields__", {}).get(name)
            if field is not None and "option" in field.metadata and name not in options.HIDDEN:
                first.setdefault(name, base.GROUP)  # type: ignore[attr-defined]
    for name, title in first.items():
        groups[title].append(name)
    return groups


def defaults(options: type[Options]) -> Settings:
    """The defaults of a command line, by name."""
    names = {name for names in _groups(options).values() for name in names}
    return {field.name: field.default for field in dataclasses.fields(options) if field.name in names}


def complete(options: type[Chosen], settings: Mapping[str, Any]) -> Chosen:
    """Settings as an object. Names that the class does not have (from other versions) are left out."""
    known = {field.name for field in dataclasses.fields(options)}
    return options(**{name: value for name, value in settings.items() if name in known})


def check_models(given: Iterable[str], settings: Options) -> None:
    """InputError for the first option in `given` without effect for the model. (A preset may set such options.)"""
    for name in given:
        declared = declaration(type(settings), name) if name in vars(settings) and name != "preset" else None
        model = getattr(settings, "model", "")
        if declared is not None and declared.models and model not in declared.models:
            field = next(field for field in dataclasses.fields(settings) if field.name == name)
            flag = f"--{'no-' if field.default is True else ''}{name.replace('_', '-')}"
            raise InputError(f"{flag}: for --model {' or '.join(declared.models)}; here --model is {model}")


def add_options(
    parser: Parser, options: type[Options], presets: Iterable[str] = (), preset_help: Mapping[str, str] | None = None
) -> None:
    """Adds the options of a class to a parser."""
    fields = {field.name: field for field in dataclasses.fields(options)}
    for title, names in _groups(options).items():
        group = parser.add_argument_group(title)
        for name in names:
            declared, default, annotation = declaration(options, name), fields[name].default, str(fields[name].type)
            dashed, shown = name.replace("_", "-"), declared.shown
            if shown is None or (name == "iterations" and default is not None):
                shown = "none" if default is None else f"{default:g}" if isinstance(default, float) else str(default)
            if declared.basic:
                parser.basic.add(name)
            if annotation == "bool":
                flag = f"--no-{dashed}" if default else f"--{dashed}"
                action = "store_false" if default else "store_true"
                group.add_argument(flag, dest=name, action=action, help=declared.help.replace("%", "%%"))
            else:
                convert, metavar = declared.argument(name, annotation)
                text = (declared.help + (f" (default {shown})" if shown else "")).replace("%", "%%")
                more = {} if declared.optional is None else {"nargs": "?", "const": declared.optional}
                group.add_argument(f"--{dashed}", type=convert, metavar=metavar, help=text, **more)
    if presets:
        lines = "; ".join(f"{name}: {text}" for name, text in (preset_help or {}).items()).replace("%", "%%")
        parser.add_argument("--preset", type=one_of("preset", presets), metavar="NAME", help=lines)
        parser.basic.add("preset")
