"""What has come of the steps since the last line of metrics."""

import time

from stop_mim.training.step import StepOutcome


class Interval:
    """Losses and time since the last line of metrics; the losses go into checkpoints, the time does not."""

    def __init__(self) -> None:
        self.health, self.scores = "", ""
        self.last_loss, self.last_gradient_norm = float("nan"), float("nan")
        self.restart()

    def restart(self) -> None:
        """Begin the next interval."""
        self.losses: list[float] = []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count time and steps from now on; the losses stay."""
        self._steps = 0
        self._since = time.perf_counter()

    def add(self, outcome: StepOutcome) -> None:
        """One step more."""
        self._steps += 1
        self.last_gradient_norm = outcome.gradient_norm
        if outcome.updated:
            self.losses.append(outcome.loss)
            self.last_loss = outcome.loss

    def __len__(self) -> int:
        return self._steps

    def mean_loss(self) -> float:
        """The mean over the steps whose loss was finite."""
        return sum(self.losses) / len(self.losses) if self.losses else float("nan")

    def seconds(self) -> float:
        """Seconds since the clock was started."""
        return max(time.perf_counter() - self._since, 1e-9)
