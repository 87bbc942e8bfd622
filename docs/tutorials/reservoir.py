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
# # An echo state network with an orthogonal reservoir
#
# An echo state network is a recurrent network whose weights are not trained. Only a linear readout of its states is
# fitted, by ridge regression. Here it predicts a chaotic series, 84 steps ahead, from the present value alone: the
# states have to hold the past.
#
# The series is that of Mackey and Glass, dy/dt = 0.2 y(t - 17) / (1 + y(t - 17)¹⁰) - 0.1 y(t), in steps of 1.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

from orthokern.diagnostics import spectral_radius
from orthokern.nn import RNN


def mackey_glass(steps: int, per_step: int = 10) -> torch.Tensor:
    """The series [steps], without its first 500 values, by Euler's method."""
    lag = 17 * per_step
    y = np.full(lag + (steps + 500) * per_step, 1.2)
    for t in range(lag, len(y) - 1):
        y[t + 1] = y[t] + (0.2 * y[t - lag] / (1 + y[t - lag] ** 10) - 0.1 * y[t]) / per_step
    return torch.from_numpy(y[lag + 500 * per_step :: per_step])


ahead, transient, training, hidden, leak = 84, 200, 3000, 400, 0.5
series = mackey_glass(5000 + ahead)
x, y = series[:-ahead, None] - series.mean(), series[ahead:] - series.mean()  # [T, 1], [T]
print(len(x), "steps, of which", training, "are for training")

# %% [markdown]
# ## The reservoir
#
# `init="orthogonal"` draws W from the orthogonal matrices, whose eigenvalues all have modulus 1. Scaling W to a
# spectral radius below 1 lets the network forget. `leak` is the share of the new value in a step.


# %%
def reservoir(radius: float, init: str | None = "orthogonal", seed: int = 0) -> RNN:
    """W is orthogonal, or Gaussian for init None, with this spectral radius; the input weights are U(-1, 1)."""
    torch.manual_seed(seed)
    rnn = RNN(1, hidden, init=init, leak=leak, dtype=torch.float64).requires_grad_(False)
    if init is None:
        rnn.weight_hh_l0.normal_()
    rnn.weight_hh_l0 *= radius / spectral_radius(rnn.weight_hh_l0)
    rnn.weight_ih_l0.uniform_(-1, 1)
    rnn.bias_ih_l0.uniform_(-0.2, 0.2)
    rnn.bias_hh_l0.zero_()
    return rnn


def predict(states: torch.Tensor, ridge: float = 1e-8) -> tuple[torch.Tensor, float]:
    """The predictions [T] of a readout of states [T, N], and their error after the training over the deviation of y."""
    features = torch.cat([states, torch.ones(len(states), 1, dtype=states.dtype)], 1)
    a, b = features[transient:training], y[transient:training]
    weights = torch.linalg.solve(a.mT @ a + ridge * torch.eye(hidden + 1, dtype=a.dtype), a.mT @ b)
    predicted = features @ weights
    error = (predicted - y)[training:].square().mean().sqrt() / y[training:].std()
    return predicted, error.item()


rnn = reservoir(0.99)
states, _ = rnn(x)  # [T, N]
predicted, error = predict(states)
print(f"error {error:.3f}; of the present value as the prediction {(x[:, 0] - y).square().mean().sqrt() / y.std():.3f}")

# %% [markdown]
# ## The same in NumPy and in ReservoirPy
#
# A loop with the same equations has the same states. ReservoirPy, if it is installed, draws a sparse matrix of its own
# for the same number of units, leak and spectral radius, with its other defaults.
# [Coming from another package](../coming-from.md#reservoirpy) runs a reservoir of ReservoirPy here.

# %%
w, w_in = rnn.weight_hh_l0.numpy(), rnn.weight_ih_l0.numpy()
h, by_hand = np.zeros(hidden), []
for x_t in x.numpy():
    h = (1 - leak) * h + leak * np.tanh(w @ h + w_in @ x_t + rnn.bias_ih_l0.numpy())
    by_hand.append(h)
torch.testing.assert_close(torch.from_numpy(np.stack(by_hand)), states)

try:
    from reservoirpy.nodes import Reservoir
except ImportError:
    print("ReservoirPy is not installed")
else:
    theirs = torch.from_numpy(Reservoir(hidden, lr=leak, sr=0.99, input_scaling=1.0, seed=0).run(x.numpy()))
    print(f"error of ReservoirPy {predict(theirs)[1]:.3f}")

# %% [markdown]
# ## The spectral radius
#
# The eigenvalues of a Gaussian matrix of spectral radius ρ fill a disk: most components of a state are forgotten faster
# than ρᵗ. Those of an orthogonal matrix times ρ all lie on the circle. Means of two draws:

# %%
radii = [0.7, 0.8, 0.9, 0.95, 0.99]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
for init, name in (("orthogonal", "orthogonal"), (None, "Gaussian")):
    errors = [np.mean([predict(reservoir(radius, init, seed)(x)[0])[1] for seed in (1, 2)]) for radius in radii]
    print(name, *(f"{radius}: {error:.3f}" for radius, error in zip(radii, errors, strict=True)))
    axes[1].plot(radii, errors, "o-", label=name)
axes[0].plot(y[training : training + 400], label="series")
axes[0].plot(predicted[training : training + 400], "--", label=f"predicted {ahead} steps before")
axes[0].set(xlabel="step after the training", ylabel="y minus its mean")
axes[1].set(xlabel="spectral radius", ylabel="error / deviation", ylim=(0, None))
for axis in axes:
    axis.legend(frameon=False)
figure.tight_layout()
plt.show()
