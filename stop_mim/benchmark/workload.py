"""What is measured: a training step built as the trainer builds it, in one process, on synthetic images or on the loader's."""

import os
from collections.abc import Generator, Iterator
from itertools import count, repeat

import torch
from torch import Tensor

from stop_mim.benchmark.flops import TokenCounts
from stop_mim.data.bad_images import BadImages
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError
from stop_mim.masking import Masks
from stop_mim.models.objective import Objective
from stop_mim.seeds import derive_seed, seeded_generator
from stop_mim.training.acceleration import CapturedStep, accelerate, autocast_for, is_compiled
from stop_mim.training.build import build_objective
from stop_mim.training.config import TrainConfig
from stop_mim.training.distributed import Ranks, choose_device
from stop_mim.training.inputs import Loader, StepInputs
from stop_mim.training.progress import ProgressDisplay
from stop_mim.training.schedules import values_at
from stop_mim.training.step import TrainingStep, make_optimiser

# The length of an epoch of synthetic images: it moves the schedules, and makes a run long enough to be compiled.
SYNTHETIC_STEPS_PER_EPOCH = 1000


class Workload:
    """The parts of a run without its folder: model, optimiser, masks and images, and the step that uses them all."""

    def __init__(self, config: TrainConfig, uses_data: bool, display: ProgressDisplay | None = None) -> None:
        self.config, self.device = config, one_device(config)
        self.display = display or ProgressDisplay(shown=False)
        self.notes: list[str] = []
        ranks = Ranks(0, 1, 1, self.device)
        self.inputs = StepInputs(config, ranks)
        self.per_device, self.batches_per_step = self.inputs.per_device, self.inputs.batches_per_step
        self.loader = self._open_loader() if uses_data else None
        self.images, self.steps_per_epoch = self._open_images()
        self.total_steps = config.optim.epochs * self.steps_per_epoch
        torch.manual_seed(derive_seed(config.seed, "weights"))
        self.objective: Objective = build_objective(config, self.total_steps).to(self.device)
        self.optimiser = make_optimiser(self.objective, config.optim, self.device)
        self.autocast = autocast_for(config.speed.precision, self.device)
        self.counts = TokenCounts.of(self.draw_masks(0), self.objective.encoder.grid)
        self._numbers, self._batches = count(), self.inputs.with_masks(self.images)
        clip = config.optim.clip_gradient_norm
        step = TrainingStep(self.objective, self.objective, self.optimiser, ranks, self.autocast, clip)
        steps = min(self.total_steps, config.stop_after_steps or self.total_steps)
        self._step = accelerate(step, config.speed, steps, self.display.say, self._warn)

    @property
    def images_per_step(self) -> int:
        """Images of an update."""
        return self.per_device * self.batches_per_step

    @property
    def image_source(self) -> str:
        """Where the images come from, in words."""
        return "synthetic, on the device" if self.loader is None else f"{self.config.data}; {self.loader.description}"

    @property
    def is_compiled(self) -> bool:
        """Whether the objective is compiled; known after the first step, as it may not work."""
        return is_compiled(self.objective)

    @property
    def is_captured(self) -> bool:
        """Whether the step is to be captured as a CUDA graph."""
        return isinstance(self._step, CapturedStep)

    def step(self) -> None:
        """A whole training step, as the trainer makes one: images, masks, gradients, weights and target."""
        number = next(self._numbers)
        values = values_at(number, self.steps_per_epoch, self.config.optim)
        self.objective.positions.set_step(number)
        self._step(next(self._batches), values, derive_seed(self.config.seed, "step", number, 0))

    def close(self) -> None:
        """End the loader's processes, which would outlive the last step."""
        for batches in (self._batches, self.images):
            if isinstance(batches, Generator):
                batches.close()

    def draw_masks(self, number: int) -> Masks:
        """The masks of the batch of that number."""
        return self.inputs.draw_masks(number)

    def _warn(self, text: str) -> None:
        self.display.say(text, style="bold yellow")
        self.notes.append(text)

    def _open_images(self) -> tuple[Iterator[Tensor], int]:
        if self.loader is None:
            generator = seeded_generator(self.device, self.config.seed, "bench images")
            shape = (self.per_device, 3, *self.config.encoder.image_size)
            images = torch.randn(shape, device=self.device, generator=generator)
            return repeat(images), SYNTHETIC_STEPS_PER_EPOCH
        order = self.inputs.order(self.loader)
        return self.loader.batches(order, 0), order.steps_per_epoch

    def _open_loader(self) -> Loader:
        if not self.config.data:
            raise InputError(
                "data is not given: add --data, or measure synthetic images with --bench.images synthetic."
            )
        source = open_source(self.config.data)
        return self.inputs.open_loader(source, BadImages(source.name, len(source)), self.display)


def one_device(config: TrainConfig) -> torch.device:
    """The device that is measured, by this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("bench measures one process: start it without torchrun.")
    device = choose_device(config.speed.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
