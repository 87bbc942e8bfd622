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
# # A perceptual decision in a low-rank network
#
# A network sees a noisy signal whose mean is slightly above or below zero, and must say which after a delay. It has to
# integrate the signal and to keep the result. This is a standard task for recurrent networks in neuroscience, which are
# leaky and noisy, and often of a low rank, so that their dynamics can be drawn.
#
# The network has 256 units of rank 2. W = U diag(s) Vᵀ is never formed: a step takes O(N K) operations.

# %%
import matplotlib.pyplot as plt
import torch

from orthokern.diagnostics.plots import plot_latent
from orthokern.nn import FactorizedRNN
from orthokern.optim import GeodesicRMSprop, optimizer_for

torch.manual_seed(0)
T, stimulus, batch, hidden = 60, 40, 64, 256
strengths = torch.tensor([-0.4, -0.2, -0.1, 0.1, 0.2, 0.4])


def trials(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Signals [T, count, 1] and the strengths of their means [count]."""
    strength = strengths[torch.randint(len(strengths), (count,))]
    signal = torch.zeros(T, count, 1)
    signal[:stimulus] = strength[:, None] + torch.randn(stimulus, count, 1)
    return signal, strength


# %% [markdown]
# ## The network
#
# `leak=0.1` makes h_t = 0.9 h_{t-1} + 0.1 tanh(...): the step is a tenth of the time constant of a unit. `noise=0.2` is
# added to every pre-activation in training. Without the recurrence a unit would forget the signal within 10 steps.

# %%
rnn = FactorizedRNN(1, hidden, rank=2, leak=0.1, noise=0.2, margin=0.5)
readout = torch.nn.Linear(hidden, 1)
model = torch.nn.ModuleDict({"rnn": rnn, "readout": readout})
print("parameters of the module:", sum(p.numel() for p in rnn.parameters()), "of a dense W alone:", hidden**2)

# %%
optimizer = optimizer_for(
    model, lr=2e-3, geodesic_lr=1e-3, spectrum_lr=1e-2, euclidean=torch.optim.Adam, geodesic=GeodesicRMSprop
)
losses = []
for _ in range(300):
    signal, strength = trials(batch)
    states, last = rnn(signal)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(readout(last[0])[:, 0], (strength > 0).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {sum(losses[:20]) / 20:.3f} at the start, {sum(losses[-20:]) / 20:.3f} at the end")

# %% [markdown]
# ## The decisions
#
# An ideal observer compares the mean of the 40 noisy values with zero.

# %%
model.eval()
with torch.no_grad():
    signal, strength = trials(2000)
    states, last = rnn(signal)
    right = (readout(last[0])[:, 0] > 0) == (strength > 0)
    ideal = (signal.sum((0, 2)) > 0) == (strength > 0)
for value in strengths[3:].tolist():
    rows = (strength.abs() - value).abs() < 1e-6
    ours, best = (each[rows].float().mean() for each in (right, ideal))
    print(f"strength {value:.1f}: right {ours:.1%}, ideal observer {best:.1%}")

# %% [markdown]
# ## The dynamics
#
# W reads a state h through the two numbers κ = Vᵀh, `rnn.latent(states)`. The eigenvalues of `latent_matrix()` are
# those of W that are not zero. `plot_latent` draws both. Near h = 0, the component of κ with the eigenvalue λ keeps the
# fraction 1 - leak (1 - λ) in a step: with λ near 1 it integrates the signal. The means of the trials lie on one line
# in the plane of κ.

# %%
with torch.no_grad():
    eigenvalues = torch.linalg.eigvals(rnn.latent_matrix())
print("eigenvalues of W:", [f"{value:.2f}" for value in eigenvalues.tolist()])
figure, axes = plt.subplots(1, 3, figsize=(13, 4))
plot_latent(rnn, states, groups=strength, axes=axes)
axes[0].set_title("means of the trials, by strength")
for value, line in zip(strengths.tolist(), axes[0].lines, strict=True):
    rows = (strength - value).abs() < 1e-6
    axes[2].plot((states[:, rows] @ readout.weight[0].detach()).mean(1), color=line.get_color())
axes[2].axvspan(0, stimulus, color="0.93")
axes[2].set(xlabel="step", ylabel="readout", title="grey: the signal is on")
figure.tight_layout()
plt.show()
