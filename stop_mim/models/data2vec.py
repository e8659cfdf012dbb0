"""data2vec: a student that sees mask tokens predicts the features that its moving average computes from the whole image."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from stop_mim.errors import InputError
from stop_mim.masking import Masks
from stop_mim.models.build import build_encoder, build_positions
from stop_mim.models.config import ModelConfig
from stop_mim.models.encoder import Encoder, Images, cut_patches, gather_patches
from stop_mim.models.objective import OBJECTIVES, TargetObjective, layer_normed
from stop_mim.models.predictor import MaskedTokens, Noise
from stop_mim.positions import PROJECTION_INIT_STD

Features = Float[Tensor, "batch n_masked dim"]


class PatchProjection(nn.Linear):
    """The convolution that embeds patches, as a linear layer from pixels to features; it owns no weights."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        nn.Module.__init__(self)
        # In a tuple, so that the layer is not registered a second time.
        self._convolution = (convolution,)
        self.in_features, self.out_features = convolution.weight[0].numel(), convolution.out_channels

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self._convolution[0].weight.flatten(1)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        return self._convolution[0].bias


class Data2Vec(TargetObjective):
    """The objective of data2vec; masks have one target block, and all other patches are context.

    The student's first tokens are the paper's, with the patch embedding as A: a visible patch with pixels x is
    c = A x + b + ψ, a masked one m = ψ̂ + m̃. A n is the embedding of a patch of noise. Scaling A down would silence the
    visible patches, too.

    Args:
        encoder: the student; the target encoder is the teacher.
        masked_input: makes the student's first tokens; its projection is the `PatchProjection` of the encoder.
        target_layers: number of last layers of the teacher whose outputs are averaged. Each is layer-normed without
            weights, as is the average; the teacher's last norm is not applied. The released vision models do the same.
        beta: error above which smooth-L1 is linear.
    """

    def __init__(self, encoder: Encoder, masked_input: MaskedTokens, target_layers: int = 6, beta: float = 2.0) -> None:
        super().__init__(encoder, beta)
        if encoder.vit.num_prefix_tokens:
            raise InputError("The encoder has a class token, which data2vec does not use: give one without.")
        if not 1 <= target_layers <= encoder.depth:
            raise InputError(
                f"objective.target_layers is {target_layers}: the encoder has {encoder.depth}, choose at most those."
            )
        self.masked_input, self.target_layers = masked_input, target_layers
        self.head = nn.Linear(encoder.dim, encoder.dim)
        nn.init.trunc_normal_(self.head.weight, std=PROJECTION_INIT_STD)
        nn.init.zeros_(self.head.bias)
        self.train()

    @property
    def masked_tokens(self) -> MaskedTokens:
        return self.masked_input

    def forward(self, images: Images, masks: Masks, noise: Noise | None = None) -> Float[Tensor, ""]:
        """Return the loss of a batch: smooth-L1 between the student's and the teacher's features."""
        self.require_fit(images, masks)
        if masks.targets.shape[1] > 1:
            raise InputError(
                f"The masks have {masks.targets.shape[1]} target blocks and data2vec predicts one: use BlockwiseMasks or "
                "RandomMasks."
            )
        predicted, target = self.predict(images, masks, noise), self.target_features(images, masks)
        return F.smooth_l1_loss(predicted.float(), target.float(), beta=self.beta)

    def predict(self, images: Images, masks: Masks, noise: Noise | None = None) -> Features:
        """Return the features of the masked patches as the student predicts them from the others."""
        visible = gather_patches(cut_patches(images, self.encoder.patch_size), masks.context)
        tokens = self.masked_input.tokens(visible, masks.context, masks.targets, noise)
        features = self.encoder.transform_tokens(self.encoder.vit.norm_pre(tokens))
        return self.head(features[:, visible.shape[1] :])

    @torch.no_grad()
    def target_features(self, images: Images, masks: Masks) -> Features:
        """Return the teacher's features of the masked patches; it sees the whole image."""
        outputs = self.target.vit.forward_intermediates(
            images, indices=self.target_layers, norm=False, output_fmt="NLC", intermediates_only=True
        )
        mean = torch.stack([layer_normed(tokens) for tokens in outputs]).mean(0)
        return layer_normed(gather_patches(mean, masks.targets.flatten(1)))


@OBJECTIVES.register("data2vec")
def build_data2vec(config: ModelConfig) -> Data2Vec:
    """Build data2vec with new weights."""
    if config.positions.kind == "learned":
        raise InputError(
            "positions.kind is learned: data2vec uses the encoder's positions, which are fixed; choose another kind."
        )
    if config.masks.kind == "multiblock":
        raise InputError("masks.kind is multiblock: data2vec needs one target block; choose blockwise or random.")
    encoder = build_encoder(config.encoder)
    projection = PatchProjection(encoder.vit.patch_embed.proj)
    masked_input = MaskedTokens(projection, build_positions(config.positions, encoder.grid, projection))
    return Data2Vec(encoder, masked_input, config.objective.target_layers, config.objective.beta)
