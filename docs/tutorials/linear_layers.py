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
# # Linear recurrences with nonlinear layers between them
#
# A linear recurrent unit (LRU) or an S5 layer is a linear recurrence in its own modes: every pair of units rotates by
# an angle and shrinks by a radius. It costs O(N) per step, and gradients pass through a thousand steps of it as
# they pass through one. The nonlinearity is a multilayer perceptron (MLP) on the states of each step.
# `orthokern.nn.RotationRNN` is the recurrence; this page puts it into such a block.
#
# The task is a product of two past inputs: x is a sequence of random signs, and the target is
# y(t) = x(t - 20) x(t - 50). No single past input, and no linear function of them, says anything about y. The network
# has to store 50 inputs and to multiply two of them.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

from orthokern.nn import RotationRNN
from orthokern.optim import optimizer_for

first, second, T, B, width = 20, 50, 400, 16, 64


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, B, 1] and y [T - second, B, 1], both of -1 and 1; y belongs to the last steps of x."""
    x = 2.0 * torch.randint(2, (T, B, 1)) - 1.0
    return x, x[second - first : T - first] * x[: T - second]


# %% [markdown]
# ## The block
#
# Normalise, remember, transform, and add the result to the input. `RotationRNN` scales its input such that the variance
# of a state does not depend on its radius. It therefore needs no normalisation layer after it. Radii are drawn
# between 0.9 and 0.999, which remember about 10 to 1000 steps, and stay below 1.


# %%
class Block(nn.Module):
    def __init__(self, width: int, radii: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rnn = RotationRNN(width, 2 * width, radii=radii)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [T, B, width]
        states, _ = self.rnn(self.norm(x))
        return x + self.mlp(states)


class GRU(nn.Module):
    """For comparison."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.rnn, self.readout = nn.GRU(1, units), nn.Linear(units, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.readout(self.rnn(x)[0])


# %% [markdown]
# ## Training
#
# `optimizer_for` leaves radii and angles without weight decay, which would pull angles to 0.


# %%
def train(model: nn.Module, lr: float, iterations: int) -> list[float]:
    """The share of correct signs in every iteration."""
    optimizer = optimizer_for(model, lr=lr, euclidean=torch.optim.AdamW, weight_decay=0.01)
    correct = []
    for _ in range(iterations):
        x, y = batch()
        logits = model(x)[second:]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, (y + 1) / 2)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        correct.append(((logits > 0) == (y > 0)).float().mean().item())
    return correct


torch.manual_seed(0)
models = {
    "1 block": nn.Sequential(nn.Linear(1, width), Block(width), nn.Linear(width, 1)),
    "2 blocks": nn.Sequential(nn.Linear(1, width), Block(width), Block(width), nn.Linear(width, 1)),
    "torch.nn.GRU": GRU(128),
}
start = models["1 block"][1].rnn.eigenvalues().detach()
curves = {}
for name, model in models.items():
    parameters = sum(p.numel() for p in model.parameters())
    curves[name] = train(model, 3e-3, 200)
    print(f"{name}: {parameters} parameters, {100 * sum(curves[name][-20:]) / 20:.1f} % of the signs are correct")

# %% [markdown]
# The blocks learn the product within 100 iterations. The GRU, which multiplies in every step, does not find it: its
# gradient has to come through 50 steps of gates that have not learned to keep anything.
#
# ## What the recurrence has learned
#
# The eigenvalues λ of the first block in the complex plane, before and after the training. The circle has radius 1.

# %%
end = models["1 block"][1].rnn.eigenvalues().detach()
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
for name, curve in curves.items():
    axes[0].plot(curve, label=name)
axes[0].set(xlabel="iteration", ylabel="share of correct signs", ylim=(0.4, 1.02))
circle = torch.linspace(0, torch.pi, 200)
axes[1].plot(circle.cos(), circle.sin(), color="0.7", linewidth=1)
axes[1].plot(start.real, start.imag, "o", markersize=3, label="before the training")
axes[1].plot(end.real, end.imag, "o", markersize=3, label="after it")
axes[1].set(xlabel="Re λ", ylabel="Im λ", aspect="equal")
for axis in axes:
    axis.legend(frameon=False)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## A stream
#
# `frozen()` prepares a layer for single steps, whose state the caller keeps. Steps of the whole network give the
# results of the whole sequence.

# %%
model = models["1 block"]
encoder, block, readout = model
layer, h, outputs = block.rnn.frozen(), None, []
x, _ = batch()
with torch.no_grad():
    for x_t in x[:100]:  # [B, 1]
        encoded = encoder(x_t)
        states, h = layer.step(block.norm(encoded), h)
        outputs.append(readout(encoded + block.mlp(states)))
    torch.testing.assert_close(torch.stack(outputs), model(x[:100]), rtol=1e-4, atol=1e-4)
print(f"{layer} keeps a state of shape {tuple(h.shape)}")
