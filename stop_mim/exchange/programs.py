"""Encoders as programs of their own, ONNX and torch.export's: each is run again and compared before it is kept."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from stop_mim.errors import InputError, MissingExtra
from stop_mim.models.encoder import Encoder
from stop_mim.seeds import seeded_generator

ONNX_FILE, PROGRAM_FILE = "model.onnx", "model.pt2"
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
ONNX_TOLERANCE, PROGRAM_TOLERANCE = 1e-4, 1e-5
IMAGES, TOKENS = "images", "tokens"
# ONNX is one message of protobuf, which ends at 2 GiB: the weights of larger encoders go into a file beside it.
LARGEST_MESSAGE = 1 << 30

Images = Float[Tensor, "batch 3 height width"]
PatchTokens = Float[Tensor, "batch n_patches dim"]


class TokenProgram(nn.Module):
    """What is exported: normalised images in, normed patch tokens out, by timm's own forward."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.vit = encoder.vit

    def forward(self, images: Tensor) -> Tensor:
        """Normed tokens of all patches."""
        return self.vit.forward_features(images)[:, self.vit.num_prefix_tokens :]


def require_onnx() -> None:
    """Refuse to begin what needs packages that are not there."""
    for package in ONNX_PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra("The export to ONNX", package, "onnx")


def write_onnx_folder(encoder: Encoder, folder: Path) -> None:
    """An ONNX model for batches of any number of images, of the size that the encoder was made for."""
    require_onnx()
    import onnxruntime

    program = torch.onnx.export(
        TokenProgram(encoder).eval(),
        (_images(encoder, 2),),
        dynamo=True,
        input_names=[IMAGES],
        output_names=[TOKENS],
        dynamic_shapes=_any_batch(),
        verbose=False,
    )
    assert program is not None
    size = sum(parameter.numel() * parameter.element_size() for parameter in encoder.parameters())
    program.save(folder / ONNX_FILE, external_data=size > LARGEST_MESSAGE)
    session = onnxruntime.InferenceSession(folder / ONNX_FILE, providers=["CPUExecutionProvider"])

    def run(images: Images) -> PatchTokens:
        return torch.from_numpy(session.run([TOKENS], {IMAGES: images.numpy()})[0])

    _compare(encoder, run, ONNX_TOLERANCE, "onnxruntime")


def write_program_folder(encoder: Encoder, folder: Path) -> None:
    """A program of torch.export for batches of any number of images, of the size that the encoder was made for."""
    program = torch.export.export(TokenProgram(encoder).eval(), (_images(encoder, 2),), dynamic_shapes=_any_batch())
    torch.export.save(program, folder / PROGRAM_FILE)
    _compare(encoder, torch.export.load(folder / PROGRAM_FILE).module(), PROGRAM_TOLERANCE, "torch.export")


def _any_batch() -> dict[str, dict[int, torch.export.Dim]]:
    return {IMAGES: {0: torch.export.Dim("batch", min=1)}}


def _images(encoder: Encoder, count: int) -> Images:
    height, width = encoder.image_size
    return torch.randn(count, 3, height, width, generator=seeded_generator("cpu", 0, "exported images", count))


@torch.no_grad()
def _compare(encoder: Encoder, run: Callable[[Images], PatchTokens], tolerance: float, name: str) -> None:
    for count in (1, 3):
        images = _images(encoder, count)
        difference = (run(images) - encoder(images)).abs().max().item()
        # Written so that a NaN is refused too.
        if not difference <= tolerance:
            raise InputError(
                f"The program that {name} made gives other tokens than the encoder (they differ by {difference:.2g}): it is "
                "not kept; choose another format."
            )
