"""What is to be run: refused in one sentence where it cannot be, kept in the folder, and recognised there."""

import json
from dataclasses import replace

import pytest
from mini_sweep import MINI, STEPS, install, mini_config, silent

from stop_mim.errors import InputError
from stop_mim.sweeps.config import SweepConfig
from stop_mim.sweeps.estimate import steps_of
from stop_mim.sweeps.grid import SWEEPS, Variant
from stop_mim.sweeps.plan import Job, make_plan, out_folder, read_plan, require_same_plan, write_plan
from stop_mim.sweeps.runner import run_sweep
from stop_mim.sweeps.scales import find_scale


@pytest.fixture(autouse=True)
def _mini(monkeypatch):
    install(monkeypatch)


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("minis", {}, "There is no sweep 'minis': choose one of positions, .*, mini"),
        ("mini", {"seeds": (0, 1, 0)}, "seeds has 0 twice: give every seed once"),
        ("mini", {"seeds": ()}, "seeds is empty: give at least one seed"),
        ("mini", {"seeds": (-1,)}, "seeds has -1: give numbers that are zero or positive"),
        ("mini", {"variants": ("loud",)}, "has no variant 'loud': choose one of fixed, noisy"),
        ("mini", {"baseline": "loud"}, "has no variant 'loud': choose one of fixed, noisy"),
        ("mini", {"side_by_side": 0}, "side_by_side is 0: give a number above zero"),
        ("mini", {"epochs": 0}, "epochs is 0: give a number above zero"),
        ("mini", {"data": "nowhere"}, "There is no data set 'nowhere'"),
        ("mini", {"probe_data": "x"}, "The scale demo has probes of its own: leave 'x' out"),
        ("mini", {"scale": "tiny-imagenet"}, "The scale tiny-imagenet has no images of its own: add --data"),
        ("mini", {"scale": "imagenet"}, "The scale imagenet has no images of its own: add --data"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(name, fields, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence) as caught:
        run_sweep(name, mini_config(tmp_path / "out", **fields), silent())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_unknown_scale_is_one_sentence():
    with pytest.raises(InputError, match="There is no scale 'huge': choose one of demo, tiny-imagenet, imagenet"):
        find_scale("huge")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"masks.target_scale": (0.5, 0.9)}, "The masks do not fit a grid of 4x4 patches"),
        ({"positions.covariance": "low_rank(99)"}, "covariance is 'low_rank"),
        ({"positions.sgima": 1}, "There is no field 'positions.sgima'"),
        ({"speed.batch_size_per_device": 3}, "optim.batch_size is 8: it must be a multiple of 3"),
    ],
)
def test_a_variant_that_cannot_run_is_refused_before_any_runs(changes, why, tmp_path, monkeypatch):
    broken = replace(MINI, variants=(*MINI.variants, Variant("broken", changes)))
    monkeypatch.setitem(SWEEPS, "mini", broken)
    with pytest.raises(InputError, match=f"The variant 'broken' cannot run: .*{why}"):
        run_sweep("mini", mini_config(tmp_path / "out"), silent())
    assert not (tmp_path / "out").exists()


def test_a_plan_comes_back_as_it_was(tmp_path):
    plan = make_plan("mini", mini_config(tmp_path))
    write_plan(tmp_path, plan)
    assert read_plan(tmp_path) == plan


def test_a_job_comes_back_as_it_was(tmp_path):
    jobs = list(make_plan("mini", mini_config(tmp_path)).jobs(tmp_path, (0, 5)))
    assert [Job.from_line(job.to_line()) for job in jobs] == jobs
    assert all("\n" not in job.to_line() for job in jobs)
    assert [str(job.folder.relative_to(tmp_path)) for job in jobs] == [
        "fixed/seed-0",
        "noisy/seed-0",
        "fixed/seed-5",
        "noisy/seed-5",
    ]
    assert [job.config.seed for job in jobs] == [0, 0, 5, 5]
    assert [job.config.positions.kind for job in jobs[:2]] == ["sincos", "stochastic"]
    assert steps_of(jobs[0], 32) == STEPS


def test_only_some_variants(tmp_path):
    plan = make_plan("mini", mini_config(tmp_path, variants=("noisy",)))
    assert [job.name for job in plan.jobs(tmp_path, (3,), ("noisy",))] == ["noisy seed 3"]
    # They belong to the same sweep.
    write_plan(tmp_path, plan)
    require_same_plan(tmp_path, make_plan("mini", mini_config(tmp_path)))


def test_more_seeds_or_another_speed_are_the_same_sweep(tmp_path):
    config = mini_config(tmp_path)
    write_plan(tmp_path, make_plan("mini", config))
    speed = replace(config.speed, batch_size_per_device=4)
    more = replace(config, seeds=(0, 1, 2, 3), speed=speed, baseline="noisy", side_by_side=2)
    require_same_plan(tmp_path, make_plan("mini", more))


def test_another_sweep_in_the_folder_is_refused(tmp_path, monkeypatch):
    write_plan(tmp_path, make_plan("mini", mini_config(tmp_path)))
    with pytest.raises(InputError, match=r"holds another sweep .*base.optim.epochs was 10 there and is 11 now"):
        run_sweep("mini", mini_config(tmp_path, epochs=11), silent())
    with pytest.raises(InputError, match=r"holds another sweep \('mini' at the scale demo; sweep was mini"):
        run_sweep("tokens", mini_config(tmp_path), silent())
    louder = replace(MINI, variants=(MINI.variants[0], Variant("noisy", {"positions.sigma": 2.0})))
    monkeypatch.setitem(SWEEPS, "mini", louder)
    with pytest.raises(InputError, match=r"variants.noisy.positions.sigma was 1.0 there and is 2.0 now"):
        run_sweep("mini", mini_config(tmp_path), silent())


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InputError, match="exists and is not the folder of a sweep: choose another --out"):
        run_sweep("mini", mini_config(tmp_path), silent())
    with pytest.raises(InputError, match="exists and is not the folder of a sweep"):
        run_sweep("mini", mini_config(tmp_path / "thesis.tex"), silent())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "stop-mim sweep 1"}'])
def test_a_damaged_plan_is_one_sentence(text, tmp_path):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(InputError, match=r"sweep.json cannot be read .*: restore it, or choose another --out"):
        run_sweep("mini", mini_config(tmp_path), silent())


def test_a_plan_of_an_earlier_version_lacks_fields_that_had_no_other_value(tmp_path):
    plan = make_plan("mini", mini_config(tmp_path))
    write_plan(tmp_path, plan)
    stored = json.loads((tmp_path / "sweep.json").read_text())
    del stored["base"]["objective"]
    (tmp_path / "sweep.json").write_text(json.dumps(stored))
    require_same_plan(tmp_path, plan)


def test_the_same_command_has_the_same_folder():
    assert str(out_folder("tokens", SweepConfig(scale="imagenet"))) == "runs/sweep-tokens-imagenet"
