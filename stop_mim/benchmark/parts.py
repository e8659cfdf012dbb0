"""The parts of a training step, each as work that can be timed on its own; parts that an objective lacks are left out."""

from collections.abc import Callable

import torch
from torch import Tensor

from stop_mim.benchmark.timing import Spread, Work, call_seconds, waited_seconds
from stop_mim.benchmark.workload import Workload
from stop_mim.errors import first_line
from stop_mim.models.data2vec import Data2Vec
from stop_mim.models.ijepa import IJEPA
from stop_mim.models.mae import MAE
from stop_mim.models.objective import TargetObjective
from stop_mim.training.acceleration import STEPS_BEFORE_CAPTURE, recording
from stop_mim.training.config import TrainConfig
from stop_mim.training.schedules import values_at

DATA, MASKS, FORWARD, BACKWARD, OPTIMISER = "data (loader)", "masks", "whole forward", "backward", "optimiser"
TARGET, EMA = "target forward", "EMA of the target"
ENCODER, PREDICTOR, DECODER = "context encoder forward", "predictor forward", "decoder forward"
STUDENT = "student forward"

PARTS = {
    "ijepa": (MASKS, TARGET, ENCODER, PREDICTOR, FORWARD, BACKWARD, OPTIMISER, EMA),
    "mae": (MASKS, ENCODER, DECODER, FORWARD, BACKWARD, OPTIMISER),
    "data2vec": (MASKS, TARGET, STUDENT, FORWARD, BACKWARD, OPTIMISER, EMA),
}


def measure_parts(
    workload: Workload, calls: int, warmup: int, tell: Callable[[str], None] = lambda name: None
) -> dict[str, Spread]:
    """Seconds that each part takes in a step, its batches together; `tell` gets the name of what comes next."""

    def measure(name: str, work: Work, recordable: bool = True) -> Spread:
        recorded = _recorded(workload, name, work) if recordable and workload.is_captured else work
        return Spread.of(call_seconds(recorded, workload.device, calls, warmup))

    found: dict[str, Spread] = {}
    times = workload.batches_per_step
    if workload.loader is not None:
        tell(DATA)
        found[DATA] = Spread.of(waited_seconds(lambda: next(workload.images), workload.device, calls, warmup))
    tell(MASKS)
    # In training too, masks are drawn beside the graph.
    found[MASKS] = measure(MASKS, lambda: workload.draw_masks(0), recordable=False)
    for name, work in forward_parts(workload).items():
        tell(name)
        found[name] = measure(name, work)
    tell(BACKWARD)
    gradients = forward_and_backward(workload)
    found[BACKWARD] = _difference(measure(BACKWARD, gradients), found[FORWARD])
    found = {name: spread.scaled(times) for name, spread in found.items()}
    # The next parts need gradients, which are not those within a graph.
    gradients()
    for name, work in update_parts(workload).items():
        tell(name)
        found[name] = measure(name, work)
    return found


def part_names(config: TrainConfig, uses_data: bool) -> tuple[str, ...]:
    """The parts of that objective, in the order in which they are measured."""
    return ((DATA,) if uses_data else ()) + PARTS[config.objective.kind]


def forward_parts(workload: Workload) -> dict[str, Work]:
    """Everything up to the loss of one batch."""
    objective, images, masks = workload.objective, next(workload.images), workload.draw_masks(0)
    parts: dict[str, Work] = {}
    if isinstance(objective, IJEPA | Data2Vec):
        parts[TARGET] = lambda: objective.target_features(images, masks)
    if isinstance(objective, Data2Vec):
        parts[STUDENT] = lambda: objective.predict(images, masks)
    if isinstance(objective, IJEPA | MAE):
        predictor = objective.predictor if isinstance(objective, IJEPA) else objective.decoder
        features = _leaf_features(workload, images, masks.context)
        parts[ENCODER] = lambda: objective.encoder(images, masks.context)
        name = PREDICTOR if isinstance(objective, IJEPA) else DECODER
        parts[name] = lambda: predictor(features, masks.context, masks.targets)
    if workload.is_compiled:
        parts = {name: torch.compile(work, dynamic=False) for name, work in parts.items()}
    parts[FORWARD] = lambda: objective(images, masks)
    return {name: _autocast(workload, work) for name, work in parts.items()}


def forward_and_backward(workload: Workload) -> Work:
    """The gradients of one batch, beginning with none."""
    objective, images, masks = workload.objective, next(workload.images), workload.draw_masks(0)

    def work() -> None:
        workload.optimiser.zero_grad(set_to_none=True)
        with workload.autocast:
            loss = objective(images, masks)
        loss.backward()

    return work


def update_parts(workload: Workload) -> dict[str, Work]:
    """What comes after the gradients, which must be there."""
    momentum = values_at(0, workload.steps_per_epoch, workload.config.optim).ema_momentum
    weight = torch.tensor(1 - momentum, device=workload.device)
    parts: dict[str, Work] = {OPTIMISER: workload.optimiser.step}
    if isinstance(workload.objective, TargetObjective):
        parts[EMA] = lambda: workload.objective.move_target(weight)
    return parts


def _recorded(workload: Workload, name: str, work: Work) -> Work:
    """The part as a CUDA graph of its own, as it is in a captured step; where that fails as it is, and that is said."""
    here, aside = torch.cuda.current_stream(workload.device), torch.cuda.Stream(workload.device)
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
    # Whatever cannot be recorded on its own: its launches are then in its time.
    except Exception as error:
        why = first_line(error)
        workload.notes.append(f"'{name}' could not be captured on its own ({why}): it was launched from Python.")
        return work
    return graph.replay


def _autocast(workload: Workload, work: Work) -> Work:
    def wrapped() -> object:
        with workload.autocast:
            return work()

    return wrapped


def _leaf_features(workload: Workload, images: Tensor, context: Tensor) -> Tensor:
    """What the predictor gets from the encoder; it learns as if gradients went on from there."""
    with torch.no_grad(), workload.autocast:
        features = workload.objective.encoder(images, context)
    return features.detach().requires_grad_()


def _difference(both: Spread, first: Spread) -> Spread:
    """What is left, between the least and the most that the quartiles allow; never less than nothing."""
    median, low, high = both.median - first.median, both.low - first.high, both.high - first.low
    return Spread(max(0.0, median), max(0.0, low), max(0.0, high))
