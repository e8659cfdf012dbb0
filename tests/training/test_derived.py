"""Settings that follow from the images, the device and its memory, and the epochs; what is warned of; config files."""

from dataclasses import replace

import pytest
import torch
from tiny_run import assert_same_checkpoint, checkpoint_at, quietly, tiny_config

from stop_mim.errors import InputError
from stop_mim.sweeps.plan import SweepConfig, make_plan
from stop_mim.training import trial
from stop_mim.training.config import LogConfig, TrainConfig, to_json
from stop_mim.training.config_file import read_config, run_name
from stop_mim.training.derived import batch_for, derive, epochs_for, following
from stop_mim.training.description import warnings_about
from stop_mim.training.distributed import Ranks
from stop_mim.training.pretrain import train
from stop_mim.training.recipes import find_recipe
from stop_mim.training.run_folder import RunFolder
from stop_mim.training.trial import images_at_once, settle

PHOTOS = find_recipe("stop-photos")


@pytest.mark.parametrize(
    ("images", "processes", "expected"),
    # All images in one batch; 2 and 16 batches an epoch; the largest batches; a part for each process.
    [(5, 1, 5), (20, 1, 20), (31, 1, 15), (593, 1, 37), (5_000, 1, 248), (10**6, 1, 256), (10**6, 8, 256), (40, 3, 18)],
)
def test_batches_are_a_sixteenth_of_the_images_within_limits(images, processes, expected):
    assert batch_for(images, processes) == expected


def test_a_number_of_epochs_that_is_none_is_left_to_the_field():
    assert following(PHOTOS, {"optim.epochs": None}) == PHOTOS


def test_hardly_any_image_is_left_out_of_an_epoch_and_batches_have_parts():
    for images in range(2, 3000):
        batch = batch_for(images)
        assert batch <= images
        # Below 64 images a batch, fewer than there are batches; above, up to 7 more for each of the batches.
        assert images % batch < images // batch * (8 if batch >= 64 else 1)
        assert batch < 64 or batch % 8 == 0


def test_epochs_are_those_of_so_many_steps_within_limits():
    assert [epochs_for(steps, "cuda") for steps in (1, 16, 100, 10_000)] == [800, 800, 200, 100]
    assert [epochs_for(steps, "cpu") for steps in (1, 16, 100, 10_000)] == [100, 100, 20, 10]


def test_what_is_given_is_kept_and_the_rest_follows_it():
    free = derive(PHOTOS, 593, "cuda").optim
    assert (free.batch_size, free.epochs, free.warmup_epochs, free.derive) == (37, 800, 80.0, ())
    assert free.lr == pytest.approx(5e-4 * (37 / 256) ** 0.5, rel=5e-3)
    assert (free.start_lr, free.final_lr) == (
        pytest.approx(free.lr / 10, rel=5e-3),
        pytest.approx(free.lr / 100, rel=5e-3),
    )
    given = {"optim.epochs": "3", "optim.lr": "1e-3", "optim.final_lr": "0.0"}
    config = following(PHOTOS, given)
    config = replace(config, optim=replace(config.optim, lr=1e-3, final_lr=0.0))
    kept = derive(config, 593, "cpu").optim
    assert (kept.epochs, kept.lr, kept.final_lr, kept.warmup_epochs, kept.start_lr) == (3, 1e-3, 0.0, 0.3, 1e-4)
    assert kept.batch_size == 37


def test_the_warm_up_keeps_its_fraction_of_the_epochs():
    huge = find_recipe("stop-vith14")
    assert following(huge, {}) == huge
    half = following(huge, {"optim.epochs": "150"}).optim
    assert (half.epochs, half.warmup_epochs, half.hold_after_epoch) == (150, 20.0, 125.0)
    # A bad value is left to whoever reads it.
    for bad in ("many", "-1", float("inf")):
        assert following(huge, {"optim.epochs": bad}) == huge


def test_the_runs_of_a_sweep_have_the_warm_up_of_its_scale(tmp_path):
    # The scale has half of its recipe's epochs and all of its warm-up.
    config = SweepConfig(scale="imagenet", data="images", out=tmp_path)
    options = make_plan("tokens", config).jobs[0].pretrain
    assert options[options.index("--optim.epochs") + 1] == "300"
    assert options[options.index("--optim.warmup-epochs") + 1] == "15"


def test_short_runs_left_out_images_and_unscaled_learning_rates_are_warned_of():
    optim = find_recipe("stop-vitb16").optim
    assert warnings_about(optim, 1_281_167, optim) == []
    (rate,) = warnings_about(replace(optim, batch_size=512), 1_281_167, optim)
    assert "0.0008 for 2,048 images" in rate
    assert "--optim.lr 0.0004" in rate
    assert warnings_about(replace(optim, batch_size=512, lr=4e-4), 1_281_167, optim) == []
    short, left_out = warnings_about(replace(optim, epochs=100, batch_size=512), 593)
    assert "100 steps" in short
    assert "81 of the 593 images" in left_out


def test_a_run_keeps_what_was_derived_and_its_trial_steps_leave_no_trace(tmp_path, monkeypatch):
    monkeypatch.setattr("stop_mim.training.derived.EPOCHS", {"cpu": (2, 2)})
    small = tiny_config(log=LogConfig(1, 5, tensorboard=False))
    optim = replace(small.optim, derive=PHOTOS.optim.derive)
    config = replace(small, optim=optim, speed=replace(small.speed, batch_size_per_device=None))
    told = {}
    for steps in (0, 2):
        run = replace(config, out=str(tmp_path / str(steps)), log=replace(config.log, trial_steps=steps))
        told[steps] = quietly(train, run)[1]
    assert_same_checkpoint(*(checkpoint_at(tmp_path / str(steps), 8) for steps in (0, 2)))
    assert "8 steps (2 epochs of 4), warm-up 0.2 epochs" in told[2]
    assert "14 images per step, 14 at once" in told[2]
    assert "Warning: The run has 8 steps" in told[2]
    assert "images/s, " in told[2].split("measured")[1].splitlines()[0]
    assert "measured" not in told[0]
    kept = RunFolder(tmp_path / "2").config()
    assert (kept.optim.batch_size, kept.optim.epochs, kept.optim.derive) == (14, 2, ())
    assert kept.speed.batch_size_per_device == 14


def test_a_file_describes_a_new_run(tmp_path):
    run = tmp_path / "first"
    run.mkdir()
    before = tiny_config(out=run, stop_after_steps=3)
    (run / "config.json").write_text(to_json(before))
    assert read_config(run / "config.json") == replace(before, out=None, stop_after_steps=None)
    assert (run_name(run / "config.json"), run_name(tmp_path / "mine.yaml")) == ("first", "mine")
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: stop-vitb16\noptim: {epochs: 300, lr: 1e-3}\nencoder:\n  image_size: [64, 64]\nseed: 4\n")
    config, recipe = read_config(file), find_recipe("stop-vitb16")
    assert (config.optim.lr, config.encoder.image_size, config.seed) == (1e-3, (64, 64), 4)
    assert (config.optim.warmup_epochs, config.optim.batch_size, config.predictor) == (7.5, 2048, recipe.predictor)
    for empty, text in (("a.yml", ""), ("a.json", "{}")):
        (tmp_path / empty).write_text(text)
        assert read_config(tmp_path / empty) == TrainConfig()
    for text in ("optim: [1]", "optim: {lr: fast}", "optim: {rate: 1}", "recipe: stop-vitb61", "a: b: c", "3"):
        file.write_text(text)
        with pytest.raises(InputError, match=r"[^.]\): correct it\."):
            read_config(file)


MIB = 2**20


def memory_of(fixed, an_image, limit=float("inf")):
    """A step's memory, and a device that has no more than the limit."""

    def measure(images):
        needed = fixed + an_image * images
        if needed > limit:
            raise torch.OutOfMemoryError
        return needed

    return measure


@pytest.mark.parametrize(
    ("per_step", "budget", "expected"),
    # All fit; the largest divisor that fits; none but one; few images are not divided at all.
    [(2048, 3000, 2048), (2048, 200, 64), (2048, 164, 64), (2048, 163, 32), (100, 180, 50), (2048, 50, 1), (16, 0, 16)],
)
def test_the_largest_part_that_fits(per_step, budget, expected):
    assert images_at_once(per_step, memory_of(100 * MIB, MIB), budget * MIB) == expected


def test_on_a_gpu_memory_is_read_after_what_earlier_runs_left_is_freed_and_half_of_it_is_used(monkeypatch):
    done = []
    monkeypatch.setattr(trial, "forget_peak", lambda device: done.append("freed"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: done.append("read") or (400 * MIB, 800 * MIB))
    config, ranks, measure = find_recipe("stop-vitb16"), Ranks(0, 1, 1, torch.device("cuda")), memory_of(100 * MIB, MIB)
    settled = settle(config, ranks, lambda text: None, lambda config, device, images: measure(images))
    assert settled == replace(config, speed=replace(config.speed, batch_size_per_device=64))
    assert done == ["freed", "read", "freed"]


def test_a_device_that_holds_hardly_any_image_is_an_error_only_if_it_holds_none():
    assert images_at_once(64, memory_of(100 * MIB, 10 * MIB, limit=200 * MIB), 150 * MIB) == 4
    with pytest.raises(InputError, match="4 images does not fit"):
        images_at_once(64, memory_of(100 * MIB, 10 * MIB, limit=120 * MIB), 60 * MIB)
