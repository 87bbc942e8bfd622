"""A linear recurrence in the eigenbasis of its matrix: O(N) multiply-adds a step, with the full gradient of W.

basis.py      the eigenvectors, and their refinement after each change of W
choice.py     whether a call uses the modal form
op.py         states and loss in modal form, with dL/dW from gradient.py
loss.py       recurrence, readout and cross-entropy in one call, modal or step by step
reference.py  the recurrence in modal coordinates and its loss; cpu.py, cuda.py: the kernels
"""

from orthokern.ops.modal.choice import SUPPORT

__all__ = ["SUPPORT"]
