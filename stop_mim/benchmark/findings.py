"""What a benchmark found, and its file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stop_mim.benchmark.timing import Spread
from stop_mim.errors import InputError
from stop_mim.evaluation.results import write_json

FORMAT = "stop-mim bench 1"


@dataclass(frozen=True)
class StepMeasurement:
    """A training step, measured."""

    seconds: Spread
    images_per_second: Spread
    peak_memory: int | None
    """Bytes; None where it cannot be told for this step alone."""


@dataclass(frozen=True)
class ComparedStep:
    """The step of one implementation, with the masks that it was given."""

    name: str
    masks: str
    context: int
    targets: int
    step: StepMeasurement


@dataclass(frozen=True)
class ScaledStep:
    """The step of one variant, or why it was not measured."""

    change: str
    value: str
    step: StepMeasurement | None
    skipped: str = ""


@dataclass(frozen=True)
class BenchReport:
    """All that was measured, and all that one must know to measure it again."""

    recipe: str
    environment: dict[str, Any]
    config: dict[str, Any]
    bench: dict[str, Any]
    hardware: str
    images: str
    images_per_step: int
    batches_per_step: int
    tokens: dict[str, int]
    dtype: str
    execution: str
    """Whether the step was compiled and captured."""
    step: StepMeasurement
    parts: dict[str, Spread]
    """Seconds of each part in a step."""
    busy_seconds: float | None
    """Time of a step during which kernels run; None on the CPU."""
    flops: int
    """Operations of a step in matrix products."""
    ceilings: tuple[float, ...]
    """Operations a second of one large matrix product: before the step and after it, then before and after each of others."""
    comparison: tuple[ComparedStep, ...] = ()
    scaling: tuple[ScaledStep, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def host_gap(self) -> float | None:
        """Seconds of a step during which no kernel runs."""
        return None if self.busy_seconds is None else max(0.0, self.step.seconds.median - self.busy_seconds)

    @property
    def ceiling(self) -> float:
        """Operations a second of one large matrix product, when the step was measured."""
        return max(self.ceilings[:2])

    @property
    def flops_per_second(self) -> float:
        """Operations a second of the step."""
        return self.flops / self.step.seconds.median

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        derived = {"host_gap_seconds": self.host_gap, "part_of_ceiling": self.flops_per_second / self.ceiling}
        return {"format": FORMAT, **asdict(self), "derived": derived}


def write_report(path: Path, report: BenchReport) -> None:
    """Write all of it as JSON in one step."""
    write_json(path, report.as_json())


def read_report(path: Path) -> BenchReport:
    """What `write_report` wrote."""
    try:
        found = json.loads(path.read_text())
        if found.pop("format") != FORMAT:
            raise ValueError(path)
        del found["derived"]
        found["step"] = _step(found["step"])
        found["parts"] = {name: Spread(**spread) for name, spread in found["parts"].items()}
        found["comparison"] = tuple(ComparedStep(**one | {"step": _step(one["step"])}) for one in found["comparison"])
        found["scaling"] = tuple(ScaledStep(**one | {"step": _step(one["step"])}) for one in found["scaling"])
        return BenchReport(**found | {name: tuple(found[name]) for name in ("notes", "ceilings")})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not hold a benchmark of this version of stop-mim: name another file.") from error


def _step(found: dict[str, Any] | None) -> Any:
    if found is None:
        return None
    spreads = {name: Spread(**found[name]) for name in ("seconds", "images_per_second")}
    return StepMeasurement(**found | spreads)
