"""Checks of arguments shared by the modules. Each returns the value or raises an InputError of one line."""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence

from orthokern import dispatch
from orthokern._decompositions import robust_svdvals
from orthokern.dispatch import BACKENDS
from orthokern.errors import InputError, OutOfRange, unknown_name
from orthokern.ops._checks import as_int, strided
from orthokern.ops._dispatcher import no_dispatch_modes

LOADED_TOLERANCE = 1e-3  # largest |B^T B - I| of a base that is loaded


def readable(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be read without a synchronisation: on a CPU, and neither traced nor under
    vmap."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)
    return not isinstance(tensor, FakeTensor)


def positive_int(name: str, value: Any, minimum: int = 1) -> int:
    count = as_int(value)
    if count is None:
        raise InputError(f"{name} must be an integer, got {value!r}")
    if count < minimum:
        raise InputError(f"{name} must be at least {minimum}, got {count}")
    if count >= 1 << 63:
        raise InputError(f"{name} must be below 2^63, got {count}")
    return count


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {value!r}")
    return value


def number(name: str, value: Any, accepted: str) -> float:
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"{name} must be {accepted}, got {value!r}") from None
    except OverflowError:
        raise InputError(f"{name} must be {accepted}, got an integer of {value.bit_length()} bits") from None


def finite(name: str, value: Any, bound: Literal["", " above 0", ", 0 or more"] = "") -> float:
    """A finite number within the bound."""
    accepted = f"a finite number{bound}"
    result = number(name, value, accepted)
    if not math.isfinite(result) or (bound and result < 0.0) or (bound == " above 0" and result == 0.0):
        raise InputError(f"{name} must be {accepted}, got {value!r}")
    return result


def share(name: str, value: Any) -> float:
    """A number in [0, 1]."""
    result = number(name, value, "a number in [0, 1]")
    if not 0.0 <= result <= 1.0:
        raise InputError(f"{name} must be a number in [0, 1], got {value!r}")
    return result


class Settings(NamedTuple):
    """The arguments that all recurrent modules share with torch's."""

    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool


def recurrent_settings(
    input_size: Any,
    hidden_size: Any,
    num_layers: Any,
    bias: Any,
    batch_first: Any,
    dropout: Any,
    bidirectional: Any,
    *,
    stacklevel: int,
) -> Settings:
    """The checked arguments. Warns of a dropout without effect, as torch does; stacklevel: of the module's caller."""
    result = Settings(
        positive_int("input_size", input_size),
        positive_int("hidden_size", hidden_size),
        positive_int("num_layers", num_layers),
        flag("bias", bias),
        flag("batch_first", batch_first),
        share("dropout", dropout),
        flag("bidirectional", bidirectional),
    )
    if result.dropout > 0.0 and result.num_layers == 1:
        warnings.warn(
            f"dropout={dropout} has no effect: it acts between layers, and num_layers is 1", stacklevel=stacklevel
        )
    return result


def parameter_dtype(value: torch.dtype | None, *, half: bool) -> torch.dtype:
    """The dtype of the parameters: float32, float64 and, with `half` (for a dense recurrence), 16-bit dtypes."""
    dtype = torch.get_default_dtype() if value is None else value
    accepted = [torch.float32, torch.float64] + ([torch.bfloat16, torch.float16] if half else [])
    if dtype not in accepted:
        why = " (orthogonality is lost in 16 bits)" if dtype in (torch.bfloat16, torch.float16) else ""
        raise InputError(f"dtype {dtype} is not supported{why}; accepted: {', '.join(str(d) for d in accepted)}")
    return dtype


def check_backend(name: str | None) -> str | None:
    """A backend name. Whether the backend supports the call is only known in forward."""
    names = ("auto", *BACKENDS)
    if name is not None and name not in names:
        raise unknown_name("backend", name, names)
    return name


def check_device(value: Any) -> Any:
    """A device on which torch can allocate tensors on this machine, or None for torch's default."""
    if value is None:
        return None
    reason = ""
    try:
        device = torch.device(value)
        try:
            torch.empty(0, device=device)
            return device
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            reason = f" ({(str(error).splitlines() or [''])[0]})"
    except (RuntimeError, TypeError):
        pass
    raise InputError(
        f"device {str(value)!r} cannot be used here{reason}; accepted: a device that this torch and machine have, "
        "as cpu, cuda or cuda:0"
    )


def check_input(
    input: Any, weight: Tensor, input_size: int, *, batch_first: bool, packed: bool, small_ids: bool = False
) -> bool:
    """Checks the input of a recurrence, except its T and B; True for token ids.

    input: [T,B,D], [T,D] or token ids without D ([B,T,..] if batch_first); the data of a PackedSequence if packed. It
    must have the device of the input weight and, if it is floating, its dtype. small_ids: ids may also be uint8 or
    int16.
    """
    if not isinstance(input, Tensor):
        refuse_proxy(input)
        raise InputError(f"input must be a Tensor or a PackedSequence, got {type(input).__name__}")
    strided("input", input)
    if input.device != weight.device:
        raise InputError(f"input is on {input.device} and the parameters on {weight.device}; accepted: the same device")
    if weight.is_complex():
        raise InputError(f"parameters have dtype {weight.dtype}; accepted: real floating dtypes")
    ids = (torch.int64, torch.int32, *((torch.int16, torch.uint8) if small_ids else ()))
    tokens = input.dtype in ids
    if not tokens and input.dtype != weight.dtype:
        raise InputError(
            f"input has dtype {input.dtype}; accepted: {weight.dtype} like the parameters, "
            f"or token ids in {', '.join(map(str, ids[:-1]))} or {ids[-1]}"
        )
    kind = "token ids" if tokens else "floats"
    if packed:
        if input.dim() != (1 if tokens else 2):
            accepted = "one id per step" if tokens else f"{input_size} features per step"
            raise InputError(f"input packs {kind} of shape {tuple(input.shape)}; accepted: {accepted}")
    elif input.dim() not in ((1, 2) if tokens else (2, 3)):
        order, more = "B, T" if batch_first else "T, B", "" if tokens else ", D"
        raise InputError(
            f"input ({kind}) has shape {tuple(input.shape)}; accepted: [{order}{more}], or [T{more}] for one sequence"
        )
    if not tokens and input.shape[-1] != input_size:
        raise InputError(
            f"input has {input.shape[-1]} features (shape {tuple(input.shape)}); "
            f"accepted: input_size = {input_size} in the last dimension"
        )
    return tokens


def refuse_proxy(value: Any) -> None:
    """Rejects what torch.fx.symbolic_trace passes in place of a tensor."""
    if isinstance(value, Proxy):
        raise InputError(
            "torch.fx traces into a module of orthokern, whose checks need tensors; "
            "accepted: a Tracer whose is_leaf_module is True for it"
        )


def check_ids(ids: Tensor, size: int) -> None:
    """Rejects token ids outside of [0, size): immediately on a CPU, and in the graph under torch.compile. On a GPU
    torch's look-up rejects them."""
    if ids.is_cuda or ids.is_meta:
        return
    if torch.compiler.is_compiling():
        torch._assert_async(
            ((ids >= 0) & (ids < size)).all(), f"input has token ids outside of [0, input_size = {size})"
        )
        return
    if not readable(ids):
        return
    low, high = (int(v) for v in ids.aminmax())
    if low < 0 or high >= size:
        raise InputError(f"input has token ids from {low} to {high}; accepted: ids in [0, input_size = {size})")


def check_packed(packed: PackedSequence) -> None:
    """Rejects a PackedSequence that torch's functions do not create. Tensors on a GPU are not read."""
    sizes, data = packed.batch_sizes, packed.data
    if not isinstance(sizes, Tensor) or sizes.dim() != 1 or sizes.dtype != torch.int64 or len(sizes) == 0:
        result = f"{sizes.dtype} {tuple(sizes.shape)}" if isinstance(sizes, Tensor) else type(sizes).__name__
        raise InputError(f"batch_sizes of the input is {result}; accepted: torch.int64 [T], T at least 1")
    orders = (("sorted_indices", packed.sorted_indices), ("unsorted_indices", packed.unsorted_indices))
    if (orders[0][1] is None) != (orders[1][1] is None):
        raise InputError("the input has one of sorted_indices and unsorted_indices; accepted: both or neither")
    if not readable(sizes):
        return
    steps = sizes.tolist()
    falling = all(a >= b for a, b in itertools.pairwise(steps))
    if steps[-1] < 1 or not falling or sum(steps) != len(data):
        text = str(steps if len(steps) <= 8 else [*steps[:8], "..."]).replace("'", "")
        raise InputError(
            f"batch_sizes of the input are {text} for {len(data)} rows; accepted: at least 1 each, none above the one "
            "before, the rows as their sum"
        )
    for name, order in orders:
        if order is None:
            continue
        wrong = order.dim() != 1 or order.dtype != torch.int64 or len(order) != steps[0]
        if wrong or (readable(order) and not torch.equal(order.sort()[0], torch.arange(steps[0], device="cpu"))):
            raise InputError(f"{name} of the input is no order of its {steps[0]} sequences; accepted: each index once")
    if packed.sorted_indices is not None and readable(packed.sorted_indices):
        if not torch.equal(packed.sorted_indices[packed.unsorted_indices], torch.arange(steps[0], device="cpu")):
            raise InputError(
                "unsorted_indices of the input do not undo its sorted_indices; accepted: the inverse order"
            )


def check_resets(resets: Any, shape: tuple[int, ...], letters: str, device: torch.device, ways: int) -> None:
    """Rejects resets that are not bool of this shape, [T, B] in the layout of the input, and resets of a bidirectional
    module."""
    if not isinstance(resets, Tensor):
        raise InputError(f"resets must be a Tensor or None, got {type(resets).__name__}")
    if ways > 1:
        raise InputError("resets are given to a bidirectional module; accepted: bidirectional=False")
    if resets.dtype != torch.bool or tuple(resets.shape) != shape or resets.device != device:
        raise InputError(
            f"resets is {resets.dtype} {tuple(resets.shape)} on {resets.device}; accepted: torch.bool {shape} "
            f"([{letters}]) on {device}, like the input"
        )


def new_parameter(name: str, shape: tuple[int, ...], device: Any, dtype: torch.dtype | None) -> nn.Parameter:
    """A parameter with uninitialised values. Raises InputError if there is not enough memory."""
    try:
        return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
    except (RuntimeError, TypeError, OverflowError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in ("memory", "overflow")):
            raise
        raise InputError(
            f"there is no memory for {name} of shape {list(shape)}; accepted: sizes whose parameters fit"
        ) from None


def check_held(name: str, value: Any, shape: tuple[int, ...] | None) -> None:
    """Rejects an invalid replacement of a module's parameter; of a buffer, whose shape is None, any tensor is taken."""
    held = type(value)
    if (held is nn.Parameter or held is Tensor) and value.layout is torch.strided and value.shape == shape:
        return
    if not isinstance(value, Tensor):
        refuse_proxy(value)
        accepted = "a tensor" if shape is None else f"a tensor of shape {list(shape)}"
        raise InputError(f"parameter {name} is {value!r}; accepted: {accepted}")
    if shape is not None and value.shape != shape:
        raise InputError(f"parameter {name} has shape {list(value.shape)}; accepted: {list(shape)}")
    strided(f"parameter {name}", value)


def deviation(m: Tensor) -> float:
    """The largest |M^T M - I| over the entries of a basis M [N,K]."""
    return float((m.mT @ m - torch.eye(m.shape[1], dtype=m.dtype, device=m.device)).abs().max())


def largest_deviation(matrices: Iterable[Tensor]) -> float:
    """The largest `deviation`: 0 for no matrices, NaN if one has NaN entries (Python's max would drop a NaN)."""
    return float(torch.tensor([0.0, *map(deviation, matrices)], dtype=torch.float64, device="cpu").max())


def check_loaded_orthogonal(name: str, loaded: Any, held: Tensor) -> None:
    """Rejects a base B [N,N] from a state_dict, to be loaded into `held`, that is not orthogonal. load_state_dict
    itself rejects other shapes."""
    if not isinstance(loaded, Tensor) or loaded.shape != held.shape or loaded.is_meta:
        return
    off = deviation(loaded.double())
    if not off <= LOADED_TOLERANCE:
        raise InputError(f"{name} is not orthogonal: |B^T B - I| is {off:.3g}; accepted: up to {LOADED_TOLERANCE:g}")


def warn_unless_orthonormal(name: str, loaded: Any) -> None:
    """Warns of a basis [N,K] from a state_dict that is not orthonormal, as after averaging or with another optimizer.
    load_state_dict itself rejects other shapes."""
    if not isinstance(loaded, Tensor) or not readable(loaded) or loaded.ndim != 2 or not loaded.is_floating_point():
        return
    off = deviation(loaded.detach().double())
    if not off <= LOADED_TOLERANCE:
        warnings.warn(
            f"{name} is not orthonormal: |M^T M - I| is {off:.3g}; orthonormalize() of the module replaces it by the "
            "nearest basis",
            stacklevel=2,
        )


# module -> suffix of a recurrence -> (versions of its bases, how often a change of them was noticed); None after a
# warning. Not attributes, so that a module can be copied and pickled.
_watched: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[int, int]] | None] = weakref.WeakKeyDictionary()


def watch_bases(module: nn.Module, suffix: str, u: Tensor, v: Tensor) -> None:
    """Warns once if training makes the bases of a module on a CPU lose their orthonormality, which happens where an
    optimizer of torch trains them like other parameters.

    They are measured at the 1st, 2nd, 4th, 8th, ... change of their versions, so that the cost does not depend on the
    length of the training. On a GPU they are not measured: the host would wait for the device.
    """
    if not module.training or not no_dispatch_modes() or not all(type(m) is nn.Parameter and m.is_cpu for m in (u, v)):
        return
    known = _watched.setdefault(module, {})
    if known is None:
        return
    version = u._version + v._version
    before, changes = known.get(suffix, (version, 0))
    changes += version != before
    known[suffix] = version, changes
    if version == before or changes & (changes - 1):
        return
    for name, m in ((f"u_{suffix}", u), (f"v_{suffix}", v)):
        if not (off := deviation(m.detach())) <= LOADED_TOLERANCE:
            _watched[module] = None
            warnings.warn(
                f"{name} is no longer orthonormal: |M^T M - I| is {off:.3g}; U and V need an optimizer of "
                "orthokern.optim, such as optimizer_for(model, lr=1e-3, geodesic_lr=1e-4)",
                stacklevel=2,
            )
            return


def check_exponential(name: str, parameter: Tensor, p: Tensor) -> None:
    """Rejects a parameter [N,N] whose exponential P [N,N] is not finite, where P is `readable`."""
    if not readable(p) or bool(p.detach().isfinite().all()):
        return
    bad = int((~parameter.detach().isfinite()).sum())
    if bad:
        raise OutOfRange(f"{name} holds {bad} NaN or infinite values of {parameter.numel()}; accepted: finite numbers")
    lower = parameter.detach().double().tril(-1)
    angles = robust_svdvals(lower - lower.mT)
    r = float(angles[0]) * float(((angles / angles[0]) ** 12).sum()) ** (1 / 12)
    largest = dispatch.leaf("skew_exp", "reference").LARGEST[p.dtype]
    raise OutOfRange(
        f"{name} is too large for an exponential: |A^6|_F^(1/6) is {r:.4g}, with |A|_2 = {float(angles[0]):.4g}; "
        f"accepted: up to {largest:.4g} in {p.dtype}"
    )


def settings_text(module: nn.Module, **defaults: Any) -> str:
    """The sizes of a module and the settings that differ from the defaults, for extra_repr."""
    given = [f"{name}={value!r}" for name, usual in defaults.items() if (value := getattr(module, name)) != usual]
    return ", ".join([str(module.input_size), str(module.hidden_size), *given])
