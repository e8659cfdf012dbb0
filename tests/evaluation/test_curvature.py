import pytest
import torch
from torch import nn

from stop_mim.evaluation.curvature import inverse_curvature, precondition, sum_of_products


def correlated(count=600, dim=12, seed=0):
    """Features far from zero, along whose principal components the variances fall by a million."""
    generator = torch.Generator().manual_seed(seed)
    turned = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
    return (torch.randn(count, dim, generator=generator) * torch.logspace(0, -3, dim)) @ turned + 2


def test_products_add_up_to_moments_of_features_and_one():
    features = correlated()
    total = sum_of_products(features[:200]) + sum_of_products(features[200:])
    assert total.dtype == torch.float64
    assert total[-1, -1] == 600
    torch.testing.assert_close((total / 600)[-1, :-1].float(), features.mean(0))
    torch.testing.assert_close((total / 600)[:-1, :-1].float(), features.T @ features / 600)


@pytest.mark.parametrize("columns", [12, 3])
@pytest.mark.parametrize("standardised", [False, True])
def test_it_is_the_inverse_of_the_losss_second_derivatives(columns, standardised):
    features = torch.randn(300, 12, generator=torch.Generator().manual_seed(0)) * torch.linspace(1, 3, 12) + 1
    seen = features[:, -columns:]
    if standardised:
        seen = (seen - seen.mean(0)) / seen.std(0, unbiased=False)
    seen = nn.functional.pad(seen, (0, 1), value=1.0).double()

    def loss(weights_of_a_class):
        scores = torch.zeros(len(seen), 5, dtype=torch.float64)
        scores = torch.cat([(seen @ weights_of_a_class)[:, None], scores[:, 1:]], 1)
        return -scores.log_softmax(1)[:, 1].mean() + 0.01 / 2 * weights_of_a_class.square().sum()

    expected = torch.autograd.functional.hessian(loss, torch.zeros(columns + 1, dtype=torch.float64)).inverse()
    ours = inverse_curvature(sum_of_products(features) / 300, columns, standardised, 5, 0.01)
    assert (ours - expected).norm() < 0.01 * expected.norm()


def test_features_that_do_not_vary_have_finite_steps():
    features = torch.cat([correlated(), torch.zeros(600, 2), torch.ones(600, 1)], 1)
    for standardised in (False, True):
        inverse = inverse_curvature(sum_of_products(features) / 600, 15, standardised, 5, 0.0)
        assert torch.isfinite(inverse).all()
        assert inverse.abs().max() < 1e7


def distance_to_optimum(inverse, rate, steps):
    """How far the loss is from its least value, after so many steps with all images."""
    features = correlated()
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(4, 12, generator=generator) / features.std(0)
    labels = (features @ directions.T + torch.randn(600, 4, generator=generator)).argmax(1)
    linear = nn.Linear(12, 4)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)

    def loss():
        squares = linear.weight.square().sum() + linear.bias.square().sum()
        return nn.functional.cross_entropy(linear(features), labels) + 1e-5 / 2 * squares

    for _ in range(steps):
        linear.zero_grad()
        nn.functional.cross_entropy(linear(features), labels).backward()
        if inverse is not None:
            precondition(linear, inverse, 1e-5)
        with torch.no_grad():
            for parameter in linear.parameters():
                decay = 1e-5 * parameter if inverse is None else 0
                parameter -= rate * (parameter.grad + decay)
    reached = loss().item()
    optimiser = torch.optim.LBFGS(
        linear.parameters(), max_iter=20_000, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value

    optimiser.step(closure)
    return reached - loss().item()


def test_the_optimum_is_the_same_and_reached_in_far_fewer_steps():
    inverse = inverse_curvature(sum_of_products(correlated()) / 600, 12, False, 4, 1e-5)
    assert -1e-4 < distance_to_optimum(inverse, 1.0, 100) < 0.01
    # The best rate of many; with a larger one it explodes.
    assert min(distance_to_optimum(None, rate, 100) for rate in (0.01, 0.03, 0.1, 0.3)) > 0.05
