"""`export_encoder`: an encoder as a new folder in an export format, with a model card; optionally pushed to the hub."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, ModelCardData, get_token

from stop_mim import __version__
from stop_mim.errors import InputError
from stop_mim.exchange import EXPORTERS
from stop_mim.exchange.formats import Exported, Place
from stop_mim.exchange.loading import load_encoder, locate
from stop_mim.exchange.releases import PUBLISHED, RELEASE
from stop_mim.files import SECONDS_A_DAY, remove_temporaries, user_path, write_atomically
from stop_mim.models.encoder import Encoder
from stop_mim.models.fingerprint import encoder_fingerprint
from stop_mim.results import RESULTS_FILE, Evaluation, read_results
from stop_mim.tables import Table
from stop_mim.training.config import TrainConfig
from stop_mim.training.run_folder import RunFolder
from stop_mim.training.schedules import EMA_START

CARD_FILE = "README.md"
TAGS = ["self-supervised learning", "masked image modelling", "I-JEPA", "StoP", "stop-mim"]
RESULTS = ("evaluation", "data", "score", "measured")
# Characters with a meaning in Markdown; a table escapes its bars itself.
SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!~&$])")


@dataclass(frozen=True)
class Origin:
    """Where an encoder comes from; if it was not trained here, only its name is known."""

    name: str
    config: TrainConfig | None = None
    recipe: str = "custom"
    scores: Sequence[tuple[str, str, str, str]] = ()
    """Name, data, value and date of each score."""


def export_encoder(name: str, to: str, out: Path, push: str | None = None, licence: str | None = None) -> Path:
    """Write an encoder as a new folder; return the folder.

    Args:
        name: any name that `load_encoder` takes.
        to: name of the export format: timm, hf, onnx, export, or a plugin's.
        push: repository of the Hugging Face hub (OWNER/NAME) to upload the folder to.
        licence: licence of the weights, for the model card.
    """
    write_files = EXPORTERS.find(to)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty folder: choose another --out.")
    # Before anything is written.
    token = None if push is None else _hub_token(push)
    encoder = load_encoder(name)
    if not isinstance(encoder, Encoder):
        raise InputError(f"{name} is not a plain Vision Transformer: only those can be exported.")
    origin, place = _origin_of(name, encoder), Place(push or str(out), push is not None)
    # The licence of the authors of a release stays.
    licence = licence or ("cc-by-nc-4.0" if name.startswith(RELEASE) else None)

    def write(folder: Path) -> None:
        folder.mkdir()
        exported = write_files(encoder, folder, place)
        (folder / CARD_FILE).write_text(model_card(encoder, origin, exported, licence))

    remove_temporaries(out.parent, [out.name], older_than_s=SECONDS_A_DAY)
    write_atomically(out, write)
    if push is not None:
        _push(out, push, token)
    return out


def _origin_of(name: str, encoder: Encoder) -> Origin:
    """Return what the run of an encoder has recorded about it: its training, and the scores of exactly these weights."""
    _, _, kind, folder = locate(name)
    if folder is None:
        is_file = kind != "nothing" and not name.startswith((RELEASE, PUBLISHED))
        return Origin(Path(os.path.abspath(user_path(name))).name if is_file else name)
    run, results = RunFolder(folder), read_results(folder / RESULTS_FILE)
    fingerprints = _fingerprints(encoder) if results else set()
    # Without the encoder's name: a path may be written in several ways; the newest evaluation comes last.
    own = {one.identity()[1:]: one for one in results if one.facts.get("encoder_fingerprint") in fingerprints}
    scores = [
        (one.name_of(score), _seen(one, encoder), f"{score.value:.1f}{score.unit}", str(one.facts.get("date", ""))[:10])
        for one in own.values()
        for score in one.scores
        if score.headline
    ]
    return Origin(folder.name, run.config(), run.recipe(), scores)


def _seen(one: Evaluation, encoder: Encoder) -> str:
    """Return the data of an evaluation, with its test data, image size and token if these are not the usual ones."""
    found, size = [_short(one.data)], one.facts.get("image_size")
    if one.test_data != one.data:
        found.append(f"tested on {_short(one.test_data)}")
    if size and tuple(size) != encoder.image_size:
        found.append(f"{size[0]}x{size[1]} pixels")
    if one.facts.get("pool") == "cls":
        found.append("class token")
    return ", ".join(found)


def _fingerprints(encoder: Encoder) -> set[str]:
    """Return the fingerprints under which an encoder's scores are stored: one for each way to pool its tokens."""
    usual, found = encoder.pool, set()
    for pool in encoder.pools:
        encoder.pool = pool
        found.add(encoder_fingerprint(encoder))
    encoder.pool = usual
    return found


def _hub_token(repository: str) -> str:
    """Return the token for an upload to this repository; raise InputError if the upload could not work."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository, re.ASCII):
        raise InputError(f"push is '{repository}': give OWNER/NAME, such as somebody/stop-vitb16.")
    token = get_token()
    if not token:
        raise InputError("There is no token for the Hugging Face hub: run 'hf auth login' or set HF_TOKEN.")
    return token


def _push(folder: Path, repository: str, token: str | None) -> None:
    """Upload a folder; a repository that does not exist is created as a private one."""
    api = HfApi(token=token)
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repository, commit_message="Upload an encoder of stop-mim")
    # The hub and the network raise many different errors.
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise InputError(
            f"{repository} could not be pushed ({reason}): check the token and the network, then upload {folder}, which is "
            "complete."
        ) from error


def model_card(encoder: Encoder, origin: Origin, exported: Exported, licence: str | None = None) -> str:
    """Return the card as Markdown with the hub's header."""
    rows, columns = encoder.grid
    size = f"{sum(parameter.numel() for parameter in encoder.parameters()) / 1e6:.1f} M parameters"
    summary = (
        f"A Vision Transformer: width {encoder.dim}, {encoder.depth} layers, {encoder.heads} heads, {size}. It turns images "
        f"of {encoder.image_size[0]}x{encoder.image_size[1]} pixels into one feature vector for each of {rows}x{columns} "
        f"patches. Exported by stop-mim {__version__}."
    )
    weights = (
        "No licence was given for the weights: ask their author" if licence is None else f"Weights: {_escape(licence)}"
    )
    header = ModelCardData(
        library_name=exported.library, pipeline_tag="image-feature-extraction", tags=TAGS, license=licence
    )
    code = "\n".join(exported.code)
    sections = [
        f"---\n{header.to_yaml()}\n---",
        f"# {_escape(_short(origin.name))}",
        summary,
        f"## How to load it\n\n```python\n{code}\n```",
        _training(origin),
        _table("## Results", RESULTS, origin.scores) if origin.scores else "## Results\n\nNot evaluated yet.",
        f"## Licence\n\n{weights}. stop-mim itself: Apache-2.0.",
    ]
    return "\n\n".join(sections) + "\n"


def _escape(text: str) -> str:
    """Return text that Markdown shows unchanged, on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _short(name: str) -> str:
    """Return a name with the last part of its absolute path alone: a card does not show the author's folders."""
    # A folder's name may have a colon too; the path of a URL has two slashes.
    path = re.sub(r"^\w+:", "", name)
    own = user_path(path).is_absolute() and not path.startswith("//")
    return name.removesuffix(path) + path.rstrip("/").rpartition("/")[2] if own else name


def _training(origin: Origin) -> str:
    config = origin.config
    if config is None:
        return f"## Training\n\nNot trained by stop-mim: the weights are those of {_escape(_short(origin.name))}."
    optim, positions, predictor = config.optim, config.positions, config.predictor
    noise = f", sigma {positions.sigma:g}, covariance {positions.covariance}" if positions.kind == "stochastic" else ""
    start = f"{EMA_START}, less in a short run," if optim.ema_start is None else optim.ema_start
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
        "momentum of the target": f"{start} to {optim.ema_final:g}",
        "seed": str(config.seed),
    }
    return _table("## Training", ("", ""), list(facts.items()))


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    escaped = [[_escape(cell) for cell in row] for row in rows]
    return Table(caption, head, escaped, names=len(head)).markdown().rstrip()
