"""MAE: its loss, what the encoder sees, and the same numbers as transformers' MAE."""

import re

import pytest
import torch
from safetensors.torch import load_file

from stop_mim.exchange.importing import read_hub_folder, to_timm_names
from stop_mim.masking import Masks, RandomMasks
from stop_mim.models.encoder import Dimensions, create_encoder
from stop_mim.models.mae import MAE
from stop_mim.models.predictor import Predictor, context_projection
from stop_mim.positions import Positions, SinCosPositions

PATCH, GRID = 8, (4, 6)


def make():
    """A MAE of 24 patches of 8x8."""
    torch.manual_seed(0)
    encoder = create_encoder(Dimensions(width=48, depth=2, heads=3), image_size=(32, 48), patch_size=PATCH)
    projection = context_projection(48, 24)
    return MAE(encoder, Predictor(projection, SinCosPositions(GRID, 24), depth=2, heads=2, outputs=3 * PATCH**2))


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 32, 48, generator=generator), RandomMasks(GRID).sample(4, generator=generator)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_loss_is_the_mean_squared_error_of_normalised_pixels(batch):
    model, (images, masks) = make(), batch
    predicted, errors = model.predict(images, masks), []
    for image in range(4):
        for number, patch in enumerate(masks.targets[image, 0].tolist()):
            row, column = patch // GRID[1] * PATCH, patch % GRID[1] * PATCH
            pixels = images[image, :, row : row + PATCH, column : column + PATCH].flatten()
            wanted = (pixels - pixels.mean()) / (pixels.var(correction=1) + 1e-6).sqrt()
            errors.append((predicted[image, 0, number] - wanted).square().mean())
    torch.testing.assert_close(model(images, masks), torch.stack(errors).mean(), atol=1e-6, rtol=1e-5)


def test_without_normalisation_pixels_are_predicted_as_they_are(batch):
    model, (images, masks) = make(), batch
    model.norm_pixels = False
    target = model.target_pixels(images, masks)
    row, column = masks.targets[2, 0, 5].item() // GRID[1] * PATCH, masks.targets[2, 0, 5].item() % GRID[1] * PATCH
    assert torch.equal(target[2, 0, 5], images[2, :, row : row + PATCH, column : column + PATCH].flatten())
    assert model(images, masks).item() != make()(images, masks).item()


class CopiedPositions(Positions):
    """A table that was made elsewhere."""

    def __init__(self, table, grid):
        super().__init__()
        self.grid, self.dim = grid, table.shape[1]
        self.register_buffer("copied", table)

    def table(self):
        return self.copied


@pytest.fixture(scope="module")
def theirs():
    """transformers' MAE with random weights, none of which is zero."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTMAEConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=96,
        layer_norm_eps=1e-6,
        image_size=32,
        patch_size=PATCH,
        decoder_num_attention_heads=2,
        decoder_hidden_size=24,
        decoder_num_hidden_layers=2,
        decoder_intermediate_size=96,
        mask_ratio=0.75,
        norm_pix_loss=True,
    )
    torch.manual_seed(0)
    model = transformers.ViTMAEForPreTraining(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.ndim > 1 else 0.5)
    # A whole new model of theirs may have tables of zeros, until weights are loaded; its parts make the real ones.
    parts = transformers.models.vit_mae.modeling_vit_mae
    embeddings, decoder = parts.ViTMAEEmbeddings(config), parts.ViTMAEDecoder(config, num_patches=16)
    embeddings.initialize_weights()
    decoder.initialize_weights(num_patches=16)
    model.vit.embeddings.position_embeddings.data.copy_(embeddings.position_embeddings)
    model.decoder.decoder_pos_embed.data.copy_(decoder.decoder_pos_embed)
    return model


def copied(theirs, folder):
    """Our MAE with their weights, their class token and their tables of positions."""
    theirs.save_pretrained(folder)
    encoder, state = read_hub_folder(folder), load_file(folder / "model.safetensors")
    positions = CopiedPositions(state["decoder.decoder_pos_embed"][0, 1:], (4, 4))
    projection = context_projection(48, 24)
    decoder = Predictor(projection, positions, depth=2, heads=2, outputs=3 * PATCH**2)
    decoder.mask_token.data.copy_(state["decoder.mask_token"][0, 0])
    # Their pixels are in the order row, column, channel.
    order = torch.arange(3 * PATCH**2).reshape(PATCH, PATCH, 3).permute(2, 0, 1).flatten()
    for kind in ("weight", "bias"):
        getattr(projection, kind).data.copy_(state[f"decoder.decoder_embed.{kind}"])
        getattr(decoder.norm, kind).data.copy_(state[f"decoder.decoder_norm.{kind}"])
        getattr(decoder.head, kind).data.copy_(state[f"decoder.decoder_pred.{kind}"][order])
    # Versions of transformers store the layers under different names.
    stored = r"decoder\.decoder_(?:layers|encoder\.layer)(\..*)"
    layers = {f"encoder.layer{found[1]}": state[name] for name in state if (found := re.fullmatch(stored, name))}
    renamed = {name.removeprefix("blocks."): tensor for name, tensor in to_timm_names(layers).items()}
    decoder.blocks.load_state_dict(renamed, strict=True)
    return MAE(encoder, decoder), order


def test_loss_and_predictions_are_those_of_transformers_on_the_same_weights_and_mask(theirs, tmp_path):
    model, order = copied(theirs, tmp_path)
    images, noise = torch.randn(3, 3, 32, 32, generator=seeded()), torch.rand(3, 16, generator=seeded(1))
    with torch.no_grad():
        wanted = theirs(images, noise=noise)
        masked = wanted.mask.bool()
        masks = Masks((~masked).nonzero()[:, 1].view(3, 4), masked.nonzero()[:, 1].view(3, 1, 12))
        predicted, loss = model.predict(images, masks), model(images, masks)
    # The patches of the lowest noise are seen: what they call noise decides the mask, and nothing else.
    assert torch.equal(noise.argsort(1)[:, :4].sort(1).values, masks.context)
    logits = torch.stack([wanted.logits[image, masks.targets[image, 0]] for image in range(3)])[..., order]
    assert logits.std() > 0.1
    torch.testing.assert_close(predicted[:, 0], logits, atol=1e-5, rtol=1e-5)
    assert loss.item() == pytest.approx(wanted.loss.item(), abs=1e-5)
