"""Models of the hub give their own tokens, without network: small ones are saved and loaded as a folder."""

import sys

import pytest
import torch

from stop_mim.errors import InputError, MissingExtra
from stop_mim.models.hub_encoder import load_hub_encoder

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

SHAPE = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}


def save(tmp_path, kind, config):
    torch.manual_seed(0)
    model = kind(config(**SHAPE)).eval()
    model.save_pretrained(tmp_path / "model")
    return model, load_hub_encoder(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "pools"),
    [
        ("ViT", ("cls", "mean")),
        ("IJepa", ("mean",)),
        ("Dinov2", ("cls", "mean")),
        ("Dinov2WithRegisters", ("cls", "mean")),
        ("ViTMSN", ("cls", "mean")),
        ("Data2VecVision", ("mean", "cls")),
    ],
)
def test_tokens_are_those_of_the_model(tmp_path, name, pools):
    model, encoder = save(tmp_path, getattr(transformers, f"{name}Model"), getattr(transformers, f"{name}Config"))
    images = torch.randn(2, 3, 32, 32)
    tokens = encoder(images)
    assert tokens.shape == (2, 16, 48)
    torch.testing.assert_close(tokens, model(images).last_hidden_state[:, -16:])
    torch.testing.assert_close(encoder.embed(images, 2)[:, 48:], tokens.mean(1))
    assert encoder.pools == pools
    if "cls" in pools:
        encoder.pool = "cls"
        torch.testing.assert_close(encoder.embed(images, 2)[:, 48:], model(images).last_hidden_state[:, 0])
        assert encoder.embed(images, 2).shape == (2, 96)
    encoder.image_size = (48, 40)  # As evaluate --image-size does.
    assert encoder(torch.randn(1, 3, 48, 40)).shape == (1, 30, 48)
    assert not encoder.training


def test_an_mae_is_its_encoder_without_masking(tmp_path):
    model, encoder = save(tmp_path, transformers.ViTMAEForPreTraining, transformers.ViTMAEConfig)
    images = torch.randn(2, 3, 32, 32)
    model.vit.config.mask_ratio = 0.0
    model.vit.embeddings.config.mask_ratio = 0.0
    order = torch.linspace(0, 1, 16).repeat(2, 1)
    expected = model.vit(images, noise=order).last_hidden_state[:, 1:]
    torch.testing.assert_close(encoder(images), expected, atol=1e-5, rtol=1e-4)


def test_untrained_weights_are_others(tmp_path):
    _, encoder = save(tmp_path, transformers.ViTModel, transformers.ViTConfig)
    torch.manual_seed(1)
    other = load_hub_encoder(str(tmp_path / "model"), pretrained=False)
    assert not torch.equal(encoder(torch.ones(1, 3, 32, 32)), other(torch.ones(1, 3, 32, 32)))


def test_mistakes_are_named(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"hf:.*nothing.* could not be loaded"):
        load_hub_encoder(str(tmp_path / "nothing"))
    transformers.BertModel(
        transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16)
    ).save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match="not a plain Vision Transformer"):
        load_hub_encoder(str(tmp_path / "bert"))
    # Its parts have the names of a ViT's, but its layers have several widths.
    swin = transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 1])
    # Its weights are not needed to refuse it.
    swin.save_pretrained(tmp_path / "swin")
    with pytest.raises(InputError, match="'swin', not a plain Vision Transformer"):
        load_hub_encoder(str(tmp_path / "swin"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"stop-mim\[hf\]"):
        load_hub_encoder("somebody/model")


class RunsCode:
    def __reduce__(self):
        return print, ("code of a file ran",)


def test_a_pickle_is_read_as_far_as_it_holds_tensors_alone(tmp_path, capsys):
    """The DINO and data2vec models of the hub have no other file."""
    model, encoder = save(tmp_path, transformers.Data2VecVisionModel, transformers.Data2VecVisionConfig)
    (tmp_path / "model" / "model.safetensors").unlink()
    weights = tmp_path / "model" / "pytorch_model.bin"
    torch.save(model.state_dict(), weights)
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(load_hub_encoder(str(tmp_path / "model"))(images), encoder(images))
    torch.save({**model.state_dict(), "more": RunsCode()}, weights)
    with pytest.raises(InputError, match="only tensors"):
        load_hub_encoder(str(tmp_path / "model"))
    assert "ran" not in capsys.readouterr().out
