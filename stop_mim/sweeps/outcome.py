"""How a run of a sweep ended: what was measured, or why it failed. Written once, when it is over."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stop_mim.errors import InputError
from stop_mim.files import write_atomically

OUTCOME_FILE = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """The end of a run, good or bad."""

    error: str | None = None
    """Why it failed, as a sentence; none if it did not."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Accuracies of the probes, and the health signs after the last step."""
    steps: int = 0
    images_per_second: float | None = None
    """Median over the lines of metrics.jsonl."""
    probe_seconds: float | None = None


def outcome_file(run: Path) -> Path:
    """Where the outcome of a run lies."""
    return run / OUTCOME_FILE


def read_outcome(run: Path) -> Outcome | None:
    """The outcome of a run, if it is over."""
    file = outcome_file(run)
    if not file.exists():
        return None
    try:
        return Outcome(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({error}): delete it, and the run goes on.") from error


def write_outcome(run: Path, outcome: Outcome) -> None:
    """Write it in one step."""
    text = json.dumps(asdict(outcome), indent=2)
    write_atomically(outcome_file(run), lambda file: file.write_text(text + "\n"))
