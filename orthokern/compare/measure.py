"""The comparison: runs both models on the same inputs, compares the results with float64, and times them in turns."""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orthokern import dispatch
from orthokern.compare.result import Comparison, Errors, Times
from orthokern.conversion import Conversion, Report, convert
from orthokern.errors import BackendUnavailable, InputError
from orthokern.nn._checks import positive_int

SECONDS = 60.0  # no new round of timing after this, once there are LEAST_ROUNDS
LEAST_ROUNDS = 3
# The error of orthokern against float64 may be FACTOR times that of torch, plus FLOOR units of rounding of the largest
# value: two orders of summation differ by that much. Where a unit of relu lies within rounding of its kink, the two may
# take different branches, and a gradient then differs by more. TRIALS draws that all disagree are no such accident.
FACTOR, FLOOR, TRIALS = 4.0, 64.0, 3


def compare(module: nn.Module, *inputs: Any, rounds: int = 11, backend: str | None = None, seed: int = 0) -> Comparison:
    """Run a model and its conversion on the same inputs, and compare times, memory and results.

    The results of both are compared with those of the same model in float64, so that their difference can be compared
    with the rounding error of torch itself. The function works on copies: the given module is not changed. Dropout is
    disabled in both models.

    Args:
        module: the model, in the mode (train or eval) to compare.
        inputs: inputs of its forward; tensors, or PackedSequences, tuples, lists and dictionaries of tensors.
        rounds: number of timed rounds of each model. If they take more than a minute there are fewer, but at least 3.
        backend: backend of orthokern's modules; see ``orthokern.functional``.
        seed: seed of the cotangents, and of random numbers in forward.

    Returns:
        A `Comparison`; print it, or read its attributes.

    Raises:
        InputError: the model has no module that can be replaced, or it or an input is on the meta device; or its
            forward or backward raises, or its forward returns no floating-point tensor or is random even with a fixed
            seed.

    Example::

        >>> from orthokern.compare import compare
        >>> found = compare(torch.nn.GRU(8, 16), torch.randn(20, 4, 8), rounds=3)
        >>> found.agree
        True
    """
    rounds = positive_int("rounds", rounds)
    theirs = _copy(module)
    refuse_meta(theirs, inputs)
    notes = _without_dropout(theirs)
    ours, report = convert(theirs, backend=backend)
    if not report.swapped:
        raise InputError(f"{type(module).__name__} has no torch.nn.RNN or torch.nn.GRU to swap{_why_not(report)}")
    run = _Run(inputs, seed)
    if run.is_random(theirs):
        theirs.eval()
        ours.eval()
        notes.append("forward draws random numbers: both models run in eval mode")
        if run.is_random(theirs):
            raise InputError(f"forward of {type(module).__name__} is random in eval mode too: nothing to compare")
    backends = _backends(Conversion(ours, report))
    with_backward = run.differentiable(theirs)
    if not with_backward:
        notes.append("no output depends on a parameter that requires gradients: forward only")
    outputs, gradients, trials = _agreement(theirs, ours, run, with_backward)
    if trials > 1 and outputs.agree and (gradients is None or gradients.agree):
        notes.append(f"agreed at draw {trials} of the weights: near a kink of relu rounding decides the branch")
    kept = (_kept_mib(theirs, run), _kept_mib(ours, run))
    forward, backward, peaks = _time(theirs, ours, run, rounds, with_backward)
    if len(forward.torch) < rounds:
        notes.append(f"{len(forward.torch)} rounds instead of {rounds}: they took {SECONDS:.0f} s")
    return Comparison(
        _head(module, run), report, backends, forward, backward, kept, peaks, outputs, gradients, tuple(notes)
    )


def _copy(module: nn.Module) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise InputError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise InputError(f"the model cannot be copied ({first_line(error)})") from error


def refuse_meta(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Rejects a model or inputs on the meta device, whose tensors have no values."""
    named = [*module.named_parameters(), *module.named_buffers(), *(("an input", t) for t in tensors(inputs))]
    for name, tensor in named:
        if tensor.is_meta:
            raise InputError(f"{name} of {type(module).__name__} is on the device meta; accepted: tensors with values")


def first_line(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _why_not(report: Report) -> str:
    return "".join(f"; {each.name or 'the module itself'} ({each.was}): {each.reason}" for each in report.kept)


def _without_dropout(module: nn.Module) -> list[str]:
    """Switches off what would drop units at random; what there is to say of it."""
    found = False
    for each in module.modules():
        if isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0:
            each.p, found = 0.0, True
        elif isinstance(each, nn.RNNBase) and each.dropout > 0:
            each.dropout, found = 0.0, True
    return ["dropout is switched off in both models"] if found else []


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in an output or input: of tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """An input with every tensor changed; a PackedSequence keeps its sizes."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return nn.utils.rnn.PackedSequence(change(value.data), *value[1:])
    if isinstance(value, Mapping):
        return {name: mapped(each, change) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, change) for each in value))
    if isinstance(value, tuple | list):
        return type(value)(mapped(each, change) for each in value)
    return value


class _Run:
    """One set of inputs and cotangents, to run a model with."""

    def __init__(self, inputs: tuple[Any, ...], seed: int) -> None:
        self.inputs, self.seed = inputs, seed
        self.device = next((t.device for t in tensors(inputs)), torch.device("cpu"))
        self._cotangents: list[Tensor] = []

    def given(self) -> tuple[Any, ...]:
        """The inputs, with gradients for those that asked for them."""
        made: tuple[Any, ...] = mapped(self.inputs, lambda t: t.detach().requires_grad_(t.requires_grad))
        return made

    def leaves(self, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        """The inputs, with gradients for all floating ones, and these in `dtype`."""

        def leaf(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            return t.detach().to(dtype or t.dtype, copy=True).requires_grad_()

        made: tuple[Any, ...] = mapped(self.inputs, leaf)
        return made

    def forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
        """The floating tensors of the output."""
        torch.manual_seed(self.seed)
        try:
            output = module(*inputs)
        except (InputError, BackendUnavailable, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of a user's model
            shapes = ", ".join(f"{list(t.shape)} {dispatch.dtype_name(t.dtype)}" for t in tensors(inputs))
            raise InputError(
                f"forward of {type(module).__name__} raised {first_line(error)}, with input {shapes}; "
                "the factory may return (model, input, ...) to choose the input"
            ) from error
        found = [t for t in tensors(output) if t.is_floating_point()]
        if not found:
            raise InputError(f"forward of {type(module).__name__} returns no floating tensor: nothing to compare")
        return found

    def is_random(self, module: nn.Module) -> bool:
        """Whether two seeds give two results."""
        with torch.no_grad():
            first = self.forward(module, self.given())
            self.seed += 1
            second = self.forward(module, self.given())
            self.seed -= 1
        return any(not torch.equal(a, b) for a, b in zip(first, second, strict=True) if not a.isnan().any())

    def differentiable(self, module: nn.Module) -> bool:
        """Whether there is anything to run backward from."""
        return any(t.requires_grad for t in self.forward(module, self.given()))

    def cotangents(self, outputs: list[Tensor]) -> list[Tensor]:
        """Random numbers of the outputs' shapes, the same ones for every model."""
        if not self._cotangents:
            generator = torch.Generator().manual_seed(self.seed)
            self._cotangents = [torch.randn(t.shape, generator=generator, device="cpu").to(t.device) for t in outputs]
        return [c.to(t.dtype) for c, t in zip(self._cotangents, outputs, strict=True)]

    def backward(self, module: nn.Module, outputs: list[Tensor]) -> None:
        pairs = [(t, c) for t, c in zip(outputs, self.cotangents(outputs), strict=True) if t.requires_grad]
        try:
            torch.autograd.backward([t for t, _ in pairs], [c for _, c in pairs])
        except (InputError, BackendUnavailable, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of a user's model: as one that changes the output of a recurrence in place
            raise InputError(f"backward of {type(module).__name__} raised {first_line(error)}") from error

    def results(
        self, module: nn.Module, with_backward: bool, dtype: torch.dtype | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs, and the gradients of parameters and floating inputs."""
        inputs = self.leaves(dtype)
        module.zero_grad(set_to_none=True)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype or default)  # of the states that a forward makes with torch.zeros
        try:
            outputs = self.forward(module, inputs)
        finally:
            torch.set_default_dtype(default)
        gradients: list[Tensor] = []
        if with_backward:
            self.backward(module, outputs)
            wanted = [*module.parameters(), *(t for t in tensors(inputs) if t.is_floating_point())]
            gradients = [t.grad if t.grad is not None else torch.zeros_like(t) for t in wanted]
            module.zero_grad(set_to_none=True)
        return [t.detach() for t in outputs], gradients


# ---- agreement ---------------------------------------------------------------------------------------------------


def _agreement(theirs: nn.Module, ours: nn.Module, run: _Run, with_backward: bool) -> tuple[Errors, Errors | None, int]:
    """Errors of outputs and gradients, and at which draw of the weights. The first draw is the model's own."""
    parameters = [p for p in theirs.parameters() if p.is_floating_point()]
    own = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(run.seed)
    first = None
    try:
        for trial in range(1, TRIALS + 1):
            errors = _errors(theirs, ours, run, with_backward)
            if all(each.agree for each in errors if each is not None):
                return *errors, trial
            first = first or errors
            with torch.no_grad():
                for p, q, value in zip(parameters, _twins(theirs, ours, parameters), own, strict=True):
                    noise = torch.randn(value.shape, generator=generator, dtype=torch.float32, device="cpu").to(value)
                    p.copy_(value * (1 + 1e-3 * noise))
                    q.copy_(p)
        assert first is not None
        return *first, TRIALS
    finally:
        with torch.no_grad():
            for p, q, value in zip(parameters, _twins(theirs, ours, parameters), own, strict=True):
                p.copy_(value)
                q.copy_(value)


def _twins(theirs: nn.Module, ours: nn.Module, parameters: list[nn.Parameter]) -> list[Tensor]:
    """The parameters of our model in the order of theirs: the names are the same."""
    by_name = dict(ours.named_parameters(remove_duplicate=False))
    names = {id(p): name for name, p in theirs.named_parameters(remove_duplicate=False)}
    return [by_name[names[id(p)]] for p in parameters]


def _errors(theirs: nn.Module, ours: nn.Module, run: _Run, with_backward: bool) -> tuple[Errors, Errors | None]:
    exact = run.results(copy.deepcopy(theirs).double(), with_backward, torch.float64)
    of_torch = run.results(theirs, with_backward)
    of_ours = run.results(ours, with_backward)
    scale = 1.0
    if all(t.dtype == torch.float64 for t in of_torch[0]):
        # The exact results are torch's own here: its rounding is that in float32, scaled by the units of rounding.
        scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        of_torch = run.results(copy.deepcopy(theirs).float(), with_backward, torch.float32)
    found = []
    for part in (0, 1) if with_backward else (0,):
        plain, mine, truth = of_torch[part], of_ours[part], exact[part]
        if not len(plain) == len(mine) == len(truth):
            raise InputError("the model returns another number of tensors in float64: nothing to compare")
        if part == 0 and not any(bool(t.isfinite().any()) for t in truth):
            raise InputError("no output of the model is a finite number, also in float64: nothing to compare")
        rounding = _largest(plain, truth) * scale
        eps = max((torch.finfo(t.dtype).eps for t in mine), default=0.0)
        allowed = FACTOR * rounding + FLOOR * eps
        between = _largest(mine, plain if scale == 1.0 else truth)
        found.append(Errors(rounding, _largest(mine, truth), between, allowed))
    return found[0], found[1] if with_backward else None


def _largest(values: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference, relative to the largest value of each tensor; NaN where one alone is not finite."""
    worst = 0.0
    for a, b in zip(values, others, strict=True):
        if a.numel() == 0:
            continue
        a, b = a.detach().double().cpu(), b.detach().double().cpu()
        same = (a == b) | (a.isnan() & b.isnan())
        off = torch.where(same, torch.zeros_like(a), (a - b).abs())
        top = float(b[b.isfinite()].abs().max()) if bool(b.isfinite().any()) else 0.0
        error = float(off.max()) / (top if top > 0 else 1.0)
        if not error <= worst:  # NaN too
            worst = error
        if worst != worst:
            return worst
    return worst


# ---- time and memory ---------------------------------------------------------------------------------------------


def _kept_mib(module: nn.Module, run: _Run) -> float:
    """MiB of the storages that the graph of one forward holds, without those of parameters and inputs."""
    inputs = run.given()
    given = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers(), *tensors(inputs)]}
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in given:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = run.forward(module, inputs)
    del outputs
    return sum(found.values()) / 2**20


def _time(
    theirs: nn.Module, ours: nn.Module, run: _Run, rounds: int, with_backward: bool
) -> tuple[Times, Times | None, tuple[float, float] | None]:
    """Times in turns, after two rounds that do not count; and the peaks of memory on a CUDA device."""
    cuda = run.device.type == "cuda"

    def now() -> float:
        if cuda:
            torch.cuda.synchronize(run.device)
        return time.perf_counter()

    inputs = run.given()
    forward: tuple[list[float], list[float]] = ([], [])
    backward: tuple[list[float], list[float]] = ([], [])
    peaks = [0.0, 0.0]
    started = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(-2, rounds):
            if number >= LEAST_ROUNDS and time.perf_counter() - started > SECONDS:
                break
            order = (0, 1) if number % 2 == 0 else (1, 0)
            for which in order:
                module = (theirs, ours)[which]
                module.zero_grad(set_to_none=True)
                if cuda:
                    torch.cuda.reset_peak_memory_stats(run.device)
                start = now()
                outputs = run.forward(module, inputs)
                middle = now()
                if with_backward:
                    run.backward(module, outputs)
                    end = now()
                if number >= 0:
                    forward[which].append(1e3 * (middle - start))
                    if with_backward:
                        backward[which].append(1e3 * (end - middle))
                    if cuda:
                        peaks[which] = max(peaks[which], torch.cuda.max_memory_allocated(run.device) / 2**20)
                del outputs
                for t in tensors(inputs):
                    t.grad = None
    finally:
        if collecting:
            gc.enable()
    theirs.zero_grad(set_to_none=True)
    ours.zero_grad(set_to_none=True)
    return (
        Times(tuple(forward[0]), tuple(forward[1])),
        Times(tuple(backward[0]), tuple(backward[1])) if with_backward else None,
        (peaks[0], peaks[1]) if cuda else None,
    )


# ---- text --------------------------------------------------------------------------------------------------------


def _head(module: nn.Module, run: _Run) -> str:
    shapes = ", ".join(f"{list(t.shape)} {dispatch.dtype_name(t.dtype)}" for t in tensors(run.inputs))
    cuda = run.device.type == "cuda"
    place = torch.cuda.get_device_name(run.device) if cuda else f"cpu, threads: {torch.get_num_threads()}"
    mode = "training" if module.training else "eval"
    return f"{type(module).__name__}, {mode} mode, input {shapes}; {place}; torch {torch.__version__}"


def _backends(conversion: Conversion) -> tuple[str, ...]:
    """Which backend serves each swapped module, and why none of those before it in the order of "auto"."""
    lines = []
    for each in conversion.report.swapped:
        module: Any = conversion.module.get_submodule(each.name)
        op, sizes = module._op()
        weight = module.weight_hh_l0
        call = dispatch.Call(weight.device, weight.dtype, sizes)
        chosen = dispatch.choose(op, module.backend, call)
        asked = dispatch.requested(module.backend)
        if asked == "auto":
            before = dispatch.AUTO_ORDER[: dispatch.AUTO_ORDER.index(chosen)]
            reasons = [f"{name}: {' and '.join(dispatch.reasons(op, name, call))}" for name in before]
            why = "; ".join(reasons) or "the first in the order of auto"
        else:
            why = "asked for"
        lines.append(f"backend of {each.name or 'the module itself'}: {chosen} ({op}; {why})")
    return tuple(lines)
