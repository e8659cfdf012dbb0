"""What can be evaluated, by name: whatever `load_encoder` takes, and the same without training."""

from dataclasses import dataclass
from pathlib import Path

import torch

from stop_mim.exchange.loading import HUB, TIMM, is_checkpoint, load_encoder, split_part
from stop_mim.models.encoder import FrozenEncoder
from stop_mim.seeds import derive_seed
from stop_mim.training.build import build_encoder
from stop_mim.training.run_folder import RunFolder

UNTRAINED = "untrained:"
OTHERS = (TIMM, HUB)


@dataclass(frozen=True)
class NamedEncoder:
    """An encoder, what it was asked for by, and the folder of the run that it comes from."""

    name: str
    encoder: FrozenEncoder
    run: Path | None


def open_encoder(name: str) -> NamedEncoder:
    """The encoder of this name; a run that goes on meanwhile is read at its newest checkpoint."""
    if name.startswith(UNTRAINED):
        return NamedEncoder(name, _untrained(name.removeprefix(UNTRAINED)), None)
    encoder = load_encoder(name)
    return NamedEncoder(name, encoder, None if name.startswith(OTHERS) else _run_of(split_part(name)[0]))


def _run_of(path: Path) -> Path | None:
    """The run that an encoder is part of, which keeps its results."""
    folder = path if path.is_dir() else path.parent.parent if is_checkpoint(path) else path.parent
    return folder if RunFolder(folder).environment_file.exists() else None


def _untrained(name: str) -> FrozenEncoder:
    if name.startswith(OTHERS):
        torch.manual_seed(0)
        return load_encoder(name, pretrained=False)
    config = RunFolder(Path(name).expanduser()).config()
    torch.manual_seed(derive_seed(config.seed, "weights"))
    return build_encoder(config.encoder).eval()
