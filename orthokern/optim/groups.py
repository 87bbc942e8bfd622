"""One optimizer for a whole model: geodesic steps for orthonormal bases, and any torch optimizer for the other
parameters, with separate rates for spectra."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orthokern.errors import InputError, is_number, number, require, unknown_name
from orthokern.optim._checks import check_range, check_rate, shown
from orthokern.optim.geodesic import GeodesicSGD, counters_on_host

# geodesic: orthonormal bases; spectrum: singular values; skew: generators of an exponential; rotation: moduli and
# angles of eigenvalues; other: everything else
ROLES = ("geodesic", "spectrum", "skew", "rotation", "other")
# Options of torch's optimizers that schedulers cycle, and the values that stand for no momentum
_MOMENTA: dict[str, Any] = {"momentum": 0.0, "betas": (0.0, 0.0)}


class _Entry(NamedTuple):
    """A parameter; margin and spectrum_map are those of its module if it is a spectrum."""

    name: str
    parameter: Tensor
    margin: float | None
    spectrum_map: str


def _named_split(model: nn.Module) -> dict[str, list[_Entry]]:
    """Role -> its parameters, each once, in the order of model.named_parameters()."""
    require(isinstance(model, nn.Module), "model", "a torch.nn.Module", type(model).__name__)
    roles: dict[Tensor, tuple[str, float | None, str]] = {}
    for path, module in model.named_modules():
        own: Any = getattr(module, "parameter_roles", dict)
        for name, role in own().items():
            require(role in ROLES, f"role of {path}.{name}", f"one of {', '.join(ROLES)}", repr(role))
            if role != "other":
                margin = getattr(module, "margin", None) if role == "spectrum" else None
                roles[getattr(module, name)] = (role, margin, getattr(module, "spectrum_map", "sigmoid"))
    split: dict[str, list[_Entry]] = {role: [] for role in ROLES}
    for name, p in model.named_parameters():
        role, margin, spectrum_map = roles.get(p, ("other", None, "sigmoid"))
        split[role].append(_Entry(name, p, margin, spectrum_map))
    return split


def split_parameters(model: nn.Module) -> dict[str, list[Any]]:
    """Group a model's parameters by role.

    Args:
        model: any module. The roles are those of `parameter_roles()`, {parameter name: role}, of all modules in it that
            have this method. A module with the role "spectrum" also has `margin`, a number or None, and may have
            `spectrum_map`, "tanh" or "sigmoid" (the default).

    Returns:
        {"geodesic": [parameter, ...], the orthonormal bases; "spectrum": [(parameter, margin), ...], where margin is
        None if the parameter is the spectrum itself; "skew", "rotation", "other": [parameter, ...]}. Each parameter
        appears once.

    Example::

        >>> from orthokern.nn import FactorizedRNN
        >>> sorted(role for role, parameters in split_parameters(FactorizedRNN(3, 8)).items() if parameters)
        ['geodesic', 'other', 'spectrum']
    """
    split = _named_split(model)
    return {
        role: [(entry.parameter, entry.margin) if role == "spectrum" else entry.parameter for entry in entries]
        for role, entries in split.items()
    }


class CombinedOptimizer(Optimizer):
    """Several optimizers with disjoint parameters, with the interface of one.

    `param_groups` and `state` are those of all parts: a learning rate scheduler, or a loop that sets group["lr"],
    changes the parts. `state_dict()` has torch's usual form, {"state", "param_groups"}, over all groups in the order of
    the parts. `step(closure)` calls the closure once, then steps the parts in order. If a part raises (as GeodesicSGD
    does for NaN gradients), the parts after it do not step; such a part should come first.

    `param_groups` and `state` are new containers at each access, so that `optimizer.param_groups[1:] = []` and
    `optimizer.state.clear()` have no effect: change those of a part, `optimizer.parts["euclidean"].state.clear()`. A
    scheduler that cycles the momentum (torch's OneCycleLR and CyclicLR) has no effect on the momentum of the geodesic
    part, which has none. These schedulers and SWALR replace the rates of all groups: pass one rate per group,
    `max_lr=[group["lr"] for group in optimizer.param_groups]`. If groups with different initial rates get a single
    number, `step` raises InputError. It cannot detect this for CyclicLR with `cycle_momentum=False`. `eta_min` of the
    cosine schedules is one rate for all groups too: keep it below the smallest one.

    Args:
        parts: name -> optimizer. LBFGS, which needs several evaluations per step, is not accepted.

    Raises:
        InputError: no parts, a part that is not an optimizer, a parameter in two parts, or LBFGS.

    Example::

        >>> weight, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
        >>> parts = {"weights": torch.optim.SGD([weight], lr=0.1), "biases": torch.optim.Adam([bias], lr=0.01)}
        >>> optimizer = CombinedOptimizer(parts)
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.1, 0.01]
    """

    _one_rate = True  # whether all groups began with the same rate, or had it in the state_dict loaded last

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        require(isinstance(parts, Mapping) and parts, "parts", "a dict of at least one optimizer", shown(parts))
        for name, part in parts.items():
            fits = isinstance(part, Optimizer) and not isinstance(part, torch.optim.LBFGS)
            accepted = "a torch.optim.Optimizer that evaluates its closure once per step"
            require(fits, f"part {name!r}", accepted, type(part).__name__)
        seen: dict[Tensor, str] = {}
        for name, part in parts.items():
            for p in (p for group in part.param_groups for p in group["params"]):
                if seen.setdefault(p, name) != name:
                    raise InputError(
                        f"a parameter of shape {tuple(p.shape)} is in parts {seen[p]!r} and {name!r}; accepted: in one"
                    )
        self.parts = dict(parts)
        self._complete = False
        # also before Optimizer.__init__: param_groups reads them
        self.defaults = {n: part.defaults[n] for part in parts.values() for n in _MOMENTA if n in part.defaults}
        super().__init__(self.param_groups, self.defaults)
        self._one_rate = self._alike()
        self._complete = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """A new list of the groups of all parts, which are not copied."""
        groups = [group for part in self.parts.values() for group in part.param_groups]
        for group in groups:  # schedulers that cycle momentum set it in all groups, also where the optimizer has none
            for name in _MOMENTA.keys() & self.defaults.keys():
                group.setdefault(name, _MOMENTA[name])
        return groups

    @param_groups.setter
    def param_groups(self, _: list[dict[str, Any]]) -> None:
        """Ignores the empty list that Optimizer.__init__ assigns: the groups are those of the parts."""

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """A new dict of the states of all parts, which are not copied."""
        merged: defaultdict[Tensor, Any] = defaultdict(dict)
        for part in self.parts.values():
            merged.update(part.state)
        return merged

    @state.setter
    def state(self, _: defaultdict[Tensor, Any]) -> None:
        """Ignored, as for param_groups."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: add a group to a part, `optimizer.parts["euclidean"].add_param_group({"params": [(name, p), ...]})`.
        The groups of `optimizer_for` have names, so torch accepts only groups with names."""
        if self._complete:  # else Optimizer.__init__ calls it, for groups that the parts already hold
            raise InputError(
                f"a CombinedOptimizer has no groups of its own; add the group to a part: {', '.join(self.parts)}; with "
                "the names of the parameters, as from module.named_parameters(), if the part has names"
            )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every part, in order; the closure, if any, is called once, and its value returned.

        Raises InputError, before any part steps, for a learning rate that is not finite or below 0, and if a scheduler
        has given one rate to groups that had different ones.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):  # before the first part changes anything
            check_rate(index, group)
        self._check_schedule()
        for part in self.parts.values():
            part.step()
        return loss

    def _alike(self) -> bool:
        """Whether all groups have the same rate, before the factors of schedulers."""
        rates = [group.get("initial_lr", group.get("lr")) for group in self.param_groups]
        return len({float(rate) if isinstance(rate, Tensor) else rate for rate in rates}) == 1

    def _check_schedule(self) -> None:
        """InputError if a scheduler has given one rate to groups that had different ones."""
        # OneCycleLR, CyclicLR and SWALR replace rates; they leave these entries in the groups
        groups = self.param_groups
        replaced = any("max_lr" in group or "base_momentum" in group for group in groups) and self._alike()
        averaged = all("swa_lr" in group for group in groups) and len({group["swa_lr"] for group in groups}) == 1
        if not self._one_rate and (replaced or averaged):
            raise InputError(
                "a scheduler has set one learning rate for all groups, U and V too; accepted: one rate per group, "
                'as max_lr=[group["lr"] for group in optimizer.param_groups] (SWALR: swa_lr); no parameter was changed'
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned for an optimizer of the same groups; InputError if the groups differ."""
        require(isinstance(state_dict, Mapping), "state_dict", "a dict", type(state_dict).__name__)
        saved, groups = state_dict.get("param_groups", []), self.param_groups
        ours = [(group.get("role"), len(group["params"])) for group in groups]
        theirs = [(group.get("role"), len(group["params"])) for group in saved]
        require(ours == theirs, "groups (role, parameters) of the state_dict", ours, theirs)
        super().load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """torch's state_dict, with every number of a group on the host."""
        return counters_on_host(super().state_dict())

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "parts": self.parts, "_complete": True, "_one_rate": self._one_rate}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "parts" in state:  # unpickled or copied
            super().__setstate__(state)
            return
        groups, loaded = list(state["param_groups"]), state["state"]  # from Optimizer.load_state_dict
        for part in self.parts.values():
            own, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            parameters = {p for group in own for p in group["params"]}
            part_state: defaultdict[Tensor, Any] = defaultdict(dict)
            part_state.update({p: value for p, value in loaded.items() if p in parameters})
            part.__setstate__({"state": part_state, "param_groups": own})
        self._one_rate = self._alike()


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside the wrappers of torch.compile and data parallelism, whose parameters have other names."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def optimizer_for(
    model: nn.Module,
    *,
    lr: float | Mapping[str, float] = 1e-3,
    geodesic_lr: float | None = None,
    steps: int = 100,
    spectrum_lr: float | None = None,
    skew_lr: float | None = None,
    rotation_lr: float | None = None,
    euclidean: Callable[..., Optimizer] = torch.optim.RMSprop,
    basis_clip: float | None = None,
    geodesic: Callable[..., Optimizer] = GeodesicSGD,
    geodesic_options: Mapping[str, Any] | None = None,
    **euclidean_kwargs: Any,
) -> CombinedOptimizer:
    """One optimizer for all parameters of a model, with the update that each kind of parameter needs.

    Bases are trained by GeodesicSGD at `geodesic_lr`, all other parameters by the `euclidean` optimizer. Spectra have
    one group per margin m and map, at `spectrum_lr` / (2 m), since ds/dp is proportional to 2m (Vorontsov et al. 2017,
    below eq. 11); for the map "tanh", where p is half as large for the same s, at `spectrum_lr` / (4 m), so that with
    an optimizer whose steps do not scale with the gradient (RMSprop, Adam) s changes in the same way for both maps. A
    margin of 0 freezes its group (lr 0); for a margin of None (s itself is the parameter) the rate is `spectrum_lr`.
    Generators of an exponential (ExpRNN, NonNormalRNN) have the rate `skew_lr`, and the state of the optimizer is
    adapted whenever their base moves. Moduli and angles of eigenvalues have the rate `rotation_lr`, all others `lr`.
    The model may have no bases or spectra.

    Weight decay in `euclidean_kwargs` applies to s if s is the parameter (then it is the decay of W itself) but not to
    p, since decaying p would move s to 1. To decay that W, see orthokern.penalties.composite_weight_decay. Weight decay
    does not apply to generators, or to moduli and angles of eigenvalues.

    Args:
        model: any module, also in torch.compile, DataParallel or DistributedDataParallel; see split_parameters.
        lr: rate of the other parameters; or a dict with one rate for each child module that has such parameters, by
            name. Each child then has a separate group, whose role is the name of the child.
        geodesic_lr: rate of the bases. None: the smaller of 0.4 / N, for the largest N, and 0.02 / `steps`, which
            docs/choosing.md explains.
        steps: approximate number of time steps over which the model has to remember; used for the default of
            `geodesic_lr`.
        spectrum_lr: rate of the spectra before the division; None for `lr`. Required if `lr` is a dict and the model
            has spectra.
        skew_lr: rate of the generators of an exponential; None for `lr`. Required if `lr` is a dict and the model has
            generators. The literature uses `lr` / 10.
        rotation_lr: rate of moduli and angles of eigenvalues (RotationRNN, NonNormalRNN); None for the rate of the
            other parameters. If a state is remembered over n steps, a change of an angle is applied n times. For a
            RotationRNN with a memory of many steps, pass about 1 / n.
        euclidean: an optimizer class, or a callable, with arguments (groups, lr=..., **euclidean_kwargs).
        basis_clip: clip the joint gradient norm of all bases of the model; None: no clipping.
        geodesic: GeodesicSGD or GeodesicRMSprop, or a callable with their arguments.
        geodesic_options: further keyword arguments of `geodesic`.
        euclidean_kwargs: further keyword arguments of `euclidean`. `maximize` is also that of `geodesic`, unless
            `geodesic_options` has one.

    Returns:
        A CombinedOptimizer with the parts "geodesic" and "euclidean", if there are parameters for them. Each group has
        "role": "geodesic", "other" (or a child's name), "rotation", "skew" or "spectrum"; a spectrum group also has
        "margin" and "spectrum_map".

    Raises:
        InputError: one of these:
            - a rate that is not a finite number of at least 0;
            - `euclidean` is LBFGS, or `euclidean` or `geodesic` cannot be called;
            - a model without parameters;
            - a dict `lr` that lacks a child or has an unknown one;
            - a dict `lr` without `spectrum_lr` or `skew_lr`, for a model that has spectra or generators;
            - `steps` or `basis_clip` out of range, or bases or options that GeodesicSGD does not accept.
        TypeError: an argument that `euclidean` or `geodesic` does not have.

    Example::

        >>> from orthokern.nn import FactorizedRNN
        >>> model = torch.nn.ModuleDict({"rnn": FactorizedRNN(10, 64), "readout": torch.nn.Linear(64, 10)})
        >>> optimizer = optimizer_for(model, lr={"rnn": 1e-3, "readout": 1e-2}, spectrum_lr=1e-3, geodesic_lr=1e-5)
        >>> [(group["role"], group["lr"]) for group in optimizer.param_groups]  # spectrum: 1e-3 / (2 * 0.1)
        [('geodesic', 1e-05), ('rnn', 0.001), ('readout', 0.01), ('spectrum', 0.005)]
    """
    for option, kind in (("euclidean", euclidean), ("geodesic", geodesic)):
        require(callable(kind), option, "an optimizer class or a function that returns an optimizer", repr(kind))
    is_lbfgs = isinstance(euclidean, type) and issubclass(euclidean, torch.optim.LBFGS)
    require(not is_lbfgs, "euclidean", "an optimizer that takes several groups", "LBFGS")
    require(
        basis_clip is None or (is_number(basis_clip) and basis_clip > 0),
        "basis_clip",
        "a number above 0, or None",
        repr(basis_clip),
    )
    require(isinstance(geodesic_options, Mapping | None), "geodesic_options", "a dict, or None", repr(geodesic_options))
    model = _unwrapped(model)
    split = _named_split(model)
    number("steps", steps, "a number of at least 1", lambda value: value >= 1)
    if geodesic_lr is None:
        geodesic_lr = min([0.02 / steps, *(0.4 / entry.parameter.shape[-2] for entry in split["geodesic"])])
    rates = _checked_rates(split, lr, geodesic_lr, {"spectrum": spectrum_lr, "skew": skew_lr})
    if rotation_lr is not None:
        check_range("rotation_lr", rotation_lr)
    require(any(split.values()), "model", "a module with parameters", type(model).__name__)
    parts: dict[str, Optimizer] = {}
    if split["geodesic"]:
        group = _group(split["geodesic"], "geodesic", geodesic_lr)
        shared = {name: euclidean_kwargs[name] for name in ("maximize",) if name in euclidean_kwargs}
        options = {"max_grad_norm": basis_clip, **shared, **(geodesic_options or {})}
        parts["geodesic"] = geodesic([group], geodesic_lr, **options)
    groups = [_group(entries, child or "other", rate) for child, rate, entries in _by_child(split["other"], lr)]
    for _, rate, entries in _by_child(split["rotation"], lr):
        rate = rate if rotation_lr is None else rotation_lr
        groups.append({**_group(entries, "rotation", rate), "weight_decay": 0.0})
    if split["skew"]:
        groups.append({**_group(split["skew"], "skew", rates["skew_lr"]), "weight_decay": 0.0})
    groups += _spectrum_groups(split["spectrum"], rates.get("spectrum_lr"))  # without spectra there may be none
    if groups:
        try:
            parts["euclidean"] = euclidean(groups, lr=groups[0]["lr"], **euclidean_kwargs)
        except TypeError as error:
            raise TypeError(f"{error} (optimizer_for passes on all arguments that it does not have itself)") from error
    for module in model.modules():
        track = getattr(module, "track_optimizer", None)
        if callable(track):
            track(parts["euclidean"])
    return CombinedOptimizer(parts)


def _checked_rates(
    split: dict[str, list[_Entry]],
    lr: float | Mapping[str, float],
    geodesic_lr: float,
    own: dict[str, float | None],
) -> dict[str, Any]:
    """The rates of `optimizer_for` by name, each a finite number of at least 0; `own`: role -> its rate, or None."""
    rates: dict[str, Any] = {"lr": lr}
    if isinstance(lr, Mapping):
        rates = {f"lr of {child}": rate for child, rate in lr.items()}
        children = {entry.name.partition(".")[0]: None for entries in split.values() for entry in entries}
        for child in lr:
            if child not in children:
                raise unknown_name("child in lr", child, children)
    for role, rate in own.items():
        if rate is not None or not isinstance(lr, Mapping):
            rates[f"{role}_lr"] = lr if rate is None else rate
        else:
            require(not split[role], f"{role}_lr", "a number, since lr is a dict", "None")
    rates["geodesic_lr"] = geodesic_lr
    for name, rate in rates.items():
        check_range(name, rate)
    return rates


def _by_child(
    entries: list[_Entry], lr: float | Mapping[str, float]
) -> Iterator[tuple[str | None, float, list[_Entry]]]:
    """(child or None, rate, its entries) of `optimizer_for`, in the order of `lr`."""
    if not isinstance(lr, Mapping):
        if entries:
            yield None, lr, entries
        return
    for entry in entries:
        child = entry.name.partition(".")[0]
        if child not in lr:
            raise InputError(f"lr has no rate for {child!r}: accepted is one for each child of the model")
    for child, rate in lr.items():
        own = [entry for entry in entries if entry.name.partition(".")[0] == child]
        if own:
            yield child, rate, own


def _spectrum_groups(entries: list[_Entry], spectrum_lr: Any) -> list[dict[str, Any]]:
    """One group for the spectra of each margin and map, see `optimizer_for`."""
    alike: dict[tuple[float | None, str], list[_Entry]] = {}
    for entry in entries:
        alike.setdefault((entry.margin, entry.spectrum_map), []).append(entry)
    groups: list[dict[str, Any]] = []
    for (margin, spectrum_map), same in alike.items():
        constraint = {"margin": margin, "spectrum_map": spectrum_map}
        if margin is None:
            groups.append({**_group(same, "spectrum", spectrum_lr), **constraint})
            continue
        scale = (2.0 if spectrum_map == "sigmoid" else 4.0) * margin
        rate = spectrum_lr / scale if margin > 0.0 else 0.0
        finite = rate <= torch.finfo(torch.float32).max
        require(finite, "spectrum_lr", f"a rate that can be divided by the margin of {margin:g}", f"{spectrum_lr:g}")
        groups.append({**_group(same, "spectrum", rate), **constraint, "weight_decay": 0.0})
    return groups


def _group(entries: list[_Entry], role: str, lr: Any) -> dict[str, Any]:
    return {
        "params": [entry.parameter for entry in entries],
        "param_names": [entry.name for entry in entries],
        "role": role,
        "lr": lr.clone() if isinstance(lr, Tensor) else lr,  # each group has its own, which a scheduler multiplies
    }
