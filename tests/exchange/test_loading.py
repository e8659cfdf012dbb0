"""Encoders in every format that others keep theirs in, and one sentence for what is none of them."""

import json

import pytest
import timm
import torch
from release_files import generator, release, tokens_by_definition, without_prefix
from safetensors.torch import load_file, save_file

import stop_mim
from stop_mim.cli import main
from stop_mim.errors import InputError
from stop_mim.exchange.hub_names import from_hub, to_hub_names, to_timm_names
from stop_mim.exchange.timm_folder import write_timm_folder
from stop_mim.models.encoder import Dimensions, Encoder, create_encoder, save_encoder
from stop_mim.models.hub_encoder import HubEncoder, load_hub_encoder

SHAPE = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32, generator=generator(0))


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="needs the extra hf")


def randomised(model):
    random = generator(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.1
    return model.eval()


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("kind", ["safetensors", "state", "model", "with a classifier"])
def test_files_of_timms_names(tmp_path, images, class_token, kind):
    more = {} if class_token else {"class_token": False, "global_pool": "avg", "fc_norm": False}
    classes = 10 if kind == "with a classifier" else 0
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=classes, **more)
    state = randomised(model).state_dict()
    if kind in ("safetensors", "with a classifier"):
        save_file(state, path := tmp_path / "model.safetensors")
    else:
        torch.save(state if kind == "state" else {"model": state, "epoch": 1}, path := tmp_path / "model.pth")
    encoder = stop_mim.load_encoder(path)
    torch.testing.assert_close(encoder(images), model.forward_features(images)[:, int(class_token) :])
    assert encoder.vit.pos_embed.requires_grad, "these positions are learned"


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_tiny_patch16_224 with other heads"])
def test_folders_of_timm_as_timm_writes_them(tmp_path, images, name):
    arguments = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 0}
    if "heads" in name:
        arguments |= {"num_heads": 6, "class_token": False, "global_pool": "avg", "fc_norm": False}
    model = randomised(timm.create_model("vit_tiny_patch16_224", **arguments))
    timm.models.save_for_hf(model, tmp_path / "folder", safe_serialization=True, model_args=arguments)
    encoder = stop_mim.load_encoder(tmp_path / "folder")
    assert encoder.heads == arguments.get("num_heads", 3)
    assert encoder.mean == pytest.approx(model.pretrained_cfg["mean"])
    torch.testing.assert_close(encoder(images), model.forward_features(images)[:, model.num_prefix_tokens :])


@pytest.mark.parametrize("name", ["IJepaModel", "IJepaForImageClassification", "ViTModel", "ViTMAEForPreTraining"])
def test_folders_of_hugging_face_become_timm_models(tmp_path, images, transformers, name):
    config = getattr(transformers, f"{name.replace('Model', '').replace('For', ' ').split()[0]}Config")
    model = randomised(getattr(transformers, name)(config(**SHAPE)))
    model.save_pretrained(tmp_path / "model")
    hub = load_hub_encoder(str(tmp_path / "model"))
    for encoder in (
        stop_mim.load_encoder(tmp_path / "model"),
        stop_mim.load_encoder(f"hf:{tmp_path / 'model'}"),
        from_hub(hub),
    ):
        assert isinstance(encoder, Encoder)
        assert encoder.norm_eps == 1e-12
        torch.testing.assert_close(encoder(images), hub(images), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(encoder.embed(images, 2), hub.embed(images, 2), atol=1e-5, rtol=1e-4)
    # Saved as one of ours it is still the same, with its eps and its class token.
    save_encoder(encoder, tmp_path / "ours.safetensors")
    again = stop_mim.load_encoder(tmp_path / "ours.safetensors")
    assert again.norm_eps == 1e-12
    assert torch.equal(again(images), encoder(images))


def test_other_models_of_hugging_face_stay_what_they_are(tmp_path, images, transformers):
    randomised(transformers.Dinov2Model(transformers.Dinov2Config(**SHAPE))).save_pretrained(tmp_path / "dino")
    other = transformers.IJepaConfig(**SHAPE, hidden_act="relu")
    randomised(transformers.IJepaModel(other)).save_pretrained(tmp_path / "relu")
    for name in (f"{prefix}{tmp_path / kind}" for prefix in ("", "hf:") for kind in ("dino", "relu")):
        encoder = stop_mim.load_encoder(name)
        assert isinstance(encoder, HubEncoder)
        assert encoder(images).shape == (2, 16, 48)


def test_names_go_there_and_back():
    state = without_prefix(release()["encoder"])
    assert to_timm_names(to_hub_names(state)).keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in to_timm_names(to_hub_names(state)).items())


def test_a_part_of_a_file_and_a_file_with_such_a_name(tmp_path):
    contents = release()
    torch.save(contents, tmp_path / "a.pth.tar")
    torch.save(release(grid=2), tmp_path / "a.pth.tar#encoder")
    images = torch.randn(1, 3, 32, 32)
    assert stop_mim.load_encoder(tmp_path / "a.pth.tar#target_encoder").grid == (4, 4)
    assert stop_mim.load_encoder(tmp_path / "a.pth.tar#encoder").grid == (2, 2), "a file of that name comes first"
    (tmp_path / "a.pth.tar#encoder").unlink()
    encoder = stop_mim.load_encoder(tmp_path / "a.pth.tar#encoder")
    state = without_prefix(contents["encoder"])
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(encoder(images), tokens_by_definition(state, images, 3), atol=1e-4, rtol=1e-3)


def small():
    torch.manual_seed(0)
    return create_encoder(Dimensions(48, 2, 3), 32, 8)


def timm_folder(tmp_path, change_tensors=None, change_config=None):
    folder = tmp_path / "timm"
    folder.mkdir()
    write_timm_folder(small(), folder)
    tensors = load_file(folder / "model.safetensors")
    (change_tensors or (lambda t: None))(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (change_config or (lambda c: None))(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_timm_says_how_its_folder_is_built(tmp_path, images):
    encoder = stop_mim.load_encoder(timm_folder(tmp_path))
    assert torch.equal(encoder(images), small().eval()(images))
    assert not encoder.vit.pos_embed.requires_grad


@pytest.mark.parametrize(
    ("change_tensors", "change_config", "words"),
    [
        (lambda t: t.pop("norm.bias"), None, r"1 missing \(norm.bias\)"),
        (lambda t: t.update(extra=torch.zeros(1)), None, r"1 unknown \(extra\)"),
        (
            None,
            lambda c: c["model_args"].update(patch_size=16),
            "of another shape .*patch_embed.proj.weight is 48x3x8x8",
        ),
        (None, lambda c: c["model_args"].update(depth=3), r"12 missing \(blocks.2"),
        (None, lambda c: c.update(architecture="vit_nonsense"), "timm cannot build the model"),
        (None, lambda c: c.update(architecture="resnet18"), "timm cannot build the model"),
        (None, lambda c: c["model_args"].update(num_heads="three"), "timm cannot build the model"),
    ],
)
def test_a_folder_of_timm_that_is_wrong(tmp_path, change_tensors, change_config, words):
    with pytest.raises(InputError, match=words):
        stop_mim.load_encoder(timm_folder(tmp_path, change_tensors, change_config))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_hidden_layers", 3, "num_hidden_layers is 3 there, its weights have 2"),
        ("patch_size", 16, "patch_size is 16 there, its weights have 8"),
        ("image_size", 64, "16 positions, but images of 64x64 pixels have 8x8 patches"),
        ("num_attention_heads", 5, "48 wide, which 5 heads cannot share"),
        ("layer_norm_eps", None, "has no layer_norm_eps"),
    ],
)
def test_a_folder_of_hugging_face_that_is_wrong(tmp_path, transformers, name, value, words):
    folder = tmp_path / "model"
    transformers.IJepaModel(transformers.IJepaConfig(**SHAPE)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop(name) if value is None else config.update({name: value})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=words):
        stop_mim.load_encoder(folder)


def test_weights_that_a_model_of_hugging_face_lacks(tmp_path, transformers):
    folder = tmp_path / "model"
    transformers.IJepaModel(transformers.IJepaConfig(**SHAPE)).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("encoder.layer.1.attention.attention.key.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"1 missing \(blocks.1.attn.qkv.weight\); 2 unknown"):
        stop_mim.load_encoder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"holds no model.safetensors"):
        stop_mim.load_encoder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json cannot be read"):
        stop_mim.load_encoder(folder)


def test_what_is_no_encoder_is_told(tmp_path):
    for name, content in {"text.pth": b"hello", "empty.pth.tar": b"", "broken.safetensors": b"not tensors"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"{name} cannot be read"):
            stop_mim.load_encoder(tmp_path / name)
    save_file({"conv1.weight": torch.zeros(8, 3, 7, 7)}, tmp_path / "resnet.safetensors")
    with pytest.raises(InputError, match="holds no Vision Transformer"):
        stop_mim.load_encoder(tmp_path / "resnet.safetensors")
    with pytest.raises(InputError, match="There is no encoder 'nowhere'"):
        stop_mim.load_encoder("nowhere")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"holds no encoder.safetensors"):
        stop_mim.load_encoder(tmp_path / "folder")


def test_our_file_with_another_architecture_in_its_words(tmp_path):
    path = tmp_path / "mine.safetensors"
    save_encoder(small(), path)
    tensors = load_file(path)
    words = {"format": "stop-mim encoder", "mean": "[0, 0, 0]", "std": "[1, 1, 1]"}
    for architecture, complaint in [
        ('{"embed_dim": 48, "patch_size": 16}', "does not fit the architecture that it names"),
        ('{"nonsense": 1}', "no architecture that can be built"),
        ("not json", "no architecture that can be built"),
    ]:
        save_file(tensors, path, {**words, "architecture": architecture})
        with pytest.raises(InputError, match=complaint):
            stop_mim.load_encoder(path)


def test_a_checkpoint_far_from_its_run(tmp_path):
    from stop_mim.training.checkpoint import Checkpoint, save_checkpoint

    save_checkpoint(Checkpoint(1, {"model.target.x": torch.zeros(1)}, {}), tmp_path / "a" / "step-1.safetensors")
    with pytest.raises(InputError, match="lies outside of its run"):
        stop_mim.load_encoder(tmp_path / "a" / "step-1.safetensors")


def test_the_command_line_tells_it_in_one_sentence(tmp_path, capsys):
    (tmp_path / "cut.pth.tar").write_bytes(b"PK\x03\x04 and then nothing")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "cut.pth.tar"), "--to", "timm", "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("stop-mim: ")
    assert "cannot be read" in line
    assert sorted(tmp_path.rglob("*")) == before
