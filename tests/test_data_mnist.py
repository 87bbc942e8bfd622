"""The reader of MNIST files: its results, and damaged files that it rejects."""

from __future__ import annotations

import gzip
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import refused

from orthokern.data import load_mnist, pixel_permutation, pixel_statistics

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


def images_file(images: torch.Tensor) -> bytes:
    return struct.pack(">4I", 2051, len(images), 28, 28) + images.numpy().tobytes()


def labels_file(labels: torch.Tensor) -> bytes:
    return struct.pack(">2I", 2049, len(labels)) + labels.numpy().tobytes()


def files(n_train: int = 12, n_test: int = 5) -> dict[str, bytes]:
    generator = torch.Generator().manual_seed(0)

    def drawn(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, dtype=torch.uint8, generator=generator)

    return {
        TRAIN_IMAGES: images_file(drawn(256, n_train, 784)),
        TRAIN_LABELS: labels_file(drawn(10, n_train)),
        TEST_IMAGES: images_file(drawn(256, n_test, 784)),
        TEST_LABELS: labels_file(drawn(10, n_test)),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in files().items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_values_and_split(folder: Path) -> None:
    data, raw = load_mnist(folder, validation=4), files()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [8, 4, 5]
    images = torch.cat([data.train.images, data.validation.images])
    labels = torch.cat([data.train.labels, data.validation.labels])
    assert images.dtype == torch.uint8 and images.shape == (12, 784)
    assert labels.dtype == torch.int64
    assert images.numpy().tobytes() == raw[TRAIN_IMAGES][16:]
    assert labels.tolist() == list(raw[TRAIN_LABELS][8:])
    assert data.test.images.numpy().tobytes() == raw[TEST_IMAGES][16:]
    assert data.test.labels.tolist() == list(raw[TEST_LABELS][8:])
    assert len(load_mnist(folder, validation=0).validation) == 0


@pytest.mark.parametrize(("mark", "ending", "packed"), [("-", ".gz", True), (".", "", True), (".", ".gz", False)])
def test_spellings(folder: Path, mark: str, ending: str, packed: bool) -> None:
    """gzip is detected from the content, not from the name."""
    expected = load_mnist(folder, validation=2)
    for name, content in files().items():
        (folder / name).unlink()
        name = name.replace("-idx", f"{mark}idx") + ending
        (folder / name).write_bytes(gzip.compress(content) if packed else content)
    (folder / TRAIN_IMAGES).mkdir()  # beside the file, as in some archives
    result = load_mnist(folder, validation=2)
    for part in ("train", "validation", "test"):
        assert torch.equal(getattr(result, part).images, getattr(expected, part).images)
        assert torch.equal(getattr(result, part).labels, getattr(expected, part).labels)


# name of the file to change, its new content (None: no file), and what the error says
DAMAGES: dict[str, tuple[str, Callable[[dict[str, bytes]], bytes | None], str]] = {
    "missing": (TEST_LABELS, lambda f: None, "missing data file t10k-labels-idx1-ubyte (nor "),
    "empty": (TRAIN_IMAGES, lambda f: b"", "cut off: 0 bytes; expected: a header of 16"),
    "truncated": (TRAIN_IMAGES, lambda f: f[TRAIN_IMAGES][:-1], "has 9423 bytes for 12 images; expected: 9424"),
    "other file": (TRAIN_IMAGES, lambda f: b"%PDF-1.4" * 20, "has magic number 626017350; expected: 2051"),
    "other size of images": (
        TEST_IMAGES,
        lambda f: struct.pack(">4I", 2051, 5, 32, 32) + bytes(5 * 1024),
        "holds images of 32 x 32 pixels; expected: 28 x 28",
    ),
    "a label of 10": (TRAIN_LABELS, lambda f: f[TRAIN_LABELS][:-1] + b"\x0a", "has the label 10; expected: 0 to 9"),
    "other counts": (TRAIN_IMAGES, lambda f: f[TEST_IMAGES], "12 labels; expected: the same"),
    "gzip cut off": (TRAIN_IMAGES, lambda f: gzip.compress(f[TRAIN_IMAGES])[:-3], "gzip cannot decompress it"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damages(folder: Path, damage: str) -> None:
    name, change, expected = DAMAGES[damage]
    (folder / name).unlink()
    content = change(files())
    if content is not None:
        (folder / name).write_bytes(content)
    refused(lambda: load_mnist(folder, validation=4), name, expected)


def test_wrong_arguments(folder: Path) -> None:
    refused(lambda: load_mnist(folder / "nowhere"), "missing data file train-images-idx3-ubyte", "nowhere")
    told = "validation must be below 12, the number of training images, got 12"
    refused(lambda: load_mnist(folder, validation=12), told)
    for images in (torch.zeros(3), torch.zeros(0, 4)):
        refused(lambda images=images: pixel_statistics(images), "images must be [n, P] with n at least 1, got shape [")


def test_permutation() -> None:
    """Golden values: another order is another task."""
    order = pixel_permutation(7)
    assert order.dtype == torch.int64 and order.sort().values.tolist() == list(range(784))
    assert torch.equal(order, pixel_permutation(7)) and not torch.equal(order, pixel_permutation(8))
    assert hashlib.sha256(order.numpy().astype("<i8").tobytes()).hexdigest()[:16] == "4fbbf862a7a64e92"
