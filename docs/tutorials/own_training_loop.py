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
# # Your own training loop with the geodesic optimizer
#
# A `FactorizedRNN` stores orthogonal matrices U and V as parameters. An ordinary optimizer would make them lose their
# orthogonality. The geodesic optimizers of `orthokern.optim` take Cayley steps, which keep it. This tutorial adds them
# to a plain PyTorch training loop, with a learning rate schedule, gradient clipping and a checkpoint.
#
# The task: a sequence starts with one of eight symbols, 99 blanks follow, and the network must name the symbol at the
# end.

# %%
import math
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

from orthokern.nn import FactorizedRNN
from orthokern.optim import CombinedOptimizer, GeodesicSGD, optimizer_for, split_parameters

T, batch, hidden, symbols = 100, 64, 64, 8


def recall_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [T, B], 0 for the blank; the symbols to recall, 0 to 7 [B]."""
    target = torch.randint(0, symbols, (batch,))
    tokens = torch.zeros(T, batch, dtype=torch.int64)
    tokens[0] = target + 1
    return tokens, target


class Recall(nn.Module):
    def __init__(self, rnn: nn.Module | None = None) -> None:
        super().__init__()
        self.rnn = rnn or FactorizedRNN(symbols + 1, hidden, nonlinearity="modrelu", margin=0.01)
        self.readout = nn.Linear(hidden, symbols)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.rnn(nn.functional.one_hot(tokens, symbols + 1).float())
        return self.readout(states[-1])


# %% [markdown]
# ## Which parameter is what
#
# `split_parameters` sorts the parameters by the update that each needs. It asks every module that has
# `parameter_roles()`, wherever it is in the model.

# %%
torch.manual_seed(0)
model = Recall()
for role, parameters in split_parameters(model).items():
    print(role, [tuple(p[0].shape if isinstance(p, tuple) else p.shape) for p in parameters])

# %% [markdown]
# ## One optimizer for all of them
#
# `optimizer_for` builds the parts and puts them behind the interface of one `torch.optim.Optimizer`. Checkpoints and
# schedulers work as usual. Schedulers scale the rates of all groups; `OneCycleLR`, `CyclicLR` and `SWALR` replace them,
# and need one rate per group. Any torch optimizer can serve the other parameters.

# %%
plain = Recall(nn.RNN(symbols + 1, hidden))  # for comparison, with the same loop and Adam for all parameters
plain_optimizer = torch.optim.Adam(plain.parameters(), lr=2e-3)
plain_losses = []
for _ in range(200):
    tokens, target = recall_batch()
    loss = nn.functional.cross_entropy(plain(tokens), target)
    plain_optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    plain_optimizer.step()
    plain_losses.append(loss.item())
print(f"torch.nn.RNN, iteration 200: loss {sum(plain_losses[-10:]) / 10:.1e}")

# %%
optimizer = optimizer_for(model, lr=2e-3, geodesic_lr=1e-2, euclidean=torch.optim.Adam, basis_clip=1.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
losses, errors = [], []
for iteration in range(200):
    tokens, target = recall_batch()
    loss = nn.functional.cross_entropy(model(tokens), target)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    errors.append(float(model.rnn.orthogonality_error()))
    if iteration % 50 == 49:
        print(f"iteration {iteration + 1}: loss {sum(losses[-10:]) / 10:.1e}, orthogonality error {errors[-1]:.1e}")

# %% [markdown]
# Guessing gives a loss of ln 8 = 2.08 nats, and the plain RNN does no better.

# %%
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.semilogy(losses, label="FactorizedRNN")
axes.semilogy(plain_losses, label="torch.nn.RNN")
axes.axhline(math.log(symbols), color="gray", linestyle="--", label="guessing")
axes.set(xlabel="iteration", ylabel="cross-entropy (nats)")
axes.legend()
plt.show()
assert sum(losses[-10:]) / 10 < 0.2
assert max(errors) < 1e-5

# %% [markdown]
# ## The same by hand
#
# The parts can also be made one by one. A spectrum's rate is divided by twice the margin, because the parameter of the
# spectrum is scaled by it.

# %%
split = split_parameters(model)
spectra = [{"params": [p], "lr": 2e-3 / (2 * margin)} for p, margin in split["spectrum"]]
by_hand = CombinedOptimizer(
    {
        "geodesic": GeodesicSGD(split["geodesic"], lr=1e-2, max_grad_norm=1.0),
        "euclidean": torch.optim.Adam([{"params": split["other"]}, *spectra], lr=2e-3),
    }
)
print([f"{group['lr']:.2g}" for group in by_hand.param_groups])

# %% [markdown]
# ## A checkpoint
#
# The state of the combined optimizer is one ordinary `state_dict`. It loads with `weights_only=True`.

# %%
path = Path("recall.pt")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

resumed = Recall()
resumed_optimizer = optimizer_for(resumed, lr=2e-3, geodesic_lr=1e-2, euclidean=torch.optim.Adam, basis_clip=1.0)
saved = torch.load(path, weights_only=True)
resumed.load_state_dict(saved["model"])
resumed_optimizer.load_state_dict(saved["optimizer"])
path.unlink()

tokens, target = recall_batch()
for m, o in ((model, optimizer), (resumed, resumed_optimizer)):
    o.zero_grad()
    nn.functional.cross_entropy(m(tokens), target).backward()
    o.step()
difference = max(
    float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), resumed.parameters(), strict=True)
)
print("largest difference after one more step:", difference)
assert math.isclose(difference, 0.0, abs_tol=1e-7)
