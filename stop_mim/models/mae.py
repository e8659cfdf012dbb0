"""MAE, a masked autoencoder: give back the pixels of masked patches from the few that the encoder sees."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stop_mim.masking import Masks
from stop_mim.models.encoder import Encoder, cut_patches, gather_patches
from stop_mim.models.objective import Objective
from stop_mim.models.predictor import Predictor
from stop_mim.positions import PROJECTION_INIT_STD, Positions

VARIANCE_EPS = 1e-6

Pixels = Float[Tensor, "batch n_blocks n_target pixels"]


def pixel_loss(predicted: Pixels, target: Pixels) -> Float[Tensor, ""]:
    """Mean squared error, averaged over all pixels of the masked patches."""
    return F.mse_loss(predicted.float(), target.float())


def normalise_patches(patches: Float[Tensor, "batch n pixels"]) -> Float[Tensor, "batch n pixels"]:
    """Every patch by the mean and the (unbiased) variance of its own values, all channels together."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - mean) / (variance + VARIANCE_EPS).sqrt()


class Decoder(Predictor):
    """The predictor, with pixels as its output: A projects from encoder to decoder, and StoP is in its positions.

    Pixels have the order of a convolution's weight: channel, row, column. A class token, where the encoder has one, is a
    context token without a position.
    """

    def __init__(
        self, projection: nn.Linear, positions: Positions, pixels: int, depth: int = 8, heads: int = 16
    ) -> None:
        super().__init__(projection, positions, depth, heads)
        self.head = nn.Linear(projection.out_features, pixels)
        nn.init.trunc_normal_(self.head.weight, std=PROJECTION_INIT_STD)
        nn.init.zeros_(self.head.bias)

    def forward(
        self,
        context: Float[Tensor, "batch n_tokens encoder_dim"],
        context_indices: Int[Tensor, "batch n_context"],
        target_indices: Int[Tensor, "batch n_blocks n_target"],
        generator: torch.Generator | None = None,
    ) -> Pixels:
        """Predicted pixels of every target block, each on its own: MAE's masks have one."""
        n_blocks = target_indices.shape[1]
        n_prefix = context.shape[1] - context_indices.shape[1]
        patches = context[:, n_prefix:]
        context_positions = self.positions(context_indices, tokens="context", context=patches, generator=generator)
        context_tokens = self.projection(context) + F.pad(context_positions, (0, 0, n_prefix, 0))
        masked_tokens = self.positions(
            target_indices.flatten(0, 1), tokens="masked", context=patches, generator=generator
        )
        if self.positions.adds_mask_token:
            masked_tokens = masked_tokens + self.mask_token
        masked_tokens = masked_tokens.to(context_tokens).unflatten(0, (-1, n_blocks))
        return self.head(self.norm(self._transform(context_tokens, masked_tokens)))


class MAE(Objective):
    """The objective: (images, masks) to a loss. The encoder sees the context alone, and is itself what is wanted.

    `norm_pixels`: whether the pixels to be predicted are normalised patch by patch.
    """

    def __init__(self, encoder: Encoder, decoder: Decoder, norm_pixels: bool = True) -> None:
        super().__init__()
        self.encoder, self.decoder, self.norm_pixels = encoder, decoder, norm_pixels
        self.train()

    @property
    def frozen(self) -> Encoder:
        """The encoder."""
        return self.encoder

    @property
    def masked_tokens(self) -> Decoder:
        """The decoder."""
        return self.decoder

    def forward(
        self, images: Float[Tensor, "batch 3 height width"], masks: Masks, generator: torch.Generator | None = None
    ) -> Float[Tensor, ""]:
        """The loss of a batch; the generator draws the noise of stochastic positions."""
        return pixel_loss(self.predict(images, masks, generator), self.target_pixels(images, masks))

    def predict(
        self, images: Float[Tensor, "batch 3 height width"], masks: Masks, generator: torch.Generator | None = None
    ) -> Pixels:
        """Pixels of the masked patches as predicted from the context."""
        vit = self.encoder.vit
        # Not by calling the encoder, which keeps a class token to itself.
        context = vit.norm(vit.blocks(self.encoder._embed_patches(images, masks.context)))
        return self.decoder(context, masks.context, masks.targets, generator)

    @torch.no_grad()
    def target_pixels(self, images: Float[Tensor, "batch 3 height width"], masks: Masks) -> Pixels:
        """The pixels of the masked patches as they are."""
        patches = gather_patches(cut_patches(images.float(), self.encoder.patch_size), masks.targets.flatten(1))
        patches = normalise_patches(patches) if self.norm_pixels else patches
        return patches.unflatten(1, masks.targets.shape[1:])

    def layers(self) -> list[nn.Module]:
        """Those of encoder and decoder."""
        return [*self.encoder.vit.blocks, *self.decoder.blocks]
