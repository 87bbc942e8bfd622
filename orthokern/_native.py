"""The native module ``orthokern._C``, or the reason why it is not used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

module: Any = None
build: dict[str, Any] = {}  # facts about the build
REASON = ""
try:
    from orthokern import _C

    module = _C
    build = json.loads(module.build_info())
except ImportError as error:
    REASON = f"the native module is not built ({error}): install a C++17 compiler and run `pip install -e .`"

# The headers that are the contract of the kernels with Python, in an editable installation. setup.py has the same hash.
_headers = sorted((Path(__file__).parents[1] / "csrc").glob("*/ops.h"))
if module is not None and _headers:
    if hashlib.sha256(b"".join(header.read_bytes() for header in _headers)).hexdigest() != build.get("contract"):
        module, build = None, {}
        REASON = "the native module was built from other sources than these: run `pip install -e .` again"
