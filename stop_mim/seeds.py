"""Seeds derived from a purpose, such as a step, so that no random state has to be saved to resume a run."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, *purpose: int | str) -> int:
    """Return the seed of a purpose, such as derive_seed(0, "masks", step)."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seeded_generator(device: torch.device | str, seed: int, *purpose: int | str) -> torch.Generator:
    """Return a generator with the seed of a purpose."""
    return torch.Generator(device).manual_seed(derive_seed(seed, *purpose))


@contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator, which the initialisation of layers uses; it is restored at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
