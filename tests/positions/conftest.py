"""A projection, some patches, and a model so small that it learns something within a second."""

import pytest
import torch
from torch import nn

from stop_mim.masking import MultiBlockMasks
from stop_mim.models.build import build_objective
from stop_mim.training.config import EncoderConfig, PositionsConfig, PredictorConfig, TrainConfig

ENCODER_DIM, DIM = 12, 8


@pytest.fixture
def projection():
    torch.manual_seed(0)
    return nn.Linear(ENCODER_DIM, DIM)


@pytest.fixture
def indices():
    return torch.tensor([[0, 4, 7], [14, 1, 1]])


@pytest.fixture
def noisy():
    """Positions with the noise of a seed."""

    def draw(positions, indices, seed=0, context=None):
        noise = positions.draw_noise(indices, generator=torch.Generator().manual_seed(seed))
        return positions(indices, context=context, noise=noise)

    return draw


@pytest.fixture
def train_briefly():
    """Trains I-JEPA with these positions on a few smooth images; returns the objective and the loss of every step."""

    def train(positions: PositionsConfig, steps=80, lr=3e-3):
        torch.manual_seed(0)
        encoder = EncoderConfig("tiny", image_size=(32, 48), patch_size=8, width=24, depth=2, heads=2)
        objective = build_objective(
            TrainConfig(encoder=encoder, predictor=PredictorConfig(width=16, depth=1, heads=2), positions=positions)
        )
        generator = torch.Generator().manual_seed(1)
        coarse = torch.randn(12, 3, 4, 6, generator=generator)
        images = nn.functional.interpolate(coarse, size=(32, 48), mode="bilinear")
        sampler = MultiBlockMasks((4, 6))
        optimiser = torch.optim.AdamW([p for p in objective.parameters() if p.requires_grad], lr, weight_decay=0.0)
        losses = []
        for _ in range(steps):
            masks = sampler.sample(12, generator=generator)
            loss = objective(images, masks, objective.draw_noise(masks, generator))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            objective.move_target(0.001)
            losses.append(loss.item())
        return objective, losses

    return train
