"""Plans: mistakes are refused before anything runs, and a directory keeps the settings of its sweep."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mini_sweep import mini_config

from stop_mim.cli import main
from stop_mim.errors import InputError
from stop_mim.sweeps.grid import Sweep, with_overrides
from stop_mim.sweeps.plan import SweepConfig, base_config, make_plan, runs_by_seed
from stop_mim.training.pretrain import TrainResult

TRAINED = TrainResult(Path("out"), 1, 1, 0.0, None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scale": "huge"}, "'huge'"),
        ({"seeds": ()}, "seeds is"),
        ({"seeds": (0, 1, 0)}, r"seeds is \(0, 1, 0\)"),
        ({"seeds": (2**70,)}, "seeds is"),
        ({"variants": ("loud",)}, "'loud'.*fixed, noisy"),
        ({"baseline": "loud"}, "'loud'"),
        ({"probe_data": "x"}, "--probe-data"),
        ({"scale": "tiny-imagenet"}, "add --data"),
        ({"recipe": "mae-tiny"}, "'mae-tiny'"),
        ({"transfer": ("scenes:count=32",)}, "scenes:count=32"),
        ({"transfer": ("a=scenes", "a=photos")}, "a=photos"),
        ({"transfer": ("a/b=scenes",)}, "letters, digits"),
    ],
)
@pytest.mark.usefixtures("mini")
def test_bad_input_is_refused(fields, words):
    with pytest.raises(InputError, match=words):
        make_plan("mini", mini_config(**fields))


@pytest.mark.parametrize(
    ("changed", "words"), [({"positions.sgima": 1}, "'positions.sgima'"), ({"positions.sigma": -1.0}, "-1.0")]
)
def test_a_variant_that_is_no_valid_config_is_named(mini, changed, words):
    mini["sweep"] = Sweep("broken", {"broken": changed})
    with pytest.raises(InputError, match=f"'broken'.*{words}"):
        make_plan("mini", mini_config())


@pytest.mark.usefixtures("mini")
def test_jobs_are_ordinary_commands_seed_by_seed():
    base = with_overrides(base_config(mini_config()), {"speed.device": "cpu", "speed.recompute": True, "optim.lr": 0.5})
    jobs = make_plan("mini", mini_config(seeds=(0, 5)), base).jobs
    assert [job.name for job in jobs] == ["fixed/seed-0", "noisy/seed-0", "fixed/seed-5", "noisy/seed-5"]
    command = jobs[2].training
    assert command[:2] == ("pretrain", "demo")
    for option in (("--seed", "5"), ("--positions.kind", "sincos"), ("--optim.lr", "0.5"), ("--speed.device", "cpu")):
        place = command.index(option[0])
        assert command[place : place + 2] == option
    run, scores = "out/fixed/seed-5", "out/fixed/seed-5/scores.json"
    evaluation = ("evaluate", run, "--data", "scenes", "--speed.device", "cpu", "--untrained", "no", "--json", scores)
    assert jobs[2].evaluations == {"scores.json": evaluation}
    own, other = make_plan("mini", mini_config(transfer=("c=cifar-100",)), base).jobs[0].evaluations.values()
    assert "--task" not in own
    probe = ("--task", "linear", "--linear.standardise", "True", "--linear.layers", "1", "--data", "cifar-100")
    assert other[:10] == ("evaluate", "out/fixed/seed-0", *probe)
    Path(run).mkdir(parents=True)
    Path(run, "config.json").touch()
    assert jobs[2].training == ("resume", run, "--speed.device", "cpu", "--speed.recompute")


def test_runs_are_in_the_order_of_their_seeds_without_copies(tmp_path):
    for name in ("seed-10", "seed-2", "seed-2.old", "seed-x", "copy of seed-3"):
        (tmp_path / name).mkdir()
    assert list(runs_by_seed(tmp_path).items()) == [(2, tmp_path / "seed-2"), (10, tmp_path / "seed-10")]


def test_labelled_images_are_those_of_the_options():
    config = SweepConfig(scale="imagenet", data="photos", test_data="test", low_shot_list=Path("1percent.txt"))
    evaluate = make_plan("tokens", config).evaluate
    assert evaluate[-6:] == ("--data", "photos", "--test-data", "test", "--low-shot.list-file", "1percent.txt")
    assert "labelled" in make_plan("tokens", replace(config, probe_data="labelled")).evaluate
    assert str(make_plan("tokens", config).out) == "runs/sweep-tokens-imagenet"


def test_another_recipe_takes_the_length_of_the_scale():
    config = SweepConfig(scale="tiny-imagenet", recipe="mae-tiny-imagenet", data="photos")
    with pytest.raises(InputError, match=r"'l1-0\.01'.*l1_strength is 0\.01.*mae"):
        make_plan("regularisation", config)
    plan = make_plan("positions", config)
    assert plan.jobs[0].pretrain[:2] == ("pretrain", "mae-tiny-imagenet")
    assert (plan.base.objective.kind, plan.base.optim.epochs) == ("mae", 54)
    assert str(plan.out) == "runs/sweep-positions-mae-tiny-imagenet"


def test_the_imagenet_sweeps_take_compat_and_any_field(monkeypatch):
    config, trained = SweepConfig(scale="imagenet", compat="release", seeds=(0,), data="photos"), []
    base = with_overrides(base_config(config), {"predictor.depth": 3, "augment.blur_probability": 0.0})
    plan = make_plan("positions", config, base)
    monkeypatch.setattr("stop_mim.training.pretrain.train", lambda run, **more: trained.append(run) or TRAINED)
    for job, overrides in zip(plan.jobs, plan.variants.values(), strict=True):
        assert job.pretrain[2:4] == ("--compat", "release")
        main(job.training)
        assert trained[-1] == with_overrides(base, {**overrides, "out": str(job.folder)})
    assert (trained[-1].masks.compat, trained[-1].positions.convention, trained[-1].optim.epochs) == (
        "release",
        "release",
        300,
    )
    assert str(plan.out) == "runs/sweep-positions-imagenet-release"


@pytest.mark.usefixtures("mini")
def test_other_seeds_variants_and_speed_are_the_same_sweep():
    make_plan("mini", mini_config()).keep()
    more = mini_config(seeds=(0, 1, 2), variants=("noisy",), baseline="noisy", side_by_side=2)
    base = with_overrides(base_config(more), {"speed.workers": 3, "log.every_steps": 7, "checkpoint.keep": 9})
    make_plan("mini", more, base).check()


def test_a_sweep_may_get_more_variants(mini):
    plan = make_plan("mini", mini_config())
    plan.keep()
    mini["sweep"] = Sweep("fixed", {"fixed": plan.variants["fixed"], "loud": {"positions.sigma": 9.0}})
    more = make_plan("mini", mini_config())
    more.check()
    more.keep()
    assert list(more.document()["variants"]) == ["fixed", "loud"]
    assert list(json.loads(Path("out/sweep.json").read_text())["variants"]) == ["fixed", "noisy", "loud"]


def test_a_directory_of_something_else_is_refused(mini):
    make_plan("mini", mini_config()).keep()
    with pytest.raises(InputError, match=r"out holds.*'optim.epochs': 10.*'optim.epochs': 11"):
        make_plan("mini", mini_config(epochs=11)).check()
    mini["sweep"] = Sweep("fixed", {"fixed": {"positions.sigma": 2.0}})
    with pytest.raises(InputError, match=r"variant fixed was.*2\.0"):
        make_plan("mini", mini_config()).check()
    Path("out/sweep.json").write_text("{")
    with pytest.raises(InputError, match=r"sweep\.json cannot be read"):
        make_plan("mini", mini_config()).check()
    Path("out/sweep.json").rename("out/thesis.tex")
    with pytest.raises(InputError, match="out exists"):
        make_plan("mini", mini_config()).check()
