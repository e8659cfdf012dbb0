"""data2vec: a student that sees mask tokens predicts what an average of itself over time makes of the whole image."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from stop_mim.errors import InputError
from stop_mim.masking import Masks
from stop_mim.models.encoder import Encoder, cut_patches, gather_patches
from stop_mim.models.objective import TargetObjective, check_target_layers, top_layers_mean
from stop_mim.positions import PROJECTION_INIT_STD, Positions

Features = Float[Tensor, "batch n_masked dim"]


class PatchProjection(nn.Linear):
    """The convolution that embeds patches, as the linear layer from pixels to features that it is; it owns no weights."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        nn.Module.__init__(self)
        # In a tuple, so that the layer is not registered here a second time.
        self._convolution = (convolution,)
        self.in_features, self.out_features = convolution.weight[0].numel(), convolution.out_channels

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The convolution's weight as a matrix."""
        return self._convolution[0].weight.flatten(1)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The convolution's bias."""
        return self._convolution[0].bias


class MaskedInput(nn.Module):
    """Pixels of visible patches and places of masked ones in, the student's first tokens out.

    A visible patch is c = A x + b + ψ with its pixels x, a masked one m = ψ̂ + m̃: the paper's two tokens, with the patch
    embedding as A. So A n is the noise of an image that is nothing but noise, and A cannot vanish to silence it: scaled
    down, it would silence the visible patches too.
    """

    def __init__(self, projection: nn.Linear, positions: Positions) -> None:
        super().__init__()
        self.projection, self.positions = projection, positions
        self.mask_token = nn.Parameter(torch.zeros(positions.dim), requires_grad=positions.adds_mask_token)
        if positions.adds_mask_token:
            nn.init.trunc_normal_(self.mask_token, std=PROJECTION_INIT_STD)

    def forward(
        self,
        visible: Float[Tensor, "batch n_visible pixels"],
        visible_indices: Int[Tensor, "batch n_visible"],
        masked_indices: Int[Tensor, "batch n_masked"],
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "batch n_tokens dim"]:
        """Tokens of the visible patches, then of the masked ones."""
        visible_positions = self.positions(visible_indices, tokens="context", context=visible, generator=generator)
        visible_tokens = self.projection(visible) + visible_positions
        masked_tokens = self.positions(masked_indices, tokens="masked", context=visible, generator=generator)
        if self.positions.adds_mask_token:
            masked_tokens = masked_tokens + self.mask_token
        return torch.cat([visible_tokens, masked_tokens.to(visible_tokens)], dim=1)


class Data2Vec(TargetObjective):
    """The objective: (images, masks) to a loss; masks have one target block, the masked patches, and show all others.

    - `target_layers`: of how many last layers of the teacher the outputs are averaged, each layer-normed without weights,
      as is the average, as in the released vision models. The teacher's own last norm has no part in it.
    - `beta`: the error from which smooth-L1 is linear.
    """

    def __init__(self, encoder: Encoder, masked_input: MaskedInput, target_layers: int = 6, beta: float = 2.0) -> None:
        super().__init__(encoder)
        check_target_layers(encoder, target_layers)
        if encoder.vit.num_prefix_tokens:
            raise InputError("The encoder has a class token, for which data2vec has no use: give one without.")
        self.masked_input, self.target_layers, self.beta = masked_input, target_layers, beta
        self.head = nn.Linear(encoder.dim, encoder.dim)
        nn.init.trunc_normal_(self.head.weight, std=PROJECTION_INIT_STD)
        nn.init.zeros_(self.head.bias)
        self.train()

    @property
    def masked_tokens(self) -> MaskedInput:
        """The student's input."""
        return self.masked_input

    def forward(
        self, images: Float[Tensor, "batch 3 height width"], masks: Masks, generator: torch.Generator | None = None
    ) -> Float[Tensor, ""]:
        """The loss of a batch; the generator draws the noise of stochastic positions."""
        predicted, target = self.predict(images, masks, generator), self.target_features(images, masks)
        return F.smooth_l1_loss(predicted.float(), target.float(), beta=self.beta)

    def predict(
        self, images: Float[Tensor, "batch 3 height width"], masks: Masks, generator: torch.Generator | None = None
    ) -> Features:
        """Features of the masked patches as the student, which sees the others, predicts them."""
        vit, masked = self.encoder.vit, masks.targets.flatten(1)
        visible = gather_patches(cut_patches(images, self.encoder.patch_size), masks.context)
        tokens = self.masked_input(visible, masks.context, masked, generator)
        return self.head(vit.norm(vit.blocks(vit.norm_pre(tokens)))[:, -masked.shape[1] :])

    @torch.no_grad()
    def target_features(self, images: Float[Tensor, "batch 3 height width"], masks: Masks) -> Features:
        """Features of the masked patches as the teacher sees them in the whole image."""
        tokens = top_layers_mean(self.target, images, self.target_layers, final_norm=False)
        return F.layer_norm(gather_patches(tokens, masks.targets.flatten(1)), tokens.shape[-1:])

    def layers(self) -> list[nn.Module]:
        """The student's and the teacher's."""
        return [*self.encoder.vit.blocks, *self.target.vit.blocks]
