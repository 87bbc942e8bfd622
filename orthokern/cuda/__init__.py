"""The CUDA leaf: native kernels with the signatures of ``orthokern.reference``, one file for each op.

Only ``_call.py`` passes addresses to the kernels, which it puts on the current stream of the tensors' device. Nothing
here waits for the device. A file has the stem of its op (``orthokern/ops/<op>.py``), where shapes and arguments are
documented: B batch, T time, N hidden, K rank, D input features or token ids.

Importing never fails: ``AVAILABLE`` is False if the kernels were not built, and ``REASON`` is the reason.
"""

from orthokern.cuda._call import AVAILABLE, REASON

__all__ = ["AVAILABLE", "REASON"]
