"""What a report shows of its runs, as plain values for a page: states, curves, maps and pictures, thinned and rounded."""

import base64
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL.Image
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from stop_mim.analysis.covariance import noise_spectrum
from stop_mim.analysis.predictions import (
    fitted,
    patch_features,
    pca_maps,
    prediction_maps,
    sample_images,
    sample_masks,
)
from stop_mim.analysis.runs import AnalysedRun, RunRecords, check_same_grid, open_run, read_records
from stop_mim.analysis.similarity import similarity_maps
from stop_mim.data.decode import BadImage, decode_image
from stop_mim.errors import InputError
from stop_mim.models.objective import TargetObjective
from stop_mim.positions import Positions, StochasticPositions
from stop_mim.seeds import seeded_generator
from stop_mim.training.loop import MAX_NOT_FINITE_IN_A_ROW
from stop_mim.training.run_folder import RunFolder

MAX_IMAGES = 16
# What all runs together may take, in bytes before base64: the page stays below 10 MB however many there are.
POSITION_BYTES, PREDICTION_BYTES = 1_500_000, 3_000_000
CURVE_POINTS, LEAST_CURVE_POINTS, MOST_CURVE_POINTS = 4000, 120, 600
PICTURE_SIDE = 288
NEGLIGIBLE_VARIANCE = 1e-9
WARNING, NOT_FINITE, SAVED = "Warning: ", "is not finite", "Saved step"

Plain = dict[str, Any]


@dataclass(frozen=True)
class State:
    """How far a run has come."""

    kind: Literal["finished", "unfinished", "failed", "empty"]
    text: str


@dataclass(frozen=True)
class ReportedRun:
    """A run as a report sees it: its records, and its model if there is a checkpoint that can be read."""

    records: RunRecords
    name: str
    recipe: str
    sessions: list[Plain]
    """Versions and hardware, one for each time that the run was begun or resumed."""
    log: list[str]
    model: AnalysedRun | None
    missing: str
    """Why there is no model, if there is none."""

    @property
    def warnings(self) -> list[str]:
        """The lines of the log that warn of something, with their times."""
        return [line.replace(WARNING, "", 1) for line in self.log if WARNING in line]

    @property
    def total_steps(self) -> int | None:
        """The steps of the whole run, as far as its records tell."""
        last = next((line for line in reversed(self.records.metrics) if line.get("epoch")), None)
        return None if last is None else round(last["step"] / last["epoch"] * self.records.config.optim.epochs)

    @property
    def state(self) -> State:
        """Finished, unfinished or failed; whether an unfinished run still goes on cannot be seen from its folder."""
        if _diverged(self.log):
            return State("failed", f"failed: the loss was not finite {MAX_NOT_FINITE_IN_A_ROW} times in a row")
        if not self.records.metrics:
            return State("empty", "no step recorded: it failed early, or has only just begun")
        step, total = self.records.last_step, self.total_steps
        if total is not None and step >= total:
            return State("finished", f"finished: all {total:,} steps")
        return State("unfinished", f"unfinished: step {step:,}" + ("" if total is None else f" of {total:,}"))


@dataclass(frozen=True)
class Pictures:
    """The images on which predictions and features are shown."""

    pixels: tuple[UInt8[Tensor, "3 height width"], ...] = ()
    origin: str = ""
    missing: str = ""
    """Why there are none, if there are none."""


@dataclass(frozen=True)
class Looks:
    """What a run's model gives to look at, ready for the page; notes say what is missing, by section."""

    spectrum: Plain | None = None
    positions: Plain | None = None
    predictions: Plain | None = None
    features: Plain | None = None
    notes: dict[str, str] = field(default_factory=dict)


def read_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """The runs of these folders, which must be of one grid to be compared."""
    if not paths:
        raise InputError("No run is given: name the folder of at least one run.")
    resolved = [path.resolve() for path in paths]
    for number, path in enumerate(paths):
        if resolved[number] in resolved[:number]:
            raise InputError(f"The run {path} is given twice: name it once.")
    records = [read_records(path) for path in paths]
    check_same_grid(records)
    names = [one.name for one in records]
    distinct = names if len(set(names)) == len(names) else [str(path) for path in paths]
    return [_read_run(one, name) for one, name in zip(records, distinct, strict=True)]


def _read_run(records: RunRecords, name: str) -> ReportedRun:
    folder, model, missing = (
        RunFolder(records.path),
        None,
        "It has not saved a checkpoint: there is no model to look at.",
    )
    if folder.newest_checkpoint() is not None:
        try:
            model, missing = open_run(records.path), ""
        except InputError as error:
            missing = str(error)
    sessions = _read_sessions(folder.environment_file)
    recipe = next((str(session["recipe"]) for session in sessions if "recipe" in session), "custom")
    log = folder.log_file.read_text(errors="replace").splitlines() if folder.log_file.exists() else []
    return ReportedRun(records, name, recipe, sessions, log, model, missing)


def _read_sessions(file: Path) -> list[Plain]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return []
    return [session for session in found if isinstance(session, dict)] if isinstance(found, list) else []


def _diverged(log: Sequence[str]) -> bool:
    """Whether the log ends as that of a run whose loss was not finite too often."""
    lines = [line for line in log if SAVED not in line][-MAX_NOT_FINITE_IN_A_ROW:]
    return len(lines) == MAX_NOT_FINITE_IN_A_ROW and all(WARNING in line and NOT_FINITE in line for line in lines)


def curve(metrics: Sequence[dict[str, float]], name: str, most_points: int) -> Plain | None:
    """Steps and finite values of a measurement; of very many, those that keep every peak."""
    known = [(line["step"], line[name]) for line in metrics if isinstance(line.get(name), int | float)]
    points = thinned([point for point in known if math.isfinite(point[1])], most_points)
    if not points:
        return None
    return {"x": [int(step) for step, _ in points], "y": [rounded(value) for _, value in points]}


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Of more points than `most` the lowest and the highest of every stretch, the first and the last."""
    if len(points) <= most:
        return list(points)
    stretches = np.array_split(np.arange(len(points)), max(1, most // 2 - 1))
    kept = {0, len(points) - 1}
    for stretch in stretches:
        values = [points[number][1] for number in stretch]
        kept |= {int(stretch[np.argmin(values)]), int(stretch[np.argmax(values)])}
    return [points[number] for number in sorted(kept)]


def points_a_curve(runs: int) -> int:
    """How many points a curve may have, so that the curves of all runs stay small."""
    return min(MOST_CURVE_POINTS, max(LEAST_CURVE_POINTS, CURVE_POINTS // runs))


def rounded(value: float) -> float:
    """Four digits, which is more than anybody reads off a chart."""
    return float(f"{value:.4g}")


def look_at(run: ReportedRun, pictures: Pictures, n_runs: int) -> Looks:
    """All that can be seen of a run's model; what cannot be is said in the notes."""
    if run.model is None:
        sections = ("noise", "positions", "predictions", "features")
        return Looks(notes=dict.fromkeys(sections, run.missing))
    positions, notes = run.model.objective.positions, {}
    spectrum = _spectrum(positions)
    if spectrum is None:
        notes["noise"] = f"Its {run.records.config.positions.kind} positions have no covariance of noise."
    maps = position_maps(positions, POSITION_BYTES // n_runs)
    if "mean" not in maps:
        notes["positions"] = "Its positions have no noise: the maps with noise are left out."
    predictions, features = None, None
    if not pictures.pixels:
        notes["predictions"] = notes["features"] = pictures.missing
    else:
        images = torch.stack([fitted(image, run.model.objective.encoder.image_size) for image in pictures.pixels])
        features = {"maps": _colours(run.model, images)}
        predictions = _predictions(run.model, images, PREDICTION_BYTES // n_runs)
    if pictures.pixels and predictions is None:
        notes["predictions"] = (
            f"{type(run.model.objective).__name__} predicts pixels and no features: there are no maps."
        )
    return Looks(spectrum, maps, predictions, features, notes)


def _spectrum(positions: Positions) -> Plain | None:
    if not isinstance(positions, StochasticPositions) or positions.apply_to == "none":
        return None
    found = noise_spectrum(positions)
    if not found.trace > 0:
        return None
    # Of a Σ that is not of full rank only rounding is left in the other directions.
    eigenvalues = found.eigenvalues[found.eigenvalues > NEGLIGIBLE_VARIANCE * found.eigenvalues[0]]
    plain = {
        "x": list(range(1, len(eigenvalues) + 1)),
        "y": [rounded(value) for value in eigenvalues.tolist()],
        "effective_rank": rounded(found.effective_rank),
        "trace": rounded(found.trace),
        "dim": positions.dim,
    }
    if found.by_frequency is not None and found.frequencies is not None:
        plain["frequencies"] = [rounded(value) for value in found.frequencies.tolist()]
        plain["variances"] = [rounded(value) for value in found.by_frequency.mean(0).tolist()]
    return plain


def position_maps(positions: Positions, budget: int, seed: int = 0, draws: int = 256) -> Plain:
    """Cosines of the position of each query patch to all fixed ones: without noise and, where there is any, with it."""
    noisy = positions.noise_power().item() > 0
    patches = len(positions.table())
    queries = spread_out(positions.grid, max(1, budget // (patches * (3 if noisy else 1))))
    generator = seeded_generator("cpu", seed, "report positions")
    found = [similarity_maps(positions, query, generator, draws if noisy else 1) for query in queries]
    kinds = {"fixed": torch.stack([maps.fixed for maps in found])}
    if noisy:
        kinds |= {"sample": torch.stack([maps.sample for maps in found]), "mean": torch.stack([m.mean for m in found])}
    low = min(values.min().item() for values in kinds.values())
    packs = {kind: packed(values, low, 1.0) for kind, values in kinds.items()}
    return {"queries": queries, "low": rounded(low), "high": 1.0, "draws": draws, **packs}


def spread_out(grid: tuple[int, int], most: int) -> list[int]:
    """All patches of a grid or, where they are too many, those of every second or third row and column."""
    rows, columns = grid
    step = 1
    while math.ceil(rows / step) * math.ceil(columns / step) > most and step < max(grid):
        step += 1
    return [row * columns + column for row in range(0, rows, step) for column in range(0, columns, step)]


def _predictions(run: AnalysedRun, images: UInt8[Tensor, "n 3 height width"], budget: int) -> Plain | None:
    """For every image its masks, and for its masked patches to what in the image their predictions are alike."""
    objective = run.objective
    if not isinstance(objective, TargetObjective):
        return None
    masks = sample_masks(run, len(images))
    maps = prediction_maps(objective, images, masks)
    most = max(1, budget // (len(images) * maps.shape[-1]))
    shown = [_image_maps(masks.targets[number].flatten(), maps[number], most) for number in range(len(images))]
    return {"context": masks.context.tolist(), "images": shown}


def _image_maps(masked: Int[Tensor, " n"], maps: Float[Tensor, "n n_patches"], most: int) -> Plain:
    # Target blocks overlap: of a patch in several, the first block's prediction is shown.
    first = {patch: number for number, patch in reversed(list(enumerate(masked.tolist())))}
    patches = sorted(first)
    queries = [patches[number * len(patches) // most] for number in range(most)] if len(patches) > most else patches
    rows = maps[[first[patch] for patch in queries]]
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    return {
        "masked": patches,
        "queries": queries,
        "low": [rounded(value) for value in low.flatten().tolist()],
        "high": [rounded(value) for value in high.flatten().tolist()],
        "maps": packed(rows, low, high),
    }


def _colours(run: AnalysedRun, images: UInt8[Tensor, "n 3 height width"]) -> list[str]:
    colours = pca_maps(patch_features(run.objective.frozen, images), run.grid)
    return [packed(map_, 0.0, 1.0) for map_ in colours]


def packed(values: Float[Tensor, "*shape"], low: float | Tensor, high: float | Tensor) -> str:
    """Numbers as bytes in base64: 0 is low, 255 is high."""
    span = torch.as_tensor(high - low, dtype=values.dtype).clamp(min=1e-12)
    levels = ((values - low) / span * 255).round().clamp(0, 255).to(torch.uint8)
    return base64.b64encode(levels.contiguous().numpy().tobytes()).decode()


def choose_pictures(runs: Sequence[ReportedRun], given: Sequence[Path] | None) -> Pictures:
    """The given images, or some of the first run's data that can be opened."""
    if given:
        return _read_pictures(given, runs[0].records)
    failures = []
    for run in runs:
        data = run.records.config.data
        if run.model is None:
            continue
        try:
            return Pictures(tuple(sample_images(run.records, MAX_IMAGES)), f"images of {data}")
        except (InputError, OSError) as error:
            failures.append(f"The data '{data}' cannot be opened here ({str(error).rstrip('.')}): give images.")
    return Pictures(missing=failures[0] if failures else "No run has a model to show them to.")


def _read_pictures(paths: Sequence[Path], records: RunRecords) -> Pictures:
    if len(paths) > MAX_IMAGES:
        raise InputError(f"{len(paths)} images are given: give at most {MAX_IMAGES}.")
    size, patch = records.config.encoder.image_size, records.config.encoder.patch_size
    pixels = []
    for path in paths:
        try:
            image = decode_image(path.read_bytes(), str(path))
        except OSError as error:
            raise InputError(f"The image {path} cannot be read ({error.strerror}): give another file.") from error
        except BadImage as error:
            raise InputError(f"The image {path} cannot be read ({error.reason}): give another file.") from error
        height, width = image.shape[1:]
        if min(height, width) < patch:
            raise InputError(
                f"The image {path} has {height}x{width} pixels, less than a patch of {patch}x{patch}: give a larger one."
            )
        pixels.append(fitted(image, size))
    return Pictures(tuple(pixels), "the given images")


def picture_url(image: UInt8[Tensor, "3 height width"]) -> str:
    """The image as a data URL, no larger than it is shown, in the smaller of two formats."""
    picture = PIL.Image.fromarray(image.permute(1, 2, 0).numpy())
    picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    encoded = {}
    for kind in ("png", "webp"):
        stream = io.BytesIO()
        picture.save(stream, kind, **({"quality": 88} if kind == "webp" else {"optimize": True}))
        encoded[kind] = stream.getvalue()
    kind = min(encoded, key=lambda kind: len(encoded[kind]))
    return f"data:image/{kind};base64,{base64.b64encode(encoded[kind]).decode()}"
