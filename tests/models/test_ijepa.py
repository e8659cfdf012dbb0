"""The objective: what is compared with what, what learns, and how the target follows."""

import pytest
import torch
import torch.nn.functional as F

from stop_mim.masking import MultiBlockMasks
from stop_mim.models.encoder import Dimensions, create_encoder
from stop_mim.models.ijepa import IJEPA
from stop_mim.models.predictor import Predictor, context_projection
from stop_mim.positions import SinCosPositions, StochasticPositions


def make(sigma=0.25):
    torch.manual_seed(0)
    encoder = create_encoder(Dimensions(width=48, depth=2, heads=3), image_size=(48, 64), patch_size=8)
    projection = context_projection(48, 24)
    positions = StochasticPositions(SinCosPositions(encoder.grid, 24), projection, sigma=sigma)
    return IJEPA(encoder, Predictor(projection, positions, depth=2, heads=2))


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


def test_gradients_reach_everything_but_the_target(batch):
    model = make()
    model(*batch).backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {name for name, _ in model.named_parameters() if name.startswith("target.")} | {
        "encoder.vit.pos_embed"
    }


def test_the_context_never_sees_a_target_patch(batch):
    model, (images, masks) = make(sigma=0.0), batch
    changed = images.clone()
    for image, blocks in zip(changed, masks.targets, strict=True):
        for patch in blocks.flatten().tolist():
            row, column = patch // 8 * 8, patch % 8 * 8
            image[:, row : row + 8, column : column + 8] += 3
    torch.testing.assert_close(model.predict(images, masks), model.predict(changed, masks))


def test_target_is_an_average_over_time():
    model = make()
    for parameter in model.encoder.parameters():
        parameter.data.add_(1.0)
    before = [parameter.clone() for parameter in model.target.parameters()]
    model.update_target(0.9)
    for old, new, ours in zip(before, model.target.parameters(), model.encoder.parameters(), strict=True):
        wanted = 0.9 * old + 0.1 * ours if ours.requires_grad else old
        torch.testing.assert_close(new, wanted)
    model.update_target(1.0)


def test_target_stays_in_evaluation_mode():
    model = make().train()
    assert model.encoder.training
    assert not model.target.training


def test_a_generator_makes_the_loss_reproducible(batch):
    model = make()
    losses = [model(*batch, generator=torch.Generator().manual_seed(seed)).item() for seed in (3, 3, 4)]
    assert losses[0] == losses[1] != losses[2]


def test_it_learns_on_one_batch(batch):
    model = make()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 2e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(120):
        loss = model(*batch, generator=generator)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_bfloat16_autocast_needs_no_scaler(batch):
    model = make()
    exact = model(*batch, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(*batch, generator=torch.Generator().manual_seed(0))
    rounded.backward()
    assert rounded.item() == pytest.approx(exact.item(), rel=0.02)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
