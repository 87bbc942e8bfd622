"""Helpers of the correctness tests: random problems, their runs, and parameters of tests. Comparisons: `checks`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from orthokern import dispatch, functional
from orthokern._scan_contract import GruArgs, GruGradients, ScanArgs, ScanGradients, started
from orthokern.errors import InputError
from orthokern.ops.activations import PARAMETER
from orthokern.reference._scan import input_term
from orthokern.reference.activations import activation_fwd

SCANS = ("factored_scan", "dense_scan")
DTYPES = (torch.float32, torch.float64)
SHORT = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16"}


class Problem:
    """Inputs and a cotangent of a scan: tensors in the fields of a dataclass."""

    x: Tensor
    grad_hs: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with every floating or bool tensor changed by a function of a tensor; the latter stay bool."""

        def one(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(one, value))
            if isinstance(value, Tensor) and value.dtype == torch.bool:
                return change(value).bool()
            return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value

        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        return type(self)(**{field.name: one(getattr(self, field.name)) for field in fields})

    def to(self, dtype: torch.dtype) -> Self:
        """A copy in another dtype."""
        return self.map(lambda t: t.to(dtype))

    def clone(self) -> Self:
        """A copy, including token ids."""
        copy = self.map(torch.clone)
        copy.x = self.x.clone()
        return copy

    def with_poisoned_padding(self, lengths: Tensor) -> Self:
        """A copy whose padding holds values that must not be read: NaN, and token ids far out of range."""
        copy = self.clone()
        padding = torch.arange(len(self.grad_hs)).unsqueeze(1) >= lengths
        copy.x[padding] = float("nan") if copy.x.is_floating_point() else 10**9
        copy.grad_hs[padding] = float("nan")
        return copy


@dataclasses.dataclass
class ScanProblem(Problem):
    """Inputs and a cotangent of a scan, in float64; ``to`` casts them.

    matrices: (u, s, v) for factored_scan, (w,) for dense_scan. Others as in ``orthokern.functional``.
    """

    op: str
    activation: str
    x: Tensor
    matrices: tuple[Tensor, ...]
    h0: Tensor
    weight: Tensor | None
    bias: Tensor | None
    act_param: Tensor | None
    grad_hs: Tensor
    resets: Tensor | None = None
    reset_state: Tensor | None = None
    leak: Tensor | None = None

    def inputs(self) -> tuple[Tensor | None, ...]:
        """The positional arguments of the forward."""
        return (self.x, *self.matrices, self.h0, self.weight, self.bias, self.act_param)

    def args(self, **options: Any) -> ScanArgs:
        """The arguments of the op and of a backend's functions; options: fields of ScanArgs."""
        options = {"resets": self.resets, "reset_state": self.reset_state, "leak": self.leak, **options}
        return scan_args(self.op, self.inputs(), self.activation, **options)

    def grad_names(self) -> tuple[str, ...]:
        """The names of the results of the backward, the inputs first, as in ``inputs``."""
        matrices = ("u", "s", "v") if self.op == "factored_scan" else ("w",)
        names = ("x", *matrices, "h0", "weight", "bias", "act_param", "reset_state", "leak", "norm")
        return tuple(f"grad_{name}" for name in names)


def scan_args(op: str, inputs: Sequence[Tensor | None], activation: str, **options: Any) -> ScanArgs:
    """From inputs as `ScanProblem.inputs` returns them; options: fields of ScanArgs."""
    x, *matrices, h0, weight, bias, act_param = inputs
    second, scale, first = matrices if op == "factored_scan" else (matrices[0], None, None)
    assert second is not None and h0 is not None
    return ScanArgs(x, first, scale, second, h0, weight, bias, act_param, activation, **options)


def strided(t: Tensor) -> Tensor:
    """The same values with other strides: every second element of a larger, transposed tensor filled with NaN."""
    poison = float("nan") if t.is_floating_point() else -(10**6)
    wide = t.new_full([2 * n for n in reversed(t.shape)], poison)
    view = wide.permute(*reversed(range(t.ndim)))[(slice(None, None, 2),) * t.ndim]
    view.copy_(t)
    return view


def distance_to_kink(problem: ScanProblem) -> float:
    """The smallest distance of a pre-activation to a point where the activation's derivative jumps.

    A unit within rounding distance of such a point may flip between two precisions, which changes gradients by whole
    terms. Comparisons element by element need a problem without such units.
    """
    name, slope_or_bias = problem.activation, problem.act_param
    if name in ("identity", "tanh", "softsign"):
        return float("inf")
    h, nearest = problem.h0, float("inf")
    for t, e in enumerate(input_term(problem.x, problem.weight, problem.bias).unbind(0)):
        if problem.resets is not None:
            h = started(h, problem.resets[t], problem.reset_state)
        if problem.op == "factored_scan":
            u, s, v = problem.matrices
            a = ((h @ v) * s) @ u.mT + e
        else:
            a = h @ problem.matrices[0].mT + e
        if name == "oplu":
            gap = a[..., 0::2] - a[..., 1::2]
        elif name == "modrelu":
            assert slope_or_bias is not None
            gap = torch.minimum(a.abs(), (a.abs() + slope_or_bias).abs())
        else:
            gap = a
        nearest = min(nearest, float(gap.abs().min()))
        phi = activation_fwd(a, slope_or_bias, activation=name)
        h = phi if problem.leak is None else (1 - problem.leak) * h + problem.leak * phi
    return nearest


def act_param_for(activation: str, size: int, generator: torch.Generator) -> Tensor | None:
    """A parameter of 1 or N elements for the activations that take one (float64)."""
    if activation not in PARAMETER:
        return None
    values = torch.randn(size, dtype=torch.float64, generator=generator)
    # modReLU with thresholds of either sign, so that some units are switched off and some jump at 0
    return 0.2 * values if activation == "modrelu" else 0.3 + 0.1 * values


def scan_problem(
    op: str,
    *,
    B: int,
    T: int,
    N: int,
    K: int | None = None,
    D: int = 5,
    activation: str = "tanh",
    inputs: str = "dense",
    bias: bool = True,
    param_size: str = "N",
    leak: int = 0,
    gap: float = 1e-5,
    seed: int = 0,
) -> ScanProblem:
    """A random problem, float64, without pre-activations nearer than ``gap`` to a kink.

    Args:
        N: oplu, which works on pairs, gets the next even number.
        K: the rank for factored_scan, N by default.
        leak: its number of elements, 1 or N; 0 for none.
        inputs: "dense" (x is e), "features" or "tokens".
        param_size: "1" or "N", the size of act_param.
    """
    N += N % 2 if activation == "oplu" else 0
    K = N if K is None else K
    for attempt in range(200):
        generator = torch.Generator().manual_seed(1000 * seed + attempt)

        def normal(*shape: int, g: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=g)

        matrices: tuple[Tensor, ...]
        if op == "factored_scan":
            matrices = torch.linalg.qr(normal(N, K))[0], 1 + 0.1 * normal(K), torch.linalg.qr(normal(N, K))[0]
        else:
            matrices = (normal(N, N) / N**0.5,)
        if inputs == "dense":
            x, weight = normal(T, B, N), None
        elif inputs == "features":
            x, weight = normal(T, B, D), normal(N, D) / D**0.5
        else:
            x, weight = torch.randint(0, D, (T, B), generator=generator), normal(N, D)
        problem = ScanProblem(
            op=op,
            activation=activation,
            x=x,
            matrices=matrices,
            h0=normal(B, N),
            weight=weight,
            bias=normal(N) if bias and weight is not None else None,
            act_param=act_param_for(activation, 1 if param_size == "1" else N, generator),
            grad_hs=normal(T, B, N),
            leak=0.1 + 0.8 * torch.rand(leak, dtype=torch.float64, generator=generator) if leak else None,
        )
        if distance_to_kink(problem) > gap:
            return problem
    raise AssertionError("no problem without units on a kink: make it smaller")


def scan_needs(need_x: bool = True, need_params: bool = True) -> Any:
    """The argument ``needs`` of a scan's backward."""
    params = need_params
    needs: Any = (need_x, params, params, params, True, params, params, params, True, params, True)
    return ScanGradients(*needs)


def gru_needs(need_params: bool = True) -> Any:
    """The argument ``needs`` of a GRU's backward."""
    needs: Any = (True, need_params, True, need_params, True, True)
    return GruGradients(*needs)


def run_scan(
    problem: ScanProblem,
    backend: str,
    *,
    checkpoint_every: int = 0,
    bwd_backend: str | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Forward and backward ops of a problem, where its tensors are: hs, ckpt, pre and every gradient, by name.

    options: fields of ScanArgs."""
    namespace = torch.ops.orthokern
    fwd, bwd = getattr(namespace, f"{problem.op}_fwd"), getattr(namespace, f"{problem.op}_bwd")
    args = problem.args(checkpoint_every=checkpoint_every, backend=backend, **options)
    hs, ckpt, pre = fwd(*args)
    x_needed = problem.weight is not None or checkpoint_every > 0
    args = args._replace(x=args.x if x_needed else None, backend=bwd_backend or backend)
    x, first, scale, second, *others = bwd(problem.grad_hs, ckpt if checkpoint_every else hs, pre, *scan_needs(), *args)
    matrices = (second, scale, first) if problem.op == "factored_scan" else (second,)
    grads = dict(zip(problem.grad_names(), (x, *matrices, *others), strict=True))
    return {"hs": hs, "ckpt": ckpt, "pre": pre, **grads}


def with_resets(problem: ScanProblem, share: float = 0.3, *, state: bool = True, gap: float = 1e-5) -> ScanProblem:
    """A copy whose steps reset at random, one sequence at its first step; without ``state`` to zeros."""
    T, B = problem.grad_hs.shape[:2]
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        resets = torch.rand(T, B, generator=generator) < share
        resets[0, B // 2] = True
        like = torch.randn(problem.h0.shape, dtype=problem.h0.dtype, generator=generator)
        copy = dataclasses.replace(problem, resets=resets, reset_state=like if state else None)
        if distance_to_kink(copy) > gap:
            return copy
    raise AssertionError("no resets without units on a kink: make the problem smaller")


def some_lengths(B: int, T: int, order: str, seed: int = 0) -> Tensor:
    """int64 [B] in [1, T], the longest T: "falling", "rising", in "any" order, or "full" (all T)."""
    lengths = torch.randint(1, T + 1, (B,), generator=torch.Generator().manual_seed(seed))
    lengths[B // 2] = T
    if order == "full":
        return torch.full_like(lengths, T)
    return lengths if order == "any" else lengths.sort(descending=order == "falling").values


@dataclasses.dataclass
class GruProblem(Problem):
    """Inputs and a cotangent of gru_scan: x [T, B, 3N], w [3N, N], h0 [B, N], bias [3N] or None, grad_hs [T, B, N]."""

    variant: str
    x: Tensor
    w: Tensor
    h0: Tensor
    bias: Tensor | None
    grad_hs: Tensor
    resets: Tensor | None = None
    reset_state: Tensor | None = None

    NAMES = ("hs", "gates", "pre", "grad_x", "grad_w", "grad_h0", "grad_bias", "grad_reset_state", "grad_norm")

    @classmethod
    def random(cls, variant: str, T: int, B: int, N: int, *, bias: bool = True, seed: int = 0) -> GruProblem:
        """Float64, weights with singular values up to about 2."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        x, w, h0, b, g = normal(T, B, 3 * N), normal(3 * N, N) / N**0.5, normal(B, N), normal(3 * N), normal(T, B, N)
        return cls(variant, x, w, h0, b if bias else None, g)

    def with_resets(self, share: float = 0.3, *, state: bool = True, seed: int = 0) -> GruProblem:
        """A copy with resets at this share of the steps, to a random state or to zeros."""
        generator = torch.Generator().manual_seed(seed)
        resets = torch.rand(self.x.shape[:2], generator=generator) < share
        start = torch.randn(self.h0.shape, dtype=torch.float64, generator=generator).to(self.h0.dtype)
        return dataclasses.replace(self, resets=resets, reset_state=start if state else None)

    def inputs(self) -> tuple[Tensor | None, ...]:
        """The positional arguments of the forward."""
        return (self.x, self.w, self.h0, self.bias)

    def args(self, **options: Any) -> GruArgs:
        """The arguments of the op and of a backend's functions; options: fields of GruArgs."""
        options = {"resets": self.resets, "reset_state": self.reset_state, **options}
        return GruArgs(self.x, self.w, self.h0, self.bias, self.variant, **options)

    def run_leaves(self, fwd: Any, bwd: Any | None = None, *, need_params: bool = True, **options: Any) -> Any:
        """Forward and backward of two leaf modules: all results that are not None, by name."""
        args = self.args(**options)
        states = fwd.gru_scan_fwd(args)
        grads = (bwd or fwd).gru_scan_bwd(args._replace(x=None), self.grad_hs, states, gru_needs(need_params))
        return {name: t for name, t in zip(self.NAMES, (*states, *grads), strict=True) if t is not None}

    def run(self, backend: str, bwd_backend: str | None = None, *, lengths: Tensor | None = None) -> dict[str, Tensor]:
        """Forward and backward op: all results, by the names in NAMES."""
        namespace = torch.ops.orthokern
        args = self.args(backend=backend, lengths=lengths)
        saved = namespace.gru_scan_fwd(*args)
        args = args._replace(x=None, backend=bwd_backend or backend)
        grads = namespace.gru_scan_bwd(self.grad_hs, *saved, *gru_needs(), *args)
        return dict(zip(self.NAMES, (*saved, *grads), strict=True))


def assert_same_bits(
    one: dict[str, Tensor], other: dict[str, Tensor], skip: tuple[str, ...] = (), rounded: tuple[str, ...] = ()
) -> None:
    """Two results of ``run_scan`` are equal, except for the names in ``skip``.

    ``rounded``: names that depend on products of torch with another number of rows in each result. The bits of a row of
    such a product may depend on the number of rows (MKL on CPUs with AVX-512), so they are compared to rounding.
    """
    for name, tensor in one.items():
        if name in rounded:
            bound = 100 * torch.finfo(tensor.dtype).eps
            torch.testing.assert_close(tensor, other[name], rtol=bound, atol=bound, msg=lambda m, n=name: f"{n}: {m}")
        elif name not in skip:
            assert torch.equal(tensor, other[name]), f"{name} differs: {(tensor - other[name]).abs().max():.3e}"


def backends(op: str) -> list[Any]:
    """The native CPU backend; skipped with its reason if it is not built. Those of a GPU: tests/gpu."""
    why = dispatch.absence(op, "cpu")
    return [pytest.param("cpu", marks=pytest.mark.skipif(why is not None, reason=f"cpu: {why}"), id="cpu")]


def each(*ops: str) -> Callable[[Any], Any]:
    """Parametrise a test over (op, backend)."""
    params = [pytest.param(op, *one.values, id=f"{op}-{one.id}", marks=one.marks) for op in ops for one in backends(op)]
    return pytest.mark.parametrize(("op", "backend"), params)


def served(op: str) -> list[Any]:
    """The reference, and the cpu backend if it is built."""
    return ["reference", *backends(op)]


def bases(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Orthonormal columns and a random gradient."""
    m = torch.linalg.qr(torch.randn(*shape, dtype=torch.float64))[0].to(dtype)
    return m.contiguous(), torch.randn(*shape, dtype=dtype)


def refused(call: Callable[[], Any], *parts: str) -> str:
    """The message of the InputError that a call raises: one line, with these parts."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in parts), message
    return message


def on_threads(counts: Sequence[int], call: Callable[[], Any]) -> list[Any]:
    """The results of a call on each number of threads."""
    results = []
    for count in counts:
        torch.set_num_threads(count)
        results.append(call())
    return results


def batch_in(layout: str) -> tuple[Any, list[Tensor]]:
    """(an input of a recurrent module with three features, the tensors it is made of), float64, in a layout: "time
    first", "batch first", "one sequence", "packed" or "packed, not sorted"."""
    if layout.startswith("packed"):
        lengths = [6, 4, 4, 1] if layout == "packed" else [4, 1, 6, 4]
        inputs = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in lengths]
        return pack_sequence(inputs, enforce_sorted=layout == "packed"), inputs
    shape = {"time first": (6, 4, 3), "batch first": (4, 6, 3), "one sequence": (6, 3)}[layout]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    return x, [x]


def leaf_tensors(problem: ScanProblem) -> list[Tensor | None]:
    """The inputs, fresh, with requires_grad on the floating ones."""
    return [None if t is None else t.clone().requires_grad_() if t.is_floating_point() else t for t in problem.inputs()]


def call_functional(problem: ScanProblem, inputs: list[Tensor | None], **options: Any) -> Tensor:
    """The public function on the tensors of ``ScanProblem.inputs``."""
    x, *matrices, h0, weight, bias, act_param = inputs
    function = getattr(functional, problem.op)
    result: Tensor = function(
        x, *matrices, h0, weight=weight, bias=bias, activation=problem.activation, act_param=act_param, **options
    )
    return result


def gradients(problem: ScanProblem, run: Callable[..., Tensor], **options: Any) -> list[Tensor]:
    """The states that `run` returns, and the gradients of the inputs and options that have one."""
    inputs = leaf_tensors(problem)
    hs = run(problem, inputs, **options)
    wanted = [t for t in (*inputs, *options.values()) if isinstance(t, Tensor) and t.requires_grad]
    return [hs.detach(), *torch.autograd.grad(hs, wanted, problem.grad_hs)]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function compiled anew into a single graph."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=options.pop("backend", "aot_eager"), **options)
