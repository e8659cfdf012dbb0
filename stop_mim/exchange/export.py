"""`export_encoder`: an encoder as a new folder in an export format, with a model card; optionally pushed to the hub."""

import re
from pathlib import Path

from stop_mim.errors import InputError, MissingExtra
from stop_mim.exchange.card import Origin, model_card, read_scores
from stop_mim.exchange.formats import EXPORTERS, Place
from stop_mim.exchange.loading import load_encoder, run_of, split_part
from stop_mim.exchange.releases import RELEASE
from stop_mim.files import SECONDS_A_DAY, remove_temporaries, write_folder
from stop_mim.models.encoder import ENCODER_FILE, Encoder
from stop_mim.training.run_folder import RunFolder

CARD_FILE = "README.md"


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
    origin, place = _origin_of(name), Place(push or str(out), push is not None)
    if name.startswith(RELEASE):
        # The authors' licence stays.
        licence = licence or "cc-by-nc-4.0"

    def write(folder: Path) -> None:
        exported = write_files(encoder, folder, place)
        (folder / CARD_FILE).write_text(model_card(encoder, origin, exported, licence))

    remove_temporaries(out.parent, [out.name], older_than_s=SECONDS_A_DAY)
    write_folder(out, write)
    if push is not None:
        _push(out, push, token)
    return out


def _origin_of(name: str) -> Origin:
    """Return what the run of an encoder has recorded about it."""
    folder = run_of(name)
    if folder is None:
        return Origin(name)
    path, part = split_part(name)
    path = path.resolve()
    names = {folder.name, ENCODER_FILE} if path.is_dir() or path.name == ENCODER_FILE else {path.name}
    if part is not None:
        names = {Path(name).name}
    run = RunFolder(folder)
    return Origin(folder.name, run.config(), run.recipe(), read_scores(folder, names))


def _hub_token(repository: str) -> str:
    """Return the token for an upload to this repository; raise InputError if the upload could not work."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository, re.ASCII):
        raise InputError(f"push is '{repository}': give OWNER/NAME, such as somebody/stop-vitb16.")
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtra("--push", "huggingface_hub", "hf") from error
    token = huggingface_hub.get_token()
    if not token:
        raise InputError("There is no token for the Hugging Face hub: run 'hf auth login' or set HF_TOKEN.")
    return token


def _push(folder: Path, repository: str, token: str | None) -> None:
    """Upload a folder; a repository that does not exist is created as a private one."""
    import huggingface_hub

    api = huggingface_hub.HfApi(token=token)
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
