"""What the report draws of runs and their models, as plain values: curves, spectra, maps and pictures, thinned and rounded."""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from stop_mim.analysis.noise import noise_spectrum, similarity_maps
from stop_mim.analysis.predictions import (
    fitted,
    patch_features,
    pca_maps,
    prediction_maps,
    sample_images,
    sample_masks,
)
from stop_mim.analysis.runs import ONLINE, RunGroup, RunRecords
from stop_mim.data.decode import BadImage, decode_image
from stop_mim.errors import InputError
from stop_mim.models.objective import TargetObjective
from stop_mim.positions import Positions
from stop_mim.seeds import seeded_generator
from stop_mim.training.callbacks.health import SIGNS

MAX_IMAGES = 16
# Bytes that the maps of all runs together may take before base64, so that the page stays below 10 MB.
POSITION_BYTES, PREDICTION_BYTES = 1_500_000, 3_000_000
CURVE_POINTS, LEAST_CURVE_POINTS, MOST_CURVE_POINTS = 4000, 120, 600
PICTURE_SIDE = 288
DRAWS = 256
NEGLIGIBLE_VARIANCE = 1e-9

Plain = dict[str, Any]

DRAWN_SIGNS = ("rankme", "feature_std", "A_norm", "mask_token_norm", "noise_to_signal", "ema_distance")
# Section of the chart, key in metrics.jsonl, title and meaning.
MEASUREMENTS = (
    ("loss", "loss", "Loss", "mean since the previous line"),
    ("loss", "lr", "Learning rate", ""),
    ("loss", "weight_decay", "Weight decay", ""),
    ("loss", "ema_momentum", "Momentum of the target encoder", ""),
    ("loss", "gradient_norm", "Gradient norm", ""),
    ("loss", "images_per_second", "Images per second", ""),
    *(("health", SIGNS[name].key, SIGNS[name].label, SIGNS[name].meaning) for name in DRAWN_SIGNS),
    *(("scores", key, title, "top-1 accuracy in %") for key, title in ONLINE.items()),
)


def _has_target(group: RunGroup) -> bool:
    """Whether there is a target encoder; its momentum is recorded for every objective."""
    return any(line.get(SIGNS["ema_distance"].key) for run in group.runs for line in run.metrics)


def charts(groups: Sequence[RunGroup], models: Sequence["ModelData"]) -> list[Plain]:
    """Return the charts of the report: every measurement over steps, averaged over seeds, and the spectra of the noise."""
    most = min(MOST_CURVE_POINTS, max(LEAST_CURVE_POINTS, CURVE_POINTS // len(groups)))
    found = []
    for section, key, title, meaning in MEASUREMENTS:
        series = [
            {"run": number, **points}
            for number, group in enumerate(groups)
            if (key != "ema_momentum" or _has_target(group))
            and (points := curve([run.metrics for run in group.runs], key, most)) is not None
        ]
        values = [value for line in series for value in line["y"]]
        # What never changes, such as the noise of fixed positions, needs no chart.
        if len(values) <= len(series) or len({*values}) > 1:
            found.append(_chart(section, title, meaning, "step", series))
    spectra = [(number, model.spectrum) for number, model in enumerate(models) if model.spectrum is not None]
    eigenvalues = [{"run": number, **one["eigenvalues"]} for number, one in spectra]
    waves = [{"run": number, **one["waves"]} for number, one in spectra if "waves" in one]
    found += [
        _chart("noise", "Spectrum of Σ", "variance along each eigenvector", "eigenvector", eigenvalues, ["y"]),
        _chart(
            "noise", "Noise by frequency of ψ", "mean variance of sine and cosine", "radians / patch", waves, ["x", "y"]
        ),
    ]
    return [chart for chart in found if chart["series"]]


def _chart(section: str, title: str, meaning: str, x: str, series: list[Plain], log: Sequence[str] = ()) -> Plain:
    return {"section": section, "title": title, "meaning": meaning, "x": x, "series": series, "log": list(log)}


def curve(runs: Sequence[Sequence[dict[str, float]]], key: str, most_points: int) -> Plain | None:
    """Return steps and values of a measurement, the mean over runs at the steps that all have, with lowest and highest.

    Values that are not finite are left out; of too many points, those are kept that show every peak.
    """
    found = [
        {
            line["step"]: line[key]
            for line in metrics
            if isinstance(line.get(key), int | float) and math.isfinite(line[key])
        }
        for metrics in runs
    ]
    found = [points for points in found if points]
    if not found:
        return None
    steps = sorted(set.intersection(*map(set, found))) or sorted(found[0])
    values = {step: [points[step] for points in found if step in points] for step in steps}
    shown = thinned([(step, math.fsum(own) / len(own)) for step, own in values.items()], most_points)
    plain: Plain = {"x": [int(step) for step, _ in shown], "y": [rounded(value) for _, value in shown]}
    if len(found) > 1:
        plain["low"] = [rounded(min(values[step])) for step, _ in shown]
        plain["high"] = [rounded(max(values[step])) for step, _ in shown]
    return plain


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most `most` points: the first, the last, and the lowest and highest of equal stretches."""
    if len(points) <= most:
        return list(points)
    kept = {0, len(points) - 1}
    for stretch in np.array_split(np.arange(len(points)), max(1, most // 2 - 1)):
        values = [points[number][1] for number in stretch]
        kept |= {int(stretch[np.argmin(values)]), int(stretch[np.argmax(values)])}
    return [points[number] for number in sorted(kept)]


def rounded(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class Pictures:
    """The images on which predictions and features are shown, or why there are none."""

    pixels: tuple[UInt8[Tensor, "3 height width"], ...] = ()
    origin: str = ""
    missing: str = ""


@dataclass(frozen=True)
class ModelData:
    """What the report shows of a run's model; notes say what is missing, by section."""

    spectrum: Plain | None = None
    positions: Plain | None = None
    predictions: Plain | None = None
    features: list[str] | None = None
    notes: dict[str, str] = field(default_factory=dict)


def model_data(run: RunRecords, pictures: Pictures, n_runs: int) -> ModelData:
    """Return all that can be shown of a run's model."""
    positions, notes = run.objective.positions, {}
    spectrum = _spectrum(positions)
    if spectrum is None:
        notes["noise"] = "The positions have no covariance of noise."
    if not positions.noise_power() > 0:
        notes["positions"] = "The positions have no noise: there are no maps with noise."
    maps = position_maps(positions, POSITION_BYTES // n_runs)
    if not pictures.pixels:
        return ModelData(spectrum, maps, notes=notes | dict.fromkeys(("predictions", "features"), pictures.missing))
    images = torch.stack([fitted(image, run.objective.encoder.image_size) for image in pictures.pixels])
    colours = pca_maps(patch_features(run.objective.frozen, images), run.grid)
    predictions = _predictions(run, images, PREDICTION_BYTES // n_runs)
    if predictions is None:
        notes["predictions"] = "The objective predicts pixels, not features: there are no prediction maps."
    return ModelData(spectrum, maps, predictions, [packed(one, 0.0, 1.0) for one in colours], notes)


def _spectrum(positions: Positions) -> Plain | None:
    if not positions.noise_power() > 0:
        return None
    found = noise_spectrum(positions)
    # Where Σ is singular, the other directions hold rounding errors only.
    eigenvalues = found.eigenvalues[found.eigenvalues > NEGLIGIBLE_VARIANCE * found.eigenvalues[0]]
    y = [rounded(value) for value in eigenvalues.tolist()]
    plain: Plain = {
        "eigenvalues": {"x": list(range(1, len(y) + 1)), "y": y},
        "effective_rank": f"{found.effective_rank:.1f} of {positions.dim}",
        "trace": f"{found.trace:.3g}",
    }
    if found.by_frequency is not None and found.frequencies is not None:
        x, y = found.frequencies.flip(0).tolist(), found.by_frequency.mean(0).flip(0).tolist()
        plain["waves"] = {"x": [rounded(value) for value in x], "y": [rounded(value) for value in y]}
    return plain


def position_maps(positions: Positions, budget: int) -> Plain:
    """Return cosines of query patches' positions to all fixed ones, with as many queries as `budget` bytes allow."""
    noisy = positions.noise_power().item() > 0
    kinds = ("fixed", "sample", "mean") if noisy else ("fixed",)
    queries = spread_out(positions.grid, max(1, budget // (len(positions.table()) * len(kinds))))
    generator = seeded_generator("cpu", 0, "report positions")
    found = [similarity_maps(positions, query, generator, DRAWS if noisy else 1) for query in queries]
    maps = {kind: torch.stack([getattr(one, kind) for one in found]) for kind in kinds}
    low = min(values.min().item() for values in maps.values())
    packs = {kind: packed(values, low, 1.0) for kind, values in maps.items()}
    return {"queries": queries, "low": rounded(low), "draws": DRAWS, **packs}


def spread_out(grid: tuple[int, int], most: int) -> list[int]:
    """Return all patches of a grid or, if there are more than `most`, of every second or third row and column."""
    rows, columns = grid
    step = 1
    while math.ceil(rows / step) * math.ceil(columns / step) > most and step < max(grid):
        step += 1
    return [row * columns + column for row in range(0, rows, step) for column in range(0, columns, step)]


def _predictions(run: RunRecords, images: UInt8[Tensor, "n 3 height width"], budget: int) -> Plain | None:
    """Return every image's masks and the prediction maps of its masked patches."""
    if not isinstance(run.objective, TargetObjective):
        return None
    masks = sample_masks(run, len(images))
    maps = prediction_maps(run.objective, images, masks)
    most = max(1, budget // (len(images) * maps.shape[-1]))
    shown = [_image_maps(masks.targets[number].flatten(), maps[number], most) for number in range(len(images))]
    return {"context": masks.context.tolist(), "images": shown}


def _image_maps(masked: Int[Tensor, " n"], maps: Float[Tensor, "n n_patches"], most: int) -> Plain:
    # Target blocks overlap: of a patch in several blocks, the first block's prediction is shown.
    first = {patch: number for number, patch in reversed(list(enumerate(masked.tolist())))}
    patches = sorted(first)
    queries = [patches[number * len(patches) // most] for number in range(most)] if len(patches) > most else patches
    rows = maps[[first[patch] for patch in queries]]
    # Each map from its lowest to its highest value.
    levels = packed(rows, rows.amin(1, keepdim=True), rows.amax(1, keepdim=True))
    return {"masked": patches, "queries": queries, "maps": levels}


def packed(values: Float[Tensor, "*shape"], low: float | Tensor, high: float | Tensor) -> str:
    """Return numbers as bytes in base64: 0 is low, 255 is high."""
    span = torch.as_tensor(high - low, dtype=values.dtype).clamp(min=1e-12)
    levels = ((values - low) / span * 255).round().clamp(0, 255).to(torch.uint8)
    return base64.b64encode(levels.contiguous().numpy().tobytes()).decode()


def choose_pictures(runs: Sequence[RunRecords], given: Sequence[Path] | None) -> Pictures:
    """Return the given images, or else images of the first run's data that can be opened."""
    if given:
        return _read_pictures(given, runs[0])
    failures = []
    for run in runs:
        try:
            return Pictures(tuple(sample_images(run, MAX_IMAGES)), f"images of {run.config.data}")
        except (InputError, OSError) as error:
            failures.append(f"The data '{run.config.data}' cannot be opened ({str(error).rstrip('.')}): give --images.")
    return Pictures(missing=failures[0])


def _read_pictures(paths: Sequence[Path], run: RunRecords) -> Pictures:
    if len(paths) > MAX_IMAGES:
        raise InputError(f"{len(paths)} images are given: give at most {MAX_IMAGES}.")
    size, patch = run.config.encoder.image_size, run.config.encoder.patch_size
    pixels = []
    for path in paths:
        try:
            image = decode_image(path.read_bytes(), str(path))
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
    """Return the image as a data URL."""
    picture = PIL.Image.fromarray(image.permute(1, 2, 0).numpy())
    picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    stream = io.BytesIO()
    picture.save(stream, "webp", quality=88)
    return f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode()}"
