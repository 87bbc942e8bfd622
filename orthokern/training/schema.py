"""Checks of the content of a checkpoint, done before any of it is loaded.

The expected structure is that of a new run: the states of its model, task, schedules and generators are the templates
(`orthokern._state`). The state of an optimizer is created by its first step, so that a copy of the optimizer takes a
step to provide the template. Constructor arguments of optimizers and schedules must be the same as those now.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orthokern._state import check_constants, check_integer, check_like, check_real, check_tensor, constants, misfit
from orthokern.nn._loss import KEY as BASIS
from orthokern.training.task import Task

MOST_RANKS = 2**16
LARGEST_SECONDS = 1e12
LARGEST_RISE = 1e6  # largest ratio of a learning rate to its initial value
_WORD = 2**32 - 1


def json_value(value: Any, depth: int = 8) -> bool:
    """Whether config.json may have this value for a setting."""
    if isinstance(value, list):
        return depth > 0 and all(json_value(inner, depth - 1) for inner in value)
    return value is None or type(value) in (bool, int, float, str)


def check_payload(payload: Mapping[str, Any], fresh: Mapping[str, Any], task: Task) -> None:
    """Checks everything that is loaded from a checkpoint.

    Args:
        payload: the payload of the checkpoint, with all names of `fresh`; "task" and "settings" were compared already.
        fresh: the payload that a checkpoint of the new run would have.
        task: the task of the new run.

    Raises:
        InputError: a value does not fit. The message has its place.
    """
    iteration = check_integer("iteration", payload["iteration"])
    check_real("seconds", payload["seconds"], 0.0, LARGEST_SECONDS)
    check_like("reached", payload["reached"], False)
    _check_best(payload["best"], iteration)
    _check_evaluation(payload["evaluation"])
    if payload["evaluated_at"] is not None:
        check_integer("evaluated_at", payload["evaluated_at"])
    check_model(payload["model"], task)
    _check_optimizer(payload["optimizer"], fresh["optimizer"], task, iteration)
    for name, schedule in (("scheduler", task.scheduler), ("plateau", task.plateau)):
        if schedule is not None:
            _check_schedule(name, payload[name], fresh[name], type(schedule), iteration)
    check_like("average", payload["average"], fresh["average"])
    check_like("task_state", payload["task_state"], fresh["task_state"], unset=True)
    check_rng("rng", payload["rng"], fresh["rng"])
    others = payload["rng_of_other_ranks"]
    if not isinstance(others, list) or len(others) > MOST_RANKS:
        raise misfit("rng_of_other_ranks", others, f"a list of at most {MOST_RANKS}")
    for index, state in enumerate(others):
        check_rng(f"rng_of_other_ranks.{index}", state, fresh["rng"])


def check_model(state: Any, task: Task) -> None:
    """Raises InputError unless a state fits the model of the task and its parameters are finite."""
    check_like("model", state, {**task.model.state_dict(), **_bases(state, task.model)})
    for name, _ in task.model.named_parameters():
        if not bool(state[name].isfinite().all()):
            raise misfit(f"model.{name}", state[name], "finite numbers; some are not")


def _bases(state: Any, model: nn.Module) -> dict[str, Any]:
    """The cached eigenbases in a state. The modules check them when they load them; a new model has none."""
    prefixes = tuple(f"{name}." if name else "" for name, _ in model.named_modules())
    names = [name for name in state if isinstance(name, str) and BASIS in name] if isinstance(state, dict) else []
    return {name: state[name] for name in names if name[: name.index(BASIS)] in prefixes and _is_basis(state[name])}


def _is_basis(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64 and bool(value.isfinite().all())


def _check_best(best: Any, iteration: int) -> None:
    if best is None:
        return
    if not isinstance(best, dict) or best.keys() != {"score", "iteration"}:
        raise misfit("best", best, "None, or a dict of score and iteration")
    check_real("best.score", best["score"])
    check_integer("best.iteration", best["iteration"], 0, iteration)


def _check_evaluation(evaluation: Any) -> None:
    if evaluation is None:
        return
    if not isinstance(evaluation, dict) or not all(type(name) is str for name in evaluation):
        raise misfit("evaluation", evaluation, "None, or a dict of numbers by name")
    for name, value in evaluation.items():
        if type(value) not in (bool, int, float) or type(value) is int and abs(value) > sys.float_info.max:
            raise misfit(f"evaluation.{name}", value, "a number")


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def _check_optimizer(saved: Any, fresh: Mapping[str, Any], task: Task, iteration: int) -> None:
    if not isinstance(saved, dict) or saved.keys() != {"state", "param_groups"}:
        raise misfit("optimizer", saved, "a dict of state and param_groups")
    groups, ours = saved["param_groups"], fresh["param_groups"]
    if not isinstance(groups, list) or len(groups) != len(ours):
        raise misfit("optimizer.param_groups", groups, f"a list of {len(ours)}")
    parts = getattr(task.optimizer, "parts", None) or {"": task.optimizer}
    kinds = [type(part) for part in parts.values() for _ in part.param_groups]
    moving = {"lr"}
    if getattr(task.scheduler, "cycle_momentum", False):
        moving |= {"momentum", "betas"}
    for index, (group, own, kind) in enumerate(zip(groups, ours, kinds, strict=True)):
        _check_group(f"optimizer.param_groups.{index}", group, own, kind, moving)
    parameters = [p for part in task.optimizer.param_groups for p in part["params"]]
    _check_optimizer_state(saved["state"], _after_a_step(task.optimizer), parameters, iteration)


def _check_group(name: str, group: Any, own: Mapping[str, Any], kind: type, moving: set[str]) -> None:
    kept = (constants(kind, own) | {"params", "param_names", "margin", "spectrum_map"} & own.keys()) - moving
    if isinstance(group, dict):  # an older torch may not have had an option of its optimizers: decoupled_weight_decay
        for key in kept - group.keys() - {"params"}:
            group[key] = own[key]
    check_like(name, group, own)
    check_constants(name, group, own, kept)
    began = own.get("initial_lr", own["lr"])
    if not isinstance(began, Tensor) and not isinstance(own["lr"], Tensor):
        check_real(f"{name}.lr", group["lr"], 0.0, LARGEST_RISE * began)


def _after_a_step(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]] | None:
    """The "state" of a copy of the optimizer after one step with zero gradients. None for an optimizer that cannot be
    copied, or whose step needs more than gradients."""
    try:
        probe = copy.deepcopy(optimizer)  # without its hooks
        for group in probe.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        probe.step()
        found: dict[Any, dict[str, Any]] = probe.state_dict()["state"]
    except Exception:  # an optimizer class of another package
        return None
    return found


def _check_optimizer_state(
    saved: Any, like: dict[Any, dict[str, Any]] | None, parameters: list[Tensor], iteration: int
) -> None:
    name = "optimizer.state"
    if not isinstance(saved, dict):
        raise misfit(name, saved, "a dict")
    for key, state in saved.items():
        place = f"{name}.{key}"
        if type(key) is not int or not 0 <= key < len(parameters) or (like is not None and key not in like):
            raise misfit(f"a key of {name}", key, f"a parameter's number below {len(parameters)} that has a state")
        if like is not None:
            check_like(place, state, like[key])
        elif not isinstance(state, dict):
            raise misfit(place, state, "a dict")
        for entry, value in state.items():
            if entry == "step":
                steps = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
                check_real(f"{place}.step", steps, 0.0, iteration)
            elif isinstance(value, Tensor) and like is None and value.dim() > 0:
                check_tensor(f"{place}.{entry}", value, parameters[key])
            # names of running means of squares in the optimizers of torch and of this project
            if isinstance(value, Tensor) and ("_sq" in str(entry) or str(entry).startswith("square")):
                if value.is_floating_point() and bool((value < 0).any()):
                    raise misfit(f"{place}.{entry}", value, "no negative numbers")


# ---- schedules -------------------------------------------------------------------------------------------------------


def _check_schedule(name: str, saved: Any, fresh: dict[str, Any], kind: type, iteration: int) -> None:
    check_like(name, saved, fresh)
    made_with = constants(kind, fresh) - {"last_epoch"}
    # integers may be lengths, which are larger if a run is continued for more iterations
    check_constants(name, saved, fresh, {key for key in made_with if type(fresh[key]) is not int})
    check_constants(name, saved, fresh, {"base_lrs", "min_lrs"} & fresh.keys())
    for key in made_with:
        if type(fresh[key]) is int and fresh[key] > 0:
            check_integer(f"{name}.{key}", saved[key], 1)
    if "last_epoch" in fresh:
        check_integer(f"{name}.last_epoch", saved["last_epoch"], -1, iteration)


# ---- random generators -----------------------------------------------------------------------------------------------


def check_rng(name: str, value: Any, like: Mapping[str, Any]) -> None:
    """Raises InputError unless a value has the structure and ranges of the result of `rng_state`."""
    if not isinstance(value, dict) or value.keys() != like.keys():
        raise misfit(name, value, f"a dict of {', '.join(like)}")
    check_tensor(f"{name}.torch", value["torch"], like["torch"])
    _check_cuda(f"{name}.cuda", value["cuda"])
    version, words, _ = like["python"]
    saved = value["python"]
    if not isinstance(saved, (list, tuple)) or len(saved) != 3 or type(saved[0]) is not int or saved[0] != version:
        raise misfit(f"{name}.python", saved, f"version {version}, {len(words)} integers, and None or a number")
    check_like(f"{name}.python.1", saved[1], words)
    for index, word in enumerate(saved[1]):
        check_integer(f"{name}.python.1.{index}", word, 0, _WORD if index + 1 < len(words) else len(words) - 1)
    if saved[2] is not None:
        check_real(f"{name}.python.2", saved[2])
    # the last one, a cached normal draw, has any sign
    check_like(f"{name}.numpy", value["numpy"], [*like["numpy"][:4], -1.0])
    _, keys, position, has_gauss, _ = value["numpy"]
    if bool((keys < 0).any()) or bool((keys > _WORD).any()):
        raise misfit(f"{name}.numpy.1", keys, f"integers of at most {_WORD}")
    check_integer(f"{name}.numpy.2", position, 0, len(keys))
    check_integer(f"{name}.numpy.3", has_gauss, 0, 1)


def _check_cuda(name: str, states: Any) -> None:
    """Checks the states of GPU generators; there may be any number of GPUs, including none."""
    if not isinstance(states, list) or len(states) > 1024:
        raise misfit(name, states, "a list of tensors")
    for index, state in enumerate(states):
        if not isinstance(state, Tensor) or state.dim() != 1 or state.numel() > 2**16:
            raise misfit(f"{name}.{index}", state, "the state of a GPU's generator")
        check_tensor(f"{name}.{index}", state, torch.empty(state.numel(), dtype=torch.uint8))
