"""Linear heads by SGD: how good they are, what chooses among them, and what cannot be done."""

from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from small_trainings import ALONE, CPU, NOWHERE, PRECONDITIONED, QUICK, SPEED, HubModel, coloured, small_encoder

from stop_mim.data.labelled import LabelledSet
from stop_mim.errors import InputError, TrainingDiverged
from stop_mim.evaluation.features import pooled_features
from stop_mim.evaluation.linear_heads import Head
from stop_mim.evaluation.linear_sgd import LinearRun, LinearSGDConfig, config_for, linear_sgd, lr_factor
from stop_mim.evaluation.protocols import PROTOCOLS
from stop_mim.models.encoder import Encoder
from stop_mim.models.hub_encoder import HubEncoder
from stop_mim.training.config import SpeedConfig
from stop_mim.training.distributed import Ranks


def test_heads_are_about_as_good_as_logistic_regression(encoder, sets):
    train, test = sets
    results = dict(linear_sgd(encoder, train, test, replace(QUICK, epochs=16, milestones=(8, 12)), speed=SPEED))
    features = [pooled_features(encoder, data.source.pixels, 2).numpy() for data in sets]
    reference = LogisticRegression(C=1e3, max_iter=5000).fit(features[0], train.labels)
    expected = 100 * reference.score(features[1], test.labels)
    assert 60 < expected < 97  # There is something to get wrong.
    for head in ("last1", "last1+bn", "last2", "last2+bn"):
        assert results[f"linear_sgd/{head}/top1"] > expected - 7
        assert results[f"linear_sgd/{head}/top5"] == 100  # There are four classes.
    assert results["linear_sgd/top1"] > expected - 5


def test_preconditioned_heads_are_logistic_regression_after_forty_steps(encoder, sets):
    train, test = sets
    features = [pooled_features(encoder, data.source.pixels, 2).numpy() for data in sets]
    reference = LogisticRegression(C=1e3, max_iter=5000).fit(features[0], train.labels)
    expected = 100 * reference.score(features[1], test.labels)
    ours = dict(linear_sgd(encoder, *sets, PRECONDITIONED, speed=SPEED))
    for head in ("last1", "last1+bn", "last2", "last2+bn"):
        assert ours[f"linear_sgd/{head}/top1"] == pytest.approx(expected, abs=5)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_is_what_the_heads_are_trained_by(name):
    protocol = PROTOCOLS[name]
    config = config_for(protocol, seed=3)
    assert (config.epochs, config.batch_size, config.lrs, config.seed) == (protocol.epochs, 256, protocol.lrs, 3)
    assert (config.momentum, config.weight_decay) == (protocol.momentum, protocol.weight_decay)
    assert (config.train_view, config.test_view) == (protocol.train_view, protocol.test_view)
    assert config.preconditioned == (name == "generic")
    if protocol.cosine_final_lr is None:
        assert (config.schedule, config.milestones) == ("milestones", protocol.lr_milestones)
    else:
        assert config.schedule == "cosine"
        assert protocol.lr * lr_factor(config, config.epochs) == pytest.approx(protocol.cosine_final_lr)


def test_what_is_asked_for_takes_the_place_of_the_protocols():
    config = config_for(PROTOCOLS["imagenet"], epochs=14, batch_size=64, lrs=(0.1, 1.0))
    assert (config.epochs, config.batch_size, config.lrs, config.milestones) == (14, 64, (0.1, 1.0), (4, 8, 12))
    assert config_for(PROTOCOLS["imagenet"], epochs=1).milestones == ()
    with pytest.raises(InputError, match=r"linear_sgd\.epochs is 0: give a number above zero"):
        config_for(PROTOCOLS["imagenet"], epochs=0)


def test_names_tell_the_heads_and_what_was_chosen(encoder, sets):
    heads = ["last1", "last1+bn", "last2", "last2+bn"]
    for lrs in ((0.5,), (0.5, 0.03)):
        results = dict(linear_sgd(encoder, *sets, replace(QUICK, epochs=1, lrs=lrs), speed=SPEED))
        names = heads if len(lrs) == 1 else [f"{head}@{lr:g}" for head in heads for lr in lrs]
        chosen = ["layers", "batch_norm", "lr", "held_out_top1", "top1", "top5"]
        scores = [f"{name}/{score}" for name in names for score in ("held_out_top1", "top1", "top5")]
        kinds = [f"{head}/{score}" for head in heads for score in ("lr", "held_out_top1", "top1", "top5")]
        kinds = kinds if len(lrs) > 1 else []
        assert [*results] == [f"linear_sgd/{name}" for name in scores + kinds + chosen]
        for head in heads if len(lrs) > 1 else ():
            lr = results[f"linear_sgd/{head}/lr"]
            held_out = {one: results[f"linear_sgd/{head}@{one:g}/held_out_top1"] for one in lrs}
            assert held_out[lr] == max(held_out.values()) == results[f"linear_sgd/{head}/held_out_top1"]
            assert results[f"linear_sgd/{head}/top1"] == results[f"linear_sgd/{head}@{lr:g}/top1"]
        best = f"last{results['linear_sgd/layers']:.0f}{'+bn' if results['linear_sgd/batch_norm'] else ''}"
        best += f"@{results['linear_sgd/lr']:g}" if len(lrs) > 1 else ""
        for score in ("held_out_top1", "top1", "top5"):
            assert results[f"linear_sgd/{score}"] == results[f"linear_sgd/{best}/{score}"]


def test_held_out_images_choose_even_if_the_test_set_would_not(encoder, sets):
    train, test = sets
    # Where every test label is wrong, the head that has learned most is the worst of all.
    wrong = LabelledSet(test.source, (test.labels + 1) % 4, test.indices)
    config = replace(QUICK, epochs=3, lrs=(1e-9, 0.5))
    results = dict(linear_sgd(encoder, train, wrong, config, speed=SPEED))
    assert results["linear_sgd/lr"] == 0.5
    assert results["linear_sgd/held_out_top1"] > 60
    heads = [value for name, value in results.items() if name.endswith("/top1") and name.count("/") == 2]
    assert max(heads) > results["linear_sgd/top1"] + 5
    honest = dict(linear_sgd(encoder, train, test, config, speed=SPEED))
    ours = {name: value for name, value in honest.items() if "held_out" in name}
    assert ours == {name: value for name, value in results.items() if "held_out" in name}


def test_the_heads_do_not_learn_from_what_chooses_among_them(encoder):
    train = coloured(100, together=False)
    run = LinearRun(encoder, train, replace(QUICK, epochs=2), ALONE, replace(SPEED, loader="streaming"))
    run.train(NOWHERE, None)
    assert len(run.held_out) == 20
    assert sorted({*train.source.reads}) == sorted(run.used.indices)
    assert not {*run.used.indices} & {*run.held_out.indices}


def test_several_learning_rates_at_once_change_none_of_the_others(encoder, sets):
    alone = dict(linear_sgd(encoder, *sets, QUICK, speed=SPEED))
    # One of them explodes, and is not chosen.
    grid = dict(linear_sgd(encoder, *sets, replace(QUICK, lrs=(1e30, 0.5)), speed=SPEED))
    for head in ("last1", "last1+bn", "last2", "last2+bn"):
        for score in ("held_out_top1", "top1", "top5"):
            assert grid[f"linear_sgd/{head}@0.5/{score}"] == alone[f"linear_sgd/{head}/{score}"]
    assert grid["linear_sgd/last2@1e+30/top1"] == grid["linear_sgd/last2@1e+30/top5"] == 0
    assert grid["linear_sgd/lr"] == 0.5


def test_the_encoder_stays_as_it_is_and_the_global_generator_too(sets):
    encoder = small_encoder().train()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    modes = []
    encoder.vit.norm.register_forward_hook(lambda module, *_: modes.append(module.training))
    state = torch.get_rng_state()
    list(linear_sgd(encoder, *sets, replace(QUICK, epochs=1), speed=SPEED))
    assert torch.equal(torch.get_rng_state(), state)
    assert encoder.training
    assert not any(modes)
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_bad_training_images_are_left_out(encoder):
    train, test = coloured(400, together=False, bad=(5, 100)), coloured(40, seed=1)
    for loader in ("resident", "streaming"):
        speed = replace(SPEED, loader=loader)
        results = dict(linear_sgd(encoder, train, test, replace(QUICK, held_out_part=0.05), speed=speed))
        assert results["linear_sgd/top1"] > 60


def test_an_encoder_that_gives_no_numbers_is_told(sets):
    encoder = small_encoder()
    encoder.vit.norm.weight.data.fill_(torch.nan)
    with pytest.raises(TrainingDiverged, match="No linear head had a finite loss in epoch 1"):
        list(linear_sgd(encoder, *sets, QUICK, speed=SPEED))
    with pytest.raises(TrainingDiverged, match="features are not finite"):
        list(linear_sgd(encoder, *sets, PRECONDITIONED, speed=SPEED))


def test_a_batch_that_cannot_be_divided_is_refused(encoder, sets):
    run = LinearRun(encoder, sets[0], replace(QUICK, batch_size=33), ALONE, SPEED)
    run.ranks = Ranks(0, 2, 2, CPU)
    with pytest.raises(InputError, match="batch_size is 33: it must be a multiple of 2"):
        run.train(NOWHERE, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("batch_size", 1),
        ("lrs", ()),
        ("lrs", (0.1, 0.1)),
        ("lrs", (-0.1,)),
        ("lrs", (float("nan"),)),
        ("milestones", (8, 4)),
        ("milestones", (0, 4)),
        ("milestone_factor", 2.0),
        ("final_factor", -0.1),
        ("momentum", 1.0),
        ("weight_decay", -1.0),
        ("layers", 0),
        ("held_out_part", 0.0),
        ("held_out_part", 1.0),
        ("held_out_images", 0),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(field, value):
    with pytest.raises(InputError, match=f"linear_sgd.{field} is"):
        replace(LinearSGDConfig(), **{field: value})


@pytest.mark.parametrize("field", ["schedule", "train_view", "test_view"])
def test_a_misspelt_choice_is_refused_by_name(field):
    config = LinearSGDConfig()
    # As it would come from a file: in tests, a call with it is refused by its type before.
    object.__setattr__(config, field, "nonsense")
    with pytest.raises(InputError, match=f"linear_sgd.{field} is nonsense: choose"):
        config.__post_init__()


def test_encoders_of_the_hub_are_probed_too(sets):
    results = dict(linear_sgd(HubEncoder(HubModel()), *sets, QUICK, speed=SPEED))
    assert results["linear_sgd/top1"] > 60
    assert "linear_sgd/last1+bn/top1" in results
    assert not any("last2" in name or "last4" in name for name in results)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("loader", ["resident", "streaming"])
def test_on_the_gpu(sets, loader):
    encoder: Encoder = small_encoder().cuda()
    speed = SpeedConfig(workers=2, loader=loader)
    results = dict(linear_sgd(encoder, *sets, QUICK, speed=speed))
    assert results["linear_sgd/top1"] > 60
    assert Head(2, True, 0.5).name() == "last2+bn"
