"""What goes to timm and to Hugging Face comes back bit by bit, and gives the same tokens there."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import SwiGLU
from timm.models.vision_transformer import VisionTransformer

import stop_mim
from stop_mim.cli import main
from stop_mim.errors import InputError
from stop_mim.exchange.export import export_encoder
from stop_mim.exchange.hub_names import from_hub
from stop_mim.models.encoder import Dimensions, create_encoder, save_encoder
from stop_mim.models.hub_encoder import load_hub_encoder


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="needs the extra hf")


def assert_same(found, encoder):
    assert found.architecture() == encoder.architecture()
    assert (found.mean, found.std, found.norm_eps) == (encoder.mean, encoder.std, encoder.norm_eps)
    ours, theirs = encoder.vit.state_dict(), found.vit.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not found.vit.pos_embed.requires_grad


@pytest.fixture
def exported(encoder, tmp_path):
    save_encoder(encoder, tmp_path / "ours.safetensors")
    return lambda to: export_encoder(str(tmp_path / "ours.safetensors"), to, tmp_path / to)


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


def test_weights_alone_of_a_known_width_and_back(tmp_path):
    torch.manual_seed(0)
    encoder = create_encoder(Dimensions(192, 1, 3), image_size=32, patch_size=8)
    save_file(encoder.vit.state_dict(), tmp_path / "bare.safetensors")
    assert_same(stop_mim.load_encoder(tmp_path / "bare.safetensors"), encoder)


def test_hugging_face_and_back(exported, encoder, images, transformers):
    folder = exported("hf")
    model, report = transformers.IJepaModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(model(images).last_hidden_state, encoder(images), atol=1e-5, rtol=1e-5)
    assert_same(stop_mim.load_encoder(folder), encoder)
    assert_same(stop_mim.load_encoder(f"hf:{folder}"), encoder)
    assert_same(from_hub(load_hub_encoder(str(folder))), encoder)
    # Through transformers itself.
    model.save_pretrained(folder.parent / "again")
    again = stop_mim.load_encoder(folder.parent / "again")
    assert all(torch.equal(tensor, encoder.vit.state_dict()[name]) for name, tensor in again.vit.state_dict().items())


def test_hugging_faces_preprocessing_is_ours(exported, encoder, transformers):
    processor = transformers.AutoImageProcessor.from_pretrained(exported("hf"))
    pixels = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = processor(pixels, return_tensors="pt")["pixel_values"][0]
    mean, std = (torch.tensor(values)[:, None, None] for values in (encoder.mean, encoder.std))
    torch.testing.assert_close(found, (pixels / 255 - mean) / std, atol=1e-4, rtol=1e-4)


def test_oblong_images(tmp_path, transformers):
    torch.manual_seed(0)
    encoder = create_encoder(Dimensions(48, 1, 3), image_size=(32, 48), patch_size=8).eval()
    save_encoder(encoder, tmp_path / "ours.safetensors")
    images = torch.randn(1, 3, 32, 48)
    for form in ("timm", "hf"):
        assert_same(
            stop_mim.load_encoder(export_encoder(str(tmp_path / "ours.safetensors"), form, tmp_path / form)), encoder
        )
    model = transformers.IJepaModel.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(model(images).last_hidden_state, encoder(images), atol=1e-5, rtol=1e-5)
    hub = load_hub_encoder(str(tmp_path / "hf"))
    torch.testing.assert_close(hub(images), encoder(images), atol=1e-5, rtol=1e-5)
    model = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    torch.testing.assert_close(model.forward_features(images), encoder(images), atol=1e-5, rtol=1e-5)


def test_a_giants_hidden_width_survives():
    encoder = create_encoder(Dimensions(88, 1, 2, 120 / 88 + 1e-9), image_size=16, patch_size=8)
    assert encoder.vit.blocks[0].mlp.fc1.out_features == 120
    assert VisionTransformer(**encoder.architecture()).blocks[0].mlp.fc1.out_features == 120


def test_a_model_of_hugging_face_that_timm_cannot_express(tmp_path, transformers, images, capsys):
    shape = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 96}
    config = transformers.ViTMAEConfig(**shape, image_size=32, patch_size=8)
    transformers.ViTMAEModel(config).save_pretrained(tmp_path / "mae")
    for form, words in (("timm", "norms of this encoder have eps 1e-12"), ("hf", "has a class token")):
        with pytest.raises(InputError, match=words):
            export_encoder(f"hf:{tmp_path / 'mae'}", form, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mae"]


def test_a_class_token_goes_to_timm_and_back(tmp_path, images):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=0)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    main(["export", str(tmp_path / "model.safetensors"), "--to", "timm", "--out", str(tmp_path / "out")])
    again = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    torch.testing.assert_close(again.forward_features(images), model.eval().forward_features(images))


def test_what_is_more_than_plain_is_refused(tmp_path):
    scaled = timm.create_model("deit3_small_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=0)
    encoder = stop_mim.Encoder(scaled)
    with pytest.raises(InputError, match=r"more than a plain Vision Transformer \(2 unknown \(blocks.0.ls1.gamma"):
        save_encoder(encoder, tmp_path / "file.safetensors")
    for peculiar in ({"act_layer": "gelu_tanh"}, {"mlp_layer": SwiGLU}, {"qk_norm": True}, {"reg_tokens": 2}):
        other = VisionTransformer(
            img_size=32, patch_size=8, embed_dim=48, depth=1, num_heads=3, num_classes=0, **peculiar
        )
        with pytest.raises(InputError, match="more than a plain"):
            save_encoder(stop_mim.Encoder(other), tmp_path / "file.safetensors")
    assert not list(tmp_path.iterdir())
