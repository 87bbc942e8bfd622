"""The CPU backend: native kernels with the signatures of ``orthokern.reference``, one file for each op.

Only ``_call.py`` passes addresses to the kernels. A file has the name of its op; ``orthokern/ops/<op>.py`` documents
shapes and arguments: B batch, T time, N hidden, K rank, D input features or token ids, C classes.

Importing never fails: ``AVAILABLE`` is False without a native module, and ``REASON`` is the reason.
"""

from orthokern.cpu._call import AVAILABLE, REASON, build_info, empty_cache

__all__ = ["AVAILABLE", "REASON", "build_info", "empty_cache"]
