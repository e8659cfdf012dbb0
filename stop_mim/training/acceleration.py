"""Makes a training step faster without changing what it computes, up to rounding: kernels, compilation, CUDA graphs."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from stop_mim.errors import InputError, first_line
from stop_mim.masking import Masks
from stop_mim.models.kernels.fast import is_half, use_fast_kernels
from stop_mim.models.objective import Objective
from stop_mim.training.config import SpeedConfig
from stop_mim.training.distributed import Ranks
from stop_mim.training.schedules import ScheduledValues
from stop_mim.training.step import MaskedBatches, Outcome, TrainingStep

STEPS_WORTH_COMPILING, STEPS_WORTH_CAPTURING = 500, 20
STEPS_BEFORE_CAPTURE = 3

Step = Callable[[MaskedBatches, ScheduledValues, int], Outcome]
Say = Callable[[str], None]


def autocast_for(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return bf16 autocast, which needs no gradient scaler, or a context that does nothing."""
    if is_half(precision, device):
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def accelerate(
    step: TrainingStep, speed: SpeedConfig, steps: int, say: Say, warn: Say, fixed_shapes: bool = True
) -> Step:
    """Return the step with fast kernels and, if it is worth it, compiled and captured as a CUDA graph.

    Args:
        step: the plain step; its objective is changed in place.
        speed: where `compile` or `graph` is None, device, number of processes and `steps`, the length of the whole run,
            decide. Sharded models are neither compiled nor captured.
        fixed_shapes: whether all batches have the same shapes; others would be compiled again and again.
    """
    sharded = speed.sharding != "none"
    use_fast_kernels(step.objective, speed.precision, step.ranks.device, speed.recompute, calls_layers=sharded)
    worthwhile = step.ranks.device.type == "cuda" and fixed_shapes and not sharded
    compiles = speed.compile if speed.compile is not None else worthwhile and steps >= STEPS_WORTH_COMPILING
    alone = worthwhile and step.ranks.world_size == 1
    captures = speed.graph if speed.graph is not None else alone and steps >= STEPS_WORTH_CAPTURING
    inner: Step = CompiledStep(step, say, warn) if compiles else step
    return CapturedStep(step, inner, warn) if captures else inner


def require_possible(speed: SpeedConfig, ranks: Ranks) -> None:
    """Raise InputError if `speed` asks for something that this device cannot do."""
    if speed.sharding != "none" and (speed.compile or speed.graph):
        raise InputError(
            f"speed.sharding is {speed.sharding}: sharded models are neither compiled nor captured; leave "
            f"speed.{'compile' if speed.compile else 'graph'} out."
        )
    if speed.graph and (ranks.device.type != "cuda" or ranks.world_size > 1):
        raise InputError("speed.graph is True: CUDA graphs need a GPU and a single process; leave it out.")


class CompiledStep:
    """A step with a compiled objective; if compilation fails, it warns and trains without."""

    def __init__(self, step: TrainingStep, say: Say, warn: Say) -> None:
        self._step, self._say, self._warn = step, say, warn
        self._is_tried = False
        step.objective.compile(dynamic=False)

    def __call__(self, batches: MaskedBatches, values: ScheduledValues, seed: int) -> Outcome:
        """Take a step; the first one compiles."""
        if self._is_tried:
            return self._step(batches, values, seed)
        self._is_tried = True
        self._say("compiling… the first step takes about a minute")
        try:
            return self._step(batches, values, seed)
        except (InputError, torch.OutOfMemoryError):
            raise
        # Compilers raise all kinds of errors. The weights have not changed yet.
        except Exception as error:
            self._warn(
                f"The model could not be compiled ({first_line(error)}): training continues uncompiled, more slowly."
            )
            self._step.objective._compiled_call_impl = None
            return self._step(batches, values, seed)


class CapturedStep:
    """A step captured as one CUDA graph: after a few plain steps it is recorded once, then replayed.

    A replay launches all kernels of the step at once, so that a small model does not wait for Python. Batches are copied
    to where the recorded kernels read them; scheduled values are in tensors, and the graph knows the step's generators.
    """

    def __init__(self, step: TrainingStep, first: Step, warn: Say) -> None:
        self._step, self._first, self._warn = step, first, warn
        self._plain_steps = 0
        self._recorded: tuple[torch.cuda.CUDAGraph, Outcome] | None = None
        self._is_given_up = False
        self._inputs: MaskedBatches = []

    def __call__(self, batches: MaskedBatches, values: ScheduledValues, seed: int) -> Outcome:
        """Take a step."""
        if self._is_given_up:
            return self._first(batches, values, seed)
        if self._plain_steps < STEPS_BEFORE_CAPTURE:
            self._plain_steps += 1
            return self._on_side_stream(batches, values, seed)
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

    def _on_side_stream(self, batches: MaskedBatches, values: ScheduledValues, seed: int) -> Outcome:
        """Take a plain step on another stream, which torch asks for before a capture."""
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            outcome = self._first(batches, values, seed)
        here.wait_stream(side)
        return outcome

    def _capture(self, batches: MaskedBatches) -> tuple[torch.cuda.CUDAGraph, Outcome] | None:
        self._inputs = [
            (images.clone(), Masks(masks.context.clone(), masks.targets.clone(), masks.grid))
            for images, masks in batches
        ]
        self._step.optimiser.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        for generator in self._step.generators.values():
            graph.register_generator_state(generator)
        try:
            with recording(graph):
                outcome = self._step.run(self._inputs)
        except torch.OutOfMemoryError:
            raise
        # An objective may do something that cannot be recorded. The step has not run, and can be taken plainly.
        except Exception as error:
            # The old generators may believe that they are still being captured.
            self._step.generators.clear()
            self._warn(
                f"The step could not be captured as a CUDA graph ({first_line(error)}): training continues without the graph, "
                "which is slower if the model is small."
            )
            self._is_given_up, self._inputs = True, []
            return None
        self._recorded = graph, outcome
        return self._recorded


@contextmanager
def recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Record all launches of this thread into the graph; other threads may use the device meanwhile.

    The garbage collector is stopped: an event, a graph or page-locked memory of an earlier run that is freed during a
    capture calls CUDA, and the capture fails.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    finally:
        if was_enabled:
            gc.enable()


def is_compiled(objective: Objective) -> bool:
    """Return whether calls of the objective are compiled."""
    return objective._compiled_call_impl is not None
