"""Files of the releases' layout give the tokens and predictions of their definition; nothing else is loaded."""

import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from release_files import (
    HEADS,
    encoder_state,
    generator,
    prediction_by_definition,
    release,
    tokens_by_definition,
    without_prefix,
)

import stop_mim
from stop_mim.errors import InputError
from stop_mim.exchange.initial_weights import initialise
from stop_mim.masking import Masks
from stop_mim.models.build import build_objective
from stop_mim.training.config import EncoderConfig, PositionsConfig, PredictorConfig, TrainConfig


def save(contents, path):
    torch.save(contents, path)
    return path


@pytest.fixture
def images():
    return torch.randn(2, 3, 64, 64, generator=generator(0))


@pytest.mark.parametrize(
    ("width", "patch", "image_size", "prefix"),
    [(768, 16, 224, "module."), (1280, 14, 224, "")],
    ids=["ViT-B/16", "ViT-H/14"],
)
def test_tokens_are_those_of_the_definition(tmp_path, width, patch, image_size, prefix):
    grid = image_size // patch
    states = {
        "encoder": encoder_state(width, patch, grid, 1, seed=1),
        "target_encoder": encoder_state(width, patch, grid, 1, seed=3),
    }
    contents = {part: {f"{prefix}{name}": t for name, t in state.items()} for part, state in states.items()}
    path = save({**contents, "predictor": {}, "opt": {}, "epoch": 1}, tmp_path / "jepa-ep300.pth.tar")
    images = torch.randn(1, 3, image_size, image_size, generator=generator(0))
    for name, part in ((str(path), "target_encoder"), (f"{path}#encoder", "encoder")):
        encoder = stop_mim.load_encoder(name)
        assert (encoder.heads, encoder.grid, encoder.image_size) == (HEADS[width], (grid, grid), (image_size,) * 2)
        assert not encoder.training
        assert not encoder.vit.pos_embed.requires_grad, "sine-cosine positions stay fixed"
        with torch.no_grad():
            expected = tokens_by_definition(states[part], images, HEADS[width])
            torch.testing.assert_close(encoder(images), expected, atol=2e-4, rtol=1e-3)


def test_a_subset_and_half_precision(tmp_path, images):
    contents = release()
    contents["target_encoder"] = {name: tensor.half() for name, tensor in contents["target_encoder"].items()}
    encoder = stop_mim.load_encoder(save(contents, tmp_path / "half.pth.tar"))
    assert encoder.vit.norm.weight.dtype == torch.float32
    assert not encoder.vit.pos_embed.requires_grad
    indices = torch.tensor([[3, 7, 8], [15, 0, 4]])
    state = {name: tensor.float() for name, tensor in without_prefix(contents["target_encoder"]).items()}
    torch.testing.assert_close(
        encoder(images, indices), tokens_by_definition(state, images, 3, indices), atol=1e-4, rtol=1e-4
    )


def whole_model(path, positions):
    torch.manual_seed(7)
    encoder = EncoderConfig("tiny", image_size=(64, 64), depth=2)
    config = TrainConfig(encoder=encoder, predictor=PredictorConfig(width=48, depth=2), positions=positions)
    objective = build_objective(config).eval()
    initialise(objective, path)
    return objective


@pytest.mark.parametrize("stop", [False, True], ids=["I-JEPA", "StoP"])
def test_the_whole_model_predicts_as_defined(tmp_path, images, stop):
    contents = release(prefix="" if stop else "module.")
    positions = PositionsConfig(convention="release") if stop else PositionsConfig(kind="sincos")
    objective = whole_model(save(contents, tmp_path / "whole.pth.tar"), positions)
    masks = Masks(torch.tensor([[0, 1, 2, 5], [4, 8, 9, 3]]), torch.tensor([[[10, 11], [14, 15]], [[6, 7], [0, 1]]]))
    encoder, target, predictor = (without_prefix(contents[part]) for part in ("encoder", "target_encoder", "predictor"))
    context = tokens_by_definition(encoder, images, 3, masks.context)
    # StoP's masked tokens get the projection's bias, I-JEPA's the mask token.
    masked = predictor["predictor_embed.bias"] if stop else predictor["mask_token"]
    with torch.no_grad():
        predicted = objective.predict(images, masks)
        for block in range(2):
            expected = prediction_by_definition(
                predictor, context, masks.context, masks.targets[:, block], heads=3, masked=masked
            )
            torch.testing.assert_close(predicted[:, block], expected, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(
            objective.target(images), tokens_by_definition(target, images, 3), atol=1e-4, rtol=1e-3
        )


@pytest.mark.parametrize("kind", ["new", "NumPy 1", "old torch"])
def test_numpys_numbers_beside_the_tensors(tmp_path, images, kind):
    path = tmp_path / "numbers.pth.tar"
    numbers = {"loss": np.float64(0.25), "lr": np.float32(0.5), "epoch": np.int64(3), "done": np.bool_(True)}
    torch.save({**release(), **numbers}, path, _use_new_zipfile_serialization=kind != "old torch")
    if kind == "NumPy 1":
        # As NumPy 1 wrote them: the same function lay in another module.
        with zipfile.ZipFile(path) as file:
            entries = {name: file.read(name) for name in file.namelist()}
        with zipfile.ZipFile(path, "w") as file:
            for name, data in entries.items():
                file.writestr(name, data.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
        assert b"numpy.core.multiarray" in path.read_bytes()
    assert stop_mim.load_encoder(path)(images).shape == (2, 16, 192)


def change(part, change_state):
    contents = release()
    change_state(contents[part])
    return contents


def drop(*names):
    return lambda state: [state.pop(f"module.{name}") for name in names]


def put(name, *shape):
    return lambda state: state.update({f"module.{name}": torch.zeros(*shape)})


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (change("target_encoder", drop("norm.weight", "norm.bias")), r"2 missing \(norm.weight, norm.bias\)"),
        (
            change("target_encoder", put("blocks.0.attn.q_norm.weight", 64)),
            r"1 unknown \(blocks.0.attn.q_norm.weight\)",
        ),
        (
            change("target_encoder", put("blocks.1.mlp.fc1.bias", 700)),
            r"1 of another shape \(blocks.1.mlp.fc1.bias is 700 instead of 768\)",
        ),
        (change("target_encoder", put("patch_embed.proj.weight", 192, 1, 16, 16)), "1 channels"),
        (change("target_encoder", put("pos_embed", 1, 15, 192)), "15 positions"),
        (release(width=200), "width 200"),
        ({"encoder": release()["encoder"]}, "no weights under 'target_encoder'.*#encoder"),
        ({"target_encoder": {"conv1.weight": torch.zeros(64, 3, 7, 7)}}, "is not a Vision Transformer.*conv1.weight"),
        ([1, 2], "holds no weights by name"),
    ],
)
def test_what_does_not_fit_is_listed(tmp_path, contents, words):
    with pytest.raises(InputError, match=words) as raised:
        stop_mim.load_encoder(save(contents, tmp_path / "bad.pth.tar"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("part", "change_state", "words"),
    [
        ("predictor", drop("mask_token"), r"1 missing \(predictor.mask_token\)"),
        ("predictor", put("predictor_pos_embed", 1, 9, 48), "has other positions"),
        ("predictor", drop("predictor_pos_embed"), "has other positions"),
        ("encoder", put("pos_embed", 1, 25, 192), "an encoder and a target encoder of different shapes"),
    ],
)
def test_a_whole_model_must_be_whole(tmp_path, part, change_state, words):
    with pytest.raises(InputError, match=words):
        whole_model(save(change(part, change_state), tmp_path / "bad.pth.tar"), PositionsConfig())


class Evil:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("kind", ["beside the tensors", "old format", "bare pickle", "as a state"])
def test_code_in_a_file_does_not_run(tmp_path, kind):
    marker, path = tmp_path / "marker", tmp_path / "evil.pth.tar"
    if kind == "bare pickle":
        path.write_bytes(pickle.dumps(Evil(marker)))
    elif kind == "as a state":
        torch.save({"target_encoder": Evil(marker)}, path)
    else:
        torch.save({**release(), "opt": Evil(marker)}, path, _use_new_zipfile_serialization=kind != "old format")
    with pytest.raises(InputError, match="evil"):
        stop_mim.load_encoder(path)
    assert not marker.exists()
    # The same file does it when it is trusted: the test can fail.
    pickle.loads(pickle.dumps(Evil(marker)))
    assert marker.exists()


@pytest.mark.parametrize("content", [b"", b"x\n", b"<html>", b"0123"])
def test_a_file_that_torch_did_not_write_has_no_weights(tmp_path, content):
    path = tmp_path / "page.pth.tar"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"page.pth.tar is neither a file of torch.save"):
        stop_mim.load_encoder(path)


@pytest.mark.parametrize(("part", "new"), [(0.9, True), (0.999, False)])
def test_a_truncated_file_is_refused(tmp_path, part, new):
    path = tmp_path / "cut.pth.tar"
    torch.save(release(depth=1, predictor_depth=1), path, _use_new_zipfile_serialization=new)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(InputError, match="cut"):
        stop_mim.load_encoder(path)


def test_arrays_of_numpy_are_no_numbers(tmp_path):
    with pytest.raises(InputError, match="_reconstruct"):
        stop_mim.load_encoder(save({**release(), "loss": np.ones(3)}, tmp_path / "array.pth.tar"))
