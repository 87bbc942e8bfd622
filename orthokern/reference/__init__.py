"""The specification of every op: plain torch, one loop over time, any floating dtype, hand-derived backward.

These modules import torch and each other, nothing else. They are authoritative: a kernel that disagrees with them is
wrong, and numerics are changed here first. Forward functions are ordinary differentiable torch code, so they also serve
second derivatives; the ``_bwd`` functions are the formulas that the kernels implement, verified against autograd by
gradcheck. Inputs are assumed to be valid: ``orthokern.functional`` checks them.
"""
