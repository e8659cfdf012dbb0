"""Shapes in signatures are checked in every test: jaxtyping's hook must come before the package is imported."""

import io
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

# Before torch is loaded, as the command line has it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from jaxtyping import install_import_hook

SHAPED = ["masking", "models", "data", "training", "exchange", "evaluation", "sweeps", "analysis"]

# As everywhere in Python's typing, an int is welcome where a float is.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"

install_import_hook([f"stop_mim.{name}" for name in SHAPED], CHECKER)

REAL_DATA = Path(os.environ.get("STOP_MIM_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that are marked gpu where there is none, and those marked slow unless they are asked for."""
    skipped = {} if torch.cuda.is_available() else {"gpu": "needs a CUDA device"}
    skipped |= {} if "slow" in config.option.markexpr else {"slow": "takes minutes: pytest -m slow"}
    for item in items:
        for marker, reason in skipped.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """The folder of a real dataset by its name; the test is skipped where there is none."""

    def find(name: str) -> Path:
        if not (REAL_DATA / name).exists():
            pytest.skip(f"needs real data: {name} in the folder that STOP_MIM_TEST_DATA names")
        return REAL_DATA / name

    return find


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Models this small gain nothing from threads, and on a busy machine threads wait for one another."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk():
    """What tests write need not survive a power cut, and a busy disk takes longer than most of them."""
    os.fsync = lambda handle: None


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Scenes are drawn once a session, into a cache that the tests own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOP_MIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def two_steps():
    """The configuration of a run of two steps."""
    from stop_mim.training import config

    return config.TrainConfig(
        data="scenes:count=16,size=32",
        encoder=config.EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=24, depth=2, heads=2),
        predictor=config.PredictorConfig(width=16, depth=1, heads=2),
        optim=config.OptimConfig(epochs=1, batch_size=8, warmup_epochs=0.0, ema_start=0.9, ema_final=0.9),
        speed=config.SpeedConfig(device="cpu"),
        log=config.LogConfig(tensorboard=False),
        checkpoint=config.CheckpointConfig(every_steps=1),
    )


@pytest.fixture(scope="session")
def _trained(tmp_path_factory, two_steps):
    from rich.console import Console

    from stop_mim.training.pretrain import train

    folder = tmp_path_factory.mktemp("trained") / "run"
    train(replace(two_steps, out=str(folder)), recipe="my-recipe", console=Console(file=io.StringIO()))
    return folder


@pytest.fixture
def run(_trained, tmp_path):
    """A run of two steps."""
    return Path(shutil.copytree(_trained, tmp_path / "run"))
