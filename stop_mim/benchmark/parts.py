"""The parts of a training step, each timed alone; an objective has only some of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from stop_mim.benchmark.timing import Spread, Work, call_seconds, run_seconds
from stop_mim.errors import first_line
from stop_mim.masking import Masks
from stop_mim.models.data2vec import Data2Vec
from stop_mim.models.ijepa import IJEPA
from stop_mim.models.mae import MAE
from stop_mim.models.objective import TargetObjective
from stop_mim.training.acceleration import STEPS_BEFORE_CAPTURE, CapturedStep, is_compiled, recording
from stop_mim.training.pretrain import Parts

MASKS, FORWARD, BACKWARD = "masks", "whole forward", "backward"


def measure_parts(
    run: Parts, uses_data: bool, calls: int, warmup: int, show: Callable[[str], None], warn: Callable[[str], None]
) -> dict[str, Spread]:
    """Return the seconds of each part in a step, for all batches of the step together."""
    device, inputs = run.inputs.ranks.device, run.inputs
    captured = isinstance(run.trainer.step, CapturedStep)
    found: dict[str, Spread] = {}

    def measure(name: str, work: Work, capturable: bool = True) -> None:
        show(name)
        timed = _captured(name, work, device, warn) if captured and capturable else work
        found[name] = Spread.of(call_seconds(timed, device, calls, warmup))

    with closing(run.images.starting_at(0)) as images:
        if uses_data:
            show("data (loader)")
            seconds = run_seconds(lambda: next(images), device, steps=1, repeats=warmup + calls)
            found["data (loader)"] = Spread.of(seconds[warmup:])
        batch = next(images).images
    # In training, too, masks are drawn outside the graph.
    measure(MASKS, lambda: inputs.draw_masks(0), capturable=False)
    masks = inputs.draw_masks(0)[0]
    for name, work in forward_parts(run, batch, masks).items():
        measure(name, work)

    def gradients() -> None:
        run.trainer.optimiser.zero_grad(set_to_none=True)
        with run.autocast:
            loss = run.objective(batch, masks)
        loss.backward()

    measure(BACKWARD, gradients)
    found[BACKWARD] = found[BACKWARD].less(found[FORWARD])
    # Masks are drawn for all batches of a step at once.
    for name in found.keys() - {MASKS}:
        found[name] = found[name].scaled(inputs.batches_per_step)
    # The optimiser needs gradients, and not those inside a graph.
    gradients()
    measure("optimiser", run.trainer.optimiser.step)
    if isinstance(run.objective, TargetObjective):
        weight = torch.tensor(1 - run.trainer.schedule(0).ema_momentum, device=device)
        measure("EMA of the target", lambda: run.objective.move_target(weight))
    return found


def forward_parts(run: Parts, images: Float[Tensor, "batch 3 height width"], masks: Masks) -> dict[str, Work]:
    """Return the parts of the forward pass on one batch, compiled if the step is."""
    objective = run.objective
    parts: dict[str, Work] = {}
    if isinstance(objective, IJEPA | Data2Vec):
        parts["target forward"] = lambda: objective.target_features(images, masks)
    if isinstance(objective, Data2Vec):
        parts["student forward"] = lambda: objective.predict(images, masks)
    if isinstance(objective, IJEPA | MAE):
        predictor = objective.predictor if isinstance(objective, IJEPA) else objective.decoder
        with torch.no_grad(), run.autocast:
            features = objective.encoder(images, masks.context)
        features = features.detach().requires_grad_()
        parts["context encoder forward"] = lambda: objective.encoder(images, masks.context)
        name = "predictor forward" if isinstance(objective, IJEPA) else "decoder forward"
        parts[name] = lambda: predictor(features, masks.context, masks.targets)
    if is_compiled(objective):
        parts = {name: torch.compile(work, dynamic=False) for name, work in parts.items()}
    parts[FORWARD] = lambda: objective(images, masks)
    return {name: _under(run.autocast, work) for name, work in parts.items()}


def _under(autocast: AbstractContextManager[Any], work: Work) -> Work:
    def wrapped() -> object:
        with autocast:
            return work()

    return wrapped


def _captured(name: str, work: Work, device: torch.device, warn: Callable[[str], None]) -> Work:
    """Capture a part as its own CUDA graph, as it is in a captured step; if that fails, warn and time it as it is."""
    here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(STEPS_BEFORE_CAPTURE):
            work()
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with recording(graph):
            work()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        warn(f"'{name}' could not be captured alone ({first_line(error)}): its time includes launches from Python.")
        return work
    return graph.replay
