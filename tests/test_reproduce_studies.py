"""Reports of `python -m orthokern.reproduce` that are not tables of training runs: searches for the longest T, the
joint page of the constraint, and measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from reproducing import Command, toy_command
from runs import write_words

from orthokern.reproduce import __main__ as command
from orthokern.reproduce import constraint, orthogonality, search
from orthokern.reproduce.spec import Run

NAME = "oinit-table1"
SUBJECTS = command.STUDIES["constraint"]["subjects"]


@pytest.fixture
def reproduce(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return toy_command(monkeypatch, capsys, tmp_path)


def toy_search(name: str, *options: str) -> Run:
    common = "--hidden 16 --eval-every 5 --eval-sequences 20 --no-plots --short-evaluations --iterations 10".split()
    labels = {"problem": "first symbol", "network": name, "parameters": "none"}
    published = {search.PUBLISHED: 10}
    return Run(name, "random_permutation", (*common, *options), labels=labels, published=published)


@pytest.fixture
def searches(reproduce: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that solves everything up to its end (a goal of 0 %), one that solves nothing."""
    both = toy_search("easy", "--goal", "0"), toy_search("hard", "--lr", "1e-20")
    monkeypatch.setattr(search, "LONGEST", 20)
    monkeypatch.setattr(search, "read_searches", lambda spec: both)


@pytest.mark.usefixtures("searches")
def test_a_search(reproduce: Command) -> None:
    out, _ = reproduce(NAME, "--jobs", 2)
    assert (reproduce.full / f"{NAME}.md").read_text() in out
    easy, hard = reproduce.rows(NAME)
    assert easy["iterations"] == {"10": 5, "20": 5} and easy["longest"] == 20 and easy["failed"] is None
    assert hard["iterations"] == {} and hard["longest"] == 0 and hard["failed"] == 10 and hard["complete"]
    table = {line.split(" | ")[1]: line for line in out.splitlines() if line.startswith("| first symbol")}
    assert "| 10 | ≥ 20 | +10 | 5 | – |" in table["easy"]
    assert "| 10 | 0 | -10 | – | 10: not in 10 iterations" in table["hard"]
    assert not (reproduce.full / "easy-T30").exists() and not (reproduce.full / "hard-T20").exists()
    # again: nothing is trained; one of two, and longer: only what failed continues
    assert "2 of 2 searches are done already" in reproduce(NAME)[0]
    reproduce(NAME, "--iterations", 15, "--only", "hard")
    assert "not in 15 iterations" in reproduce.rows(NAME)[1]["outcome"]
    page = (reproduce.full / f"{NAME}.md").read_text()
    assert re.findall(r"--iterations (\d+)", page) == ["10", "15"]
    assert "2 of 2 searches are done already" in reproduce(NAME, "--iterations", 15)[0]


def test_the_joint_page_of_the_constraint(reproduce: Command) -> None:
    """Each number stands in the row of its options and in the column of its task, also where two rows share a run."""
    for subject in SUBJECTS:
        reproduce(f"constraint-{subject['name']}", "--report")
    path = reproduce.full / "constraint-adding.json"
    summary = json.loads(path.read_text())
    for row in summary["rows"]:
        number, seed = (int(text) for text in re.findall(r"\d+", row["name"]))
        row["ours"], row["state"] = {"best held-out error": 0.01 * number + 0.001 * seed}, "done"
        if number in (1, 2):
            row |= {"state": "solved" if number + seed > 1 else "done", "seconds": 31.4 + seed, "machine": "one core"}
        elif number == 3 and seed == 1:
            row |= {"ours": {}, "state": "not run"}
    path.write_text(json.dumps(summary))
    reproduce("constraint")
    page = (reproduce.full / "constraint.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    assert lines[0] == ["part", "value", *(subject["title"] for subject in SUBJECTS)]
    cells = {(line[0], line[1]): line[2:] for line in lines[2:]}
    assert len(cells) == 23
    trained, fixed = constraint.TRAINED, "margin, U and V fixed"
    assert cells[trained, "0.1"] == ["not run", "solved in 32 (31 to 33) s", "not run", "not run"]
    assert cells[trained, "0.01"][1] == "0.0110 (0.0100 to 0.0120), 2 of 3 solved"
    assert cells[trained, "1"][1] == "0.0310 (0.0300 to 0.0320), 2 of 3 seeds run"
    assert cells[constraint.NONLINEARITY, "relu"] == cells[trained, "0.1"]  # relu is the task's own
    assert cells[fixed, "none"] == ["not run", "0.0910 (0.0900 to 0.0920)", "not run", "not run"]
    assert page.rstrip().splitlines()[-1].startswith("one core; ")
    assert (reproduce.full / "constraint.png").stat().st_size > 10_000


def test_the_steps_of_learned_orthogonality(reproduce: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orthogonality, "GUARDED", 100)
    out, _ = reproduce("oinit-steps", "--quick", "--threads", 1)
    assert torch.get_num_threads() == 1
    table = (reproduce.out / "quick" / "oinit-steps.md").read_text()
    rows = json.loads((reproduce.out / "quick" / "oinit-steps.json").read_text())["rows"]
    for row in rows:
        if row["published_evaluations"] is not None:
            assert row["success_percent"] == 100 and row["rule"] == "plain"
            assert abs(row["mean_evaluations"] - row["published_evaluations"]) < 4 * row["standard_error"]
        if row["rule"] == "guarded":
            assert row["success_percent"] == 100
    assert table in out and "| N(0, 0.1) | 100 | 100 | guarded |" in table


def test_the_cost_of_the_constraint(reproduce: Command, tmp_path: Path) -> None:
    """Table 3 of Kanai et al.: measured in one run, the two ways to project agree, and the numbers follow."""
    (tmp_path / "ptb").mkdir()
    write_words(tmp_path / "ptb", 1200, 30)
    reproduce("gru-table3", "--quick", "--data", tmp_path, "--iterations", 7)
    numbers = json.loads((reproduce.out / "quick" / "gru-table3.json").read_text())
    # every step has work, and the two differ only in what a float32 SVD rounds
    assert numbers["counts"]["steps"] == 7 and numbers["counts"]["projections"] > 3
    assert numbers["largest_difference"] < 3e-6
    for row in numbers["rows"]:
        percent = 100 * row["ms_per_iteration"] / numbers["iteration_ms"]
        assert row["ms_per_iteration"] > 0 and row["percent_of_iteration"] == pytest.approx(percent, rel=1e-4)


def test_the_fisher_memory(reproduce: Command) -> None:
    out, _ = reproduce("nnrnn-fisher")
    table = (reproduce.full / "nnrnn-fisher.md").read_text()
    rows = reproduce.rows("nnrnn-fisher")
    assert table in out and len(rows) == 12
    for row in rows:
        assert row["ours"] == pytest.approx(row["published"], rel=5e-3 if row["d"] == 0 else 2.5e-2)
        cells = re.search(rf"\| {row['alpha']:g} \| {row['beta']:g} \| {row['d']:g} \| (\S+) \| (\S+) \|", table)
        assert cells is not None and cells[1] == f"{row['published']:.3g}"
        assert float(cells[2]) == pytest.approx(row["ours"], abs=6e-4)
    assert (reproduce.full / "nnrnn-fisher.png").read_bytes().startswith(b"\x89PNG")
