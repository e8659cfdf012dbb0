"""Random streams that are functions of what they are for, so that nothing random has to be saved to be resumed."""

import hashlib

import torch


def derive_seed(seed: int, *purpose: int | str) -> int:
    """A seed of its own for each purpose, such as derive_seed(0, "noise", step, rank)."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seeded_generator(device: torch.device | str, seed: int, *purpose: int | str) -> torch.Generator:
    """A generator on that device, seeded for that purpose."""
    return torch.Generator(device).manual_seed(derive_seed(seed, *purpose))
