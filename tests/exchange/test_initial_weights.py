"""A run can start from other weights: a whole model's or an encoder's, never a part of what was asked for."""

import shlex
from dataclasses import replace

import pytest
import timm
import torch
from release_files import generator, release, without_prefix
from safetensors.torch import save_file

import stop_mim
from stop_mim.cli import main
from stop_mim.errors import InputError
from stop_mim.exchange.initial_weights import initialise
from stop_mim.models.build import build_objective
from stop_mim.models.encoder import Dimensions, create_encoder
from stop_mim.models.encoder_file import save_encoder
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.config import (
    EncoderConfig,
    MaskConfig,
    ObjectiveConfig,
    PositionsConfig,
    PredictorConfig,
    TrainConfig,
)

RELEASE = TrainConfig(
    encoder=EncoderConfig("tiny", image_size=(64, 64), depth=2), predictor=PredictorConfig(width=48, depth=2)
)


def built(config, seed=7):
    torch.manual_seed(seed)
    return build_objective(config)


def copy_of(objective):
    return {name: tensor.clone() for name, tensor in objective.state_dict().items()}


def refuses(objective, name, words):
    before = copy_of(objective)
    with pytest.raises(InputError, match=words):
        initialise(objective, name)
    assert all(torch.equal(tensor, before[name]) for name, tensor in objective.state_dict().items()), (
        "nothing is changed"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encoder": EncoderConfig("tiny", (80, 80), depth=2)}, r"pos_embed is 1x16x192 instead of 1x25x192"),
        ({"encoder": EncoderConfig("tiny", (64, 64), depth=3)}, r"missing \(encoder.vit.blocks.2"),
        ({"encoder": EncoderConfig("tiny", (64, 64), depth=2, heads=6)}, r"has 3 heads there and 6 here"),
        ({"predictor": PredictorConfig(48, 2, heads=4)}, r"predictor.blocks.0.attn has 3 heads there and 4 here"),
        ({"positions": PositionsConfig(covariance="untied")}, r"missing \(predictor.positions.covariance.weight\)"),
        ({"objective": ObjectiveConfig("mae"), "masks": MaskConfig("random")}, r"missing \(decoder"),
    ],
)
def test_a_release_of_another_shape_is_refused(released, change, words):
    refuses(built(replace(RELEASE, **change)), released, words)


@pytest.mark.parametrize(
    ("convention", "words"),
    [
        ("paper", "never trained, comes into use and the noise is 2 times"),
        ("std", "comes into use:"),
        ("release", None),
    ],
)
def test_a_release_under_another_convention_is_hinted_at(released, convention, words):
    said = []
    initialise(built(replace(RELEASE, positions=PositionsConfig(convention=convention))), released, said.append)
    assert len(said) == (words is not None)
    assert all(words in text and "--positions.convention release" in text for text in said)


def test_other_positions_of_a_predictor_are_refused(tmp_path):
    contents = release()
    contents["predictor"]["module.predictor_pos_embed"] = torch.randn(1, 16, 48, generator=generator(0))
    torch.save(contents, tmp_path / "other.pth.tar")
    refuses(built(RELEASE), tmp_path / "other.pth.tar", "#predictor has other positions")
    assert initialise(built(RELEASE), f"{tmp_path / 'other.pth.tar'}#target_encoder").startswith("the encoder of")


def test_a_run_or_a_checkpoint_of_our_own(run, two_steps):
    first, last = sorted((run / "checkpoints").glob("*.safetensors"))
    for name, path in ((run, last), (first, first)):
        objective = built(two_steps)
        initialise(objective, name)
        tensors = read_checkpoint(path).tensors
        assert all(torch.equal(tensor, tensors[f"model.{name}"]) for name, tensor in objective.state_dict().items())
    for name in (f"{run}#encoder", f"{first}#target_encoder", run / "encoder.safetensors"):
        assert initialise(built(two_steps), name).startswith("the encoder of")
    wider = replace(two_steps, predictor=PredictorConfig(width=32, depth=1, heads=2))
    refuses(built(wider), run, r"predictor.* is 16 instead of 32.*encoder.safetensors")
    refuses(built(replace(two_steps, predictor=PredictorConfig(16, 1, heads=4))), run, "2 heads there and 4 here")
    last.unlink()
    first.unlink()
    refuses(built(two_steps), run, "encoder.safetensors")
    (run / "checkpoints").rmdir()
    assert initialise(built(two_steps), run).startswith("the encoder of")


@pytest.mark.parametrize("kind", ["ijepa", "mae", "data2vec"])
def test_an_encoder_for_any_objective(tmp_path, two_steps, kind):
    torch.manual_seed(1)
    encoder = create_encoder(Dimensions(24, 2, 2), (32, 32), 8)
    save_encoder(encoder, tmp_path / "mine.safetensors")
    masks = MaskConfig(kind={"ijepa": "multiblock", "mae": "random", "data2vec": "random"}[kind])
    objective = built(replace(two_steps, objective=ObjectiveConfig(kind), masks=masks))
    before = copy_of(objective)
    assert "predictor is new" in initialise(objective, tmp_path / "mine.safetensors")
    for part in (objective.encoder, objective.frozen):
        assert all(torch.equal(tensor, encoder.state_dict()[name]) for name, tensor in part.state_dict().items())
    others = [name for name in before if not name.startswith(("encoder.", "target."))]
    assert others
    assert all(torch.equal(objective.state_dict()[name], before[name]) for name in others)


def test_student_and_teacher_of_data2vec_never_differ_in_their_positions(tmp_path, two_steps):
    encoder = create_encoder(Dimensions(24, 2, 2), (32, 32), 8)
    torch.nn.init.trunc_normal_(encoder.vit.pos_embed, std=0.02)
    save_encoder(encoder, tmp_path / "learned.safetensors")
    config = replace(two_steps, objective=ObjectiveConfig("data2vec"), masks=MaskConfig("random"))
    refuses(built(config), tmp_path / "learned.safetensors", "data2vec")
    initialise(built(two_steps), tmp_path / "learned.safetensors")


def test_an_encoder_of_another_shape_is_refused(tmp_path, encoder, two_steps):
    save_encoder(encoder, tmp_path / "wider.safetensors")
    refuses(built(two_steps), tmp_path / "wider.safetensors", "does not fit the encoder of this run")
    config = replace(two_steps, encoder=EncoderConfig("tiny", (32, 32), 8, width=48, depth=2, heads=3))
    refuses(built(config), tmp_path / "wider.safetensors", r"its mean is \[0.4, 0.5, 0.6\] instead of")
    encoder.mean, encoder.std = (built(config).encoder.mean, built(config).encoder.std)
    save_encoder(encoder, tmp_path / "same.safetensors")
    initialise(built(config), tmp_path / "same.safetensors")
    other_heads = replace(config, encoder=replace(config.encoder, heads=6))
    refuses(built(other_heads), tmp_path / "same.safetensors", "its num_heads is 3 instead of 6")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=0)
    save_file(model.state_dict(), tmp_path / "timm.safetensors")
    refuses(built(RELEASE), tmp_path / "timm.safetensors", "class_token is True instead of False")
    refuses(built(RELEASE), tmp_path / "none.pth.tar", "There is no encoder")


def test_a_run_starts_from_a_release(released, tmp_path, capsys):
    options = shlex.split(
        "--encoder.size tiny --encoder.image-size 64 64 --encoder.depth 2 --predictor.width 48 --predictor.depth 2 "
        "--optim.batch-size 8 --optim.epochs 1 --optim.warmup-epochs 0 --optim.ema-start 1 --checkpoint.keep 9 "
        "--speed.device cpu --data scenes:count=16,size=64"
    )
    main(["pretrain", "ijepa-vitb16", *options, "--out", str(tmp_path / "run"), "--init", str(released)])
    # The target never moved: it still is the release's, whatever the encoder has learned since.
    ours, theirs = (stop_mim.load_encoder(name).vit.state_dict() for name in (tmp_path / "run", released))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    # The weights that it started from are saved before the first step, so that an early crash does not lose them.
    first = read_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000000.safetensors")
    assert torch.equal(first.tensors["model.encoder.vit.norm.bias"], without_prefix(release()["encoder"])["norm.bias"])
    arguments = [*options, "--encoder.patch-size", "8", "--out", str(tmp_path / "other"), "--init", str(released)]
    with pytest.raises(SystemExit) as ended:
        main(["pretrain", "ijepa-vitb16", *arguments])
    assert ended.value.code == 2
    assert "192x3x16x16 instead of 192x3x8x8" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
