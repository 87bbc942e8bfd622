"""The tasks music and word_lm: they learn, carry their state, keep the constraint, resume to the same bits, report
success."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import assert_resumes, build, records, run, trained
from test_data_music import npz_arrays, random_rolls
from torch import nn

from orthokern.data.music import NOTES
from orthokern.tasks import word_lm

TASKS = ("music", "word_lm")


@pytest.fixture(scope="session")
def rolls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scales, each upwards from a note of its own: after the first step every note is certain."""
    folder = tmp_path_factory.mktemp("music")
    draw = random.Random(0)
    parts = {}
    for split, count in (("train", 30), ("valid", 8), ("test", 8)):
        pieces = parts[f"{split}data"] = []
        for _ in range(count):
            steps, first = draw.randint(8, 40), draw.randint(0, 11)
            pieces.append(np.zeros((steps, NOTES), np.uint8))
            pieces[-1][np.arange(steps), (first + np.arange(steps)) % 12] = 1
    np.savez(folder / "nottingham.npz", **npz_arrays(parts))
    return folder


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences that count upwards from a word that is drawn."""
    folder = tmp_path_factory.mktemp("ptb")
    draw = random.Random(0)
    for part, count in (("train", 500), ("valid", 31), ("test", 37)):
        starts = [draw.randint(0, 5) for _ in range(count)]
        lines = [" ".join(f"w{n}" for n in range(start, start + 6)) for start in starts]
        (folder / f"ptb.{part}.txt").write_text("".join(f" {line} \n" for line in lines))
    return folder


@pytest.fixture
def small(rolls: Path, words: Path) -> dict[str, list[str]]:
    """Command lines of a second or two, with weights large enough to learn at once."""
    common = "--batch 5 --window 7 --hidden 12 --init-std 0.2 --input-scale 1 --threads 1 --diagnose-every 4".split()
    common += ["--no-plots"]
    return {"music": ["--data", str(rolls), *common], "word_lm": ["--data", str(words), *common]}


def test_music_learns(tmp_path: Path, rolls: Path) -> None:
    options = "--batch 10 --window 12 --hidden 32 --init-std 0.2 --input-scale 1 --dropout 0 --lr 0.05 --epochs 20"
    folder = tmp_path / "run"
    result = trained(folder, "music", "--data", rolls, *options.split(), "--threads", 1)
    # not knowing which of twelve notes it is costs 3.4 nats a step
    assert result["test"]["loss"] < 1.0 and result["last"]["success"] == 1
    assert result["last"]["initial_loss"] == pytest.approx(88 * math.log(2), rel=0.05)
    held_out = [r["held_out_loss"] for r in records(folder) if "held_out_loss" in r]
    assert len(held_out) == 20 and -result["best"]["score"] == min(held_out)
    assert {"learning.png", "stability.png", "gradients.png", "states.png"} <= {p.name for p in folder.iterdir()}


def test_word_lm_learns(tmp_path: Path, words: Path) -> None:
    options = "--batch 10 --window 14 --hidden 32 --init-std 0.2 --input-scale 1 --dropout 0 --lr 0.15 --epochs 5"
    result = trained(tmp_path / "run", "word_lm", "--data", words, *options.split(), "--threads", 1, "--no-plots")
    # one word of seven is drawn of six
    assert result["test"]["perplexity"] < 1.15 * 6 ** (1 / 7)
    assert result["test"]["perplexity"] == pytest.approx(math.exp(result["test"]["loss"]))
    assert result["last"]["success"] == 1 and result["last"]["initial_loss"] == pytest.approx(math.log(12), rel=0.3)


def test_music_is_measured_piece_by_piece(small: dict[str, list[str]]) -> None:
    task = build("music", small["music"])
    task.model.eval()
    model, pieces = task.model, task.data.test
    total = 0.0
    with torch.no_grad():
        for index in range(len(pieces)):
            piece = pieces.piece(index).float().unsqueeze(1)
            logits = model.readout(model.rnn(task.settings.input_scale * model.input(piece[:-1]))[0])
            total -= torch.distributions.Bernoulli(logits=logits).log_prob(piece[1:]).sum().item()
        assert task.measure("test")["loss"] == pytest.approx(total / int((pieces.lengths - 1).sum()), rel=1e-5)


def test_words_are_measured_as_streams(small: dict[str, list[str]]) -> None:
    """Each of the streams in one go; every word but the first is a target once."""
    task = build("word_lm", small["word_lm"])
    task.model.eval()
    model, text = task.model, task.data.test
    count, rows = len(text) - 1, task.settings.batch
    length = -(-count // rows)
    assert count % rows  # the last stream is shorter
    total = 0.0
    with torch.no_grad():
        for begin in range(0, count, length):
            inputs, targets = text[begin : begin + length][: count - begin], text[begin + 1 : begin + length + 1]
            states, _ = model.rnn(task.settings.input_scale * model.embedding(inputs).unsqueeze(1))
            total += nn.functional.cross_entropy(model.readout(states[:, 0]), targets, reduction="sum").item()
        assert task.measure("test")["loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("name", TASKS)
def test_the_state_goes_on(name: str, small: dict[str, list[str]]) -> None:
    """Windows of seven steps with their carried states see what one window of all steps sees, and the loss is the sum
    over a window's steps, the mean over the batch."""
    short = build(name, [*small[name], "--dropout", "0"])
    long = build(name, [*small[name], "--dropout", "0", "--window", "28"])
    long.model.load_state_dict(short.model.state_dict())
    if name == "music":  # rows begin new pieces at other times
        short.windows.rolls = long.windows.rolls = random_rolls([200] * 9)
        short.windows = short.windows.rolls.windows(5, 7, torch.Generator().manual_seed(0))
        long.windows = long.windows.rolls.windows(5, 28, torch.Generator().manual_seed(0))
    parts = [short.loss(short.next_batch()) for _ in range(4)]
    whole, numbers = long.loss(long.next_batch())
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), rel=1e-5)
    assert numbers["nll"].item() == pytest.approx(whole.item() / 28, rel=1e-6)
    torch.testing.assert_close(short.state, long.state)
    assert short.state is not None and not short.state.requires_grad and short.state.abs().max() > 0


@pytest.mark.parametrize("variant", ["kanai", "torch"])
def test_the_constraint_holds(variant: str, tmp_path: Path, small: dict[str, list[str]]) -> None:
    options = ["--variant", variant, "--iterations", 25, "--lr", 0.05, "--delta", 1.5]
    assert run("music", *small["music"], *options, "--out", tmp_path / "run") == 0
    parameters = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"]
    for name in ("weight_hh_l0", "weight_hh_l1", "weight_ih_l1"):
        largest = float(torch.linalg.matrix_norm(parameters[f"rnn.{name}"][24:].double(), 2))
        assert largest <= 0.5 * (1 + 1e-5)
    diagnosed = [r for r in records(tmp_path / "run") if "recurrent_norm" in r]
    assert len(diagnosed) == 7 and all(r["recurrent_norm_l1"] <= 0.5 * (1 + 1e-5) for r in diagnosed)
    assert all(0.5 <= r["jacobian_radius"] <= 0.625 + 1e-5 for r in diagnosed)
    assert diagnosed[-1]["projection"]["steps"] == 25 and diagnosed[-1]["lr"] == 0.05


def test_the_rate_of_words(small: dict[str, list[str]]) -> None:
    task = build("word_lm", [*small["word_lm"], "--decay-after", "2", "--decay", "1.1"])
    per = task.iterations_per_epoch
    rates = [task._rate(iteration) for iteration in range(4 * per)]
    assert rates[: 2 * per] == [1.0] * (2 * per)
    assert rates[2 * per : 3 * per] == pytest.approx([1 / 1.1] * per)
    assert rates[3 * per] == pytest.approx(1.1**-2)
    paper = word_lm.COMMAND.defaults
    assert (paper["lr"], paper["decay"], paper["decay_after"], paper["epochs"]) == (1.0, 1.1, 10, 75)


def test_the_rate_of_music(small: dict[str, list[str]]) -> None:
    """Divided after `patience` epochs without improvement, over below the floor, as the loop does it."""
    task = build("music", [*small["music"], "--patience", "2", "--decay", "2", "--lr", "0.1", "--lr-floor", "0.03"])
    task.initial_loss = 100.0
    ends, rates = [], []
    for loss in (9, 8, 8, 8, 8, 7, 7.5, 7.5, 7):
        assert task.wants_evaluation(task.iterations_per_epoch, {})
        task.plateau.step(task.score({"loss": float(loss)}))
        ends.append(task.goal_reached({"loss": float(loss)}))
        rates.append(task.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05, 0.025, 0.025])
    assert ends == [False] * 7 + [True, True]
    # in the middle of an epoch, where a run's last iteration may be, a loss is not kept
    task.measure = lambda part: {"loss": 1000.0}
    worst = task.worst_loss
    assert task.evaluate(task.iterations_per_epoch + 1)["success"] == 0 and task.worst_loss == worst


def test_success(small: dict[str, list[str]]) -> None:
    """Never above the untrained model's loss, after any epoch."""
    task = build("word_lm", small["word_lm"])
    losses = iter([2.0, 1.5, 2.0, 2.5, 1.0, math.nan, 1.0])
    task.measure = lambda part: {"loss": next(losses)}  # type: ignore[method-assign]
    task.begin()  # the untrained model's
    results = []
    for _ in range(6):
        task.wants_evaluation(task.iterations_per_epoch, {})
        results.append(task.evaluate(0))
        task.goal_reached(results[-1])
    assert [f["success"] for f in results] == [1, 1, 0, 0, 0, 0] and {f["initial_loss"] for f in results} == {2.0}


@pytest.mark.parametrize("name", TASKS)
def test_resume_is_exact(name: str, tmp_path: Path, small: dict[str, list[str]]) -> None:
    """State, dropout, order of the pieces, rates and projection: stopped twice, the same bits."""
    options = [*small[name], "--delta", "1.4", "--lr", "0.1"]
    options += ["--patience", "1"] if name == "music" else ["--decay-after", "1"]
    length = 2 * build(name, options).iterations_per_epoch + 9
    assert_resumes(name, options, tmp_path, 5, length - 6, length)
