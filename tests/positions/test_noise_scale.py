"""Noise scaled by the context: it starts as plain StoP, follows the context, and cannot be silenced."""

import pytest
import torch

from stop_mim.constraints import check_effects
from stop_mim.errors import InputError
from stop_mim.models.build import build_positions
from stop_mim.positions import NoiseScale, SinCosPositions, StochasticPositions
from stop_mim.training.config import PositionsConfig, TrainConfig

GRID, DIM, ENCODER_DIM = (3, 5), 8, 12


def make(projection, **change):
    return StochasticPositions(SinCosPositions(GRID, DIM), projection, noise_scale=NoiseScale(ENCODER_DIM), **change)


def contexts(images=4, seed=0, offset=0.0):
    return offset + torch.randn(images, 5, ENCODER_DIM, generator=torch.Generator().manual_seed(seed))


def randomise(noise_scale, size=1.0, seed=0):
    """Give the head random weights of this size."""
    generator = torch.Generator().manual_seed(seed)
    noise_scale.weight.data.copy_(size * torch.randn(noise_scale.weight.shape, generator=generator))
    return noise_scale


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("images", [1, 3, 7])
def test_it_starts_as_plain_stop_bit_for_bit(projection, noisy, images):
    indices = torch.arange(15).expand(images, 15)
    assert torch.equal(NoiseScale(ENCODER_DIM)(contexts(images)), torch.ones(images))
    plain = StochasticPositions(SinCosPositions(GRID, DIM), projection)
    assert torch.equal(noisy(make(projection), indices, context=contexts(images)), noisy(plain, indices))


def test_what_all_images_have_in_common_does_not_matter():
    noise_scale = randomise(NoiseScale(ENCODER_DIM))
    scales = noise_scale(contexts(6, offset=100.0))
    torch.testing.assert_close(scales, noise_scale(contexts(6)), atol=1e-3, rtol=0)
    (gradient,) = torch.autograd.grad(scales[0], noise_scale.weight)
    assert gradient.abs().sum() > 0.01


@pytest.mark.parametrize("size", [0.3, 1e6])
@pytest.mark.parametrize("offset", [0.0, 10.0])
@pytest.mark.parametrize("images", [1, 2, 9])
def test_no_parameters_silence_a_batch_or_an_image(size, offset, images):
    for seed in range(5):
        scales = randomise(NoiseScale(ENCODER_DIM), size, seed)(contexts(images, seed, offset))
        assert scales.square().mean().item() == pytest.approx(1, abs=1e-5)
        # What a mean can lose to its root mean square between 1/2 and 2: at worst 2 √(1/2 · 2) / (1/2 + 2).
        assert scales.mean() >= 0.8 - 1e-5
        assert scales.min() >= 0.25
        assert scales.max() <= 4.0


def test_gradient_reaches_head_and_factor_and_not_the_encoder(projection, indices):
    positions, context = make(projection), contexts(2).requires_grad_()
    positions(indices, context=context).square().sum().backward()
    assert projection.weight.grad.abs().sum() > 0
    assert positions.noise_scale.weight.grad.abs().sum() > 0
    assert context.grad is None


@pytest.mark.parametrize("covariance", ["tied", "diagonal", "low_rank(2)"])
@pytest.mark.parametrize(("images", "sigma"), [(1, 0.25), (2, 0.0)])
def test_all_that_learns_has_a_gradient_also_without_noise(projection, covariance, images, sigma):
    positions = make(projection, sigma=sigma, covariance=covariance)
    positions(torch.arange(3).expand(2, 3), context=contexts(images)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in positions.parameters())
    nowhere = make(projection, apply_to="none", covariance=covariance)
    assert not any(parameter.requires_grad for parameter in nowhere.parameters())


def test_bf16_contexts_and_autocast_keep_the_tie(projection, indices):
    positions = make(projection)
    randomise(positions.noise_scale, size=2.0)
    with torch.autocast("cpu", torch.bfloat16):
        scales = positions.noise_scale(contexts(5).bfloat16())
        assert positions(indices, context=contexts(2).bfloat16()).isfinite().all()
    assert scales.dtype == torch.float32
    assert scales.square().mean().item() == pytest.approx(1, abs=1e-5)


def test_sample_without_a_context_is_an_average_image(projection, indices):
    positions = make(projection).eval()
    randomise(positions.noise_scale)
    plain = StochasticPositions(SinCosPositions(GRID, DIM), projection)
    assert torch.equal(positions.sample(indices, generator=seeded()), plain.sample(indices, generator=seeded()))


def test_mistakes_are_named(projection, indices):
    positions = make(projection)
    with pytest.raises(InputError, match="context is None and the noise depends on the context"):
        positions(indices)
    with pytest.raises(InputError, match="indices have 2 rows and the context 3 images"):
        positions(indices, context=contexts(3))
    with pytest.raises(InputError, match=r"shape \(2, 12\): give \(images, tokens, 12 features\)"):
        positions(indices, context=torch.zeros(2, 12))
    with pytest.raises(InputError, match=r"most is 0\.5"):
        NoiseScale(ENCODER_DIM, most=0.5)


def test_the_configuration_asks_for_it_by_name(projection):
    assert build_positions(PositionsConfig(), GRID, projection).noise_scale is None
    assert build_positions(PositionsConfig(conditioned=True), GRID, projection).noise_scale.most == 2
    with pytest.raises(InputError, match=r"positions.conditioned is True.*positions.kind is sincos"):
        check_effects(TrainConfig(positions=PositionsConfig(kind="sincos", conditioned=True)))
