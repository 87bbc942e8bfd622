# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Constrain any layer of a model
#
# `orthokern.parametrize` keeps the weight of any PyTorch layer orthogonal, or its singular values in 1 ± margin.
# The layer, the optimizer and the training loop stay as they are. This tutorial constrains the layers of a deep
# multilayer perceptron and of a `torch.nn.RNNCell`.
#
# The classes are parametrizations of torch, as those of `torch.nn.utils.parametrizations.orthogonal` and of geotorch
# are. They add a margin (`FactorizedSpectrum`) and a non-normal part (`SchurForm`); `orthokern.nn.ExpRNN` can also move
# its base ([side by side](../coming-from.md#geotorch-and-torchnnutilsparametrizations)).

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.utils import parametrize

from orthokern.parametrize import Cayley, Exponential, FactorizedSpectrum, Householder

torch.manual_seed(0)

# %% [markdown]
# ## One layer
#
# `register_parametrization` replaces `layer.weight` by a function of a free parameter. The weight that the layer had is
# replaced by the nearest orthogonal matrix.

# %%
layer = nn.Linear(32, 32)
parametrize.register_parametrization(layer, "weight", Exponential(layer.weight))


def orthogonality_error(weight: torch.Tensor) -> float:
    """max |WᵀW - I|"""
    return float((weight.T @ weight - torch.eye(weight.shape[1])).abs().max().detach())


print(f"{orthogonality_error(layer.weight):.1e}")
print([name for name, _ in layer.named_parameters()])

# %% [markdown]
# | class | weight | shape |
# | --- | --- | --- |
# | `Exponential` | W = B exp(A), A skew-symmetric | square |
# | `Cayley` | W = B (I - A/2)⁻¹ (I + A/2) | square |
# | `Householder` | a product of reflections: orthonormal columns or rows | any |
# | `FactorizedSpectrum` | W = U diag(s) Vᵀ, every s in 1 ± margin | any |
# | `SchurForm` | W = P (Λ + T) Pᵀ: eigenvalues and a non-normal part | square |
#
# `Exponential` and `Cayley` are for square layers:

# %%
for constraint in (Exponential, Cayley):
    square = nn.Linear(16, 16)
    parametrize.register_parametrization(square, "weight", constraint(square.weight))
    print(constraint.__name__, f"{orthogonality_error(square.weight):.1e}")

# %% [markdown]
# `Householder` and `FactorizedSpectrum` accept any shape. A margin limits how far the singular values may be from 1.
# The start of `nn.Linear` has smaller singular values, so all of them are moved to the lower bound.

# %%
tall = nn.Linear(16, 48)
parametrize.register_parametrization(tall, "weight", Householder(tall.weight))
print("Householder", f"{orthogonality_error(tall.weight):.1e}")

wide = nn.Linear(48, 16)
parametrize.register_parametrization(wide, "weight", FactorizedSpectrum(wide.weight, margin=0.1))
singular_values = torch.linalg.svdvals(wide.weight.detach())
print("FactorizedSpectrum: singular values from", f"{singular_values.min():.3f} to {singular_values.max():.3f}")

# %% [markdown]
# ## A deep network
#
# Thirty tanh layers between an input and an output layer must tell two interleaved spirals apart. With PyTorch's
# initialisation the gradient that reaches the first layer is orders of magnitude smaller than that of the last.


# %%
def deep(constrained: bool, width: int = 32, depth: int = 30) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(2, width), nn.Tanh()]
    for _ in range(depth):
        hidden = nn.Linear(width, width)
        if constrained:
            parametrize.register_parametrization(hidden, "weight", Cayley(hidden.weight))
        layers += [hidden, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 2))


def spirals(points: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    radius = torch.rand(points, 1) * 0.8 + 0.2
    label = torch.randint(0, 2, (points,))
    angle = 5.0 * radius + torch.pi * label[:, None]
    x = radius * torch.cat([angle.cos(), angle.sin()], 1)
    return 2.0 * (x + 0.01 * torch.randn_like(x)), label


def gradient_norms(model: nn.Sequential) -> list[float]:
    """Norm of dL/d(output of each linear layer), from the first layer to the last."""
    x, label = spirals()
    outputs = []
    for module in model:
        x = module(x)
        if isinstance(module, nn.Linear):
            outputs.append(x)
    return [float(g.norm()) for g in torch.autograd.grad(nn.functional.cross_entropy(x, label), outputs)]


norms = {"unconstrained": gradient_norms(deep(False)), "orthogonal": gradient_norms(deep(True))}
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name, values in norms.items():
    axes.semilogy(values, label=name)
axes.set(xlabel="layer", ylabel="norm of the gradient")
axes.legend()
plt.show()
assert norms["unconstrained"][0] < 1e-3 * norms["orthogonal"][0]

# %% [markdown]
# Training needs no special optimizer: the free parameters take ordinary steps, and the weights stay orthogonal. The
# optimizer here is SGD, whose steps are as small as the gradient. Adam rescales every gradient, which hides much of the
# difference: with Adam and 16 layers, the unconstrained network learned this task faster than the orthogonal one (loss
# 0.05 and 0.32 after 80 iterations, one seed).


# %%
def train(model: nn.Sequential, iterations: int = 100) -> list[float]:
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(iterations):
        x, label = spirals()
        loss = nn.functional.cross_entropy(model(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


constrained = deep(True)
losses = {"unconstrained": train(deep(False)), "orthogonal": train(constrained)}
for name, values in losses.items():
    print(f"{name}: loss {sum(values[-10:]) / 10:.3f} (guessing gives 0.693)")
worst = max(orthogonality_error(m.weight) for m in constrained if parametrize.is_parametrized(m))
print(f"largest orthogonality error after training: {worst:.1e}")
assert losses["orthogonal"][-1] < losses["unconstrained"][-1]
assert worst < 1e-4

# %% [markdown]
# ## A recurrent cell
#
# The recurrent weight of `torch.nn.RNNCell` is a parameter like any other. For whole sequences use the modules of
# `orthokern.nn`, which run all time steps in one kernel. `parametrize.cached()` computes the weight once for all
# time steps.

# %%
cell = nn.RNNCell(8, 64)
parametrize.register_parametrization(cell, "weight_hh", FactorizedSpectrum(cell.weight_hh, margin=0.01))
state = torch.zeros(4, 64)
with parametrize.cached():
    for x in torch.randn(100, 4, 8):
        state = cell(x, state)
state.square().mean().backward()
singular_values = torch.linalg.svdvals(cell.weight_hh.detach())
print(f"singular values from {singular_values.min():.4f} to {singular_values.max():.4f}")
assert 0.99 - 1e-5 < singular_values.min() and singular_values.max() < 1.01 + 1e-5

# %% [markdown]
# `parametrize.remove_parametrizations(layer, "weight")` makes the weight an ordinary parameter again.

# %%
parametrize.remove_parametrizations(layer, "weight")
print(type(layer.weight).__name__, f"{orthogonality_error(layer.weight):.1e}")
