"""Features of the loop for all tasks: accumulation, epochs, norms through time, rejected checkpoints."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import pytest
import torch
import toy_task
from runs import assert_refused, build, records, same, trained
from runs import run as run_task
from torch import Tensor
from toy_task import Toy, ToyOptions

from orthokern import dispatch
from orthokern.commandline import Parser
from orthokern.errors import CheckpointError, InputError
from orthokern.reproduce.runner import is_done
from orthokern.training import LoopSettings, RunFolder, cli, load_checkpoint, read_metrics, save_checkpoint, train
from orthokern.training.options import add_options, option
from orthokern.training.progress import Progress

OPTIONS = ["--iterations", 20, "--threads", 1, "--no-plots"]


def run(*arguments: object) -> int:
    return toy_task.main([str(argument) for argument in arguments])


def go(folder: Path, task: Toy, **settings: Any) -> str:
    """Trains for twenty iterations; returns what a user sees."""
    progress = Progress(20, io.StringIO(), every=0.0)
    loop = LoopSettings(20, 4, 5, False, **settings)
    assert train(task, RunFolder.create(folder, "toy", asdict(task.settings)), loop, progress=progress).exit_code == 0
    return progress.stream.getvalue()  # type: ignore[attr-defined]


def task(cls: type[Toy] = Toy, **settings: Any) -> Toy:
    torch.manual_seed(3)
    return cls(ToyOptions(**settings))


def test_a_time_limit(tmp_path: Path) -> None:
    """The run ends in the iteration that passes the limit, with an evaluation; resumed parts count."""
    folder = tmp_path / "run"

    def done() -> list[int]:
        return [record["iteration"] for record in read_metrics(folder / "metrics.jsonl")]

    assert run("--out", folder, "--no-plots", "--iterations", 7, "--minutes", 1e-6) == 0
    assert done() == [1] and "held_out_loss" in read_metrics(folder / "metrics.jsonl")[0] and is_done(folder)
    assert run("--resume", folder) == 0 and done() == [1]
    assert run("--resume", folder, "--minutes", 1000) == 0 and done() == list(range(1, 8))


def test_a_time_limit_bounds_evaluations(tmp_path: Path, ptb: Path) -> None:
    """They read a part of the text: one batch at least."""
    options = f"--data {ptb} --hidden 8 --batch 2 --window 4 --threads 1 --no-plots".split()
    task = build("word_lm", options)
    whole = task.measure("validation")
    assert len(list(task.in_time(range(50)))) == 50
    task.evaluation_seconds = 0.0
    assert len(list(task.in_time(range(50)))) == 1 and task.measure("validation") != whole
    result = trained(tmp_path / "run", "word_lm", *options, "--minutes", 1e-6)
    assert result["iteration"] == 1 and result["last"]["loss"] > 0 and result["test"]["loss"] > 0


class Threefold(Toy):
    """Three batches at once."""

    def next_batch(self) -> tuple[Tensor, Tensor]:
        parts = [super(Threefold, self).next_batch() for _ in range(3)]
        return torch.cat([x for x, _ in parts], 1), torch.cat([y for _, y in parts], 1)


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    """To rounding: the sums over the batch are taken in another order."""
    small, large = task(), task(Threefold)
    go(tmp_path / "small", small, accumulate=3)
    go(tmp_path / "large", large)
    a, b = records(tmp_path / "small"), records(tmp_path / "large")
    assert [r.keys() for r in a] == [r.keys() for r in b]
    for x, y in zip(a, b, strict=True):
        for key in ("loss", "last_error"):
            assert x[key] == pytest.approx(y[key], rel=1e-12)
        assert x["grad_norm"] == pytest.approx(y["grad_norm"], rel=1e-6)  # computed in float32
    for p, q in zip(small.model.parameters(), large.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-12)
    assert small.batches == large.batches == 60
    assert load_checkpoint(tmp_path / "small" / "checkpoint.pt")["iteration"] == 20


@pytest.mark.parametrize(
    ("given", "stored", "message"),
    [
        ({"bias": False}, {"bias": True}, "--no-bias: the run to resume was started without it; leave the option out"),
        ({"learn_blank": True}, {"learn_blank": False}, "--learn-blank: the run to resume was started without it;"),
        ({"margin": None}, {"margin": 0.1}, "--margin none: the run to resume has --margin 0.1; leave the option out"),
        ({"input_lr": 0.1}, {"input_lr": None}, "--input-lr 0.1: the run to resume has --input-lr none; leave"),
    ],
)
def test_a_change_of_a_resumed_run_is_told_as_typed(
    given: dict[str, Any], stored: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}"):
        cli.resolve(given, {**stored}, {}, stored)


def test_the_environment_chooses_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the command line names none; the record says what was used, and a resumed run keeps to it."""
    for name, options, used in (("variable", [], "reference"), ("option", ["--backend", "auto"], "auto")):
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "_process_default", "reference")
            assert run(*OPTIONS, "--iterations", 2, "--out", tmp_path / name, *options) == 0
        assert run("--resume", tmp_path / name, "--iterations", 3) == 0
        assert load_checkpoint(tmp_path / name / "checkpoint.pt")["settings"]["backend"] == used


def plain(toy: Toy, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """The toy's states h_t and predictions in plain torch, step by step, for dropout 0."""
    rnn = toy.model.rnn
    w_ih, w, bias = rnn.get_parameter("weight_ih_l0"), rnn.recurrent_matrix(), rnn.get_parameter("bias_l0")
    h, states = torch.zeros(x.shape[1], w.shape[0], dtype=x.dtype), []
    for step in x:
        h = torch.tanh(h @ w.mT + step @ w_ih.mT + bias)
        h.retain_grad()
        states.append(h)
    return states, toy.model.readout(torch.stack(states))[..., 0]


def norms(tensors: list[Any]) -> list[float]:
    return [torch.linalg.vector_norm(t).item() for t in tensors]


def test_norms_through_time(tmp_path: Path) -> None:
    """Against autograd through a plain loop, of the first iteration's first batch."""
    go(tmp_path / "run", task(), accumulate=2, last_step_gradient=True)
    record, fresh = records(tmp_path / "run")[0], task()
    x, target = fresh.next_batch()
    for name, last in (("grad_norm_through_time", slice(None)), ("last_grad_norm_through_time", slice(-1, None))):
        states, said = plain(fresh, x)
        (said - target)[last].square().mean().backward()
        assert record["state_norm_through_time"] == pytest.approx(norms(states), rel=1e-5)
        assert record[name] == pytest.approx(norms([h.grad for h in states]), rel=1e-5)


def test_epochs(tmp_path: Path) -> None:
    for per_epoch, epoch in ((8, 0.375), (7, 0.4286), (None, None)):
        toy = task()
        toy.iterations_per_epoch = per_epoch
        shown = go(tmp_path / str(per_epoch), toy)
        assert records(tmp_path / str(per_epoch))[2].get("epoch") == epoch
        assert ("iteration 12/20: epoch 1.50, loss" in shown) == (per_epoch == 8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 2}, "must have format version 1, got 2"),
        ({"task": "copy"}, "is of the task 'copy', not of 'toy'"),
        ({"settings": {"hidden": 16}}, "was written with hidden=16, this run has hidden=12"),
        ({"model": None}, "does not fit this run: Error(s) in loading state_dict for Model: size mismatch"),
        ({"optimizer": None}, "does not fit this run"),
        ({"rng": {}}, "does not fit this run"),
        ({"task_state": {}}, "does not fit this run"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_checkpoints(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    path = folder / "checkpoint.pt"
    assert run(*OPTIONS, "--out", folder) == 0
    payload = load_checkpoint(path)
    if "settings" in change:
        change = {"settings": {**payload["settings"], **change["settings"]}}
    elif change.keys() <= {"model", "optimizer"}:  # of a larger network
        large = task(hidden=16)
        change = {key: getattr(large, key).state_dict() for key in change}
        change["optimizer"] = {"state": {}, "param_groups": []} if "optimizer" in change else payload["optimizer"]
    save_checkpoint(path, {**payload, **change})
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    told = f"error: checkpoint {path} {message}"
    assert_refused(capsys, told, toy_task.main, "--resume", folder, "--iterations", 30)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before  # nothing is lost


def test_a_device_of_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert run(*OPTIONS, "--iterations", 1, "--out", folder) == 0
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["settings"]["device"] = "cuda:99"
    path.write_text(json.dumps(config))
    told = f"error: {path}: device: 'cuda:99': this machine has "
    assert_refused(capsys, told, toy_task.main, "--resume", folder)


def test_a_version_with_more_settings_continues_an_old_run(tmp_path: Path) -> None:
    """With the default of a setting that neither config.json nor the checkpoint names."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert run(*OPTIONS, "--out", whole) == 0
    assert run(*OPTIONS, "--iterations", 8, "--out", folder) == 0
    config = json.loads((folder / "config.json").read_text())
    payload = load_checkpoint(folder / "checkpoint.pt")
    for settings in (config["settings"], payload["settings"]):
        assert settings.pop("accumulate") == 1
    (folder / "config.json").write_text(json.dumps(config))
    save_checkpoint(folder / "checkpoint.pt", payload)
    assert run("--resume", folder, "--iterations", 20) == 0
    resumed, expected = (load_checkpoint(each / "checkpoint.pt") for each in (folder, whole))
    assert resumed["settings"]["accumulate"] == 1 and same(resumed["model"], expected["model"])


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    progress = Progress(200, stream)
    progress.update(100, "loss 0.5 and more text than a narrow terminal could ever hold")
    progress.line("warning: a message")
    progress.update(200, "loss 0.1", force=True)
    progress.close()
    text = stream.getvalue()
    assert "\r100/200 |##########          | loss 0.5" in text
    assert all(len(part) < 60 for line in text.split("\n") for part in line.split("\r"))
    assert "warning: a message\n" in text and text.endswith("\n")


def test_numbers_of_numpy(tmp_path: Path) -> None:
    """An evaluation may have them; a state_dict that a checkpoint cannot hold fails when it is written."""

    class OfNumpy(Toy):
        def evaluate(self, iteration: int) -> dict[str, float]:
            return {name: np.float64(value) for name, value in super().evaluate(iteration).items()}

    go(tmp_path / "run", task(OfNumpy))
    assert load_checkpoint(tmp_path / "run" / "best.pt")["task"] == "toy"
    with pytest.raises(TypeError, match="a checkpoint must hold numbers, .* got numpy"):
        save_checkpoint(tmp_path / "other.pt", {"position": np.int64(3)})


def test_annotations_of_options() -> None:
    """Types as objects, as in a file without `from __future__ import annotations`, and the word none."""

    class Own(cli.RunOptions):
        GROUP = "own"

    Own.__annotations__ = {"rate": float, "count": Optional[int], "word": Union[str, None], "flag": bool}  # noqa: UP007, UP045
    Own.rate = option(0.5, "a rate", above=0.0)  # type: ignore[attr-defined]
    Own.count = option(2, "a count")  # type: ignore[attr-defined]
    Own.word = option("a", "a word", choices=("a", "b"))  # type: ignore[attr-defined]
    Own.flag = option(False, "a flag")  # type: ignore[attr-defined]
    parser = Parser(prog="own")
    add_options(parser, dataclass(kw_only=True)(Own))
    words = ["--rate", "0.3", "--count", "none", "--word", "none", "--flag"]
    assert parser.parse(words) == {"rate": 0.3, "count": None, "word": None, "flag": True}
    for wrong in (["--rate", "0"], ["--count", "0"], ["--word", "c"]):
        with pytest.raises(InputError):
            parser.parse(wrong)


def test_a_longer_curve_from_its_first_iteration(tmp_path: Path) -> None:
    options = "--T 5 --hidden 6 --batch 4 --eval-sequences 4 --threads 1 --no-plots --diagnose-every 1 --goal 0".split()
    options += "--schedule cosine --lr-decay 0.1 --lr 0.5".split()
    assert run_task("adding", *options, "--iterations", 4, "--out", tmp_path / "run") == 0
    assert run_task("adding", "--resume", tmp_path / "run", "--iterations", 8) == 0
    assert run_task("adding", *options, "--iterations", 8, "--out", tmp_path / "whole") == 0
    rates = [[record["lr"] for record in records(tmp_path / name)[4:]] for name in ("run", "whole")]
    assert rates[0] == rates[1]
    state = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["optimizer"] for name in ("run", "whole")]
    assert [g["lr"] for g in state[0]["param_groups"]] == [g["lr"] for g in state[1]["param_groups"]]


def test_a_continued_run_has_no_result_until_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run("--out", folder, *OPTIONS) == 0 and is_done(folder)
    results: list[bool] = []

    class Watched(Toy):
        def evaluate(self, iteration: int) -> dict[str, float]:
            results.append((folder / "result.json").exists())
            return super().evaluate(iteration)

    assert (
        cli.TaskCommand("toy", "", "", ToyOptions, Watched).main(["--resume", str(folder), "--iterations", "30"]) == 0
    )
    assert results and not any(results) and is_done(folder)


def test_settings_of_the_loop(tmp_path: Path) -> None:
    for wrong in ({"iterations": None}, {"checkpoint_every": 0}, {"accumulate": 0}):
        settings = LoopSettings(**{"iterations": 3, "checkpoint_every": 4, **wrong})
        with pytest.raises(InputError, match=f"{next(iter(wrong))} must be an integer of at least 1"):
            train(task(), RunFolder.create(tmp_path / "run", "toy", {}), settings)
