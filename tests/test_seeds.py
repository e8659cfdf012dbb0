"""Seeds for purposes: the same everywhere and always, and unrelated to one another."""

import itertools

import torch

from stop_mim.seeds import derive_seed, seeded_generator, seeded_weights


def test_a_seed_is_the_same_in_every_version_and_process():
    # Golden values, from the first run of this function: were they to change, no old run could be resumed exactly.
    assert derive_seed(0, "noise", 3, 1) == 730617078977525110
    assert derive_seed(7) == 843011692241435484


def test_every_purpose_has_a_seed_of_its_own():
    purposes = [
        (seed, name, number, rank)
        for seed, name, number, rank in itertools.product(range(3), ("noise", "masks"), range(40), range(4))
    ]
    assert len({derive_seed(*purpose) for purpose in purposes}) == len(purposes)
    # Neither gluing the parts together nor mixing numbers and texts up may give the same seed.
    assert (
        len({derive_seed(0, "a", 12), derive_seed(0, "a", 1, 2), derive_seed(0, "a1", 2), derive_seed(0, "a", "12")})
        == 4
    )


def test_neighbouring_streams_are_not_correlated():
    streams = torch.stack([torch.randn(4000, generator=seeded_generator("cpu", 0, "noise", step)) for step in range(8)])
    off_diagonal = torch.corrcoef(streams) - torch.eye(8)
    assert off_diagonal.abs().max() < 0.08


def test_seeding_weights_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with seeded_weights(5):
        first = torch.nn.Linear(2, 2).weight
    with seeded_weights(5):
        assert torch.equal(torch.nn.Linear(2, 2).weight, first)
    assert torch.equal(torch.rand(2), expected)
