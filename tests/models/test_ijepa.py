"""The objective: what is compared with what, what learns, and how the target follows."""

import math

import pytest
import torch
import torch.nn.functional as F

from stop_mim.errors import InputError
from stop_mim.masking import MultiBlockMasks
from stop_mim.models.encoder import Dimensions, create_encoder
from stop_mim.models.ijepa import IJEPA, lower_resolution
from stop_mim.models.predictor import Predictor, context_projection
from stop_mim.positions import SinCosPositions, StochasticPositions


def make(sigma=0.25, depth=2, **options):
    torch.manual_seed(0)
    encoder = create_encoder(Dimensions(width=48, depth=depth, heads=3), image_size=(48, 64), patch_size=8)
    projection = context_projection(48, 24)
    positions = StochasticPositions(SinCosPositions(encoder.grid, 24), projection, sigma=sigma)
    outputs = 48 if options.get("target_resolution", "full") == "full" else 96
    return IJEPA(encoder, Predictor(projection, positions, depth=2, heads=2, outputs=outputs), **options)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 48, 64, generator=generator), MultiBlockMasks((6, 8)).sample(4, generator=generator)


def test_targets_are_the_layer_normed_features_of_the_whole_image(batch):
    model, (images, masks) = make(depth=3), batch
    vit = model.target.vit
    torch.nn.init.normal_(vit.norm.weight)
    torch.nn.init.normal_(vit.norm.bias)
    tokens = vit.patch_embed(images).flatten(1, 2) + vit.pos_embed
    for block in vit.blocks:
        tokens = block(tokens)
    features = F.layer_norm(vit.norm(tokens), (48,))
    expected = torch.stack([features[i, masks.targets[i]] for i in range(4)])
    torch.testing.assert_close(model.target_features(images, masks), expected, atol=1e-5, rtol=1e-5)
    assert not model.target_features(images, masks).requires_grad


def test_beta_is_where_the_loss_becomes_linear(batch):
    predicted, target = make(sigma=0.0).predict(*batch), make().target_features(*batch)
    for beta in (0.5, 1.0):
        loss = make(sigma=0.0, beta=beta)(*batch)
        torch.testing.assert_close(loss, F.smooth_l1_loss(predicted, target, beta=beta), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("grid", [(6, 8), (5, 7)])
def test_half_the_resolution_is_the_mean_or_the_largest_of_four(grid):
    tokens = torch.randn(2, grid[0] * grid[1], 3, generator=torch.Generator().manual_seed(2))
    maps = tokens.unflatten(1, grid)
    for resolution, summary in (("bilinear", torch.mean), ("max", torch.amax)):
        lower = lower_resolution(tokens, grid, resolution).unflatten(1, grid)
        torch.testing.assert_close(lower[:, 0, 0], lower[:, 1, 1])
        if grid == (6, 8):
            torch.testing.assert_close(lower[:, 2, 4], summary(maps[:, 2:4, 4:6].flatten(1, 2), dim=1))


@pytest.mark.parametrize("resolution", ["bilinear", "max"])
def test_the_original_and_half_the_resolution_are_predicted_and_weigh_the_same(batch, resolution):
    model, (images, masks) = make(sigma=0.0, target_resolution=resolution), batch
    predicted, losses = model.predict(images, masks).split(48, dim=-1), []
    tokens = model.target(images)
    for part, whole in zip(predicted, (tokens, lower_resolution(tokens, (6, 8), resolution)), strict=True):
        expected = F.layer_norm(torch.stack([whole[i, masks.targets[i]] for i in range(4)]), (48,))
        losses.append(F.smooth_l1_loss(part, expected))
    torch.testing.assert_close(model(images, masks), sum(losses) / 2)


def test_l1_is_the_mean_entry_of_a_so_that_strengths_transfer_between_widths(batch):
    plain, penalised, (images, masks) = make(sigma=0.0), make(sigma=0.0, l1_strength=10), batch
    weight = penalised.predictor.projection.weight
    added = penalised(images, masks) - plain(images, masks)
    torch.testing.assert_close(added, 10 * weight.abs().sum() / (24 * 48))
    # E|a| of a normal distribution of std 0.02 that is cut far outside, at any width.
    assert added.item() / 10 == pytest.approx(0.02 * math.sqrt(2 / math.pi), rel=0.05)


def test_a_predictor_of_another_encoder_is_refused():
    encoder, projection = create_encoder(Dimensions(48, 1, 3), 32, 8), context_projection(64, 24)
    predictor = Predictor(projection, SinCosPositions(encoder.grid, 24), depth=1, heads=2)
    with pytest.raises(InputError, match="takes 64 features and the encoder has 48"):
        IJEPA(encoder, predictor)
    predictor = Predictor(context_projection(48, 24), SinCosPositions(encoder.grid, 24), depth=1, heads=2, outputs=96)
    with pytest.raises(InputError, match="has 96 outputs and its targets 48 features"):
        IJEPA(encoder, predictor)
