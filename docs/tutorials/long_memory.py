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
# # Long memory with a factorized RNN
#
# In the copy task a network reads ten symbols, then T blank inputs and a marker, and must then output the ten symbols
# in order. A network without memory reaches a cross-entropy of 10 ln(8) / (T + 20) nats per step and no less. In this
# tutorial a `FactorizedRNN` solves the task for T = 1000.
#
# `python -m orthokern.tasks.copy --T 10000` is the complete experiment, with records, checkpoints and plots.

# %%
import math

import matplotlib.pyplot as plt
import torch

from orthokern.data import CopyTask
from orthokern.nn import GRU, FactorizedRNN, LinearCrossEntropy
from orthokern.optim import optimizer_for

torch.manual_seed(0)
T, batch, hidden = 1000, 50, 128
task = CopyTask(T)
tokens, targets = task.batch(batch)
print("tokens", tuple(tokens.shape), "targets", tuple(targets.shape), f"baseline {task.baseline:.4f} nats per step")

# %% [markdown]
# ## The model
#
# The recurrent matrix is W = U diag(s) Vᵀ with orthogonal U and V. A margin of 0.001 keeps every singular value s
# between 0.999 and 1.001. Over 1000 steps W changes the length of a state by a factor between 0.37 and 2.72. A margin
# of 0.1 would allow factors from 1e-46 to 1e41.
#
# The module reads token ids, so no one-hot tensor is needed. `nonlinearity="identity"` makes the recurrence linear.
# Then `rnn.loss` can work in the eigenbasis of W, at O(N) operations per step in place of O(N²).

# %%
rnn = FactorizedRNN(task.num_ids, hidden, nonlinearity="identity", bias=False, margin=0.001)
readout = LinearCrossEntropy(hidden, task.num_classes)
model = torch.nn.ModuleDict({"rnn": rnn, "readout": readout})
print(rnn.explain_loss(task.length, batch, task.num_classes))

# %% [markdown]
# Two choices for the start make training short. The blank input has the weight zero, so that the state holds the
# symbols and nothing else. The readout starts at zero, with a bias that says how often the target is blank.

# %%
with torch.no_grad():
    table = rnn.get_parameter("weight_ih_l0")
    table.normal_(0.0, math.sqrt(2.0 / (hidden + task.num_ids)))
    table[:, 0] = 0.0
    readout.weight.zero_()
    readout.get_parameter("bias").zero_()[0] = math.log((task.length - task.recall) * task.symbols / task.recall)
    start = readout.get_parameter("bias").clone()

# %% [markdown]
# ## The optimizer
#
# `optimizer_for` finds out what each parameter is: U and V take geodesic (Cayley) steps that keep them orthogonal, the
# spectrum has its own rate, everything else goes to RMSprop. The rates of U, V and s are divided by T, since a change
# of the recurrent matrix acts T times in a row. The rate that is printed for the spectrum, 0.01, is 0.02 / T divided by
# twice the margin: it is that of the parameter p, and s = 1 + 2 margin (sigmoid(p) - 1/2).

# %%
optimizer = optimizer_for(
    model,
    lr={"rnn": 1e-3, "readout": 2e-2},
    spectrum_lr=0.02 / T,
    geodesic_lr=0.01 / T,
    basis_clip=1.0,
)
for group in optimizer.param_groups:
    print(group["role"], f"{group['lr']:.2g}", [tuple(p.shape) for p in group["params"]])

# %% [markdown]
# The gradient of the blank's weights is set to zero, so that they stay zero.

# %%
losses, accuracies = [], []
for iteration in range(40):
    tokens, targets = task.batch(batch)
    loss, hits = rnn.loss(tokens, readout, targets)
    optimizer.zero_grad()
    loss.backward()
    table.grad[:, 0] = 0.0
    optimizer.step()
    losses.append(loss.item())
    accuracies.append(hits[-task.recall :].double().mean().item() / batch)
    if iteration % 10 == 9:
        print(f"iteration {iteration + 1}: loss {losses[-1]:.6f}, recall accuracy {100 * accuracies[-1]:.1f} %")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.semilogy(losses)
left.axhline(task.baseline, color="gray", linestyle="--", label="without memory")
left.set(xlabel="iteration", ylabel="loss (nats per step)")
left.legend()
right.plot(accuracies)
right.set(xlabel="iteration", ylabel="recall accuracy")
plt.show()

# %% [markdown]
# ## A GRU with the same start
#
# The two choices for the start can be given to any network. They are not what solves the task: a GRU with them has not
# even learned in 20 iterations when to answer, which would bring it to the loss without memory.

# %%
torch.manual_seed(0)
gru = GRU(task.num_ids, hidden)
gru_readout = LinearCrossEntropy(hidden, task.num_classes)
with torch.no_grad():
    gru.get_parameter("weight_ih_l0")[:, 0] = 0.0
    gru_readout.weight.zero_()
    gru_readout.get_parameter("bias").copy_(start)
parameters = [*gru.parameters(), *gru_readout.parameters()]
adam = torch.optim.Adam(parameters, lr=2e-3)
gru_losses = []
for _ in range(20):
    tokens, targets = task.batch(batch)
    loss = gru_readout.loss(gru(tokens)[0], targets)
    adam.zero_grad()
    loss.backward()
    gru.get_parameter("weight_ih_l0").grad[:, 0] = 0.0
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    adam.step()
    gru_losses.append(loss.item())
print(
    f"after 20 iterations: GRU {gru_losses[-1]:.4f}, FactorizedRNN {losses[19]:.4f}, without memory {task.baseline:.4f}"
)
assert gru_losses[-1] > task.baseline > losses[19]

# %% [markdown]
# ## What was learned
#
# U and V are orthogonal up to rounding, and the singular values are inside the margin.

# %%
spectrum = torch.linalg.svdvals(rnn.recurrent_matrix().detach().double())
print(f"orthogonality error {float(rnn.orthogonality_error()):.1e}")
print(f"singular values from {spectrum.min():.5f} to {spectrum.max():.5f}")
assert accuracies[-1] > 0.9, "the recall accuracy should be above 90 % after 40 iterations"
assert 0.999 < spectrum.min() <= spectrum.max() < 1.001
