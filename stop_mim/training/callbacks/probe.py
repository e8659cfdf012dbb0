"""The online probe of a run: trained and scored on labelled images; the encoder learns nothing from them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from stop_mim.models.encoder import Encoder
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.checkpoint import Checkpoint
from stop_mim.training.config import ProbeConfig
from stop_mim.training.online_probe import OnlineProbe
from stop_mim.training.step import StepOutcome
from stop_mim.training.trainer import Callback, Trainer


class RunProbe(Callback):
    """Gives the probe a batch every few steps, and scores it; only the main process has a probe."""

    name = "probe"

    def __init__(
        self,
        config: ProbeConfig,
        probe: OnlineProbe | None,
        fingerprint: str,
        encoder: Encoder,
        autocast: AbstractContextManager[Any],
        display: ProgressDisplay,
    ) -> None:
        self.config, self.probe, self.fingerprint = config, probe, fingerprint
        self.encoder, self.autocast, self.display = encoder, autocast, display

    def start(self, trainer: Trainer) -> None:
        """Describe the probe."""
        assert self.probe is not None
        self.display.say(f"probe      {self.config.data}; {self.probe.description}")

    def reads(self, step: int) -> bool:
        """Whether the probe is scored."""
        return step % self.config.score_every_steps == 0

    def after_step(self, trainer: Trainer, batch: Any, outcomes: Sequence[StepOutcome]) -> None:
        """Train and score the probe, as functions of the step alone; the last step of a run is scored too."""
        assert self.probe is not None
        step = trainer.done
        if step % self.config.every_steps == 0:
            self.probe.learn(self.encoder, step // self.config.every_steps, self.autocast)
        if self.reads(step) or step == trainer.total_steps:
            trainer.measurements |= self.probe.score(self.encoder, self.autocast)

    def state(self) -> dict[str, Any]:
        """Return the fingerprint of the labelled images."""
        return {"fingerprint": self.fingerprint}

    def tensors(self) -> dict[str, Tensor]:
        """Return the probe's weights and memory."""
        return {} if self.probe is None else self.probe.tensors()

    def restore(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Continue the probe; if its labelled images are not those of the checkpoint, a new probe starts."""
        if self.probe is None:
            return
        if state == self.state():
            self.probe.restore(Checkpoint(0, tensors, {}))
        else:
            self.display.warn(f"The checkpoint has no probe of '{self.config.data}' as it is now: a new probe starts.")
