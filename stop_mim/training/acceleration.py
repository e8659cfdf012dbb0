"""Everything that makes a step faster and leaves what it learns as it is, but for rounding and random draws."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from stop_mim.errors import InputError, first_line
from stop_mim.masking import Masks
from stop_mim.models.frozen_forward import has_frozen_forward
from stop_mim.models.ijepa import IJEPA
from stop_mim.models.objective import Objective
from stop_mim.models.short_attention import use_short_attention
from stop_mim.training.config import SpeedConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.schedules import ScheduledValues
from stop_mim.training.step import Batches, Outcome, TrainingStep

STEPS_WORTH_COMPILING, STEPS_WORTH_CAPTURING = 500, 20
STEPS_BEFORE_CAPTURE = 3

Step = Callable[[Batches, ScheduledValues, int], Outcome]
Say = Callable[[str], None]


def autocast_for(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """bf16 autocast, which needs no scaling of gradients, or nothing."""
    if is_half(precision, device):
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def is_half(precision: str, device: torch.device) -> bool:
    """Whether this precision is bf16 on this device."""
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")


def accelerate(
    step: TrainingStep, speed: SpeedConfig, steps: int, say: Say, warn: Say, fixed_shapes: bool = True
) -> Step:
    """The step as `speed` wants it for a run of so many steps: compiled, captured as a CUDA graph, or as it is.

    Batches whose shapes are not fixed would be compiled anew again and again, and cannot be captured.
    """
    on_gpu = step.ranks.device.type == "cuda"
    require_possible(step.objective, speed, step.ranks)
    prepare_objective(step.objective, speed, step.ranks.device)
    worthwhile = on_gpu and fixed_shapes
    compiles = speed.compile if speed.compile is not None else worthwhile and steps >= STEPS_WORTH_COMPILING
    alone_on_gpu = worthwhile and step.ranks.world_size == 1
    captures = speed.graph if speed.graph is not None else alone_on_gpu and steps >= STEPS_WORTH_CAPTURING
    inner: Step = CompiledStep(step, say, warn) if compiles else step
    return CapturedStep(step, inner, warn) if captures else inner


def require_possible(objective: Objective, speed: SpeedConfig, ranks: Ranks) -> None:
    """Refuse what `speed` asks for where the objective or the device cannot do it."""
    if speed.graph and (ranks.device.type != "cuda" or ranks.world_size > 1):
        raise InputError("speed.graph is True: CUDA graphs need a GPU and a single process; leave it out.")


def prepare_objective(objective: Objective, speed: SpeedConfig, device: torch.device) -> None:
    """Give an objective the layers and the target's precision that suit `speed` and the device."""
    half_on_gpu = device.type == "cuda" and is_half(speed.precision, device)
    if half_on_gpu:
        use_short_attention(objective.layers())
        if isinstance(objective, IJEPA) and has_frozen_forward(objective.target):
            objective.frozen_precision = "bf16"
    if speed.recompute:
        recompute_layers(objective)


def recompute_layers(objective: Objective) -> None:
    """Keep what goes into a layer alone, and compute what is in it again for its gradient."""
    for layer in objective.layers():
        draws = any(getattr(module, "drop_prob", 0) for module in layer.modules())
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=draws)


class CompiledStep:
    """A step whose objective is compiled, forward and backward; if that fails it goes on without, and says so."""

    def __init__(self, step: TrainingStep, say: Say, warn: Say) -> None:
        self._step, self._say, self._warn = step, say, warn
        self._is_tried = False
        step.objective.compile(dynamic=False)

    def __call__(self, batches: Batches, values: ScheduledValues, seed: int) -> Outcome:
        """Take a step; the first one compiles."""
        if self._is_tried:
            return self._step(batches, values, seed)
        self._is_tried = True
        self._say("Compiling: the first step takes about a minute.")
        try:
            return self._step(batches, values, seed)
        except (InputError, torch.OutOfMemoryError):
            raise
        # Whatever dynamo, inductor, triton or a compiler make of this machine; the weights are as they were.
        except Exception as error:
            self._warn(f"The model could not be compiled ({first_line(error)}): it trains without, slower.")
            self._step.objective._compiled_call_impl = None
            return self._step(batches, values, seed)


class CapturedStep:
    """A step as one CUDA graph: after a few plain steps it is recorded once, and from there on replayed.

    A replay launches all kernels of the step together, so that a small model does not wait for Python. Its batches are
    copied to where the recorded kernels read them; schedules and random draws are in tensors and generators already.
    """

    def __init__(self, step: TrainingStep, first: Step, warn: Say) -> None:
        self._step, self._first, self._warn = step, first, warn
        self._plain_steps = 0
        self._recorded: tuple[torch.cuda.CUDAGraph, Outcome] | None = None
        self._is_given_up = False
        self._inputs: Batches = []

    def __call__(self, batches: Batches, values: ScheduledValues, seed: int) -> Outcome:
        """Take a step."""
        if not self._is_given_up and self._inputs and _shapes(batches) != _shapes(self._inputs):
            self._give_up("the shapes of its batches change")
        if self._is_given_up:
            return self._first(batches, values, seed)
        if self._plain_steps < STEPS_BEFORE_CAPTURE:
            self._plain_steps += 1
            return self._aside(batches, values, seed)
        recorded = self._recorded or self._capture(batches)
        if recorded is None:
            return self._first(batches, values, seed)
        graph, outcome = recorded
        for (images, masks), (new_images, new_masks) in zip(self._inputs, batches, strict=True):
            images.copy_(new_images)
            masks.context.copy_(new_masks.context)
            masks.targets.copy_(new_masks.targets)
        self._step.schedule(values, seed)
        graph.replay()
        return outcome.clone()

    def _aside(self, batches: Batches, values: ScheduledValues, seed: int) -> Outcome:
        """A plain step on another stream, as torch wants it before a recording."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            outcome = self._first(batches, values, seed)
        here.wait_stream(aside)
        return outcome

    def _capture(self, batches: Batches) -> tuple[torch.cuda.CUDAGraph, Outcome] | None:
        self._inputs = [
            (images.clone(), Masks(masks.context.clone(), masks.targets.clone())) for images, masks in batches
        ]
        self._step.optimiser.zero_grad(set_to_none=True)
        # A graph has memory of its own: what the plain steps used is given back first.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph):
                outcome = self._step.run(self._inputs)
        except torch.OutOfMemoryError:
            raise
        # Whatever in an objective cannot be recorded: the step was not taken, and can be taken plainly.
        except Exception as error:
            self._give_up(first_line(error))
            return None
        self._recorded = graph, outcome
        return self._recorded

    def _give_up(self, reason: str) -> None:
        self._warn(
            f"The step could not be captured as a CUDA graph ({reason}): it trains without, slower if the model is small."
        )
        self._is_given_up, self._recorded, self._inputs = True, None, []


def recording(graph: torch.cuda.CUDAGraph) -> AbstractContextManager[Any]:
    """Record what is launched into the graph; threads that decode images may use the device meanwhile."""
    return torch.cuda.graph(graph, capture_error_mode="thread_local")


def _shapes(batches: Batches) -> list[tuple[torch.Size, ...]]:
    return [(images.shape, masks.context.shape, masks.targets.shape) for images, masks in batches]


def is_compiled(objective: Objective) -> bool:
    """Whether calls of the objective are compiled."""
    return objective._compiled_call_impl is not None
