"""The encoder is a timm model: what is trained here must give the same numbers there."""

import inspect
import math

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from timm.models.vision_transformer import VisionTransformer
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import center_crop, normalize, resize, to_tensor

from stop_mim.errors import InputError
from stop_mim.exchange.importing import load_timm_encoder
from stop_mim.exchange.loading import load_encoder
from stop_mim.models.encoder import SIZES, Dimensions, Encoder, Preprocessing, create_encoder, cut_patches, mlp_ratio
from stop_mim.models.encoder_file import save_encoder
from stop_mim.models.predictor import Predictor, context_projection
from stop_mim.positions import SinCosPositions

SMALL = Dimensions(width=48, depth=3, heads=3)


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return create_encoder(SMALL, image_size=(32, 48), patch_size=8).eval()


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(1))


def test_a_full_subset_gives_the_same_tokens_in_its_own_order(encoder, images):
    order = torch.stack([torch.randperm(24), torch.randperm(24)])
    torch.testing.assert_close(
        encoder(images, order),
        torch.gather(encoder(images), 1, order[..., None].expand(-1, -1, 48)),
        atol=1e-5,
        rtol=1e-5,
    )


def test_embed_pools_the_last_layers(encoder, images):
    torch.testing.assert_close(encoder.embed(images), encoder(images).mean(1))
    four = encoder.embed(images, layers=2)
    assert four.shape == (2, 96)
    torch.testing.assert_close(four[:, 48:], encoder.embed(images))
    timms = encoder.vit.forward_intermediates(images, indices=2, norm=True, output_fmt="NLC", intermediates_only=True)
    torch.testing.assert_close(four, torch.cat([tokens.mean(1) for tokens in timms], 1), atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="has 3 layers"):
        encoder.embed(images, layers=4)


@pytest.mark.parametrize("size", [(32, 48), (16, 80)])
def test_any_image_size_works_as_it_does_in_timm(encoder, size):
    images = torch.randn(1, 3, *size)
    assert encoder(images).shape == (1, size[0] * size[1] // 64, 48)
    torch.testing.assert_close(encoder(images), encoder.vit.forward_features(images), atol=1e-5, rtol=1e-5)


def test_images_that_do_not_fit_the_patches_are_refused(encoder):
    with pytest.raises(InputError, match="30x48 pixels cannot be cut into patches of 8x8"):
        encoder(torch.randn(1, 3, 30, 48))
    with pytest.raises(InputError, match=r"encoder.patch_size is 7"):
        create_encoder(SMALL, image_size=32, patch_size=7)


def test_patches_are_row_major():
    image = torch.arange(2 * 4 * 6.0).reshape(1, 2, 4, 6)
    patches = cut_patches(image, (2, 3))
    assert patches.shape == (1, 4, 12)
    assert torch.equal(patches[0, 1], image[0, :, :2, 3:].flatten())
    assert torch.equal(patches[0, 2], image[0, :, 2:, :3].flatten())


def test_sizes_are_those_of_the_papers():
    millions = {"tiny": 5.5, "small": 21.6, "base": 85.7, "large": 303, "huge": 631, "giant": 1011}
    for name, size in SIZES.items():
        # Four matrices of attention and two of the MLP in each layer; the rest is below 2%.
        layer = (4 + 2 * size.mlp_ratio) * size.width**2
        assert size.depth * layer / 1e6 == pytest.approx(millions[name], rel=0.05)


@pytest.mark.parametrize("initialisation", ["scaled", "release"])
def test_initial_weights_are_scaled_by_depth_or_those_of_the_release(initialisation):
    torch.manual_seed(0)
    encoder = create_encoder(Dimensions(192, 6, 3), image_size=32, patch_size=8, initialisation=initialisation)
    projection = context_projection(192, 96)
    before = projection.weight.clone()
    positions = SinCosPositions(encoder.grid, 96)
    predictor = Predictor(projection, positions, depth=3, heads=3, initialisation=initialisation)
    assert torch.equal(projection.weight, before)
    scaled = initialisation == "scaled"
    for blocks in (encoder.vit.blocks, predictor.blocks):
        for depth, block in enumerate(blocks, start=1):
            for end in (block.attn.proj, block.mlp.fc2):
                assert end.weight.std().item() == pytest.approx(
                    0.02 / math.sqrt(2 * depth) if scaled else 0.02, rel=0.05
                )
            assert block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    patches = encoder.vit.patch_embed.proj.weight.std().item()
    assert patches == pytest.approx(1 / math.sqrt(3 * 8 * 8) if scaled else 0.02, rel=0.05)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_reading_gives_the_same_encoder_back(encoder, images, tmp_path, kind):
    path = tmp_path / "encoder.safetensors"
    save_encoder(encoder, path)
    loaded = load_encoder(path if kind == "file" else tmp_path)
    assert not loaded.training
    assert not loaded.vit.pos_embed.requires_grad
    assert all(parameter.requires_grad for name, parameter in loaded.named_parameters() if name != "vit.pos_embed")
    assert torch.equal(loaded(images), encoder(images))
    assert (loaded.mean, loaded.std, loaded.grid) == (encoder.mean, encoder.std, encoder.grid)


def test_timms_models_with_their_class_token():
    encoder = load_timm_encoder("vit_tiny_patch16_224", pretrained=False).eval()
    images = torch.randn(1, 3, 224, 224)
    assert encoder(images).shape == (1, 196, 192)
    torch.testing.assert_close(encoder(images), encoder.vit.forward_features(images)[:, 1:])
    assert encoder(images, torch.tensor([[3, 4]])).shape == (1, 2, 192)
    assert encoder(torch.randn(1, 3, 96, 64)).shape == (1, 24, 192)
    assert encoder.embed(images, layers=4).shape == (1, 768)
    torch.testing.assert_close(encoder.embed(images), encoder(images).mean(1))
    assert encoder.pools == ("cls", "mean")
    encoder.pool = "cls"
    torch.testing.assert_close(encoder.embed(images, layers=4)[:, -192:], encoder.vit(images))


@pytest.mark.parametrize("class_token", [False, True])
def test_a_last_norm_after_pooling_is_applied_as_timm_does(class_token):
    more = {"global_pool": "avg", "class_token": class_token, "no_embed_class": True, "reg_tokens": 1}
    vit = VisionTransformer(32, 8, embed_dim=48, depth=2, num_heads=3, num_classes=0, dynamic_img_size=True, **more)
    assert isinstance(vit.norm, torch.nn.Identity), "the last norm is vit.fc_norm"
    for parameter in vit.parameters():
        parameter.data = torch.randn_like(parameter)
    encoder, images = Encoder(vit.eval()), torch.randn(2, 3, 32, 32)
    tokens = vit.forward_features(images)
    torch.testing.assert_close(encoder.embed(images), vit.forward_head(tokens, pre_logits=True))
    torch.testing.assert_close(encoder.embed(images, layers=2)[:, 48:], encoder.embed(images))
    torch.testing.assert_close(encoder(images), vit.fc_norm(tokens[:, vit.num_prefix_tokens :]))
    if class_token:
        encoder.pool = "cls"
        torch.testing.assert_close(encoder.embed(images), vit.fc_norm(tokens[:, 0]))


def test_what_timm_does_not_have_is_named():
    for name, words in [
        ("vit_smal_patch16_224", "timm has no model 'vit_smal_patch16_224': .* vit_small_patch16_224"),
        ("resnet18", "not a plain Vision Transformer"),
        ("vit_tiny_r_s16_p8_224", "'vit_tiny_r_s16_p8_224' has a HybridEmbed, .* vit_base_patch16_224"),
        ("vit_pwee_patch16_reg1_gap_256", "'vit_pwee_patch16_reg1_gap_256' has a ParallelScalingBlock"),
    ]:
        with pytest.raises(InputError, match=words):
            load_timm_encoder(name, pretrained=False)


def test_the_mlp_ratio_gives_any_hidden_width():
    for hidden, width in [(120, 88), (6144, 1408), (3072, 768), (392, 88)]:
        assert int(width * mlp_ratio(hidden, width)) == hidden
    assert mlp_ratio(3072, 768) == 4.0


@pytest.mark.parametrize(
    ("preprocessing", "resized"),
    [
        (Preprocessing(), 32),
        (Preprocessing("bilinear", 0.875), 36),
        (Preprocessing("bicubic", 1.0, "squash"), [32, 32]),
    ],
)
def test_the_transform_is_torchvisions_and_stays_with_the_file(encoder, tmp_path, preprocessing, resized):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 90, 3), dtype=np.uint8))
    encoder.preprocessing = preprocessing
    save_encoder(encoder, str(tmp_path / "encoder.safetensors"))
    again = load_encoder(tmp_path / "encoder.safetensors")
    assert again.transform(image).shape == (3, 32, 48)
    again.image_size = (32, 32)
    cut = center_crop(resize(image, resized, InterpolationMode(preprocessing.interpolation)), [32, 32])
    torch.testing.assert_close(again.transform(image), normalize(to_tensor(cut), encoder.mean, encoder.std))


def test_the_transform_takes_what_training_takes(encoder):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8))
    upright = encoder.transform(image)
    turned = image.transpose(Image.Transpose.ROTATE_90)
    exif = turned.getexif()
    exif[ExifTags.Base.Orientation] = 6
    turned.info["exif"] = exif.tobytes()
    assert torch.equal(encoder.transform(turned), upright)
    image.info["exif"] = b"Exif\0\0damaged"
    assert torch.equal(encoder.transform(image), upright)
    assert torch.equal(encoder.transform(image.convert("RGBA")), upright)
    grey = encoder.transform(image.convert("L").convert("RGB"))
    assert torch.equal(encoder.transform(image.convert("L")), grey)
    assert encoder.transform(image.convert("CMYK")).shape == (3, 32, 48)


def test_an_encoder_that_could_not_be_made_or_loaded_again_is_refused(encoder, tmp_path):
    with pytest.raises(InputError, match="'teeny'"):
        inspect.unwrap(create_encoder)("teeny")  # Without the check of types.
    with pytest.raises(InputError, match=r"encoder\.pth"):
        save_encoder(encoder, tmp_path / "encoder.pth")
    assert not list(tmp_path.iterdir())
