"""An encoder for others: written as a whole folder with its model card, and pushed to the hub if wanted."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from stop_mim.errors import InputError
from stop_mim.exchange.folder import require_free, write_folder
from stop_mim.exchange.hub_folder import write_hub_folder
from stop_mim.exchange.loading import is_checkpoint, load_encoder, split_part
from stop_mim.exchange.model_card import Origin, model_card, read_scores
from stop_mim.exchange.programs import require_onnx, write_onnx_folder, write_program_folder
from stop_mim.exchange.publishing import push_folder, require_push
from stop_mim.exchange.timm_folder import write_timm_folder
from stop_mim.models.encoder import ENCODER_FILE, Encoder
from stop_mim.training.run_folder import RunFolder

Form = Literal["timm", "hf", "onnx", "export"]
WRITERS: dict[str, Callable[[Encoder, Path], None]] = {
    "timm": write_timm_folder,
    "hf": write_hub_folder,
    "onnx": write_onnx_folder,
    "export": write_program_folder,
}
CARD_FILE, RESULTS_FILE = "README.md", "results.json"


def export_encoder(name: str, to: Form, out: Path, push: str | None = None, licence: str | None = None) -> Path:
    """Write the encoder of this name as a new folder in that form; what cannot work is known before anything is written."""
    if to not in WRITERS:
        raise InputError(f"to is '{to}': choose {', '.join(get_args(Form))}.")
    require_free(out)
    if to == "onnx":
        require_onnx()
    if push is not None:
        require_push(push)
    encoder = load_encoder(name)
    if not isinstance(encoder, Encoder):
        raise InputError(f"{name} is no plain Vision Transformer: only such encoders can be exported.")
    card = model_card(encoder, origin_of(name), to, push or str(out), push is not None, licence)

    def write(folder: Path) -> None:
        WRITERS[to](encoder, folder)
        (folder / CARD_FILE).write_text(card)

    write_folder(out, write)
    if push is not None:
        push_folder(out, push)
    return out


def origin_of(name: str) -> Origin:
    """What the run that an encoder comes from has recorded of it."""
    path = split_part(name)[0].resolve()
    if path.is_dir() or path.name == ENCODER_FILE:
        folder = path if path.is_dir() else path.parent
        names = {folder.name, ENCODER_FILE}
    else:
        folder, names = path.parent.parent, {path.name}
    run = RunFolder(folder)
    if not (path.exists() and run.config_file.exists() and run.environment_file.exists()):
        return Origin(name)
    if path.is_file() and path.name != ENCODER_FILE and not is_checkpoint(path):
        return Origin(name)
    return Origin(folder.name, run.config(), run.recipe(), read_scores(folder / RESULTS_FILE, names))
