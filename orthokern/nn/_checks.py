"""Checks of arguments, and new and random parameters, shared by the modules. Each check returns the value or raises an
InputError of one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from orthokern import dispatch
from orthokern._autocast import keeps_dtype
from orthokern._decompositions import robust_svdvals
from orthokern.dispatch import BACKENDS
from orthokern.errors import InputError, OutOfRange, cpu_generator, number, one_of, require
from orthokern.ops._common import check_range

LOADED_TOLERANCE = 1e-3  # largest |B^T B - I| of a base that is loaded
FULL, HALF = (torch.float32, torch.float64), (torch.bfloat16, torch.float16)


def readable(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be read without a synchronisation: on a CPU, and neither traced nor under
    vmap."""
    modes = torch._C._TorchDispatchModeKey
    if tensor.device.type != "cpu" or torch.compiler.is_compiling() or torch._C._get_dispatch_mode(modes.PROXY):
        return False
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)
    return not isinstance(tensor, FakeTensor)


def compute_weights(module: Any) -> None:
    """Runs the hooks of torch.nn.utils.prune, weight_norm and spectral_norm that compute a weight before a forward. For
    methods that read weights outside of it."""
    for hook in getattr(module, "_forward_pre_hooks", {}).values():
        if isinstance(hook, (BasePruningMethod, WeightNorm, SpectralNorm)):
            hook(module, ())


def flag(name: str, value: Any) -> bool:
    require(isinstance(value, bool), name, "True or False", repr(value))
    return bool(value)


def at_least_zero(name: str, value: Any) -> float:
    return number(name, value, "a finite number, 0 or more", lambda result: result >= 0.0)


def above_zero(name: str, value: Any) -> float:
    return number(name, value, "a finite number above 0", lambda result: result > 0.0)


def share(name: str, value: Any) -> float:
    return number(name, value, "a number in (0, 1]", lambda result: 0.0 < result <= 1.0)


def check_backend(name: str, value: str | None) -> str | None:
    """A backend name. Whether the backend supports the call is only known in forward."""
    return None if value is None else one_of(name, value, ("auto", *BACKENDS))


def check_dtype(dtype: torch.dtype, *, half: bool) -> None:
    """The dtype of parameters: float32, float64 and, with `half` (for a dense recurrence), 16-bit dtypes."""
    if dtype not in FULL and not (half and dtype in HALF):
        why = " (only orthokern.nn.RNN accepts 16 bits)" if dtype in HALF else ""
        accepted = ", ".join(map(str, FULL + (HALF if half else ())))
        raise InputError(f"dtype {dtype} is not supported for parameters{why}; accepted: {accepted}")


def check_ids(ids: Tensor, size: int) -> None:
    """Rejects token ids outside of [0, size) that can be read; elsewhere torch's look-up rejects them."""
    if readable(ids):
        check_range("the input", ids, size, "token ids")


def new_parameter(name: str, shape: tuple[int, ...], device: Any, dtype: torch.dtype | None) -> nn.Parameter:
    """A parameter with uninitialised values. Raises InputError if torch cannot allocate it."""
    try:
        return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    except (RuntimeError, TypeError, OverflowError, AssertionError) as error:  # a torch without CUDA asserts
        reason = str(error).split("\n")[0].split(". ")[0][:100]
        raise InputError(
            f"device {str(device or torch.get_default_device())!r} cannot hold {name} of shape {list(shape)} "
            f"({reason}); accepted: cpu, or a cuda device that is present and has the memory"
        ) from None


def draw(fill: Callable[..., Any], tensor: Tensor, *args: float, generator: torch.Generator | None) -> None:
    """fill(tensor, *args, generator=generator), where fill is a function of torch.nn.init.

    None draws with the global generator of the tensor's device. Numbers of a given generator are drawn on the CPU and
    copied to the tensor, so that a seed gives the same values on every device. Tensors on the meta device then do not
    change, and nothing is drawn.

    Raises:
        InputError: for a generator that is not on the CPU, or an object that is not a generator.
    """
    if generator is None:
        fill(tensor, *args, generator=None)
        return
    cpu_generator(generator)
    if tensor.is_meta:
        return
    drawn = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    fill(drawn, *args, generator=generator)
    with torch.no_grad():
        tensor.copy_(drawn)


@torch.no_grad()
@keeps_dtype
def deviation(m: Tensor) -> float:
    """The largest |M^T M - I| over the entries of a basis M [N,K]."""
    return float((m.mT @ m - torch.eye(m.shape[1], dtype=m.dtype, device=m.device)).abs().max())


def largest_deviation(matrices: Iterable[Tensor]) -> float:
    """The largest `deviation`, NaN included (Python's max would drop a NaN)."""
    return float(torch.tensor([*map(deviation, matrices)], dtype=torch.float64, device="cpu").max())


def check_loaded_orthogonal(name: str, loaded: Any, parameter: Tensor) -> None:
    """Rejects a base B [N,N] from a state_dict, to be loaded into `parameter`, that is not orthogonal. load_state_dict
    itself rejects other shapes."""
    if not isinstance(loaded, Tensor) or loaded.shape != parameter.shape or loaded.is_meta:
        return
    off = deviation(loaded.double())
    if not off <= LOADED_TOLERANCE:
        raise InputError(f"{name} is not orthogonal: |B^T B - I| is {off:.3g}; accepted: up to {LOADED_TOLERANCE:g}")


def warn_unless_orthonormal(text: str, m: Any, advice: str) -> bool:
    """Warns about a basis M [N,K] on a CPU that is not orthonormal; returns whether it did."""
    if not isinstance(m, Tensor) or not readable(m) or m.ndim != 2 or not m.is_floating_point():
        return False
    off = deviation(m.double())
    if not off <= LOADED_TOLERANCE:
        warnings.warn(f"{text} orthonormal: |M^T M - I| is {off:.3g}; {advice}", stacklevel=2)
        return True
    return False


def check_exponential(name: str, parameter: Tensor, p: Tensor) -> None:
    """Rejects a parameter [N,N] whose exponential P [N,N] is not finite, if P is `readable`."""
    if not readable(p) or bool(p.detach().isfinite().all()):
        return
    check_finite(name, parameter, "finite numbers")
    lower = parameter.detach().double().tril(-1)
    angles = robust_svdvals(lower - lower.mT)
    r = float(angles[0]) * float(((angles / angles[0]) ** 12).sum()) ** (1 / 12)
    largest = dispatch.leaf("skew_exp", "reference").LARGEST[p.dtype]
    raise OutOfRange(
        f"{name} is too large for an exponential: |A^6|_F^(1/6) is {r:.4g}, with |A|_2 = {float(angles[0]):.4g}; "
        f"accepted: up to {largest:.4g} in {p.dtype}"
    )


def check_finite(name: str, parameter: Tensor, accepted: str) -> None:
    """Rejects NaN and infinite values of a parameter, if they are `readable`."""
    if readable(parameter) and (bad := int((~parameter.detach().isfinite()).sum())):
        raise OutOfRange(f"{name} holds {bad} NaN or infinite values of {parameter.numel()}; accepted: {accepted}")
