"""The model card of an exported encoder, written from what its run recorded."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stop_mim
from stop_mim.exchange.formats import Exported
from stop_mim.models.encoder import Encoder
from stop_mim.results import RESULTS_FILE, read_results
from stop_mim.training.config import TrainConfig

TAGS = ["self-supervised learning", "masked image modelling", "I-JEPA", "StoP", "stop-mim"]
RESULTS = ("frozen features", "data", "score", "measured")
SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$])")

Row = tuple[str, str, str, str]


@dataclass(frozen=True)
class Origin:
    """Where an encoder comes from; if it was not trained here, only its name is known."""

    name: str
    config: TrainConfig | None = None
    recipe: str = "custom"
    scores: Sequence[Row] = ()
    """Name, data, value and date of each score."""


def read_scores(run: Path, encoders: Collection[str]) -> list[Row]:
    """Return the headline scores in a run's results of encoders whose file or folder has one of these names."""
    return [
        (one.name_of(score), _short(one.data), f"{score.value:.1f}{score.unit}", str(one.facts.get("date", ""))[:10])
        for one in read_results(run / RESULTS_FILE)
        if not one.is_baseline and Path(one.encoder).resolve().name in encoders
        for score in one.scores
        if score.headline
    ]


def model_card(encoder: Encoder, origin: Origin, exported: Exported, licence: str | None = None) -> str:
    """Return the card as Markdown with the hub's header."""
    rows, columns = encoder.grid
    size = f"{sum(parameter.numel() for parameter in encoder.parameters()) / 1e6:.1f} M parameters"
    summary = (
        f"A Vision Transformer: width {encoder.dim}, {encoder.depth} layers, {encoder.heads} heads, {size}. It turns images "
        f"of {encoder.image_size[0]}x{encoder.image_size[1]} pixels into one feature vector for each of {rows}x{columns} "
        f"patches. Exported by stop-mim {stop_mim.__version__}."
    )
    weights = (
        "No licence was given for the weights: ask their author" if licence is None else f"Weights: {_escape(licence)}"
    )
    code = "\n".join(exported.code)
    sections = [
        _header(exported.library, licence),
        f"# {_escape(_short(origin.name))}",
        summary,
        f"## How to load it\n\n```python\n{code}\n```",
        f"## Training\n\n{_training(origin)}",
        f"## Results\n\n{_table(RESULTS, origin.scores) if origin.scores else 'Not evaluated yet.'}",
        f"## Licence\n\n{weights}. stop-mim itself: Apache-2.0.",
    ]
    return "\n\n".join(sections) + "\n"


def _escape(text: str) -> str:
    """Return text that Markdown shows unchanged, on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _short(name: str) -> str:
    """Return the last part of an absolute path: a card does not show the author's folders."""
    return name.rstrip("/").rpartition("/")[2] if Path(name).expanduser().is_absolute() else name


def _header(library: str, licence: str | None) -> str:
    fields: dict[str, Any] = {"library_name": library, "pipeline_tag": "image-feature-extraction", "tags": TAGS}
    fields |= {} if licence is None else {"license": licence}
    # JSON is valid YAML, so that no text can break out of the header.
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in fields.items()), "---"])


def _training(origin: Origin) -> str:
    config = origin.config
    if config is None:
        return f"Not trained by stop-mim: the weights are those of {_escape(_short(origin.name))}."
    optim, positions, predictor = config.optim, config.positions, config.predictor
    noise = f", sigma {positions.sigma:g}, covariance {positions.covariance}" if positions.kind == "stochastic" else ""
    facts = {
        "data": _short(config.data),
        "recipe": origin.recipe,
        "objective": config.objective.kind,
        "positions": f"{positions.kind}{noise}, convention {positions.convention}",
        "masks": config.masks.kind,
        "predictor": f"width {predictor.width}, {predictor.depth} layers",
        "epochs": str(optim.epochs),
        "batch size": str(optim.batch_size),
        "learning rate": f"{optim.start_lr:g} to {optim.lr:g} to {optim.final_lr:g}",
        "weight decay": f"{optim.weight_decay:g} to {optim.final_weight_decay:g}",
        "momentum of the target": f"{'by length' if optim.ema_start is None else optim.ema_start} to {optim.ema_final:g}",
        "seed": str(config.seed),
    }
    return _table(("", ""), list(facts.items()))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([_escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
