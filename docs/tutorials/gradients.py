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
# # Seeing vanishing and exploding gradients
#
# The gradient of a loss at the last step T passes through one Jacobian per time step on its way back to step t:
#
# $$
# \frac{\partial L}{\partial h_t} = J_{t+1}^\top \cdots J_T^\top \frac{\partial L}{\partial h_T}, \qquad
# J_t = \operatorname{diag}(\varphi'(a_t))\, W
# $$
#
# If the singular values of W are below 1, its norm falls exponentially with T - t. If they are above 1, it may grow as
# fast. `orthokern.diagnostics.tap` shows it: it collects the norm of dL/dh_t of every step during an ordinary backward.

# %%
import matplotlib.pyplot as plt
import torch

from orthokern import diagnostics
from orthokern.nn import RNN, FactorizedRNN

T, batch, hidden = 300, 8, 64
torch.manual_seed(0)
x = 0.1 * torch.randn(T, batch, 4)


def gradient_norms(rnn: torch.nn.Module) -> torch.Tensor:
    """[T]: the norm of dL/dh_t, of a loss that depends on the last state alone."""
    with diagnostics.tap() as taken:
        states, _ = rnn(x)
        (states[-1] ** 2).mean().backward()
    return taken.grad_norms[0]


def draw(curves: dict[str, torch.Tensor]) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name, norms in curves.items():
        relative = norms / norms[-1]
        axes.semilogy(relative.clamp_min(1e-38), label=name)
    axes.set(xlabel="time step t", ylabel="|dL/dh_t| / |dL/dh_T|")
    axes.legend()
    plt.show()


# %% [markdown]
# ## A linear recurrence: the matrix alone
#
# The recurrent matrix is a multiple of an orthogonal matrix. Over 300 steps a factor of 0.95 per step becomes 2e-7, and
# a factor of 1.05 becomes 2e6.

# %%
curves = {}
for scale in (0.95, 1.0, 1.05):
    rnn = RNN(4, hidden, nonlinearity="identity", init="orthogonal")
    with torch.no_grad():
        rnn.get_parameter("weight_hh_l0").mul_(scale)
    curves[f"W = {scale} Q"] = gradient_norms(rnn)
draw(curves)
ratio = {name: float(norms[0] / norms[-1]) for name, norms in curves.items()}
print({name: f"{value:.1e}" for name, value in ratio.items()})
assert abs(ratio["W = 1.0 Q"] - 1.0) < 1e-3
assert ratio["W = 0.95 Q"] < 1e-6 and ratio["W = 1.05 Q"] > 1e6

# %% [markdown]
# ## Initialisations and nonlinearities
#
# `torch.nn.RNN` draws its matrix from U(-1/√N, 1/√N). Its spectral radius is about 1/√3, so the gradient vanishes
# within a few dozen steps. An orthogonal matrix keeps it much longer. With tanh the slope φ' is below 1 wherever the
# state is not zero, so some decay remains.

# %%
curves = {}
for name, init in (("uniform, as in torch.nn.RNN", "identity"), ("orthogonal", "orthogonal")):
    torch.manual_seed(1)
    rnn = RNN(4, hidden, nonlinearity="tanh", init=init)
    if init == "identity":
        torch.nn.init.uniform_(rnn.get_parameter("weight_hh_l0"), -(hidden**-0.5), hidden**-0.5)
    curves[name] = gradient_norms(rnn)
draw(curves)
remaining = {name: float(norms[-50] / norms[-1]) for name, norms in curves.items()}
print("remaining after 50 steps:", {name: f"{value:.1e}" for name, value in remaining.items()})
assert remaining["uniform, as in torch.nn.RNN"] < 1e-6 * remaining["orthogonal"]

# %% [markdown]
# ## The margin
#
# `FactorizedRNN` keeps the singular values between 1 - m and 1 + m. The margin m bounds what T steps can do to the
# norm: at most (1 + m)^T, and at least (1 - m)^T for a linear recurrence. Here the spectrum is set to random values
# over the whole range of each margin.

# %%
curves, bounds = {}, {}
for margin in (0.0, 0.01, 0.1):
    torch.manual_seed(2)
    rnn = FactorizedRNN(4, hidden, nonlinearity="identity", margin=margin)
    with torch.no_grad():
        rnn.get_parameter("spectrum_l0").uniform_(-6.0, 6.0)
    curves[f"margin {margin}"] = gradient_norms(rnn)
    bounds[f"margin {margin}"] = (1 - margin) ** (T - 1), (1 + margin) ** (T - 1)
draw(curves)
for name, norms in curves.items():
    low, high = bounds[name]
    print(f"{name}: {float(norms[0] / norms[-1]):.2e}, between {low:.2e} and {high:.2e}")
    assert 0.99 * low <= norms[0] / norms[-1] <= 1.01 * high

# %% [markdown]
# ## The recurrent matrix of a model
#
# `diagnose_recurrence` summarises the recurrent matrices of a module: singular values, spectral radius, angles of the
# eigenvalues. The training loop of `orthokern.tasks` records these and the gradient norms; `python -m
# orthokern.diagnostics` draws the records.

# %%
record = diagnostics.diagnose_recurrence(rnn)
print("singular values:", {name: f"{value:.4g}" for name, value in record["spectrum"].items()})
print(f"spectral radius: {record['spectral_radius']:.4g}")
print(f"orthogonality error of U and V: {record['orthogonality_error']:.1e}")
figure, axes = plt.subplots(figsize=(6, 2.4), layout="constrained")
axes.bar(range(-175, 180, 10), record["eigenvalue_angles"], width=8)
axes.set(xlabel="angle of the eigenvalue (degrees)", ylabel="eigenvalues", xticks=range(-180, 181, 60))
plt.show()
