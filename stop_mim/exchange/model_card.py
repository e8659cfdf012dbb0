"""The model card that goes with an exported encoder, written from what the run has recorded."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stop_mim
from stop_mim.errors import InputError
from stop_mim.models.encoder import Encoder
from stop_mim.training.config import TrainConfig

LIBRARIES = {"timm": "timm", "hf": "transformers", "onnx": "onnx", "export": "pytorch"}
TAGS = ["self-supervised learning", "masked image modelling", "I-JEPA", "StoP", "stop-mim"]
SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$])")


@dataclass(frozen=True)
class Score:
    """One number of an evaluation."""

    data: str
    metric: str
    value: float
    date: str


@dataclass(frozen=True)
class Origin:
    """Where an encoder comes from; of one that was not trained here nothing but its name is known."""

    name: str
    config: TrainConfig | None = None
    recipe: str = "custom"
    scores: Sequence[Score] = ()


def model_card(
    encoder: Encoder, origin: Origin, form: str, place: str, pushed: bool = False, licence: str | None = None
) -> str:
    """The card, as Markdown with the hub's header; `place` is the folder, or the hub's repository if it is pushed."""
    rows, columns = encoder.grid
    size = f"{sum(parameter.numel() for parameter in encoder.parameters()) / 1e6:.1f} M parameters"
    summary = (
        f"A Vision Transformer: width {encoder.dim}, {encoder.depth} layers, {encoder.heads} heads, {size}; images of "
        f"{encoder.image_size[0]}x{encoder.image_size[1]} pixels in {rows}x{columns} patches. It turns images into one feature "
        f"vector a patch. Exported by stop-mim {stop_mim.__version__}."
    )
    code = "\n".join(loading_code(encoder, form, place, pushed))
    sections = [
        _header(form, licence),
        f"# {escape(shown(origin.name))}",
        summary,
        f"## How to load it\n\n```python\n{code}\n```",
        f"## Training\n\n{_training(origin)}",
        f"## Results\n\n{_results(origin.scores)}",
        f"## Licence\n\n{_licence(licence)}",
    ]
    return "\n\n".join(sections) + "\n"


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def shown(name: str) -> str:
    """A name without the folders that lead to it: where things lie on the author's machine is nobody's business."""
    return name.rstrip("/").rpartition("/")[2] if Path(name).expanduser().is_absolute() else name


def read_scores(results: Path, encoders: Collection[str]) -> list[Score]:
    """The main numbers that a run's results have for encoders whose names end so; none if nothing was evaluated."""
    if not results.exists():
        return []
    try:
        return [
            Score(str(one["data"]), name, float(value), str(one["facts"].get("date", ""))[:10])
            for one in json.loads(results.read_text())["evaluations"]
            for name, value in one["metrics"].items()
            if Path(one["encoder"]).name in encoders and _is_main(name)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{results} does not hold results of stop-mim: move it away, so that nothing is lost."
        ) from error


def loading_code(encoder: Encoder, form: str, place: str, pushed: bool = False) -> list[str]:
    """The lines, five at most, that make tokens of images."""
    height, width = encoder.image_size
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (encoder.mean, encoder.std))
    images = f"images = torch.randn(1, 3, {height}, {width})  # yours, normalised by mean ({mean}) and std ({std})"

    def file(name: str) -> str:
        return f"huggingface_hub.hf_hub_download({place!r}, {name!r})" if pushed else repr(f"{place}/{name}")

    hub = ", huggingface_hub" if pushed else ""
    if form == "timm":
        model = (
            f"model = timm.create_model({('hf-hub:' if pushed else 'local-dir:') + place!r}, pretrained=True).eval()"
        )
        prefix = encoder.vit.num_prefix_tokens
        tokens = f"tokens = model.forward_features(images){f'[:, {prefix}:]' if prefix else ''}"
        return ["import timm, torch", model, images, tokens]
    if form == "hf":
        model = f"model = IJepaModel.from_pretrained({place!r}).eval()"
        first = ["import torch", "from transformers import IJepaModel"]
        return [*first, model, images, "tokens = model(images).last_hidden_state"]
    if form == "onnx":
        session = f"session = onnxruntime.InferenceSession({file('model.onnx')})"
        last = "tokens = session.run(['tokens'], {'images': images.numpy()})[0]"
        return [f"import onnxruntime, torch{hub}", session, images, last]
    model = f"model = torch.export.load({file('model.pt2')}).module()"
    return [f"import torch{hub}", model, images, "tokens = model(images)"]


def _header(form: str, licence: str | None) -> str:
    fields: dict[str, Any] = {"library_name": LIBRARIES[form], "pipeline_tag": "image-feature-extraction", "tags": TAGS}
    fields |= {} if licence is None else {"license": licence}
    # Every value of JSON is one of YAML too, so that no text can break out of the header.
    return "\n".join(["---", *(f"{name}: {json.dumps(value)}" for name, value in fields.items()), "---"])


def _training(origin: Origin) -> str:
    config = origin.config
    if config is None:
        return f"It was not trained by stop-mim: the weights are those of {escape(shown(origin.name))}."
    optim, positions, predictor = config.optim, config.positions, config.predictor
    noise = f", sigma {positions.sigma:g}, covariance {positions.covariance}" if positions.kind == "stochastic" else ""
    facts = {
        "data": shown(config.data),
        "recipe": origin.recipe,
        "objective": config.objective.kind,
        "positions": f"{positions.kind}{noise}, convention {positions.convention}",
        "masks": config.masks.kind,
        "predictor": f"width {predictor.width}, {predictor.depth} layers",
        "epochs": str(optim.epochs),
        "images an update": str(optim.batch_size),
        "learning rate": f"{optim.start_lr:g} to {optim.lr:g} to {optim.final_lr:g}",
        "weight decay": f"{optim.weight_decay:g} to {optim.final_weight_decay:g}",
        "momentum of the target": f"{optim.ema_start:g} to {optim.ema_final:g}",
        "seed": str(config.seed),
    }
    return _table(("", ""), list(facts.items()))


def _results(scores: Sequence[Score]) -> str:
    if not scores:
        return "Nothing has been measured yet."
    rows = [(score.metric, shown(score.data), f"{score.value:.1f}", score.date) for score in scores]
    return _table(("frozen features, %", "data", "score", "measured"), rows)


def _licence(licence: str | None) -> str:
    weights = (
        "no licence was given for the weights: ask their author" if licence is None else f"weights: {escape(licence)}"
    )
    return f"{weights[0].upper()}{weights[1:]}. stop-mim itself: Apache-2.0."


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *([escape(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _is_main(name: str) -> bool:
    """Whether it is what a task is judged by, and not one of its heads, draws or spreads."""
    *first, last = name.split("/")
    few_labels = len(first) == 2 and first[0].endswith("low-shot")
    return name == "video/J&F" or (last == "top1" and (len(first) == 1 or few_labels)) or name.startswith("knn/top1@")
