"""The CPU leaf: native kernels behind the signatures of :mod:`orthokern.reference`, a file for each op.

``_call.py`` alone passes addresses to the kernels. A file has the stem of its op (``orthokern/ops/<op>.py``), where
shapes and arguments are documented: B batch, T time, N hidden, K rank, D input features or token ids, C classes.

Importing never fails: :data:`AVAILABLE` says whether the native module was built and :data:`REASON` why not.
"""

from orthokern.cpu._call import AVAILABLE, REASON, build_info, empty_cache

__all__ = ["AVAILABLE", "REASON", "build_info", "empty_cache"]
