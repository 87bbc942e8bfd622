"""The tasks adding, pixel_mnist and char_lm: they learn, resume to the same bits, share batches, refuse bad input.

tests/test_task_copy.py has the copy task, and with it what all tasks share.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import assert_refused, assert_resumes, build, command, records, run, settings_of, trained

from orthokern.data.ptb import ALPHABET
from orthokern.nn import RotationRNN
from orthokern.tasks import adding, char_lm, music, network, optimization

TASKS = ("adding", "pixel_mnist", "char_lm", "copy")


@pytest.fixture
def small(mnist: Path, ptb: Path) -> dict[str, list[str]]:
    """Command lines of a few seconds at most."""
    common = "--iterations 30 --hidden 16 --diagnose-every 5 --threads 1 --no-plots".split()
    return {
        "adding": [*"--T 10 --eval-every 10 --eval-sequences 60 --batch 20".split(), *common],
        "pixel_mnist": [*f"--data {mnist} --pool 4 --validation 60 --batch 20".split(), *common],
        "char_lm": [*f"--data {ptb} --length 40 --batch 25".split(), *common],
        "copy": [*"--T 5 --batch 20".split(), *common],
        "deep_mnist": [*f"--data {mnist} --validation 60 --penalty 0.1".split(), *common],
    }


@pytest.mark.parametrize("model", ["factorized", "exprnn"])
def test_adding_is_solved(model: str, tmp_path: Path) -> None:
    """By the defaults, to the usual goal of 1e-3."""
    options = f"--model {model} --T 60 --hidden 32 --iterations 1000 --threads 1 --no-plots --seed 1".split()
    result = trained(tmp_path / "run", "adding", *options)
    assert result["reached"] and result["last"]["loss"] < 1e-3 and result["last"]["accuracy"] > 0.99


@pytest.mark.parametrize("model", ["factorized", "rnn", "exprnn"])
def test_adding_starts_silent(model: str) -> None:
    """Without marks every state is zero; a marked number stays, and so do the units that it is kept in."""
    options = f"--model {model} --T 50 --hidden 24 --batch 6 --threads 1".split()
    task = build("adding", options)
    numbers = torch.rand(50, 6)
    silent = task.rnn(torch.stack([numbers, torch.zeros(50, 6)], -1))[0]
    assert torch.equal(silent, torch.zeros_like(silent))

    marks = torch.zeros(50, 6)
    marks[3] = 1.0
    states = task.rnn(torch.stack([numbers, marks], -1))[0]
    gate = adding.gates(24)
    assert gate.nonzero().flatten().tolist() == [7, 15, 23]
    w = task.rnn.get_parameter("weight_ih_l0")[gate, 0]
    low = 1.0 - w.clamp(min=0.0)
    torch.testing.assert_close(states[3][:, gate], low + numbers[3].unsqueeze(1) * w)
    assert (states[3][:, ~gate] == 0).all() and (states[4:, :, gate] == 0).all()
    kept = ~gate & ~adding.sinks(24)

    for _ in range(3):
        loss, _ = task.loss(task.next_batch())
        task.optimizer.zero_grad()
        loss.backward()
        task.clip_gradients()
        task.optimizer.step()
    weight = task.rnn.get_parameter("weight_ih_l0")
    assert (weight[~gate] == 0).all() and not torch.equal(weight[gate, 0], w)
    for name, bias in task.rnn.named_parameters():
        if name.startswith("bias"):
            assert (bias[kept] == 0).all()


def test_pixel_mnist_learns(tmp_path: Path, mnist: Path) -> None:
    data = f"--data {mnist} --pool 4 --validation 60 --batch 20"
    options = f"{data} --epochs 5 --hidden 32 --threads 1 --lr 5e-3 --standardize --no-plots".split()
    result = trained(tmp_path / "run", "pixel_mnist", *options)
    assert result["test"]["accuracy"] > 0.5 and result["test"]["loss"] < 0.7 * math.log(10)
    held_out = [r["held_out_accuracy"] for r in records(tmp_path / "run") if "held_out_accuracy" in r]
    assert len(held_out) == 5 and result["best"]["score"] == max(held_out)
    assert result["best"]["iteration"] % 10 == 0 and result["iteration"] == 50


def test_char_lm_learns(tmp_path: Path, ptb: Path) -> None:
    options = f"--data {ptb} --length 40 --batch 10 --epochs 15 --hidden 32 --threads 1 --lr 5e-3 --no-plots".split()
    result = trained(tmp_path / "run", "char_lm", *options)
    # Log2 of three words and of an end, once a word of five characters: about 0.5 bits per character at best, and 4.2
    # without knowing which characters there are.
    assert result["test"]["bpc"] < 1.5 and result["test"]["accuracy"] > 0.7
    assert result["test"]["bpc"] == pytest.approx(result["test"]["loss"] / math.log(2))


@pytest.mark.parametrize("task", ["adding", "char_lm", "deep_mnist"])
def test_resume_is_exact(task: str, tmp_path: Path, small: dict[str, list[str]]) -> None:
    # a cosine ends where the iterations do, so parts of other lengths have other rates
    options = [*small[task], "--schedule", "constant", *(["--goal", "0"] if task == "adding" else [])]
    assert_resumes(task, options, tmp_path, 7, 12, 30)


def test_rotation_in_a_task() -> None:
    """The nonlinearity of the task has no effect."""
    options = "--T 10 --hidden 8 --model rotation --margin 0.2".split()
    for given, angle in ([], math.pi), (["--max-angle", "0.1"], 0.1):
        task = build("adding", [*options, *given])
        assert isinstance(task.rnn, RotationRNN) and task.rnn.max_angle == angle
        assert task.title() == "adding, T 10, model rotation, hidden 8, margin 0.2"


@pytest.mark.parametrize(
    ("task", "title"),
    [
        ("music --delta 0.5", "music, collection nottingham, layers 2, hidden 200, delta 0.5"),
        ("music --clip 3", "music, collection nottingham, layers 2, hidden 200, clip 3"),
        ("char_lm --margin none", "char_lm, model factorized, hidden 512"),
        ("char_lm --bptt 5", "char_lm, bptt 5, model factorized, hidden 512, margin 0.1"),
    ],
)
def test_titles_have_the_settings_that_are_set(task: str, title: str) -> None:
    name, *options = task.split()
    experiment = object.__new__({"music": music.MusicTask, "char_lm": char_lm.CharLm}[name])
    experiment.settings = settings_of(name, [*options, "--data", "folder"])
    assert experiment.title() == title


@pytest.mark.parametrize("model", ["factorized", "nnrnn", "lstm"])
def test_an_embedding_of_characters(model: str) -> None:
    """Multiplies the input weights, and has a gradient; weight decay acts on these weights alone."""
    options = f"--data x --hidden 8 --embedding 5 --model {model} --weight-decay 0.1".split()
    settings = settings_of("char_lm", options)
    embedded = char_lm.CharModel(settings)
    parameters = dict(embedded.named_parameters())
    weight = parameters["rnn.parametrizations.weight_ih_l0.original"]
    embedding = parameters["rnn.parametrizations.weight_ih_l0.0.embedding"]
    assert weight.shape[1] == 5 and embedding.shape == (len(ALPHABET), 5) and 0.09 < embedding.abs().max() <= 0.1
    plain = network.build_recurrence(len(ALPHABET), settings)
    plain.load_state_dict({**embedded.rnn.state_dict(), "weight_ih_l0": weight @ embedding.mT}, strict=False)
    ids = torch.randint(len(ALPHABET), (7, 3))
    states, _ = embedded.rnn(ids)
    torch.testing.assert_close(states, plain(ids)[0])
    states.square().sum().backward()
    assert embedding.grad is not None and embedding.grad[ids.unique()].abs().amin(1).gt(0).all()
    embedding.grad = weight.grad = None
    penalty = optimization.penalty(embedded.rnn, embedded.readout, settings)
    assert penalty is not None
    penalty.backward()
    assert embedding.grad is None
    torch.testing.assert_close(weight.grad, 0.2 * weight)


@pytest.mark.parametrize("task", ["pixel_mnist", "char_lm", "char_lm --bptt 9"])
def test_a_run_goes_on_with_its_data_only(
    task: str, tmp_path: Path, small: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever they lie; others of the same size, in a file that was changed, are refused, and nothing is touched."""
    name, *more = task.split()
    options, folder, moved = small[name], tmp_path / "run", tmp_path / "moved"
    shutil.copytree(options[options.index("--data") + 1], moved)
    bucket = [] if more or name != "char_lm" else ["--bucket", 2]
    short = [option for option in options if not more or option not in ("--length", "40")]
    assert run(name, *short, *more, *bucket, "--iterations", 3, "--out", folder) == 0
    assert run(name, "--resume", folder, "--data", moved, "--iterations", 4) == 0
    changed = {"pixel_mnist": "t10k-labels-idx1-ubyte", "char_lm": "ptb.train.txt"}
    file = moved / changed.get(task, "ptb.valid.txt")
    content = file.read_bytes()
    file.write_bytes(
        content[:8] + content[9:] + content[8:9] if name == "pixel_mnist" else content.replace(b"black", b"clack")
    )
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    told = "checkpoint.pt was trained on other data than "
    assert_refused(capsys, told, command(name).main, "--resume", folder, "--data", moved, "--iterations", 5)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_recorded_loss_has_no_penalty(tmp_path: Path, small: dict[str, list[str]]) -> None:
    for name, options in {"plain": [], "penalized": ["--weight-decay", 1]}.items():
        assert run("adding", *small["adding"], *options, "--iterations", 1, "--out", tmp_path / name) == 0
    (plain,), (penalized,) = records(tmp_path / "plain"), records(tmp_path / "penalized")
    assert penalized["penalty"] > 1
    assert penalized["loss"] == pytest.approx(plain["loss"], rel=1e-6)


def test_accumulated_sentences_have_the_mean_over_their_characters(small: dict[str, list[str]]) -> None:
    """The mean of the losses and of the accuracies of an iteration's batches counts every target the same."""
    task = build("char_lm", [*small["char_lm"], "--batch", "3"])
    batches = list(task.next_batches(4))
    counts = [len(targets) for _, targets, _ in batches]
    assert len(set(counts)) > 1
    weighted = [task.loss(batch) for batch in batches]
    single = [task.loss((packed, targets, 1.0)) for packed, targets, _ in batches]
    loss = sum(part[0].item() for part in weighted) / 4
    assert loss == pytest.approx(
        sum(n * part[0].item() for n, part in zip(counts, single, strict=True)) / sum(counts), rel=1e-5
    )
    assert loss != pytest.approx(sum(part[0].item() for part in single) / 4, rel=1e-5)
    right = sum(n * part[1]["accuracy"].item() for n, part in zip(counts, single, strict=True))
    assert sum(part[1]["accuracy"].item() for part in weighted) / 4 == pytest.approx(right / sum(counts), rel=1e-5)


@pytest.mark.parametrize("options", ["--batch 3 --length 60 --bucket 1", "--batch 24 --bptt 40"])
def test_steps_are_those_of_the_profiles(options: str, tmp_path: Path, ptb: Path) -> None:
    """Of the first batch of an iteration, where the batches differ in length."""
    given = "--accumulate 3 --diagnose-every 1 --iterations 12 --hidden 8 --threads 1 --no-plots".split()
    assert run("char_lm", "--data", ptb, *options.split(), *given, "--out", tmp_path / "run") == 0
    steps = [record["time_steps"] for record in records(tmp_path / "run")]
    assert steps == [len(record["grad_norm_through_time"]) for record in records(tmp_path / "run")]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", network.MODELS)
def test_every_model_trains(task: str, model: str, tmp_path: Path, small: dict[str, list[str]]) -> None:
    options = [*small[task], "--model", model, "--iterations", 2, "--clip", 1, "--weight-decay", "1e-4"]
    assert run(task, *options, "--out", tmp_path / "run") == 0
    assert len(records(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    "options",
    [
        "--gain 1.05 --margin 0 --backend reference",
        "--margin none --init glorot --soft-orthogonality 0.01",
        "--model rnn --init identity --soft-orthogonality 0.01",
        "--margin 1 --spectrum-prior 0.1 --nonlinearity tanh",
        "--optimizer sgd --momentum 0 --message-clip 100",
        "--optimizer adam --schedule cosine --lr-decay 0.1 --warmup 2",
        "--nonlinearity oplu --margin none --init henaff --learned-h0",
        "--margin 10 --apply composed --precision bf16 --init cayley --nonlinearity modrelu",
        "--nonlinearity prelu --slope 0.7 --rank 7",
        "--preset paper --clip 1 --basis-clip none",
    ],
)
def test_options(options: str, tmp_path: Path, small: dict[str, list[str]]) -> None:
    for task in ("adding", "char_lm"):
        given = [*small[task], *options.split(), "--iterations", 3]
        assert run(task, *given, "--out", tmp_path / task) == 0
        assert all(math.isfinite(r["loss"]) for r in records(tmp_path / task))


def test_penalties_are_added(small: dict[str, list[str]]) -> None:
    """The loss exceeds that of the batch by what the penalties' definitions say, from W itself."""
    extra = "--margin 1 --soft-orthogonality 0.3 --spectrum-prior 0.2 --weight-decay 0.1".split()
    task = build("adding", [*small["adding"], *extra])
    with torch.no_grad():
        task.rnn.get_parameter("spectrum_l0").normal_()
    batch = task.next_batch()
    plain, _ = task.model(*batch)
    total, _ = task.loss(batch)
    w = task.rnn.recurrent_matrix().double()  # type: ignore[operator]
    s = torch.linalg.svdvals(w)
    squares = sum(p.double().square().sum() for p in (w, task.rnn.weight_ih_l0, task.readout.weight))
    expected = 0.3 * (w.mT @ w - torch.eye(16)).square().sum() + 0.2 * (s - 1).square().sum() + 0.1 * squares
    assert (total - plain).item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("task", ["adding", "deep_mnist"])
def test_adam_has_its_decays(task: str, small: dict[str, list[str]]) -> None:
    options = "--optimizer adam --beta1 0.5 --beta2 0.7 --eps 1e-5 --decoupled-decay 0.2".split()
    adam = build(task, [*small[task], *options]).optimizer.parts["euclidean"]
    assert isinstance(adam, torch.optim.AdamW)
    group = adam.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.7), 1e-5, 0.2)


def test_schedules() -> None:
    def factors(**changes: Any) -> list[float]:
        settings = optimization.OptimizerOptions(iterations=100, **changes)
        factor = optimization.schedule_factor(settings)
        return [factor(i) for i in (0, 50, 100)]

    assert factors() == [1, 1, 1]
    assert factors(schedule="inverse", lr_decay=0.02) == pytest.approx([1, 1 / 2, 1 / 3])
    assert factors(schedule="exponential", lr_decay=0.02) == pytest.approx([1, math.exp(-1), math.exp(-2)])
    assert factors(schedule="cosine", lr_decay=0.2) == pytest.approx([1, 0.6, 0.2])
    assert factors(warmup=3) == pytest.approx([1 / 4, 1, 1])


def no_better(monkeypatch: pytest.MonkeyPatch, *losses: float) -> None:
    """Lets the evaluations of the adding task find these losses, one per iteration."""
    monkeypatch.setattr(adding.Adding, "evaluate", lambda _, i: {"loss": losses[i - 1], "accuracy": 0.0})


@pytest.mark.parametrize("warmup", [0, 5])
def test_rates_fall_on_a_plateau(
    warmup: int, tmp_path: Path, small: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two evaluations that are not better than the best, also in the middle of a warm-up; every group's."""
    nan = math.nan
    no_better(monkeypatch, 5, 4, 4, 4, 4, 3, nan, 3.5, 2)
    options = "--eval-every 1 --diagnose-every 1 --iterations 9 --goal 0 --warmup".split() + [str(warmup)]
    rates = "--lr 0.5 --input-lr 0.25 --spectrum-lr 0.125 --geodesic-lr 1e-9 --margin 0.5".split()
    plateau = "--schedule plateau --patience 2".split()
    assert run("adding", *small["adding"], *options, *rates, *plateau, "--out", tmp_path / "run") == 0
    fallen = [1.0] * 4 + [1 / 2] * 4 + [1 / 4]  # in the iterations after the first; in the 5th for the first time
    risen = [min(1.0, (i + 2) / (warmup + 1)) for i in range(9)]
    expected = [0.5 * rise * fall for rise, fall in zip(risen, fallen, strict=True)]
    assert [r["lr"] for r in records(tmp_path / "run")] == (expected if warmup == 0 else pytest.approx(expected))
    first = {"readout": 0.5, "input": 0.25, "spectrum": 0.125, "geodesic": 1e-9}
    groups = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["optimizer"]["param_groups"]
    last = {group["role"]: group["lr"] for group in groups}
    assert last == pytest.approx({role: rate / 4 for role, rate in first.items()}, rel=1e-12)


def test_resume_within_a_plateau_is_exact(
    tmp_path: Path, small: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been waited for and what was best are in the checkpoint; the evaluation that a part ends with, in
    between those that are due, is not waited for."""
    no_better(monkeypatch, 9, 4, 9, 5, 9, 5, 9, 5, 1, 5, 9, 3)
    options = [*small["adding"], *"--eval-every 2 --diagnose-every 1 --goal 0 --schedule plateau --patience 3".split()]
    options += ["--lr", "1e-3"]
    whole = assert_resumes("adding", options, tmp_path, 5, 7, 9, 12)
    assert [r["lr"] for r in records(whole)] == [1e-3] * 8 + [5e-4] * 4
    assert torch.load(whole / "checkpoint.pt", weights_only=True)["plateau"]["best"] == -3
