"""Replace the torch.nn.RNN and torch.nn.GRU modules of a model with orthokern's, with the same parameters.

``orthokern.convert`` is the function of this module. ``orthokern.compare.compare`` runs it on a model and compares the
results and times of both.
"""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from orthokern.errors import InputError, require
from orthokern.nn import GRU, RNN
from orthokern.nn._checks import check_backend, flag

__all__ = ["Conversion", "Replaced", "Report", "Skipped", "convert"]

DTYPES = (torch.float32, torch.float64)  # those that a kernel serves in both modules
DEVICES = ("cpu", "cuda", "meta")

_KINDS = (nn.RNN, nn.GRU)
COMPILED = "it is compiled; convert first, then compile"
# The attributes in the __dict__ of torch's modules; any other was set by the user and is carried over.
_OWN = frozenset[str]().union(*(kind(1, 1, device="meta").__dict__ for kind in _KINDS))


@dataclass(frozen=True)
class Replaced:
    """One module that was replaced.

    Attributes:
        name: its name in named_modules; "" for the model itself.
        was: the old module, e.g. "torch.nn.GRU(64, 128)".
        now: the new module, e.g. "orthokern.nn.GRU(64, 128)".
    """

    name: str
    was: str
    now: str


@dataclass(frozen=True)
class Skipped:
    """One recurrent module that was not replaced: its name, its type, and the reason."""

    name: str
    was: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The modules that `convert` replaced and did not replace, in the order of named_modules. str() gives one line per
    module."""

    replaced: tuple[Replaced, ...]
    skipped: tuple[Skipped, ...]

    def __str__(self) -> str:
        lines = [f"replaced {_place(each.name)}: {each.was} -> {each.now}" for each in self.replaced]
        lines += [f"skipped {_place(each.name)}: {each.was}: {each.reason}" for each in self.skipped]
        return "\n".join(lines) or "nothing replaced: no recurrent module found"


class Conversion(NamedTuple):
    """The converted model, and the report."""

    module: nn.Module
    report: Report


def convert(module: nn.Module, *, inplace: bool = False, backend: str | None = None) -> Conversion:
    """Replace the torch.nn.RNN and torch.nn.GRU modules of a model with orthokern's.

    Outputs and gradients are those of torch up to rounding, for both nonlinearities, layers, directions, layouts,
    biases, dropout and PackedSequence. The state_dict has the same names. The new modules hold the same parameter
    objects as the old ones (as their copies with ``inplace=False``): weights that are shared with other modules stay
    shared, and with ``inplace=True`` an existing optimizer stays valid. A module that is registered under several names
    is replaced by one module under all of them. Attributes that the user set are carried over.

    A recurrent module is not replaced if the new one is not faster (torch.nn.LSTM, whose equivalent is
    ``orthokern.nn.LSTM``), or if there is no equivalent module: cells, subclasses, modules with hooks or
    parametrizations, a replaced ``forward`` or additional submodules, 16-bit parameters. The report has the reason.
    Scripted and quantized modules are not in the report.

    There are six differences: the new modules are not instances of torch's, and lack its private attributes; under
    torch.autocast they return float32, because their states are float32; the backward reads their output: after a
    change in place, as by ReLU(inplace=True), torch raises "modified by an inplace operation"; torch.fx needs a Tracer
    whose ``is_leaf_module`` is true for them; they cannot be scripted; and a GRU cannot have 16-bit parameters.

    Args:
        module: the model, on a CPU or a CUDA device, with float32 or float64 recurrent parameters.
        inplace: change the model itself; False changes a copy (copy.deepcopy). A model that is itself a recurrent
            module cannot be changed in place: the module returned is a new one with its parameters.
        backend: backend of the new modules; see ``orthokern.functional``.

    Returns:
        (module, report): the converted model, and a `Report` of the modules that were replaced and not replaced.

    Raises:
        InputError: an argument is not accepted, or the model cannot be copied.

    Example::

        >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.GRU(8, 16))
        >>> model, report = orthokern.convert(model)
        >>> print(report)
        replaced '1': torch.nn.GRU(8, 16) -> orthokern.nn.GRU(8, 16)
    """
    require(isinstance(module, nn.Module), "module", "a torch.nn.Module", type(module).__name__)
    flag("inplace", inplace)
    check_backend("backend", backend)
    module = module if inplace else copied(module, "; accepted: inplace=True")
    successors: dict[int, nn.Module] = {}  # id of an old module -> the new one
    replaced, skipped = [], []
    for name, old in list(module.named_modules(remove_duplicate=False)):
        above, _, last = name.rpartition(".")
        reason = _obstacle(old)
        if reason == "" and last == "_orig_mod":  # of torch.compile, which calls the old module
            reason = COMPILED
        if reason:
            skipped.append(Skipped(name, _describe(old), reason))
        if reason != "":
            continue
        if id(old) not in successors:
            successors[id(old)] = _successor(old, backend)
        new = successors[id(old)]
        replaced.append(Replaced(name, _describe(old), f"orthokern.nn.{new}"))
        if name:
            module.get_submodule(above)._modules[last] = new
        else:
            module = new
    return Conversion(module, Report(tuple(replaced), tuple(skipped)))


def copied(module: nn.Module, otherwise: str = "") -> nn.Module:
    """A deep copy; InputError if that is not possible."""
    try:
        return copy.deepcopy(module)
    except Exception as error:  # a model may hold anything
        message = (str(error).splitlines() or [""])[0]
        raise InputError(f"the model cannot be copied ({type(error).__name__}: {message}){otherwise}") from error


def _place(name: str) -> str:
    return repr(name) if name else "the module itself"


def _describe(module: nn.Module) -> str:
    """E.g. "torch.nn.GRU(64, 128)"."""
    kind = type(module)
    home = "torch.nn" if kind.__module__.startswith("torch.nn.modules.") else kind.__module__
    text = repr(module)
    start = text.find("(")
    inside = text[start:] if start >= 0 and "\n" not in text else "(...)"
    return f"{home}.{kind.__qualname__}{inside}"


def _obstacle(module: Any) -> str | None:
    """Why a module is not replaced; "" for one that is, None for one that is not recurrent at all."""
    kind = type(module)
    if kind not in _KINDS:
        return _foreign(module)
    # torch.nn.Module calls the functions in dictionaries named _..._hooks; the new module would not, at the same place
    hooks = [name for name, value in module.__dict__.items() if name.endswith("_hooks") and value]
    if hooks:
        return f"it has {', '.join(name[1:].replace('_', ' ') for name in hooks)}"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if module.__dict__.get("_compiled_call_impl") is not None:
        return COMPILED
    added = [name for name in module.__dict__ if name not in _OWN and not hasattr(kind, name)]
    settings = [name for name in added if hasattr(_blanks()[kind], name)]
    if settings:
        return f"its attribute {settings[0]} would be a setting of the new module"
    expected = {name for names in module._all_weights for name in names}
    differing = expected ^ {*module._parameters, *module._buffers, *module._modules}
    if differing:
        return (
            f"its parameters, buffers and submodules are not those of {kind.__name__}: {', '.join(sorted(differing))}"
        )
    for name, parameter in module._parameters.items():
        if type(parameter) not in (nn.Parameter, Tensor):
            return f"its {name} is a {type(parameter).__name__}"
        if parameter.dim() != (2 if name.startswith("weight") else 1):
            return f"its {name} has shape {list(parameter.shape)}, as a part of a flat tensor"
        if parameter.dtype not in DTYPES:
            return f"its {name} is {parameter.dtype}; accepted: torch.float32 and torch.float64"
        if parameter.device.type not in DEVICES:
            return f"its {name} is on {parameter.device}; accepted: cpu and cuda"
    return ""


@functools.cache
def _blanks() -> dict[type, nn.Module]:
    """A new module for each of torch's, for the names of its attributes."""
    return {kind: _successor(kind(1, 1, device="meta", dtype=torch.float32), None) for kind in _KINDS}


def _foreign(module: Any) -> str | None:
    """`_obstacle` of a module that is not exactly torch.nn.RNN or torch.nn.GRU."""
    if not isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return None
    if parametrize.is_parametrized(module):
        names = ", ".join(getattr(module, "parametrizations", {}))
        return f"it has parametrizations ({names}); convert first, then parametrize"
    if isinstance(module, nn.LSTM):
        return "orthokern.nn.LSTM, which has the same results without projections, is not faster for all sizes"
    if isinstance(module, nn.RNNCellBase):
        return "a cell runs one step at a time; only modules that run all steps are replaced"
    base = next(each for each in (*_KINDS, nn.RNNBase) if isinstance(module, each))
    return f"it is a subclass of torch.nn.{base.__name__}, which may compute something else"


def _successor(old: nn.Module, backend: str | None) -> nn.Module:
    """orthokern's module that replaces torch's, with its parameters."""
    assert isinstance(old, nn.RNNBase)
    options: dict[str, Any] = {name: bool(getattr(old, name)) for name in ("bias", "batch_first", "bidirectional")}
    options |= {"num_layers": old.num_layers, "dropout": old.dropout, "backend": backend}
    options |= {"device": "meta", "dtype": next(old.parameters()).dtype}
    new: nn.Module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has warned of dropout with one layer
        if isinstance(old, nn.RNN):
            nonlinearity = "relu" if old.mode == "RNN_RELU" else "tanh"
            new = RNN(old.input_size, old.hidden_size, nonlinearity=nonlinearity, **options)
        else:
            new = GRU(old.input_size, old.hidden_size, variant="torch", **options)
    new._parameters.update(old._parameters)
    new.__dict__.update({name: value for name, value in old.__dict__.items() if name not in _OWN})
    new.training = old.training
    return new
