"""Synthetic sequence tasks and readers of standard file formats.

Generators take a `torch.Generator` and return plain tensors, time first ([T, B]), so that the same seed gives the same
data on every device.
"""

from orthokern.data.copy import CopyTask

__all__ = ["CopyTask"]
