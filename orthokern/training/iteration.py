"""One iteration of the training loop: the gradients of its batches, one optimizer step, and its record."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orthokern.diagnostics import tap, thin_profile
from orthokern.training.checkpoint import rng_state, set_rng_state
from orthokern.training.task import Task


@dataclass(frozen=True)
class LoopSettings:
    """The length of a training run, and the intervals of checkpoints and records.

    Attributes:
        iterations: number of the last iteration (the first is 1).
        checkpoint_every: iterations between checkpoints; one is also written after a new best evaluation, at the end
            and at an interrupt.
        diagnose_every: iterations between records of the spectrum and of the gradient through time; 0 for never.
        plots: draw the plots of the task at the end and at an interrupt.
        accumulate: batches per iteration, whose gradients and numbers are averaged. At least 1.
        last_step_gradient: also record, in diagnosed iterations, the gradient through time of `Task.last_step_loss`.
        minutes: wall time, over all resumed parts, after which the current iteration is the last.
            An evaluation or test takes at most a quarter of it.
    """

    iterations: int
    checkpoint_every: int = 50
    diagnose_every: int = 10
    plots: bool = True
    accumulate: int = 1
    last_step_gradient: bool = False
    minutes: float | None = None


def step(task: Task, settings: LoopSettings, diagnose: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """Computes the gradients of all batches and takes one optimizer step, unless loss or gradient is not finite.
    Returns loss, grad_norm and the numbers of the task, averaged over batches; and the norms through time of the first
    batch, {} without diagnostics."""
    task.optimizer.zero_grad(set_to_none=True)
    names: list[str] = []
    rows: list[Tensor] = []  # for each batch, the loss and the numbers of the task
    diagnosis: dict[str, Any] = {}
    batches = task.next_batches(settings.accumulate)
    for _ in range(settings.accumulate):
        batch = next(batches)
        with tap(sparse=True) if diagnose else nullcontext() as norms:
            loss, extra = task.loss(batch)
            (loss if settings.accumulate == 1 else loss / settings.accumulate).backward()
        names = list(extra)
        rows.append(torch.stack([number.double() for number in (loss.detach(), *extra.values())]))
        if isinstance(norms, tap):
            diagnosis = _diagnose(task, norms, batch, settings)
            diagnose = False  # only for the first batch of the iteration
    gradients = [p.grad for p in task.model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([size.float() for size in torch._foreach_norm(gradients)]))
    # One transfer for all numbers: on a GPU each .item() would synchronize.
    grad_norm, loss_value, *values = torch.cat([norm.double()[None], torch.stack(rows).mean(0)]).tolist()
    if math.isfinite(loss_value) and math.isfinite(grad_norm):
        task.clip_gradients()
        task.optimizer.step()
        if task.scheduler is not None:
            task.scheduler.step()
    return {"loss": loss_value, "grad_norm": grad_norm, **dict(zip(names, values, strict=True))}, diagnosis


def _diagnose(task: Task, norms: tap, batch: Any, settings: LoopSettings) -> dict[str, Any]:
    """The norms through time of the last layer for one batch, for the record."""
    profiles = {}
    if norms.grad_norms:
        # For the loss of this batch, without the factor of the mean over batches.
        profiles["grad_norm_through_time"] = norms.grad_norms[0] * settings.accumulate
    if norms.state_norms:
        profiles["state_norm_through_time"] = norms.state_norms[-1]
    if settings.last_step_gradient and (last := _last_step_gradient(task, batch)) is not None:
        profiles["last_grad_norm_through_time"] = last
    return {name: thin_profile(values) for name, values in profiles.items()}


def _last_step_gradient(task: Task, batch: Any) -> Tensor | None:
    """‖dL/dh_t‖ [T], where L is the loss of the last step. Gradients, buffers and random states are restored."""
    rng = rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in task.model.buffers()]
    try:
        with tap() as tapped:
            loss = task.last_step_loss(batch)
            if loss is None:
                return None
            torch.autograd.grad(loss, [p for p in task.model.parameters() if p.requires_grad], allow_unused=True)
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        set_rng_state(rng)
    return tapped.grad_norms[0] if tapped.grad_norms else None
