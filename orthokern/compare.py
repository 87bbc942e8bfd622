"""Compare a model that uses torch.nn.RNN or torch.nn.GRU with the same model on orthokern: time, memory, results."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from orthokern import dispatch
from orthokern.conversion import Conversion, Report, convert, copied
from orthokern.errors import InputError, integer, require
from orthokern.nn import GRU

__all__ = ["Comparison", "Errors", "Times", "compare"]

# The error of orthokern against float64 may be FACTOR times that of torch, plus FLOOR units of rounding of the largest
# value: two orders of summation differ by that much. If a relu unit lies within rounding of its kink, the two may take
# different branches, and a gradient then differs by more. If all of TRIALS draws disagree, this is not the reason.
FACTOR, FLOOR, TRIALS = 4.0, 64.0, 3


@dataclass(frozen=True)
class Times:
    """Times of torch and orthokern in ms, one per round. The rounds alternate between the two."""

    torch: tuple[float, ...]
    orthokern: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median time of torch divided by that of orthokern: above 1, orthokern is faster."""
        return statistics.median(self.torch) / statistics.median(self.orthokern)


@dataclass(frozen=True)
class Errors:
    """Largest differences of one kind of result, each relative to the largest value of its tensor.

    Attributes:
        torch: difference between torch and the same computation in float64.
        orthokern: difference between orthokern and the computation in float64.
        between: difference between torch and orthokern.
        allowed: the largest `orthokern` that counts as agreement.
    """

    torch: float
    orthokern: float
    between: float
    allowed: float

    @property
    def agree(self) -> bool:
        """Whether `orthokern` is at most `allowed`; False for NaN."""
        return self.orthokern <= self.allowed


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. str() is a report.

    Attributes:
        head: description of the model, the inputs and the versions.
        report: the report of `orthokern.convert`.
        backends: one line per replaced module: the selected backend and its op.
        forward, backward: times in ms; backward is None if no output depends on a parameter.
        kept_mib: MiB that torch and orthokern keep from forward to backward, without parameters and inputs.
        peak_mib: peak MiB allocated on a CUDA device; None on a CPU.
        outputs, gradients: `Errors` of outputs, and of the gradients for parameters and floating-point inputs;
            gradients is None if backward is None.
        notes: remarks about the run.
    """

    head: str
    report: Report
    backends: tuple[str, ...]
    forward: Times
    backward: Times | None
    kept_mib: tuple[float, float]
    peak_mib: tuple[float, float] | None
    outputs: Errors
    gradients: Errors | None
    notes: tuple[str, ...]

    @property
    def agree(self) -> bool:
        """Whether outputs and gradients agree."""
        return self.outputs.agree and (self.gradients is None or self.gradients.agree)

    def __str__(self) -> str:
        rows = [("", "torch", "orthokern", "")]
        for name, times in (("forward, ms", self.forward), ("backward, ms", self.backward)):
            if times is not None:
                rows.append((name, _spread(times.torch), _spread(times.orthokern), _faster(times.ratio)))
        for name, sizes in (("kept for backward, MiB", self.kept_mib), ("peak, MiB", self.peak_mib)):
            if sizes is not None:
                rows.append((name, f"{sizes[0]:.2f}", f"{sizes[1]:.2f}", ""))
        for name, errors in (("error of outputs", self.outputs), ("error of gradients", self.gradients)):
            if errors is not None:
                more = "" if errors.agree else "MORE THAN "
                text = f"{more}allowed {errors.allowed:.1e}; differ by {errors.between:.1e}"
                rows.append((name, f"{errors.torch:.1e}", f"{errors.orthokern:.1e}", text))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = [
            "  ".join([row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3]]).rstrip()
            for row in rows
        ]
        verdict = "torch and orthokern agree" if self.agree else "torch and orthokern DISAGREE"
        parts = [self.head, str(self.report), *self.backends, "", *table, "", *self.notes, verdict]
        return "\n".join(parts)


def _spread(values: tuple[float, ...]) -> str:
    """Median, and the least and the largest."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def _faster(ratio: float) -> str:
    return f"{ratio:.2f} times faster" if ratio >= 1.0 else f"{1.0 / ratio:.2f} times SLOWER"


def compare(module: nn.Module, *inputs: Any, rounds: int = 11, backend: str | None = None, seed: int = 0) -> Comparison:
    """Run a model and its conversion on the same inputs, and compare times, memory and results.

    The results of both are compared with those of the same model in float64. This relates their difference to the
    rounding error of torch itself. The function works on copies: the module itself is not changed. Dropout is disabled
    in both models.

    Args:
        module: the model, in the mode (train or eval) to compare.
        inputs: inputs of its forward; tensors, or PackedSequences, tuples, lists and dictionaries of tensors.
        rounds: number of timed rounds of each model.
        backend: backend of orthokern's modules; see ``orthokern.functional``.
        seed: seed of the cotangents, and of random numbers in forward.

    Returns:
        A `Comparison`; print it, or read its attributes.

    Raises:
        InputError: nothing to replace; a forward that is random or keeps a state; outputs that are empty or not finite;
            a model that cannot be copied or is on the meta device; rounds or seed out of range.

    Example::

        >>> from orthokern.compare import compare
        >>> compare(torch.nn.GRU(8, 16), torch.randn(20, 4, 8), rounds=3).agree
        True
    """
    rounds, seed = integer("rounds", rounds), integer("seed", seed, 0, 2**63 - 2)
    require(isinstance(module, nn.Module), "module", "a torch.nn.Module", type(module).__name__)
    kind = type(module).__name__
    if any(t.is_meta for t in (*module.parameters(), *module.buffers(), *_tensors(inputs))):
        raise InputError(f"{kind} or an input is on the device meta; accepted: tensors with values")
    theirs = copied(module)
    notes = _without_dropout(theirs)
    ours, report = convert(theirs, backend=backend)
    if not report.replaced:
        reasons = "".join(f"; {old.name or 'the module itself'} ({old.was}): {old.reason}" for old in report.skipped)
        raise InputError(f"{kind} has no torch.nn.RNN or torch.nn.GRU to replace{reasons}")
    run = _Run(inputs, seed)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        if why := run.varies(theirs):
            accepted = "a model in eval mode, equal calls of which agree"
            raise InputError(f"forward of {kind} {why}: nothing to compare; accepted: {accepted}")
        run.with_backward = any(t.requires_grad for t in run.forward(theirs, run.fresh_inputs()))
        if not run.with_backward:
            notes.append("no output depends on a parameter that requires gradients: forward only")
        outputs, gradients, trials = _agreement(theirs, ours, run)
        if trials > 1 and outputs.agree and (gradients is None or gradients.agree):
            notes.append(f"agreed at draw {trials} of the weights: near a kink of relu rounding decides the branch")
        saved = (_saved_mib(theirs, run), _saved_mib(ours, run))
        forward, backward, peaks = _time((theirs, ours), run, rounds)
    backends, head = _backends(Conversion(ours, report)), _head(module, run)
    return Comparison(head, report, backends, forward, backward, saved, peaks, outputs, gradients, tuple(notes))


def _without_dropout(module: nn.Module) -> list[str]:
    """Disables dropout; returns the note about it."""
    notes = []
    for each in module.modules():
        name = "dropout" if isinstance(each, nn.RNNBase) else "p"
        if isinstance(each, nn.modules.dropout._DropoutNd | nn.RNNBase) and getattr(each, name) > 0:
            setattr(each, name, 0.0)
            notes = ["dropout is switched off in both models"]
    return notes


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in an output or input: of tuples, lists and dictionaries."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """An input with every tensor changed; a PackedSequence keeps its sizes."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return PackedSequence(change(leaf.data), *leaf[1:])
        return change(leaf) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(of_leaf, value, is_leaf=lambda each: isinstance(each, PackedSequence))


class _Run:
    """One set of inputs and cotangents, to run a model with."""

    def __init__(self, inputs: tuple[Any, ...], seed: int) -> None:
        self.inputs, self.seed = inputs, seed
        self.device = next((t.device for t in _tensors(inputs)), torch.device("cpu"))
        self.with_backward = True
        self._cotangents: list[Tensor] = []

    def fresh_inputs(self) -> tuple[Any, ...]:
        """The inputs, with gradients for those that require them."""
        result: tuple[Any, ...] = _mapped(self.inputs, lambda t: t.detach().clone().requires_grad_(t.requires_grad))
        return result

    def forward(self, module: nn.Module, inputs: tuple[Any, ...], seed: int | None = None) -> list[Tensor]:
        """The floating-point tensors of the output."""
        torch.manual_seed(self.seed if seed is None else seed)
        outputs = [t for t in _tensors(module(*inputs)) if t.is_floating_point()]
        if not outputs:
            raise InputError(f"forward of {type(module).__name__} returns no floating tensor: nothing to compare")
        return outputs

    def varies(self, module: nn.Module) -> str | None:
        """Why two forwards give different results; None if they do not."""
        seeds = self.seed, self.seed, self.seed + 1
        with torch.no_grad():
            results = [self.forward(module, self.fresh_inputs(), seed) for seed in seeds]
        for other, why in zip(results[1:], ("keeps a state from call to call", "draws random numbers"), strict=True):
            if any(not torch.equal(a, b) for a, b in zip(results[0], other, strict=True) if not a.isnan().any()):
                return why
        return None

    def backward(self, module: nn.Module, outputs: list[Tensor]) -> None:
        """Backward from random cotangents, the same ones for every model."""
        if not self._cotangents:
            generator = torch.Generator().manual_seed(self.seed)
            self._cotangents = [torch.randn(t.shape, generator=generator, device="cpu").to(t.device) for t in outputs]
        pairs = [(t, c.to(t.dtype)) for t, c in zip(outputs, self._cotangents, strict=True) if t.requires_grad]
        torch.autograd.backward([t for t, _ in pairs], [c for _, c in pairs])

    def results(self, module: nn.Module, dtype: torch.dtype | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs, and the gradients of parameters and floating-point inputs."""

        def leaf(t: Tensor) -> Tensor:
            return t.detach().to(dtype or t.dtype, copy=True).requires_grad_() if t.is_floating_point() else t

        inputs = _mapped(self.inputs, leaf)
        module.zero_grad(set_to_none=True)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype or default)  # of the states that a forward makes with torch.zeros
        try:
            outputs = self.forward(module, inputs)
        finally:
            torch.set_default_dtype(default)
        gradients: list[Tensor] = []
        if self.with_backward:
            self.backward(module, outputs)
            leaves = [*module.parameters(), *(t for t in _tensors(inputs) if t.is_floating_point())]
            gradients = [t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves]
            module.zero_grad(set_to_none=True)
        return [t.detach() for t in outputs], gradients


# ---- agreement ---------------------------------------------------------------------------------------------------


def _agreement(theirs: nn.Module, ours: nn.Module, run: _Run) -> tuple[Errors, Errors | None, int]:
    """Errors of outputs and gradients, and at which draw of the weights. The first draw is the model's own."""
    pairs = [(p, q, p.detach().clone()) for p, q in zip(theirs.parameters(), ours.parameters(), strict=True)]
    generator = torch.Generator().manual_seed(run.seed)
    first = None
    for trial in range(1, TRIALS + 1):
        result = _errors(theirs, ours, run)
        first = result if first is None else first
        agree = all(errors.agree for errors in result if errors is not None)
        with torch.no_grad():
            for p, q, own in pairs:
                if not agree and trial < TRIALS and own.is_floating_point():
                    own = own * (1 + 1e-3 * torch.randn(own.shape, generator=generator, device="cpu").to(own))
                p.copy_(own)
                q.copy_(own)
        if agree:
            return *result, trial
    assert first is not None
    return *first, TRIALS


def _errors(theirs: nn.Module, ours: nn.Module, run: _Run) -> tuple[Errors, Errors | None]:
    exact = run.results(copy.deepcopy(theirs).double(), torch.float64)
    of_torch, of_ours = run.results(theirs), run.results(ours)
    scale = 1.0
    if all(t.dtype == torch.float64 for t in of_torch[0]):
        # The exact results are torch's own here: its rounding is that in float32, scaled by the units of rounding.
        scale = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        of_torch = run.results(copy.deepcopy(theirs).float(), torch.float32)
    if not len(of_torch[0]) == len(of_ours[0]) == len(exact[0]):
        raise InputError(
            f"the model returns {len(exact[0])} tensors in float64, {len(of_torch[0])} in float32: nothing to compare"
        )
    if not any(t.numel() for t in exact[0]):
        raise InputError("the outputs of the model are empty, as for a batch of no sequences: nothing to compare")
    if not any(bool(t.isfinite().any()) for t in exact[0]):
        raise InputError("no output of the model is a finite number, also in float64: nothing to compare")
    result = []
    for plain, mine, truth in zip(of_torch, of_ours, exact, strict=True):
        rounding = _largest(plain, truth) * scale
        eps = max((torch.finfo(t.dtype).eps for t in mine), default=0.0)
        between = _largest(mine, plain if scale == 1.0 else truth)
        result.append(Errors(rounding, _largest(mine, truth), between, FACTOR * rounding + FLOOR * eps))
    return result[0], result[1] if run.with_backward else None


def _largest(values: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference, relative to the largest value of each tensor; NaN if only one is not finite."""
    errors = [0.0]
    for a, b in zip(values, others, strict=True):
        a, b = a.detach().double().cpu().flatten(), b.detach().double().cpu().flatten()
        off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
        top = float(torch.cat([b[b.isfinite()].abs(), b.new_zeros(1)]).max())
        errors.append(float(torch.cat([off, off.new_zeros(1)]).max()) / (top or 1.0))  # the largest of NaN is NaN
    return float(torch.tensor(errors, dtype=torch.float64, device="cpu").max())


# ---- time and memory ---------------------------------------------------------------------------------------------


def _saved_mib(module: nn.Module, run: _Run) -> float:
    """MiB of the storages that the graph of one forward holds, without those of parameters and inputs."""
    inputs = run.fresh_inputs()
    excluded = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers(), *_tensors(inputs)]}
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in excluded:
            sizes[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = run.forward(module, inputs)
    del outputs
    return sum(sizes.values()) / 2**20


def _time(
    modules: tuple[nn.Module, nn.Module], run: _Run, rounds: int
) -> tuple[Times, Times | None, tuple[float, float] | None]:
    """Times of alternating runs, after two warm-up rounds, and the peaks of memory on a CUDA device."""
    inputs = run.fresh_inputs()
    samples: tuple[list[Any], list[Any]] = ([], [])
    for number in range(rounds + 2):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            samples[which].append(_sample(modules[which], run, inputs))
    forward, backward, peaks = (tuple(tuple(each[i] for each in part[2:]) for part in samples) for i in range(3))
    both = (max(peaks[0]), max(peaks[1])) if run.device.type == "cuda" else None
    return Times(*forward), Times(*backward) if run.with_backward else None, both


def _sample(module: nn.Module, run: _Run, inputs: tuple[Any, ...]) -> tuple[float, float, float]:
    """Time of one forward and backward in ms, and the peak in MiB. Gradients are removed again."""
    cuda = run.device.type == "cuda"

    def now() -> float:
        if cuda:
            torch.cuda.synchronize(run.device)
        return 1e3 * time.perf_counter()

    if cuda:
        torch.cuda.reset_peak_memory_stats(run.device)
    start = now()
    outputs = run.forward(module, inputs)
    middle = now()
    if run.with_backward:
        run.backward(module, outputs)
    end = now()
    module.zero_grad(set_to_none=True)
    for t in _tensors(inputs):
        t.grad = None
    peak = torch.cuda.max_memory_allocated(run.device) / 2**20 if cuda else 0.0
    return middle - start, end - middle, peak


def _head(module: nn.Module, run: _Run) -> str:
    shapes = ", ".join(f"{list(t.shape)} {dispatch.dtype_name(t.dtype)}" for t in _tensors(run.inputs))
    cuda = run.device.type == "cuda"
    place = torch.cuda.get_device_name(run.device) if cuda else f"cpu, threads: {torch.get_num_threads()}"
    mode = "training" if module.training else "eval"
    return f"{type(module).__name__}, {mode} mode, input {shapes}; {place}; torch {torch.__version__}"


def _backends(conversion: Conversion) -> tuple[str, ...]:
    """Which backend serves each replaced module."""
    lines = []
    for each in conversion.report.replaced:
        module: Any = conversion.module.get_submodule(each.name)
        op = "gru_scan" if isinstance(module, GRU) else "dense_scan"
        call = dispatch.Call(module.weight_hh_l0.device, module.weight_hh_l0.dtype, {"N": module.hidden_size})
        chosen = dispatch.choose(op, module.backend, call)
        lines.append(f"backend of {each.name or 'the module itself'}: {chosen} ({op})")
    return tuple(lines)
