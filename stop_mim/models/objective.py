"""The interface of objectives: all that trainer, probe and health signs know of I-JEPA, MAE and data2vec."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stop_mim.errors import InputError
from stop_mim.masking import Masks
from stop_mim.models.config import ModelConfig
from stop_mim.models.encoder import Encoder, Images
from stop_mim.models.predictor import MaskedTokens, Noise
from stop_mim.positions import Positions
from stop_mim.registry import Registry


class Objective(nn.Module, ABC):
    """Maps images and masks to a loss."""

    encoder: Encoder
    """The encoder that is trained."""

    @abstractmethod
    def forward(self, images: Images, masks: Masks, noise: Noise | None = None) -> Float[Tensor, ""]:
        """Return the loss of a batch; without `noise`, stochastic positions draw it themselves, in training."""

    @property
    @abstractmethod
    def frozen(self) -> Encoder:
        """The encoder whose features are evaluated: it is saved, probed and checked for collapse."""

    @property
    @abstractmethod
    def masked_tokens(self) -> MaskedTokens:
        """The part that makes masked tokens."""

    @property
    def positions(self) -> Positions:
        return self.masked_tokens.positions

    def require_fit(self, images: Images, masks: Masks) -> None:
        """Raise InputError unless images, masks and positions have the encoder's grid; it never waits for a GPU."""
        if torch.compiler.is_compiling():
            return
        grid, (height, width) = self.encoder.grid, self.encoder.patch_size
        rows, columns = grid
        if self.encoder.grid_of(images) != grid:
            given, wanted = tuple(images.shape[-2:]), (rows * height, columns * width)
            raise InputError(
                f"The images have {given[0]}x{given[1]} pixels and the encoder was made for {wanted[0]}x{wanted[1]}: resize "
                f"the images, or create the encoder with image_size={given}."
            )
        for name, other in (("positions", self.positions.grid), ("masks", masks.grid or grid)):
            if other != grid:
                raise InputError(
                    f"The {name} are for {other[0]}x{other[1]} patches and the encoder has {rows}x{columns}: make them with "
                    "encoder.grid."
                )
        if len(masks) != len(images):
            raise InputError(f"There are {len(images)} images and masks for {len(masks)}: sample masks for all images.")

    def draw_noise(self, masks: Masks, generator: torch.Generator | None = None) -> Noise:
        """Draw the noise of the positions for a batch: the only random numbers of a training step."""
        return Noise(
            self.positions.draw_noise(masks.context, tokens="context", generator=generator),
            self.positions.draw_noise(masks.targets.flatten(0, 1), tokens="masked", generator=generator),
        )

    def update_target(self, momentum: float) -> None:
        """Make the target encoder, if there is one, momentum · target + (1 - momentum) · encoder."""
        self.move_target(1 - momentum)

    def move_target(self, weight: float | Float[Tensor, ""]) -> None:
        """Move the target encoder, if there is one, by this fraction of its distance to the encoder."""


Builder = Callable[[ModelConfig], Objective]
OBJECTIVES: Registry[Builder] = Registry("objective", "stop_mim.models")
"""Functions from a config to an objective with new weights, by `objective.kind`."""


class TargetObjective(Objective):
    """An objective with a target encoder: a moving average of the encoder that gets no gradient.

    Args:
        encoder: the encoder that is trained; the target encoder starts as a copy.
        beta: error above which smooth-L1 is linear.
    """

    def __init__(self, encoder: Encoder, beta: float) -> None:
        super().__init__()
        self.encoder, self.beta = encoder, beta
        self.target = copy.deepcopy(encoder).requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> "TargetObjective":
        """Set the training mode of everything but the target encoder, which stays in evaluation mode."""
        super().train(mode)
        self.target.eval()
        return self

    @property
    def frozen(self) -> Encoder:
        return self.target

    @abstractmethod
    def predict(self, images: Images, masks: Masks, noise: Noise | None = None) -> Tensor:
        """Return the features of the target patches as predicted from the context."""

    @abstractmethod
    def target_features(self, images: Images, masks: Masks) -> Tensor:
        """Return the features of the target patches that the target encoder computes from the whole image."""

    @torch.no_grad()
    def move_target(self, weight: float | Float[Tensor, ""]) -> None:
        """Move the target encoder towards the encoder by this fraction; a tensor on its device causes no sync."""
        pairs = zip(self.target.parameters(), self.encoder.parameters(), strict=True)
        # A target encoder is sharded as its encoder is: nothing has to be gathered.
        moving = [(local_part(theirs), local_part(ours)) for theirs, ours in pairs if ours.requires_grad]
        if isinstance(weight, Tensor) and weight.is_cuda:
            for theirs, ours in moving:
                theirs.lerp_(ours, weight)
        else:
            torch._foreach_lerp_([theirs for theirs, _ in moving], [ours for _, ours in moving], float(weight))


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, in the same memory, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layer_normed(tokens: Float[Tensor, "batch n dim"]) -> Float[Tensor, "batch n dim"]:
    """Return tokens of mean 0 and variance 1."""
    return F.layer_norm(tokens, tokens.shape[-1:])
