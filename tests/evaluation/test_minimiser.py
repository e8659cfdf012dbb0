"""Many problems at once: each ends where it would end alone."""

import pytest
import torch

from stop_mim.evaluation.minimiser import minimise


def quadratics(problems=5, dim=30, condition=100.0):
    generator = torch.Generator().manual_seed(0)
    curvatures = torch.logspace(0, torch.tensor(condition).log10().item(), dim).repeat(problems, 1)
    optima = torch.randn(problems, dim, generator=generator)

    def objective(points):
        away = points - optima[: len(points)]
        return 0.5 * (curvatures[: len(points)] * away.square()).sum(1), curvatures[: len(points)] * away

    return objective, optima


def test_quadratics_are_solved():
    objective, optima = quadratics()
    found = minimise(objective, torch.zeros(5, 30), steps=200)
    torch.testing.assert_close(found, optima, atol=2e-3, rtol=0)


def test_rosenbrocks_valley_is_followed_to_its_end():
    def objective(points):
        x, y = points[:, 0].double(), points[:, 1].double()
        value = (1 - x) ** 2 + 100 * (y - x**2) ** 2
        gradient = torch.stack([-2 * (1 - x) - 400 * x * (y - x**2), 200 * (y - x**2)], 1)
        return value, gradient

    start = torch.tensor([[-1.2, 1.0], [0.0, 0.0], [2.0, -2.0]], dtype=torch.float64)
    found = minimise(objective, start, steps=200)
    torch.testing.assert_close(found, torch.ones(3, 2, dtype=torch.float64), atol=1e-3, rtol=0)


def test_problems_do_not_touch_one_another():
    objective, _ = quadratics()
    together = minimise(objective, torch.zeros(5, 30), steps=25)
    alone = minimise(objective, torch.zeros(1, 30), steps=25)
    torch.testing.assert_close(together[:1], alone, atol=0.05, rtol=0)


def test_a_problem_that_is_solved_stays_so_while_others_go_on():
    objective, optima = quadratics(2)
    start = torch.stack([optima[0], torch.zeros(30)])
    found = minimise(objective, start, steps=200)
    torch.testing.assert_close(found[0], optima[0], atol=1e-3, rtol=0)
    torch.testing.assert_close(found[1], optima[1], atol=2e-3, rtol=0)


def test_it_ends_when_nothing_gets_lower():
    objective, _ = quadratics(condition=10.0)
    ticks = []
    minimise(objective, torch.zeros(5, 30), steps=500, tick=lambda step, steps: ticks.append((step, steps)))
    assert ticks[-1][0] < 100
    assert ticks[0] == (1, 500)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_scale_of_the_values_does_not_matter(scale):
    objective, optima = quadratics()
    found = minimise(lambda points: tuple(scale * part for part in objective(points)), torch.zeros(5, 30))
    torch.testing.assert_close(found, optima, atol=0.02, rtol=0)
