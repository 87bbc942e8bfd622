"""MNIST as sequences of pixels: the four IDX files of LeCun, Cortes and Burges (1998), and orders of the pixels.

    file                       content                                                            magic number
    train-images-idx3-ubyte    60000 x 28 x 28 uint8, row by row, 0 is paper and 255 ink           2051
    train-labels-idx1-ubyte    60000 uint8, 0 to 9                                                2049
    t10k-images-idx3-ubyte     10000 x 28 x 28 uint8                                              2051
    t10k-labels-idx1-ubyte     10000 uint8                                                        2049

Each may be compressed by gzip, which is detected from its content, and may be named train-images.idx3-ubyte. Other data
sets in this format, with any number of images, are read as well.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from orthokern.data._files import read_first
from orthokern.errors import InputError, integer, require

SIDE = 28
PIXELS = SIDE * SIDE

_KINDS = {2051: "images", 2049: "labels"}  # by magic number


@dataclass(frozen=True)
class Labelled:
    """Images and labels.

    Attributes:
        images: [n, 784] uint8, 0 to 255, row by row.
        labels: [n] int64, 0 to 9.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Mnist:
    """The three parts of the data. `validation` is the end of the training files, and not part of `train`."""

    train: Labelled
    validation: Labelled
    test: Labelled


def load_mnist(folder: str | Path, *, validation: int = 10_000) -> Mnist:
    """Reads and checks the four MNIST files, which may be compressed by gzip. The tensors are on the CPU and take 55 MB
    for the standard files; `train` and `validation` share memory.

    Args:
        folder: folder of the files.
        validation: number of images at the end of the training files that form the validation set; at least 0, and
            below the number of training images. Vorontsov et al. 2017 train on 50 000 and validate on 10 000.
    """
    validation = integer("validation", validation, minimum=0)
    train, test = _read_part(folder, "train"), _read_part(folder, "t10k")
    split = len(train) - validation
    if split < 1:
        raise InputError(f"validation must be below {len(train)}, the number of training images, got {validation}")
    return Mnist(
        train=Labelled(train.images[:split], train.labels[:split]),
        validation=Labelled(train.images[split:], train.labels[split:]),
        test=test,
    )


def pixel_permutation(seed: int, pixels: int = PIXELS) -> Tensor:
    """A random order of the pixels, [pixels] int64, for the permuted task: images[:, pixel_permutation(seed)]. A seed
    gives the same order on every machine.

    Example::

        >>> order = pixel_permutation(0)
        >>> order.shape, torch.equal(order.sort().values, torch.arange(784))
        (torch.Size([784]), True)
    """
    generator = torch.Generator("cpu").manual_seed(integer("seed", seed, 0, 2**63 - 1))
    return torch.randperm(integer("pixels", pixels), generator=generator, device="cpu")


def pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every pixel, to standardise images: (image - mean) / deviation. Use the training
    images only, so that no information about the test images is used.

    Args:
        images: [n, P] uint8, n at least 1.

    Returns:
        mean [P] float32, and standard deviation [P] float32 (divided by n), which is 1 for a constant pixel.

    Example::

        >>> pixel_statistics(torch.tensor([[0, 7], [10, 7]], dtype=torch.uint8))
        (tensor([5., 7.]), tensor([5., 1.]))
    """
    require(images.ndim == 2 and len(images) > 0, "images", "[n, P] with n at least 1", f"shape {list(images.shape)}")
    parts = map(Tensor.double, images.split(64, 1))  # all images in float64 would be 376 MB
    numbers = [(part.mean(0), part.std(0, correction=0)) for part in parts]
    mean, deviation = (torch.cat(columns).float() for columns in zip(*numbers, strict=True))
    return mean, torch.where(deviation > 0, deviation, 1.0)


def _read_part(folder: str | Path, part: str) -> Labelled:
    """Images and labels of "train" or "t10k"."""
    images_path, images = _read_idx(folder, f"{part}-images", 2051, [SIDE, SIDE])
    labels_path, labels = _read_idx(folder, f"{part}-labels", 2049, [])
    if len(images) != len(labels):
        raise InputError(
            f"{images_path} holds {len(images)} images and {labels_path.name} {len(labels)} labels; "
            "expected: the same number"
        )
    if int(labels.max()) > 9:
        raise InputError(f"{labels_path} has the label {int(labels.max())}; expected: 0 to 9")
    return Labelled(images, labels.squeeze(1).to(torch.int64))


def _read_idx(folder: str | Path, stem: str, magic: int, shape: list[int]) -> tuple[Path, Tensor]:
    """Path and content of one file: [n, numbers in an item of `shape`] uint8."""
    path, content = read_first(
        folder, [f"{stem}{mark}idx{len(shape) + 1}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    )
    if content[:2] == b"\x1f\x8b":  # gzip; the name is not reliable, because browsers may decompress files
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise InputError(f"{path} is cut off or damaged: gzip cannot decompress it ({error})") from None
    header = 8 + 4 * len(shape)
    if len(content) < header:
        raise InputError(f"{path} is cut off: {len(content)} bytes; expected: a header of {header} bytes, then data")
    number, items, *sides = np.frombuffer(content, ">u4", header // 4).tolist()
    if number != magic:
        kind = f" ({_KINDS[number]})" if number in _KINDS else ""
        raise InputError(f"{path} has magic number {number}{kind}; expected: {magic} ({_KINDS[magic]})")
    if sides != shape:
        raise InputError(f"{path} holds images of {sides[0]} x {sides[1]} pixels; expected: {SIDE} x {SIDE}")
    size = header + items * math.prod(shape)
    if items < 1 or len(content) != size:
        raise InputError(f"{path} has {len(content)} bytes for {items} {_KINDS[magic]}; expected: {size}, at least one")
    return path, torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).view(items, -1)
