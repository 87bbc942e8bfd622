"""The models exprnn and nnrnn in the tasks, and characters as a stream: learning, resuming, rates, penalties, records,
presets, bad input.

tests/test_tasks.py trains every model on every task.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from runs import assert_resumes, build, run

from orthokern import InputError
from orthokern.data import load_ptb_stream, stream_rows
from orthokern.data.ptb_stream import STREAM_ALPHABET

SMALL = {
    "adding": "--T 10 --eval-every 10 --eval-sequences 60 --batch 20 --hidden 8 --iterations 12".split(),
    "copy": "--T 5 --batch 20 --hidden 8 --iterations 12".split(),
}
QUIET = "--threads 1 --no-plots --diagnose-every 3".split()


@pytest.mark.parametrize(
    "options",
    [
        "--model exprnn --rebase-every 2 --optimizer adam",
        "--model nnrnn --rebase-every 3 --modulus-penalty 0.1 --modulus-norm l1",
        "--model nnrnn --init torus --triangle-decay 1e-2 --last-step-gradient --accumulate 2",
        "--model exprnn --rebase-every 1 --last-step-gradient --init cayley --optimizer sgd",
    ],
)
def test_resume_is_exact(options: str, tmp_path: Path) -> None:
    given = [*SMALL["copy"], *options.split(), *QUIET, "--nonlinearity", "modrelu", "--goal", "100"]
    whole = assert_resumes("copy", given, tmp_path, 5, 12)
    moved = torch.load(whole / "checkpoint.pt", weights_only=True)["model"]["rnn._extra_state"]
    assert bool(moved[1] > 0) == ("--rebase-every" in options)


def test_rates_and_penalties() -> None:
    """Each kind of parameter at its rate; the loss exceeds the batch's by what the penalties' definitions say."""
    options = "--model nnrnn --lr 0.1 --input-lr 0.2 --modulus-penalty 0.3 --triangle-decay 0.5".split()
    for norm, skew in (("l2", []), ("l1", ["--skew-lr", "0.07"])):
        task = build("adding", [*SMALL["adding"], *options, *skew, "--modulus-norm", norm])
        rates = {group["role"]: group["lr"] for group in task.optimizer.param_groups}
        expected = {"readout": 0.1, "input": 0.2, "rotation": 0.2, "skew": 0.07 if skew else 0.01}
        assert rates == pytest.approx(expected)
        held = sum(len(group["params"]) for group in task.optimizer.param_groups)
        assert held == len(list(task.model.parameters()))
        gamma, triangle = task.rnn.get_parameter("gamma_l0"), task.rnn.get_parameter("triangle_l0")
        with torch.no_grad():
            gamma.normal_()
            triangle.normal_()
        batch = task.next_batch()
        plain, _ = task.model(*batch)
        total, numbers = task.loss(batch)
        off = gamma.detach() - 1
        moduli = off.square().sum() if norm == "l2" else off.abs().sum()
        below = triangle.detach().tril(-1)
        below[1::2, 0::2].diagonal().zero_()  # the elements of the rotations
        added = 0.3 * moduli + 0.25 * below.square().sum()
        assert (total - plain).item() == pytest.approx(added.item(), rel=1e-4)
        assert numbers["penalty"].item() == pytest.approx(added.item())


def test_the_stream_of_characters(ptb: Path, tmp_path: Path) -> None:
    """Both forms of the files give the same 50 characters, those of the sentences without the spaces around line
    ends."""
    stream = load_ptb_stream(ptb)
    text = (ptb / "ptb.valid.txt").read_text()
    assert "".join(STREAM_ALPHABET[i] for i in stream.validation.tolist()) == text.replace(" \n ", "\n")[1:-2] + "\n"
    for part in ("train", "valid", "test"):
        lines = (ptb / f"ptb.{part}.txt").read_text().splitlines()
        characters = "".join(" ".join(line[1:-1].replace(" ", "_")) + " \n " for line in lines)
        (tmp_path / f"ptb.char.{part}.txt").write_text(characters)
    assert torch.equal(load_ptb_stream(tmp_path).train, stream.train)
    assert len(set(STREAM_ALPHABET)) == 50
    rows = stream_rows(torch.arange(11), 3)
    assert rows.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    with pytest.raises(InputError, match="must be at most 3 for 7 tokens, got 4"):
        stream_rows(torch.arange(7), 4)


@pytest.mark.parametrize("model", ["nnrnn", "lstm", "peephole-lstm", "gru"])
def test_pieces_with_a_carried_state_are_one_sequence(model: str, ptb: Path) -> None:
    """The losses of the pieces of an epoch are those of all rows read in one piece, which they would not be if a state
    were lost, or a character read twice; and so is a validation's."""
    options = ["--data", str(ptb), "--batch", "5", "--hidden", "8", "--model", model]
    losses, evaluations = {}, {}
    for bptt in (7, 10_000):
        task = build("char_lm", [*options, "--bptt", str(bptt)])
        total, count = 0.0, 0
        with torch.no_grad():
            for piece in range(task.pieces):
                batch = task.next_batch()
                total += task.loss(batch)[0].item() * batch[1].numel()
                count += batch[1].numel()
                if piece == 1:
                    evaluations[bptt] = task.evaluate(0)  # in the middle: it must not touch the carried state
        if bptt == 10_000:
            evaluations[bptt] = task.evaluate(0)
        losses[bptt] = total / count
        assert count == task.parts["train"][1:].numel() and task.position == 0
    assert losses[7] == pytest.approx(losses[10_000], rel=1e-5)
    assert evaluations[7] == pytest.approx(evaluations[10_000], rel=1e-5)
    assert evaluations[7]["bpc"] == pytest.approx(evaluations[7]["loss"] / math.log(2))


def test_accumulated_pieces_count_by_their_targets(ptb: Path) -> None:
    """The last piece of an epoch is shorter than the one before."""
    options = ["--data", str(ptb), "--batch", "5", "--hidden", "8", "--model", "lstm"]
    length = len(build("char_lm", [*options, "--bptt", "7"]).parts["train"]) - 2
    sums = []
    for bptt, count in ((length, 2), (10_000, 1)):
        task = build("char_lm", [*options, "--bptt", str(bptt)])
        assert task.pieces == count
        parts = [task.loss(batch) for batch in task.next_batches(count)]
        sums.append([sum(loss.item() for loss, _ in parts), sum(numbers["accuracy"].item() for _, numbers in parts)])
        assert task.position == 0
    assert [total / 2 for total in sums[0]] == pytest.approx(sums[1], rel=1e-5)


@pytest.mark.parametrize("model", ["nnrnn", "lstm", "gru"])
def test_a_stream_learns_and_resumes(model: str, ptb: Path, tmp_path: Path) -> None:
    """Bit for bit, the carried state too: the part ends in the middle of an epoch."""
    given = f"--data {ptb} --bptt 20 --batch 8 --hidden 24 --model {model} --lr 1e-2 --schedule constant".split()
    given += [] if model in ("lstm", "gru") else ["--nonlinearity", "modrelu"]
    whole = assert_resumes("char_lm", [*given, *QUIET], tmp_path, 25, 60)
    state = torch.load(whole / "checkpoint.pt", weights_only=True)["task_state"]
    assert state["position"] > 0 and len(state["carried"]) == (2 if model == "lstm" else 1)
    assert all(bool(tensor.any()) for tensor in state["carried"])
    assert json.loads((whole / "result.json").read_text())["test"]["bpc"] < 3.5  # of 5.6 for 50 characters alike


def test_a_generator_that_leaves_its_range_is_a_divergence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "exprnn", "--skew-lr", "1e6", "--iterations", 5, "--no-plots"]
    assert run("adding", *SMALL["adding"], *options, "--out", tmp_path / "run") == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert (
        last.startswith("diverged: skew_l0 is too large for an exponential: |A^6|_F^(1/6) is ")
        and "accepted" not in last
    )
    assert "at iteration 1; no checkpoint was written yet; lower the learning rates" in last
