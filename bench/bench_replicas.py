"""Several models at once: torch.func.vmap over stacked modules, against a loop over the modules and over torch.nn.RNN.

8 models of 10 input features, the sequences their own, tanh, forward and backward to all parameters, cotangents at
every step. T = 200 and B = 10, so that a model is small and its fixed costs count. And seeds of a task with --replicas.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bench_modules import FEATURES, TOLERANCE, build, expected, gradients
from harness import Bench, Size, check, interleave, median, ratio, spread_ms
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from orthokern.tasks import adding
from orthokern.tasks.adding import Adding
from orthokern.training.iteration import LoopSettings, step
from orthokern.training.profiling import Profiler
from orthokern.training.replicas import Stacked
from orthokern.training.signals import StopRequest

SIZES = [{"N": 64, "T": 200, "B": 10, "R": 8}, {"N": 128, "T": 200, "B": 10, "R": 8}]
QUICK = [{"N": 16, "T": 5, "B": 2, "R": 3}]

# Time of the loop over that of one call: the loop over the same modules, and over torch.nn.RNN.
BARS = {"one call for each model": 1 / 0.6, "torch.nn.RNN": 4.0}


@pytest.mark.parametrize("name", ["RNN", "FactorizedRNN"])
@pytest.mark.sizes(SIZES, quick=QUICK)
def test_replicas(benchmark: Any, bench: Bench, size: Size, name: str) -> None:
    """R models in one call: forward and backward of vmap over the stacked parameters."""
    N, T, B, R = size["N"], size["T"], size["B"], size["R"]
    pairs = [build(name, N) for _ in range(R)]
    ours, theirs = zip(*pairs, strict=True)
    x, cotangent = torch.randn(R, T, B, FEATURES), torch.randn(R, T, B, N)
    parameters, buffers = stack_module_state(list(ours))

    def output(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = functional_call(ours[0], (parameters, buffers), (x,))[0]
        return found

    def together() -> tuple[Tensor, ...]:
        return torch.autograd.grad(vmap(output)(parameters, buffers, x), list(parameters.values()), cotangent)

    def loop(modules: tuple[torch.nn.Module, ...]) -> list[tuple[Tensor, ...]]:
        return [
            torch.autograd.grad(module(one)[0], list(module.parameters()), g)
            for module, one, g in zip(modules, x, cotangent, strict=True)
        ]

    def one_thread() -> None:
        torch.set_num_threads(1)
        loop(ours)
        torch.set_num_threads(threads)

    found, error, threads = together(), 0.0, torch.get_num_threads()
    for r, (module, peer) in enumerate(pairs):
        wanted = expected(module, peer, x[r], cotangent[r])
        actual = dict(zip(parameters, (grad[r] for grad in found), strict=True))
        error = max(error, check(name, actual.values(), [wanted[key] for key in actual], TOLERANCE))
    outputs = [gradients(module, x[r], cotangent[r])["output"] for r, module in enumerate(ours)]
    check(name, vmap(output)(parameters, buffers, x).detach(), outputs, TOLERANCE)

    benchmark.group = "replicas, forward and backward"
    calls = {
        "torch.nn.RNN": lambda: loop(theirs),
        "one call for each model": lambda: loop(ours),
        "one thread": one_thread,
        "ours": together,
    }
    seconds = interleave(benchmark, calls, rounds=bench.rounds(21))
    for peer_name, bar in BARS.items():
        # what the ratio would be if each thread ran its share of the loop's calls alone: those already use all threads
        shared_out = ratio(seconds[peer_name], [t / threads for t in seconds["one thread"]])
        bench.record(
            "replicas",
            f"{peer_name} over vmap of orthokern.nn.{name}",
            {**size, "D": FEATURES},
            "times as long",
            ratio(seconds[peer_name], seconds["ours"]),
            bar=bar,
            details={
                "us_per_step_and_model": round(1e6 * median(seconds["ours"]) / T / R, 3),
                "at_one_thread_rate": round(shared_out, 3),
                "ms": spread_ms(seconds["ours"]),
                "peer_ms": spread_ms(seconds[peer_name]),
                "error": error,
                "tolerance": TOLERANCE,
            },
        )


def seeds(N: int, T: int, R: int) -> list[Adding]:
    """The adding task with its defaults, with R seeds."""
    found = []
    for seed in range(R):
        torch.manual_seed(seed)
        given = {**adding.DEFAULTS, "hidden": N, "T": T, "seed": seed, "device": "cpu", "backend": "auto"}
        found.append(Adding(adding.complete(given)))
    return found


@pytest.mark.sizes([{"N": 64, "T": 50, "R": 5}, {"N": 128, "T": 50, "R": 5}], quick=[{"N": 16, "T": 5, "R": 3}])
def test_seeds_of_a_task(benchmark: Any, bench: Bench, size: Size) -> None:
    """--replicas: an iteration without diagnostics of R seeds, each alone and together."""
    alone, joint = seeds(**size), seeds(**size)
    settings, stop, profiler = LoopSettings(1), StopRequest(), Profiler(None, torch.device("cpu"))
    stacked, everyone = Stacked(joint, settings), list(range(size["R"]))

    def one_by_one() -> None:
        for task in alone:
            step(task, settings, False, stop, profiler, check=False)

    def together() -> None:
        stacked.prepare(everyone)
        for r, task in enumerate(joint):
            stacked.take(r, task, settings, False, stop, profiler, check=False)

    one_by_one()
    together()
    # gradients: RMSprop makes a step of full length of the rounding of one that is zero
    found, wanted = ([p.grad for task in tasks for p in task.model.parameters()] for tasks in (joint, alone))
    error = check("seeds of the adding task", found, wanted, TOLERANCE)
    benchmark.group = "seeds of a task"
    seconds = interleave(benchmark, {"alone": one_by_one, "together": together}, rounds=bench.rounds(21))
    bench.record(
        "replicas",
        "single iterations of the adding task over --replicas",
        {**size, "B": joint[0].settings.batch},
        "times as long",
        ratio(seconds["alone"], seconds["together"]),
        details={
            "ms": spread_ms(seconds["together"]),
            "peer_ms": spread_ms(seconds["alone"]),
            "error": error,
            "tolerance": TOLERANCE,
        },
    )
