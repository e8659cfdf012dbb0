"""Weights that others released, by name. Importing this module needs no torch."""

import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table

from stop_mim.hub import downloaded_file, endpoint, fetch
from stop_mim.models.config import EncoderConfig
from stop_mim.registry import Registry

RELEASE, META = "release:", "facebook/ijepa_"
USES = "evaluate, export, pretrain --init and load_encoder take these names."
LICENCE = "The authors allow non-commercial use only."
SHORT = {"base": "B", "large": "L", "huge": "H", "giant": "g"}
PUBLISHED = "stop-mim/"
OTHER_NAMES = {
    "runs/x": "a run directory, or one of its checkpoints",
    "model.safetensors, model.pth.tar": "a file of stop-mim, of timm, or of the I-JEPA and StoP releases",
    f"{PUBLISHED}NAME": "an encoder that this project publishes on the Hugging Face hub (none yet)",
    "hf:OWNER/NAME": "a ViT, DeiT, DINO, DINOv2, I-JEPA, MAE, BEiT or data2vec of the Hugging Face hub",
    "timm:NAME": "a Vision Transformer of timm",
    "untrained:NAME": "the same network with random weights",
}
MODEL_FILES = ("config.json", "preprocessor_config*.json", "model.safetensors*", "model-*.safetensors")


@dataclass(frozen=True)
class Release:
    """A model of the Hugging Face hub."""

    repository: str
    encoder: EncoderConfig
    about: str
    file: str | None = None
    """The .pth.tar file with encoder, target encoder and predictor; None: a model of transformers."""


RELEASES: Registry[Release] = Registry("released model")
for _name, _release in {
    "stop-vitb16": Release("amirbar1/StoP", EncoderConfig("base"), "StoP, ImageNet-1k, 600 epochs", "vit-b16.pth.tar"),
    "stop-vitl16": Release("amirbar1/StoP", EncoderConfig("large"), "StoP, ImageNet-1k, 600 epochs", "vit-l16.pth.tar"),
    "stop-vith16": Release("amirbar1/StoP", EncoderConfig("huge"), "StoP, ImageNet-1k, 300 epochs", "vit-h16.pth.tar"),
    "ijepa-vith14-1k": Release(f"{META}vith14_1k", EncoderConfig("huge", patch_size=14), "I-JEPA, ImageNet-1k"),
    "ijepa-vith14-22k": Release(f"{META}vith14_22k", EncoderConfig("huge", patch_size=14), "I-JEPA, ImageNet-22k"),
    "ijepa-vith16-1k": Release(f"{META}vith16_1k", EncoderConfig("huge", (448, 448)), "I-JEPA, ImageNet-1k"),
    "ijepa-vitg16-22k": Release(f"{META}vitg16_22k", EncoderConfig("giant"), "I-JEPA, ImageNet-22k"),
}.items():
    RELEASES.register(_name)(_release)


def fetch_release(name: str) -> Path:
    """Return a released model in the hub's cache: its file, or the folder of a model of transformers.

    A download comes with a notice of the licence on standard error.
    """
    release = RELEASES.find(name)
    known = is_downloaded(release)
    folder = fetch(release.repository, MODEL_FILES if release.file is None else (release.file,))
    if not known:
        where = f"{endpoint()}/{release.repository}"
        print(f"{RELEASE}{name} was downloaded. {LICENCE} Its licence: {where}", file=sys.stderr)
    return folder if release.file is None else folder / release.file


def is_downloaded(release: Release) -> bool:
    """Whether the hub's cache has a released model."""
    return downloaded_file(release.repository, release.file or MODEL_FILES[0]) is not None


def models_table() -> Group:
    """Return a table of the released models, and how other encoders are named."""
    table, others = (Table(box=None, pad_edge=False, show_header=False) for _ in range(2))
    for name, release in RELEASES.items():
        encoder, here = release.encoder, "downloaded" if is_downloaded(release) else ""
        size = f"ViT-{SHORT[encoder.size]}/{encoder.patch_size}, {encoder.image_size[0]} pixels"
        table.add_row(f"{RELEASE}{name}", size, release.about, here)
    for name, about in OTHER_NAMES.items():
        others.add_row(name, about)
    return Group(table, f"{LICENCE} They are downloaded from the Hugging Face hub.", "", others, "", USES)
