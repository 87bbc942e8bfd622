"""`python -m orthokern.tasks.copy`: it learns, resumes to the same bits after any kill, and rejects bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from runs import records, same

from orthokern.tasks import copy
from orthokern.training import load_checkpoint, read_metrics

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--T", "5", "--hidden", "16", "--batch", "10", "--threads", "1", "--no-plots"]


def run(*arguments: object) -> int:
    return copy.main([str(argument) for argument in arguments])


# ---- training ------------------------------------------------------------------------------------


def test_it_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T = 10: solved in about sixty iterations, with everything that a run leaves behind."""
    folder = tmp_path / "run"
    code = run("--T", 10, "--hidden", 96, "--iterations", 300, "--threads", 1, "--goal", 99, "--out", folder)
    assert code == 0
    last = capsys.readouterr().out.splitlines()[-1]
    match = re.fullmatch(
        r"solved: recall accuracy ([\d.]+) % on 200 fresh sequences \(goal 99 %\), iteration (\d+), ([\d.]+) s", last
    )
    assert match and float(match[1]) >= 99.0
    metrics = records(folder)
    assert len(metrics) == int(match[2]) < 300
    baseline = 10 * torch.log(torch.tensor(8.0)).item() / 30
    assert metrics[-1]["loss"] < 0.5 * baseline
    assert metrics[-1]["held_out_accuracy"] >= 0.99 and metrics[-1]["held_out_sequences"] == 200
    names = {
        "config.json",
        "metrics.jsonl",
        "checkpoint.pt",
        "best.pt",
        "result.json",
        "learning.png",
        "spectrum.png",
        "gradients.png",
        "states.png",
        "angles.png",
    }
    assert {p.name for p in folder.iterdir()} == names
    for name in (name for name in names if name.endswith(".png")):
        content = (folder / name).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 10_000
    looked = [r for r in metrics if "spectrum" in r]
    assert [r["iteration"] for r in looked] == list(range(1, len(metrics) + 1, 10))
    assert all(0.999 <= r["spectrum"]["min"] <= r["spectrum"]["max"] <= 1.001 for r in looked)
    assert all(r["orthogonality_error"] < 1e-5 for r in looked)
    assert len(looked[-1]["grad_norm_through_time"]) == 30
    assert json.loads((folder / "config.json").read_text())["settings"]["geodesic_lr"] == 1e-4


@pytest.mark.parametrize(
    "options",
    [
        ["--input", "scalar", "--layout", "exprnn"],
        ["--input", "scalar", "--marker", "9"],
        ["--nonlinearity", "tanh", "--margin", "0"],
        ["--nonlinearity", "oplu", "--margin", "none", "--init", "henaff"],
        ["--nonlinearity", "prelu", "--rank", "7"],
        ["--nonlinearity", "modrelu", "--apply", "composed", "--init", "cayley"],
        ["--margin", "none", "--init", "glorot", "--start", "random"],
        ["--preset", "paper", "--clip", "1", "--basis-clip", "none"],
        ["--backend", "reference"],
        ["--learn-blank", "--last-step-gradient"],
    ],
    ids=" ".join,
)
def test_options(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--iterations", 4, "--out", tmp_path / "run", *options) == 0
    metrics = records(tmp_path / "run")
    assert len(metrics) == 4 and all(r["loss"] > 0 for r in metrics)
    assert capsys.readouterr().out.splitlines()[-1].startswith("not solved: recall accuracy")


def test_seeds_and_streams(tmp_path: Path) -> None:
    """The same seed gives the same run, another seed another; evaluating more often changes nothing else."""
    for name, options in {"a": [], "b": [], "c": ["--seed", 1], "d": ["--eval-every", 3]}.items():
        assert run(*SMALL, "--iterations", 12, "--out", tmp_path / name, *options) == 0
    a, b, c, d = (records(tmp_path / name) for name in "abcd")
    assert a == b
    assert a[0]["loss"] == c[0]["loss"]  # nothing but the blank's bias speaks yet
    assert all(x["loss"] != y["loss"] for x, y in zip(a[1:], c[1:], strict=True))
    assert [r["loss"] for r in a] == [r["loss"] for r in d]
    assert [r["iteration"] for r in d if "held_out_loss" in r] == [3, 6, 9, 12]


def test_the_blank_may_be_learned() -> None:
    """Held at zero by default; with --learn-blank it starts as the other columns do, which stay as they were, and
    moves."""
    columns = {}
    for learned in (False, True):
        torch.manual_seed(0)
        task = copy.CopyExperiment(copy.complete({**copy.DEFAULTS, "T": 5, "hidden": 16, "learn_blank": learned}))
        table = task.rnn.get_parameter("weight_ih_l0")
        before = table.detach().clone()
        with torch.no_grad():
            task.readout.get_parameter("weight").normal_()
        task.loss(task.next_batch())[0].backward()
        task.clip_gradients()
        task.optimizer.step()
        columns[learned] = before[:, 0], table.detach()[:, 0], before[:, 1:]
    assert not columns[False][0].any() and not columns[False][1].any()
    assert (columns[True][0] != columns[True][1]).all() and columns[True][0].std() > 0.1
    assert torch.equal(columns[False][2], columns[True][2])


def test_the_paper_preset(tmp_path: Path) -> None:
    assert run(*SMALL, "--preset", "paper", "--iterations", 1, "--lr", "3e-4", "--out", tmp_path / "run") == 0
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    assert (settings["geodesic_lr"], settings["input_lr"], settings["clip"]) == (1e-6, 1e-4, 100.0)
    assert settings["lr"] == 3e-4  # the command line is stronger
    assert copy.complete({**copy.DEFAULTS, **copy.COMMAND.presets["paper"], "T": 10_000}).margin == 0.001


# ---- the algorithm ---------------------------------------------------------------------------------


def test_modal_as_step_by_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same run within rounding, records through time included; and the first line names the algorithm."""
    found = {}
    for name in ("modal", "sequential"):
        folder = tmp_path / name
        # the paper's small steps from a random start: nothing is zero there, whose rounding RMSprop would blow up
        options = ["--T", 70, "--start", "random", "--lr", "1e-3", "--algorithm", name, "--iterations", 11]
        assert run(*SMALL, *options, "--last-step-gradient", "--out", folder) == 0
        told = {"modal": "modal (8 modes of W, condition of their basis 1)", "sequential": "sequential"}[name]
        assert capsys.readouterr().out.splitlines()[0].startswith(f"run folder {folder}; algorithm {told}")
        found[name] = records(folder)
    for a, b in zip(*found.values(), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4) and a["accuracy"] == b["accuracy"]
        assert ("grad_norm_through_time" in a) == ("grad_norm_through_time" in b)
    first, other = (found[name][0] for name in found)
    for key in ("grad_norm_through_time", "state_norm_through_time", "last_grad_norm_through_time"):
        assert len(first[key]) == 64 and first[key] == pytest.approx(other[key], rel=1e-4)


# ---- resuming ------------------------------------------------------------------------------------


def start(folder: Path, *options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orthokern.tasks.copy", *SMALL, "--out", folder, *options]
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_iterations(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(read_metrics(folder / "metrics.jsonl")) < count:
        assert process.poll() is None, f"ended with {process.returncode}: {process.stderr.read()}"
        assert time.monotonic() < deadline, "no progress within a minute"
        time.sleep(0.002)


OFTEN = ["--checkpoint-every", 7, "--eval-every", 5, "--diagnose-every", 4, "--goal", 100]
OFTEN += ["--algorithm", "modal"]  # which has a state of its own, the basis


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy") / "whole"
    assert run(*SMALL, *OFTEN, "--iterations", 200, "--out", folder) == 0
    return folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_killed_runs_resume_to_the_same_bits(
    number: signal.Signals, never_stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed, whole, end = tmp_path / "killed", never_stopped, 200
    process = start(killed, *OFTEN, "--iterations", 100_000_000)  # it does not end before the signal arrives
    try:
        wait_for_iterations(process, killed, 20)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    code = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert process.returncode == code, err
    reached = load_checkpoint(killed / "checkpoint.pt")["iteration"]
    assert reached >= 14
    if number != signal.SIGKILL:
        message = f"stopped by {number.name} after iteration {reached}, saved; continue with --resume {killed}"
        assert err.splitlines()[-1] == message
        assert "Traceback" not in out + err
    last = read_metrics(killed / "metrics.jsonl")[-1]["iteration"]
    if last >= end:  # of a machine that delivers signals late: a whole run of another length
        whole, end = tmp_path / "whole", last + 50
        assert run(*SMALL, *OFTEN, "--iterations", end, "--out", whole) == 0
    assert run("--resume", killed, "--iterations", end) == 0
    assert f"resuming in {killed}" in capsys.readouterr().out
    assert len(records(whole)) == end
    assert records(killed) == records(whole)
    for name in ("checkpoint.pt", "best.pt"):
        ours, theirs = (load_checkpoint(folder / name) for folder in (killed, whole))
        for state in (ours, theirs):
            del state["settings"]["iterations"]  # the best one may be of before the signal, when the end was far
        assert same(ours, theirs)


def test_a_resumed_run_keeps_its_new_length(tmp_path: Path) -> None:
    """It is the length of the next --resume too, and a run whose end is moved back is evaluated where it stands."""
    folder = tmp_path / "run"

    def length() -> int:
        found: int = json.loads((folder / "config.json").read_text())["settings"]["iterations"]
        return found

    assert run(*SMALL, "--out", folder, "--iterations", 2, "--eval-every", 0, "--eval-sequences", 2) == 0
    longer = [sys.executable, "-m", "orthokern.tasks.copy", "--resume", str(folder), "--iterations", "100000000"]
    process = subprocess.Popen(longer, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_iterations(process, folder, 5)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    done = len(records(folder))
    assert length() == 100_000_000 and done >= 5
    assert run("--resume", folder, "--iterations", 3) == 0
    result = json.loads((folder / "result.json").read_text())
    assert result["iteration"] == len(records(folder)) == done
    saved = load_checkpoint(folder / "checkpoint.pt")
    assert saved["evaluated_at"] == done and saved["evaluation"] == result["last"]
    assert saved["best"] == result["best"] and result["tested"] == saved["best"]["iteration"]
    assert length() == 3


def test_resume_takes_the_settings_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert run(*SMALL, "--iterations", 6, "--margin", "none", "--out", folder) == 0
    assert run("--resume", "--out", folder, "--iterations", 9, "--T", 5, "--margin", "none") == 0
    assert len(records(folder)) == 9
    assert run("--resume", folder, "--hidden", 32) == 2
    assert "--hidden 32: the run to resume has --hidden 16" in capsys.readouterr().err
    assert run("--resume", folder, "--out", tmp_path / "other") == 2
    assert run("--resume") == 2
    assert len(records(folder)) == 9


# ---- refusals ------------------------------------------------------------------------------------


def test_divergence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A free spectrum that moves by 10 000 a step explodes at once."""
    options = ["--margin", "none", "--spectrum-lr", "1e4", "--lr", "1", "--iterations", 50]
    assert run(*SMALL, *options, "--out", tmp_path / "run") == 3
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("diverged: the ") and "at iteration" in last and "no checkpoint was written yet" in last
