"""data2vec: what the student sees, what the teacher gives, and where the noise goes."""

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

from stop_mim.errors import InputError
from stop_mim.masking import BlockwiseMasks
from stop_mim.models.data2vec import Data2Vec, PatchProjection
from stop_mim.models.encoder import Dimensions, Encoder, create_encoder
from stop_mim.models.predictor import MaskedTokens
from stop_mim.positions import SinCosPositions, StochasticPositions

PATCH, GRID = 8, (4, 6)


def make(sigma=None, target_layers=2, beta=2.0, **options):
    """24 patches of 8x8, three layers; without sigma the positions are plain ones."""
    torch.manual_seed(0)
    encoder = create_encoder(Dimensions(width=48, depth=3, heads=3), image_size=(32, 48), patch_size=PATCH)
    projection = PatchProjection(encoder.vit.patch_embed.proj)
    positions = SinCosPositions(GRID, 48)
    if sigma is not None:
        positions = StochasticPositions(positions, projection, sigma=sigma, **options)
    return Data2Vec(encoder, MaskedTokens(projection, positions), target_layers, beta)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 32, 48, generator=generator), BlockwiseMasks(GRID).sample(4, generator=generator)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def student_input(model, images, masks):
    """The tokens that enter the student's first layer, with the noise of a fixed seed."""
    seen = []
    handle = model.encoder.vit.blocks[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    model.predict(images, masks, model.draw_noise(masks, seeded()))
    handle.remove()
    return seen[0]


@pytest.mark.parametrize(("layers", "beta"), [(1, 2.0), (2, 0.5)])
def test_the_loss_is_smooth_l1_to_the_normed_mean_of_the_teachers_normed_top_layers(batch, layers, beta):
    model, (images, masks) = make(target_layers=layers, beta=beta), batch
    for parameter in model.target.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=seeded()))
    teacher = model.target.vit
    tokens, outputs = teacher.patch_embed(images).flatten(1, 2) + teacher.pos_embed, []
    for block in teacher.blocks:
        tokens = block(tokens)
        outputs.append((tokens - tokens.mean(-1, keepdim=True)) / (tokens.var(-1, False, keepdim=True) + 1e-5).sqrt())
    target = F.layer_norm(sum(outputs[-layers:]) / layers, (48,))
    wanted = torch.stack([target[i, masks.targets[i, 0]] for i in range(4)])
    errors = (model.predict(images, masks) - wanted).abs()
    loss = torch.where(errors < beta, errors.square() / (2 * beta), errors - beta / 2).mean()
    torch.testing.assert_close(model(images, masks), loss, atol=1e-5, rtol=1e-5)


def test_the_student_sees_all_patches_with_a_mask_token_in_the_place_of_masked_ones(batch):
    model, (images, masks) = make(), batch
    tokens = student_input(model, images, masks)
    assert tokens.shape == (4, 24, 48)
    whole = model.encoder.embed_patches(images)
    for i in range(4):
        torch.testing.assert_close(tokens[i, :10], whole[i, masks.context[i]], atol=1e-5, rtol=1e-5)
        positions = model.encoder.vit.pos_embed[0, masks.targets[i, 0]]
        torch.testing.assert_close(tokens[i, 10:], positions + model.masked_input.mask_token)


def test_A_is_the_patch_embedding_and_gets_gradients_through_the_noise(batch):
    for sigma, reaches in ((0.0, False), (0.25, True)):
        model, masks = make(sigma=sigma), batch[1]
        assert torch.equal(model.positions.covariance.factor(), model.encoder.vit.patch_embed.proj.weight.flatten(1))
        # Images of zeros leave A no gradient but the noise's.
        model(torch.zeros_like(batch[0]), masks).backward()
        assert bool(model.encoder.vit.patch_embed.proj.weight.grad.abs().max() > 0) == reaches


def test_the_releases_convention_works_too(batch):
    release = make(sigma=0.25, convention="release")
    release(*batch).backward()
    assert not release.masked_input.mask_token.requires_grad
    # A masked token without noise is then that of an image of zeros.
    tokens = student_input(release.eval(), *batch)
    wanted = release.encoder.embed_patches(torch.zeros_like(batch[0]), batch[1].targets[:, 0])
    torch.testing.assert_close(tokens[:, 10:], wanted)


def test_a_class_token_and_more_layers_than_there_are_are_refused():
    vit = VisionTransformer(32, PATCH, embed_dim=48, depth=1, num_heads=3, num_classes=0)
    encoder = Encoder(vit)
    masked_input = MaskedTokens(PatchProjection(vit.patch_embed.proj), SinCosPositions(4, 48))
    with pytest.raises(InputError, match="has a class token"):
        Data2Vec(encoder, masked_input, target_layers=1)
    with pytest.raises(InputError, match=r"objective\.target_layers is 4"):
        make(target_layers=4)
