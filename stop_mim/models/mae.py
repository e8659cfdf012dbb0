"""MAE, a masked autoencoder: predict the pixels of masked patches from the few that the encoder sees."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from stop_mim.errors import InputError
from stop_mim.masking import Masks
from stop_mim.models.build import build_encoder, build_predictor
from stop_mim.models.config import ModelConfig
from stop_mim.models.encoder import Encoder, Images, cut_patches, gather_patches
from stop_mim.models.objective import OBJECTIVES, Objective
from stop_mim.models.predictor import Noise, Predictor

VARIANCE_EPS = 1e-6

Pixels = Float[Tensor, "batch n_blocks n_target pixels"]


def normalise_patches(patches: Float[Tensor, "batch n pixels"]) -> Float[Tensor, "batch n pixels"]:
    """Normalise each patch by the mean and the unbiased variance of its values, all channels together."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + VARIANCE_EPS).sqrt()


class MAE(Objective):
    """The objective of MAE: the encoder sees the context only, and is evaluated itself.

    Args:
        encoder: may have a class token, which becomes a context token without a position.
        decoder: predicts the pixels of a patch in the order channel, row, column; StoP is in its positions.
        norm_pixels: normalise the target pixels patch by patch.
    """

    def __init__(self, encoder: Encoder, decoder: Predictor, norm_pixels: bool = True) -> None:
        super().__init__()
        if decoder.head.out_features != (pixels := 3 * math.prod(encoder.patch_size)):
            raise InputError(
                f"The decoder has {decoder.head.out_features} outputs and a patch {pixels} values: create it with "
                f"outputs={pixels}."
            )
        self.encoder, self.decoder, self.norm_pixels = encoder, decoder, norm_pixels
        self.train()

    @property
    def frozen(self) -> Encoder:
        return self.encoder

    @property
    def masked_tokens(self) -> Predictor:
        return self.decoder

    def forward(self, images: Images, masks: Masks, noise: Noise | None = None) -> Float[Tensor, ""]:
        """Return the loss of a batch: the mean squared error over all pixels of the masked patches."""
        self.require_fit(images, masks)
        predicted, target = self.predict(images, masks, noise), self.target_pixels(images, masks)
        return F.mse_loss(predicted.float(), target.float())

    def predict(self, images: Images, masks: Masks, noise: Noise | None = None) -> Pixels:
        """Return the pixels of the masked patches as predicted from the context."""
        context = self.encoder.transform_tokens(self.encoder.embed_patches(images, masks.context))
        return self.decoder(context, masks.context, masks.targets, noise)

    @torch.no_grad()
    def target_pixels(self, images: Images, masks: Masks) -> Pixels:
        """Return the true pixels of the masked patches."""
        patches = gather_patches(cut_patches(images.float(), self.encoder.patch_size), masks.targets.flatten(1))
        patches = normalise_patches(patches) if self.norm_pixels else patches
        return patches.unflatten(1, masks.targets.shape[1:])


@OBJECTIVES.register("mae")
def build_mae(config: ModelConfig) -> MAE:
    """Build MAE with new weights; the predictor group describes its decoder."""
    encoder = build_encoder(config.encoder)
    decoder = build_predictor(config, encoder, outputs=3 * math.prod(encoder.patch_size))
    return MAE(encoder, decoder, config.objective.norm_pixels)
