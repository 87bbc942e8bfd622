"""Reads cell arrays of matrices from MATLAB 5 files (also called v6 and v7). Only the parts of the format that the data
sets use are supported.

A file has a header of 128 bytes, followed by data elements. An element has a tag of 8 bytes (type, size) and a content,
padded to a multiple of 8 bytes; with a content of at most 4 bytes, tag and content together have 8 bytes. A compressed
element contains another element. A matrix is an element that contains elements: flags with its class, dimensions, name,
and the values in column-major order, in the smallest type that can represent them. The values of a cell array are
matrices.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from orthokern._files import FILE_LIMIT, decoding, inflate, size_text
from orthokern.errors import InputError

_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MATRIX, _COMPRESSED = 14, 15
_CELL_CLASS, _NUMERIC_CLASSES = 1, range(6, 16)  # double, single, int8, ... uint64
_COMPLEX = 0x0800
_MOST_CELLS = 2**20  # of an array, and elements of the file


class _DamagedError(Exception):
    """The content contradicts the sizes in the file."""


def read_cells(path: Path, content: bytes, names: tuple[str, ...]) -> dict[str, list[np.ndarray]]:
    """The cell arrays with the given names; other variables are ignored.

    Args:
        path: path for error messages.
        content: content of the file.
        names: names of the variables.

    Returns:
        Name -> the matrices of the cells in column-major order, each [rows, columns] with its stored type.

    Raises:
        InputError: not a MATLAB 5 file, a damaged or truncated file, a missing name, or a variable that is not a cell
            array of real numeric matrices.
    """
    if content.startswith(b"MATLAB 7.3") or content.startswith(b"\x89HDF"):
        raise InputError(f"{path} is a MATLAB 7.3 file (HDF5); expected: MATLAB 5 (save it with -v7), or a .npz file")
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if order is None or content[:6] != b"MATLAB":
        raise InputError(f"{path} is no MATLAB file: {len(content)} bytes that do not begin with its header")
    found: dict[str, list[np.ndarray]] = {}
    room = FILE_LIMIT  # for all that the file unpacks to
    with decoding(path, "damaged or cut off", len(content)):
        for kind, element in _elements(content[128:], order):
            if kind == _COMPRESSED:
                kind, element = _unpacked(element, order, room)
                room -= len(element)
            if kind == _MATRIX:
                name, array_class, values = _matrix(element, order)
                if name in names:
                    found[name] = _cells(path, name, array_class, values, order)
    missing = [name for name in names if name not in found]
    if missing:
        raise InputError(f"{path} has no variable {missing[0]}; expected: the cell arrays {', '.join(names)}")
    return found


def _unpacked(packed: bytes, order: str, room: int) -> tuple[int, bytes]:
    """(type, content) of the element in a compressed element, of at most `room` bytes."""
    tag = inflate(packed, 8)
    if len(tag) < 8:
        raise _DamagedError("a compressed element is empty")
    size = struct.unpack(order + "II", tag)[1]
    if size > room:
        raise _DamagedError(f"a compressed element promises {size} bytes; accepted: {size_text(FILE_LIMIT)} in all")
    return next(_elements(inflate(packed, 8 + size + 8), order))  # it may be padded to a multiple of 8 bytes


def _elements(data: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """(type, content) of the consecutive elements in `data`."""
    place = found = 0
    while place < len(data):
        found += 1
        if found > _MOST_CELLS:
            raise _DamagedError(f"more than {_MOST_CELLS} elements")
        if place + 8 > len(data):
            raise _DamagedError(f"{len(data) - place} bytes where a tag of 8 is expected")
        kind, size = struct.unpack_from(order + "II", data, place)
        if kind >> 16:  # the short form
            kind, size, begin, end = kind & 0xFFFF, kind >> 16, place + 4, place + 8
            if size > 4:
                raise _DamagedError(f"a short element of {size} bytes")
        else:
            begin = place + 8
            end = begin + size + (-size % 8 if kind != _COMPRESSED else 0)
        if begin + size > len(data):
            raise _DamagedError(f"an element of {size} bytes where {len(data) - begin} are left")
        yield kind, data[begin : begin + size]
        place = end


def _matrix(element: bytes, order: str) -> tuple[str, int, tuple[tuple[int, ...], list[tuple[int, bytes]]]]:
    """(name, class, (dimensions, the elements with the values)) of the content of a matrix."""
    parts = list(_elements(element, order))
    if len(parts) < 3 or len(parts[0][1]) != 8 or parts[1][0] != 5 or len(parts[1][1]) % 4:
        raise _DamagedError("a matrix without flags, dimensions and name")
    flags = struct.unpack(order + "I", parts[0][1][:4])[0]
    dimensions = struct.unpack(f"{order}{len(parts[1][1]) // 4}i", parts[1][1])
    array_class = flags & 0xFF
    return parts[2][1].decode("ascii"), -1 if flags & _COMPLEX else array_class, (dimensions, parts[3:])


def _cells(
    path: Path, name: str, array_class: int, values: tuple[tuple[int, ...], list[tuple[int, bytes]]], order: str
) -> list[np.ndarray]:
    dimensions, elements = values
    if array_class != _CELL_CLASS:
        raise InputError(f"{path}: {name} is no cell array; expected: a cell array of matrices")
    if math.prod(dimensions) != len(elements):
        raise _DamagedError(f"{name} holds {len(elements)} cells, not {dimensions}")
    cells = []
    for index, (_, element) in enumerate(elements):
        _, cell_class, (shape, numbers) = _matrix(element, order)
        if cell_class not in _NUMERIC_CLASSES or len(shape) != 2 or len(numbers) != 1 or numbers[0][0] not in _NUMBERS:
            raise InputError(f"{path}: cell {index} of {name} is no matrix of real numbers; expected: a numeric matrix")
        kind, content = numbers[0]
        dtype = np.dtype(order + _NUMBERS[kind])
        if min(shape) < 0 or shape[0] * shape[1] * dtype.itemsize != len(content):
            raise _DamagedError(f"cell {index} of {name} holds {len(content)} bytes for {shape[0]} x {shape[1]} values")
        cells.append(np.frombuffer(content, dtype).reshape(shape, order="F"))
    return cells
