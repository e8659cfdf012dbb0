"""Results of evaluations: records of scores, the files that hold them, and their tables."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from stop_mim.errors import InputError
from stop_mim.files import locked, write_atomically
from stop_mim.records import from_plain, read_record, write_json
from stop_mim.tables import Table

RESULTS_FILE = "results.json"
FORMAT = "stop-mim results 2"
# Labels that names of scores leave out.
USUAL_LABELS = ("class", "objects")
# Prefix of the name of an encoder with its initial weights.
UNTRAINED = "untrained:"
UNKNOWN = "–"
# The 97.5th percentile of a normal distribution.
NORMAL_QUANTILE = 1.959964

Scalar = str | int | float | bool
Measurement = tuple[tuple[str, str], ...]
"""How a score was measured: names and values as JSON."""


@dataclass(frozen=True)
class Score:
    """One number of an evaluation."""

    metric: str
    """What is measured, such as top1, J_mean or penalty."""
    value: float
    layers: int | None = None
    """How many last layers the features are of."""
    variant: dict[str, Scalar] = field(default_factory=dict)
    """Other coordinates, such as {"batch_norm": True, "lr": 0.01} or {"amount": "1%", "draw": 2}."""
    headline: bool = False
    """Whether it is the main result of its task, which short tables show; --details and the files have all scores."""
    unit: Literal["%", ""] = "%"
    low: float | None = None
    """Lower end of the 95% interval."""
    high: float | None = None
    """Upper end of the 95% interval."""
    std: float | None = None
    """Standard deviation over draws."""

    @property
    def parts(self) -> list[str]:
        """Coordinates and metric, such as top1, or last4, batch_norm and top1."""
        layers = [] if self.layers is None else [f"last{self.layers}"]
        return [*layers, *filter(None, map(_coordinate, self.variant.items())), self.metric]

    @property
    def name(self) -> str:
        """The parts in one text, such as last4/batch_norm/top1 or 1%/top1; for display and exact comparison."""
        return "/".join(self.parts)

    @property
    def number(self) -> str:
        """The value alone, such as 80.0, or 1e-06 for what is not in percent."""
        return f"{self.value:.1f}" if self.unit == "%" else f"{self.value:.3g}"

    @property
    def interval(self) -> str:
        """The standard deviation or the interval, such as ± 2.5 or [49.0, 94.3]; empty if there is none."""
        if self.std is not None:
            return f"± {self.std:.1f}"
        return f"[{self.low:.1f}, {self.high:.1f}]" if self.low is not None else ""

    @property
    def text(self) -> str:
        """The value with its standard deviation or interval, such as 80.0 [49.0, 94.3]."""
        return f"{self.number} {self.interval}".rstrip()

    def as_json(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        usual = asdict(Score("", math.nan))
        return {name: value for name, value in asdict(self).items() if value != usual[name]}


def _coordinate(item: tuple[str, Scalar]) -> str:
    name, value = item
    if isinstance(value, bool):
        return name if value else ""
    return value if isinstance(value, str) else f"{name}={value:g}"


def accuracy(
    top: int,
    percent: float,
    test_images: int,
    layers: int | None = None,
    variant: dict[str, Scalar] | None = None,
    headline: bool = False,
) -> Score:
    """Return the score of a top-k accuracy, with its interval for that many test images."""
    low, high = accuracy_interval(percent, test_images)
    return Score(f"top{top}", percent, layers, variant or {}, headline, low=low, high=high)


def accuracy_interval(percent: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95% interval of an accuracy in percent on `count` images."""
    part, z2 = percent / 100, NORMAL_QUANTILE**2
    centre = (part + z2 / (2 * count)) / (1 + z2 / count)
    reach = math.sqrt(part * (1 - part) * z2 / count + (z2 / (2 * count)) ** 2) / (1 + z2 / count)
    return 100 * max(0.0, centre - reach), 100 * min(1.0, centre + reach)


@dataclass(frozen=True)
class Evaluation:
    """One task with one encoder and one labelling of the data: its scores, and what is needed to measure them again."""

    encoder: str
    task: str
    label: str
    """Which label is predicted: class, count, distance, …; objects for videos."""
    data: str
    test_data: str
    protocol: dict[str, Any]
    """The name of the protocol and all settings that the scores depend on."""
    seed: int
    facts: dict[str, Any] = field(default_factory=dict)
    """Image size, fingerprints of encoder and data, numbers of images, versions, hardware, date."""
    details: dict[str, Any] = field(default_factory=dict)
    """Results that are not scores, such as the sequences of a video task."""
    scores: list[Score] = field(default_factory=list)

    @property
    def is_baseline(self) -> bool:
        """Whether the encoder has its initial weights."""
        return self.encoder.startswith(UNTRAINED)

    def chance(self, score: Score) -> float | None:
        """Return the top-1 accuracy of always answering the most frequent class; None for other scores."""
        return self.facts.get("chance") if score.metric == "top1" else None

    def parts_of(self, score: Score) -> list[str]:
        """Return the label, unless it is the usual one, the task and the parts of the score."""
        label = [] if self.label in USUAL_LABELS else [self.label]
        return [*label, self.task, *score.parts]

    def name_of(self, score: Score) -> str:
        """Return the name that `find_score` takes, such as distance/linear/top1."""
        return "/".join(self.parts_of(score))

    @property
    def encoder_and_pool(self) -> str:
        """The encoder's name, and whether its class token was scored instead of its patches."""
        return self.encoder + (" (class token)" if self.facts.get("pool") == "cls" else "")

    def identity(self) -> tuple[object, ...]:
        """Return the fields that identify an evaluation; in a file, a new one replaces an old one with the same identity."""
        return (self.encoder, json.dumps(self.facts.get("encoder_fingerprint")), *self.measurement())

    def measurement(self) -> Measurement:
        """Return what must be equal to compare the scores of different encoders, by name, as JSON."""
        fields = {name: getattr(self, name) for name in ("task", "label", "data", "test_data", "seed")}
        fields |= {f"{self.task}.{name}": value for name, value in self.protocol.items()}
        for name in ("image_size", "pool", "data_fingerprint", "test_fingerprint"):
            fields[name] = self.facts.get(name)
        return tuple((name, json.dumps(value, sort_keys=True)) for name, value in sorted(fields.items()))

    def as_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {**vars(self), "scores": [score.as_json() for score in self.scores]}


def find_score(evaluations: Sequence[Evaluation], spec: str) -> tuple[Evaluation, Score]:
    """Return the newest score of a name, with its evaluation; raise InputError if there is none.

    Trained encoders come before untrained ones.

    Args:
        evaluations: as `read_results` returns them, the newest last.
        spec: such as linear/top1, low-shot/1%/top1 or distance/linear/top1; the label may be left out.
    """
    known: dict[str, None] = {}
    newest_first = list(reversed(evaluations))
    for evaluation in sorted(newest_first, key=lambda one: one.is_baseline):
        for score in evaluation.scores:
            name = evaluation.name_of(score)
            if spec in (name, f"{evaluation.task}/{score.name}"):
                return evaluation, score
            if score.headline:
                known[name] = None
    raise InputError(f"There is no score '{spec}': choose one of {', '.join(known) or '(no scores)'}.")


def read_results(path: Path) -> list[Evaluation]:
    """Return the evaluations of a file, the newest last; none if there is no file."""
    if not path.exists():
        return []
    remedy = f"it does not hold '{FORMAT}': move the file away and evaluate again"
    found = read_record(path, dict[str, Any], remedy)
    if found.get("format") != FORMAT:
        raise InputError(f"{path} cannot be read: {remedy}.")
    try:
        evaluations = from_plain(list[Evaluation], found.get("evaluations"), "evaluations")
        for one in evaluations:
            from_plain(float | None, one.facts.get("chance"), "chance")
        return evaluations
    except InputError as error:
        raise InputError(f"{path} cannot be read ({str(error).rstrip('.')}): {remedy}.") from error


def add_results(path: Path, evaluations: Sequence[Evaluation]) -> None:
    """Add evaluations to a file; each replaces the one with the same identity. Other processes may add theirs meanwhile."""
    new = [evaluation.identity() for evaluation in evaluations]
    # A link is kept by the write: all its names have one lock.
    file = path.resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_name(f".{file.name}.lock"), wait=True):
        kept = [one for one in read_results(path) if one.identity() not in new]
        write_json(path, {"format": FORMAT, "evaluations": [one.as_json() for one in [*kept, *evaluations]]})


def results_document(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Return the content of `evaluate --json`; the details of a single video evaluation are also at the top level."""
    document: dict[str, Any] = {"format": FORMAT, "evaluations": [evaluation.as_json() for evaluation in evaluations]}
    videos = [evaluation for evaluation in evaluations if "sequences" in evaluation.details]
    return {**document, **videos[0].details} if len(videos) == 1 else document


def write_csv(path: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write a CSV file with one line for each score."""
    head = ["encoder", "task", "label", "data", "seed", "layers", "variant", "metric", "value", "low", "high", "std"]
    rows = [
        {**vars(one), **vars(score), "variant": json.dumps(score.variant) if score.variant else ""}
        for one in evaluations
        for score in one.scores
    ]

    def write(file: Path) -> None:
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, head, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)

    write_atomically(path, write)


def headline_table(evaluations: Sequence[Evaluation], known: Sequence[Evaluation] = ()) -> Table:
    """Return the main score of each task and encoder, next to the untrained encoder's and chance.

    Args:
        evaluations: what is shown, on one dataset. An untrained encoder has a row only if it is alone.
        known: other evaluations, in which the scores of untrained encoders are looked up too.
    """
    encoders = list(dict.fromkeys(one.encoder for one in evaluations))
    trained = {f"{UNTRAINED}{name}" for name in encoders}
    shown = [name for name in encoders if name not in trained]
    rows: dict[str, list[list[str]]] = {}
    for one in evaluations:
        for score in one.scores:
            if score.headline and one.encoder in shown:
                name, chance = one.name_of(score), one.chance(score)
                before = untrained_score(one, score, [*known, *evaluations])
                numbers = [score.number, score.interval, UNKNOWN if before is None else before.number]
                row = [name, one.encoder_and_pool, *numbers, UNKNOWN if chance is None else f"{chance:.1f}"]
                rows.setdefault(name, []).append(row if len(shown) > 1 else [row[0], *row[2:]])
    head = ["score", *(["encoder"] if len(shown) > 1 else []), "%", "95% interval", "untrained", "chance"]
    alone = [one.encoder_and_pool for one in evaluations if [one.encoder] == shown]
    about = f" of {alone[0]}" if alone else ""
    caption = f"Test scores{about}" + (f" on {evaluations[0].data}" if evaluations else "")
    cells = [row for group in rows.values() for row in group]
    notes = ["±: standard deviation over draws"] if any(row[-3].startswith("±") for row in cells) else []
    notes += ["chance: always the most frequent class"] if any(row[-1] != UNKNOWN for row in cells) else []
    note = f"{'; '.join(notes)}." if notes else ""
    return Table(caption, head, cells, note, names=len(head) - 4)


def untrained_score(evaluation: Evaluation, score: Score, known: Sequence[Evaluation]) -> Score | None:
    """Return the newest score of the untrained encoder that was measured alike."""
    name, alike = f"{UNTRAINED}{evaluation.encoder}", evaluation.measurement()
    found = next((one for one in reversed(known) if one.encoder == name and one.measurement() == alike), None)
    return None if found is None else next((other for other in found.scores if other.name == score.name), None)


def details_table(evaluations: Sequence[Evaluation]) -> Table:
    """Return a table of all scores: a row for each score, a column for each encoder."""
    encoders = list(dict.fromkeys(evaluation.encoder for evaluation in evaluations))
    rows: dict[str, dict[str, str]] = {}
    for evaluation in evaluations:
        for score in evaluation.scores:
            rows.setdefault(evaluation.name_of(score), {})[evaluation.encoder] = score.text
    cells = [[name, *(found.get(encoder, UNKNOWN) for encoder in encoders)] for name, found in rows.items()]
    caption = "All scores: accuracies in %, with 95% intervals or ± standard deviation over draws"
    return Table(caption, ["score", *encoders], cells)


def today() -> str:
    """Return the date and time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
