"""The CUDA leaf: native kernels behind the signatures of ``orthokern.reference``, a file for each op.

``_call.py`` alone passes addresses to the kernels, which it puts on the current stream of the tensors' device. Nothing
here waits for the device. A file has the stem of its op (``orthokern/ops/<op>.py``), where shapes and arguments are
documented: B batch, T time, N hidden, K rank, D input features or token ids.

Importing never fails: ``AVAILABLE`` says whether the kernels were built and ``REASON`` why not.
"""

from orthokern.cuda._call import AVAILABLE, REASON

__all__ = ["AVAILABLE", "REASON"]
