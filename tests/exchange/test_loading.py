"""Encoders of every format load with their own tokens; what is not an encoder is refused in one sentence."""

import json

import pytest
import timm
import torch
from release_files import generator, release
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.layers import SwiGLU
from timm.models.vision_transformer import VisionTransformer
from torchvision.transforms.functional import to_pil_image

import stop_mim
from stop_mim.errors import InputError
from stop_mim.exchange.export import export_encoder
from stop_mim.models.encoder import Dimensions, Encoder, Preprocessing, create_encoder
from stop_mim.models.encoder_file import save_encoder
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
def ijepa(tmp_path, transformers):
    """The folder of an I-JEPA model of transformers."""
    transformers.IJepaModel(transformers.IJepaConfig(**SHAPE)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def exported(ours, tmp_path):
    return lambda to: export_encoder(str(ours), to, tmp_path / to)


def randomised(model):
    random = generator(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.1
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "class_token"), [("safetensors", False), ("state", True), ("model", False), ("with a classifier", True)]
)
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
def test_folders_that_timm_wrote(tmp_path, images, name):
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
    for encoder in (stop_mim.load_encoder(tmp_path / "model"), stop_mim.load_encoder(f"hf:{tmp_path / 'model'}")):
        assert isinstance(encoder, Encoder)
        assert encoder.norm_eps == 1e-12
        torch.testing.assert_close(encoder(images), hub(images), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(encoder.embed(images, 2), hub.embed(images, 2), atol=1e-5, rtol=1e-4)
    # Saved as one of ours it is still the same, with its eps and its class token.
    save_encoder(encoder, tmp_path / "ours.safetensors")
    again = stop_mim.load_encoder(tmp_path / "ours.safetensors")
    assert again.norm_eps == 1e-12
    assert torch.equal(again(images), encoder(images))


def test_folders_of_hugging_face_that_are_at_home_or_nowhere(ijepa, monkeypatch):
    monkeypatch.setenv("HOME", str(ijepa.parent))
    assert stop_mim.load_encoder("hf:~/model").dim == 48
    assert stop_mim.load_encoder("untrained:hf:~/model").dim == 48
    for name in (f"{ijepa}/nothing", "./model", "a/b/c"):
        with pytest.raises(InputError, match=f"There is no folder '{name}': .*OWNER/NAME"):
            stop_mim.load_encoder(f"hf:{name}")


def test_other_models_of_hugging_face_stay_what_they_are(tmp_path, images, transformers):
    randomised(transformers.Dinov2Model(transformers.Dinov2Config(**SHAPE))).save_pretrained(tmp_path / "dino")
    other = transformers.IJepaConfig(**SHAPE, hidden_act="relu")
    randomised(transformers.IJepaModel(other)).save_pretrained(tmp_path / "relu")
    vit = transformers.ViTModel(transformers.ViTConfig(**SHAPE), add_pooling_layer=False)
    vit.save_pretrained(tmp_path / "pickle")
    torch.save(load_file(tmp_path / "pickle" / "model.safetensors"), tmp_path / "pickle" / "pytorch_model.bin")
    (tmp_path / "pickle" / "model.safetensors").unlink()
    for name in (f"{prefix}{tmp_path / kind}" for prefix in ("", "hf:") for kind in ("dino", "relu", "pickle")):
        encoder = stop_mim.load_encoder(name)
        assert isinstance(encoder, HubEncoder)
        assert encoder(images).shape == (3, 16, 48)


def test_a_file_whose_name_looks_like_a_part_comes_first(tmp_path):
    torch.save(release(), tmp_path / "a.pth.tar")
    torch.save(release(grid=2), tmp_path / "a.pth.tar#encoder")
    assert stop_mim.load_encoder(tmp_path / "a.pth.tar#target_encoder").grid == (4, 4)
    assert stop_mim.load_encoder(tmp_path / "a.pth.tar#encoder").grid == (2, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["model_args"].update(patch_size=16), "of another shape .*patch_embed.proj.weight is 48x3x8x8"),
        (lambda c: c["model_args"].update(depth=20000), "depth of 20000"),
        (lambda c: c.update(architecture="vit_nonsense"), "config.json .*vit_nonsense"),
        (lambda c: c["pretrained_cfg"].update(mean=[0.5]), r"mean is .*0\.5.*3 values"),
    ],
)
def test_a_folder_of_timm_that_is_wrong(exported, change, words):
    folder = exported("timm")
    # Without our metadata, as timm writes it.
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=words):
        stop_mim.load_encoder(folder)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_hidden_layers", 3, "num_hidden_layers is 3 there, 2 in"),
        ("image_size", 64, "16 positions.*64x64 pixels have 8x8"),
        ("num_attention_heads", 5, "width 48, .* 5 heads"),
        ("num_attention_heads", "3", "num_attention_heads is '3'"),
    ],
)
def test_a_folder_of_hugging_face_that_is_wrong(ijepa, name, value, words):
    config = json.loads((ijepa / "config.json").read_text())
    (ijepa / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(InputError, match=words):
        stop_mim.load_encoder(ijepa)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"image_mean": [0.5]}, r"image_mean is \[0.5\]"),
        ({"image_std": "much"}, "image_std is 'much'"),
        ({"do_center_crop": True, "size": 32, "crop_size": "small"}, "crop_size is 'small'"),
        ({"do_center_crop": True, "size": {"shortest_edge": 0}, "crop_size": {"height": 8}}, "division by zero"),
    ],
)
def test_preprocessing_of_hugging_face_that_is_wrong(ijepa, stored, words):
    (ijepa / "preprocessor_config.json").write_text(json.dumps(stored))
    for load in (stop_mim.load_encoder, load_hub_encoder):
        with pytest.raises(InputError, match=words):
            load(str(ijepa))


def test_what_a_folder_of_hugging_face_leaves_out_has_the_defaults_of_transformers(ijepa, images):
    expected = stop_mim.load_encoder(ijepa)(images)
    # A head of another task, under a name of its own.
    weights = load_file(ijepa / "model.safetensors")
    save_file(weights | {"my_head.weight": torch.zeros(2, 2)}, ijepa / "model.safetensors", {"format": "pt"})
    assert torch.equal(stop_mim.load_encoder(ijepa)(images), expected)
    config = json.loads((ijepa / "config.json").read_text())
    (ijepa / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "layer_norm_eps"}))
    torch.testing.assert_close(stop_mim.load_encoder(ijepa)(images), expected, atol=1e-5, rtol=1e-4)


def test_weights_that_a_model_of_hugging_face_lacks(ijepa):
    tensors = load_file(ijepa / "model.safetensors")
    tensors.pop("encoder.layer.1.attention.attention.key.weight")
    save_file(tensors, ijepa / "model.safetensors")
    with pytest.raises(InputError, match=r"1 missing \(blocks.1.attn.qkv.weight\); 2 unknown"):
        stop_mim.load_encoder(ijepa)
    (ijepa / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no file named model.safetensors"):
        stop_mim.load_encoder(ijepa)
    (ijepa / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config.json"):
        stop_mim.load_encoder(ijepa)


def test_what_is_no_encoder_is_named(tmp_path):
    for name, content in {"text.pth": b"hello", "empty.pth.tar": b"", "broken.safetensors": b"not tensors"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=name):
            stop_mim.load_encoder(tmp_path / name)
    save_file({"conv1.weight": torch.zeros(8, 3, 7, 7)}, tmp_path / "resnet.safetensors")
    with pytest.raises(InputError, match="is not a Vision Transformer"):
        stop_mim.load_encoder(tmp_path / "resnet.safetensors")
    with pytest.raises(InputError, match="There is no encoder 'nowhere'"):
        stop_mim.load_encoder("nowhere")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"no encoder\.safetensors"):
        stop_mim.load_encoder(tmp_path / "folder")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("architecture", '{"nonsense": 1}', "num_heads is None: give a whole number"),
        ("architecture", '{"num_heads": 0, "img_size": [32, 32]}', "0 heads"),
        ("architecture", '{"num_heads": 3, "img_size": 32}', "img_size is 32"),
        ("architecture", '{"num_heads": 3, "img_size": [1000000000, 32]}', "16 positions"),
        ("architecture", "not json", "Expecting value"),
        ("mean", "[0.5]", r"mean is \[0.5\]: give 3 values"),
        ("norm_eps", "null", "norm_eps is None"),
        ("preprocessing", '{"crop": 1}', "preprocessing.crop"),
        ("mean", "[" * 100_000, "metadata that cannot be read"),
    ],
)
def test_a_file_of_ours_with_wrong_metadata(ours, name, value, words):
    with safe_open(ours, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(ours), ours, {**metadata, name: value})
    with pytest.raises(InputError, match=f"ours.safetensors .*{words}"):
        stop_mim.load_encoder(ours)


def test_no_file_asks_for_more_layers_than_it_has(tmp_path):
    path = tmp_path / "deep.safetensors"
    save_encoder(create_encoder(Dimensions(192, 2, 3), 32, 8), path)
    tensors = load_file(path)
    save_file({**tensors, "blocks.100000.x": torch.zeros(1)}, path)
    with pytest.raises(InputError, match=r"12 missing .*1 unknown \(blocks\.100000\.x\)"):
        stop_mim.load_encoder(path)


def test_a_checkpoint_far_from_its_run(tmp_path):
    from stop_mim.training.checkpoint import Checkpoint, save_checkpoint

    save_checkpoint(Checkpoint(1, {"model.target.x": torch.zeros(1)}, {}), tmp_path / "a" / "step-1.safetensors")
    with pytest.raises(InputError, match="step-1"):
        stop_mim.load_encoder(tmp_path / "a" / "step-1.safetensors")


def test_both_encoders_of_a_run_can_be_named(run):
    from stop_mim.training.checkpoint import read_checkpoint
    from stop_mim.training.run_folder import RunFolder

    newest = RunFolder(run).newest_checkpoint()
    tensors = read_checkpoint(newest).tensors
    for part, prefix in (("encoder", "model.encoder."), ("target_encoder", "model.target.")):
        for name in (run, newest):
            found = stop_mim.load_encoder(f"{name}#{part}").state_dict()
            assert all(torch.equal(tensor, tensors[prefix + key]) for key, tensor in found.items())
    assert not torch.equal(tensors["model.encoder.vit.norm.bias"], tensors["model.target.vit.norm.bias"])
    with pytest.raises(InputError, match=r"encoder\.safetensors has no checkpoint"):
        stop_mim.load_encoder(f"{run / 'encoder.safetensors'}#encoder")


@pytest.mark.parametrize("name", ["", "timm:vit_tiny_patch16_224"])
def test_untrained_encoders_are_the_same_every_time(run, name):
    first, again = (stop_mim.load_encoder(f"untrained:{name or run}").state_dict() for _ in range(2))
    assert all(torch.equal(tensor, again[key]) for key, tensor in first.items())
    if not name:
        trained = stop_mim.load_encoder(run).state_dict()
        assert trained.keys() == first.keys()
        assert not torch.equal(trained["vit.norm.bias"], first["vit.norm.bias"])


def test_an_untrained_network_of_what_is_no_run(run, exported, ours, tmp_path):
    (tmp_path / "empty").mkdir()
    checkpoint = max((run / "checkpoints").glob("*.safetensors"))
    others = (f"{run}#encoder", run / "encoder.safetensors", checkpoint, tmp_path / "empty", "nowhere")
    for name in (ours, exported("timm"), exported("hf"), *others):
        with pytest.raises(InputError, match=f"^'{name}' is not a run directory, .* give untrained: with one"):
            stop_mim.load_encoder(f"untrained:{name}")
    stop_mim.load_encoder(f"untrained:{run}/")


def assert_same(found, encoder):
    assert found.architecture() == encoder.architecture()
    assert (found.mean, found.std, found.norm_eps) == (encoder.mean, encoder.std, encoder.norm_eps)
    ours, theirs = encoder.vit.state_dict(), found.vit.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not found.vit.pos_embed.requires_grad


def test_timm_and_back(exported, encoder, images):
    folder = exported("timm")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert type(model) is VisionTransformer
    torch.testing.assert_close(model.forward_features(images), encoder(images), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(images), encoder.embed(images), atol=1e-5, rtol=1e-5)
    settings = timm.data.resolve_model_data_config(model)
    assert (tuple(settings["mean"]), tuple(settings["std"])) == (encoder.mean, encoder.std)
    assert tuple(settings["input_size"]) == (3, 32, 32)
    plain = VisionTransformer(**json.loads((folder / "config.json").read_text())["model_args"], num_classes=0)
    plain.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    for name in (folder, folder / "model.safetensors"):
        assert_same(stop_mim.load_encoder(name), encoder)
    # Through timm itself, which keeps nothing of ours in the file.
    save_file(model.state_dict(), folder / "model.safetensors")
    assert_same(stop_mim.load_encoder(folder), encoder)


def test_hugging_face_and_back(exported, encoder, images, transformers):
    folder = exported("hf")
    model, report = transformers.IJepaModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(model(images).last_hidden_state, encoder(images), atol=1e-5, rtol=1e-5)
    assert_same(stop_mim.load_encoder(folder), encoder)
    assert_same(stop_mim.load_encoder(f"hf:{folder}"), encoder)
    # Through transformers itself.
    model.save_pretrained(folder.parent / "again")
    again = stop_mim.load_encoder(folder.parent / "again")
    assert all(torch.equal(tensor, encoder.vit.state_dict()[name]) for name, tensor in again.vit.state_dict().items())


@pytest.fixture
def photo():
    """A smooth image that is neither square nor of the encoder's size."""
    noise = torch.rand(3, 6, 9, generator=torch.Generator().manual_seed(0))
    return to_pil_image(torch.nn.functional.interpolate(noise[None], (80, 120), mode="bicubic")[0].clamp(0, 1))


def assert_preprocessed_alike(encoder, folder, photo, transformers):
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    theirs = processor(photo, return_tensors="pt")["pixel_values"][0]
    # Values of pixels are rounded to 8 bits in between.
    torch.testing.assert_close(encoder.transform(photo), theirs, atol=0.05, rtol=0)


@pytest.mark.parametrize(
    "how",
    [
        Preprocessing(),
        Preprocessing("bilinear", 0.875),
        Preprocessing("bicubic", 0.8, "squash"),
        Preprocessing("nearest", 1.0, "squash"),
    ],
)
def test_preprocessing_is_exported_to_hugging_face(encoder, tmp_path, photo, transformers, how):
    encoder.preprocessing = how
    save_encoder(encoder, tmp_path / "ours.safetensors")
    folder = export_encoder(str(tmp_path / "ours.safetensors"), "hf", tmp_path / "hf")
    again = stop_mim.load_encoder(folder)
    assert torch.equal(again.transform(photo), encoder.transform(photo))
    if how.interpolation != "nearest":  # Pixels of PIL and torchvision then differ.
        assert_preprocessed_alike(encoder, folder, photo, transformers)


def test_preprocessing_that_hugging_face_cannot_do(encoder, tmp_path):
    encoder.preprocessing = Preprocessing("bicubic", 1.0, "border")
    save_encoder(encoder, tmp_path / "ours.safetensors")
    with pytest.raises(InputError, match=r"cropped with border, .* export it to timm"):
        export_encoder(str(tmp_path / "ours.safetensors"), "hf", tmp_path / "hf")


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("ViT", {"size": 32, "do_normalize": False}, Preprocessing("bicubic", 1.0, "squash")),
        ("ViT", {"size": [32, 32]}, Preprocessing("bicubic", 1.0, "squash")),
        ("DeiT", {"size": 40, "crop_size": 32}, Preprocessing("bicubic", 0.8, "squash")),
        (
            "Beit",
            {"size": {"height": 40, "width": 40}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True},
            Preprocessing("bicubic", 0.8, "squash"),
        ),
        ("Beit", {"size": 32, "crop_size": 16}, Preprocessing("bicubic", 1.0, "squash")),
        ("Bit", {"size": 40, "crop_size": 32}, Preprocessing("bicubic", 0.8)),
        ("Bit", {"size": {"shortest_edge": 40}, "crop_size": [32, 32]}, Preprocessing("bicubic", 0.8)),
        ("Bit", {"size": 32, "do_center_crop": True, "crop_size": 32}, Preprocessing("bicubic", 1.0)),
    ],
)
def test_preprocessing_of_hugging_face_is_read_as_transformers_does(ijepa, photo, transformers, kind, values, expected):
    mean = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}
    stored = {"image_processor_type": f"{kind}ImageProcessor", "resample": 3, **mean, **values}
    (ijepa / "preprocessor_config.json").write_text(json.dumps(stored))
    for load in (stop_mim.load_encoder, load_hub_encoder):
        encoder = load(str(ijepa))
        assert encoder.preprocessing == expected
        assert_preprocessed_alike(encoder, ijepa, photo, transformers)


def test_oblong_images(tmp_path, transformers):
    torch.manual_seed(0)
    encoder = create_encoder(Dimensions(48, 1, 3), image_size=(32, 48), patch_size=8).eval()
    save_encoder(encoder, tmp_path / "ours.safetensors")
    images = torch.randn(1, 3, 32, 48)
    for form in ("timm", "hf"):
        assert_same(
            stop_mim.load_encoder(export_encoder(str(tmp_path / "ours.safetensors"), form, tmp_path / form)), encoder
        )
    hub = load_hub_encoder(str(tmp_path / "hf"))
    torch.testing.assert_close(hub(images), encoder(images), atol=1e-5, rtol=1e-5)
    model = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    torch.testing.assert_close(model.forward_features(images), encoder(images), atol=1e-5, rtol=1e-5)


def test_a_model_of_hugging_face_that_timm_cannot_express(tmp_path, transformers):
    transformers.ViTMAEModel(transformers.ViTMAEConfig(**SHAPE)).save_pretrained(tmp_path / "mae")
    for form, words in (("timm", "eps 1e-12"), ("hf", "class token")):
        with pytest.raises(InputError, match=words):
            export_encoder(f"hf:{tmp_path / 'mae'}", form, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mae"]


def test_what_is_more_than_plain_is_refused(tmp_path):
    scaled = timm.create_model("deit3_small_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=0)
    encoder = stop_mim.Encoder(scaled)
    with pytest.raises(InputError, match=r"2 unknown \(blocks.0.ls1.gamma"):
        save_encoder(encoder, tmp_path / "file.safetensors")
    for peculiar in ({"act_layer": "gelu_tanh"}, {"mlp_layer": SwiGLU}, {"qk_norm": True}, {"reg_tokens": 2}):
        other = VisionTransformer(
            img_size=32, patch_size=8, embed_dim=48, depth=1, num_heads=3, num_classes=0, **peculiar
        )
        with pytest.raises(InputError, match="Vision Transformer"):
            save_encoder(stop_mim.Encoder(other), tmp_path / "file.safetensors")
    assert not list(tmp_path.iterdir())
