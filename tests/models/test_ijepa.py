"""The objective: what is compared with what, what learns, and how the target follows."""

import pytest
import torch
import torch.nn.functional as F

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
    return IJEPA(encoder, Predictor(projection, positions, depth=2, heads=2), **options)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 48, 64, generator=generator), MultiBlockMasks((6, 8)).sample(4, generator=generator)


def test_loss_is_smooth_l1_to_layer_normed_target_features_of_the_whole_image(batch):
    model, (images, masks) = make(sigma=0.0), batch
    torch.nn.init.normal_(model.target.vit.norm.bias)
    whole = F.layer_norm(model.target.vit.forward_features(images), (48,))
    expected = torch.stack([whole[i, masks.targets[i]] for i in range(4)])
    context = torch.cat([model.encoder(images[i : i + 1], masks.context[i : i + 1]) for i in range(4)])
    predicted = model.predictor(context, masks.context, masks.targets)
    torch.testing.assert_close(model(images, masks), F.smooth_l1_loss(predicted, expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [1, 3])
def test_targets_are_the_mean_of_the_normed_top_layers(batch, layers):
    model, (images, masks) = make(depth=3, target_layers=layers), batch
    vit = model.target.vit
    torch.nn.init.normal_(vit.norm.weight)
    torch.nn.init.normal_(vit.norm.bias)
    tokens, outputs = vit.patch_embed(images).flatten(1, 2) + vit.pos_embed, []
    for block in vit.blocks:
        tokens = block(tokens)
        outputs.append(F.layer_norm(vit.norm(tokens), (48,)))
    mean = sum(outputs[-layers:]) / layers
    expected = torch.stack([mean[i, masks.targets[i]] for i in range(4)])
    torch.testing.assert_close(model.target_features(images, masks), expected, atol=1e-5, rtol=1e-5)
    assert not model.target_features(images, masks).requires_grad


def test_beta_is_where_the_loss_becomes_linear(batch):
    predicted, target = make(sigma=0.0).predict(*batch), make().target_features(*batch)
    for beta in (0.5, 1.0):
        loss = make(sigma=0.0, beta=beta)(*batch)
        torch.testing.assert_close(loss, F.smooth_l1_loss(predicted, target, beta=beta), atol=1e-6, rtol=1e-6)


def test_the_context_never_sees_a_target_patch(batch):
    model, (images, masks) = make(sigma=0.0), batch
    changed = images.clone()
    for image, blocks in zip(changed, masks.targets, strict=True):
        for patch in blocks.flatten().tolist():
            row, column = patch // 8 * 8, patch % 8 * 8
            image[:, row : row + 8, column : column + 8] += 3
    torch.testing.assert_close(model.predict(images, masks), model.predict(changed, masks))


@pytest.mark.parametrize("grid", [(6, 8), (5, 7)])
def test_half_the_resolution_is_the_mean_or_the_largest_of_four(grid):
    tokens = torch.randn(2, grid[0] * grid[1], 3, generator=torch.Generator().manual_seed(2))
    maps = tokens.unflatten(1, grid)
    for resolution, summary in (("bilinear", torch.mean), ("max", torch.amax)):
        lower = lower_resolution(tokens, grid, resolution).unflatten(1, grid)
        torch.testing.assert_close(lower[:, 0, 0], lower[:, 1, 1])
        if grid == (6, 8):
            torch.testing.assert_close(lower[:, 2, 4], summary(maps[:, 2:4, 4:6].flatten(1, 2), dim=1))


def test_targets_of_half_the_resolution_are_layer_normed(batch):
    model, (images, masks) = make(target_resolution="max"), batch
    targets = model.target_features(images, masks)
    whole = lower_resolution(model.target(images), (6, 8), "max")
    expected = F.layer_norm(torch.stack([whole[i, masks.targets[i]] for i in range(4)]), (48,))
    torch.testing.assert_close(targets, expected)


def test_l1_adds_to_the_loss_and_pulls_a_towards_zero(batch):
    plain, penalised, (images, masks) = make(sigma=0.0), make(sigma=0.0, l1_strength=0.01), batch
    weight = penalised.predictor.projection.weight
    torch.testing.assert_close(penalised(images, masks) - plain(images, masks), 0.01 * weight.abs().sum())
    for model in (plain, penalised):
        model(images, masks).backward()
    more = weight.grad - plain.predictor.projection.weight.grad
    torch.testing.assert_close(more, 0.01 * weight.detach().sign(), atol=1e-6, rtol=1e-4)
