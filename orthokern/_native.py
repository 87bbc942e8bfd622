"""The native module ``orthokern._C``, or the reason why it is not used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_root = Path(__file__).parents[1]
_in_sources = (_root / "setup.py").is_file()  # not an installed copy
module: Any = None
build: dict[str, Any] = {}  # facts about the build
REASON = ""
try:
    from orthokern import _C

    module = _C
    build = json.loads(module.build_info())
except ImportError as error:
    REASON = f"the native module cannot be loaded ({error})"
    if _in_sources:
        REASON += f"; {_root} holds the sources: run `pip install -e .` there"

# The headers with the structs that the kernels get from Python. setup.py has the same hash.
if module is not None and _in_sources:
    _csrc = _root / "csrc"
    _headers = sorted([*_csrc.glob("cuda/*.h"), _csrc / "cpu" / "ops.h", _csrc / "common" / "activations.h"])
    if hashlib.sha256(b"".join(header.read_bytes() for header in _headers)).hexdigest() != build.get("contract"):
        module, build = None, {}
        REASON = "the native module was built from other sources than these: run `pip install -e .` again"
