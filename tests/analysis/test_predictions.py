import numpy as np
import PIL.Image
import pytest
import torch
from analysed_runs import GRID, SIZE, pretend, tiny_config
from torchvision.transforms.v2.functional import resize

from stop_mim.analysis.predictions import (
    all_features,
    central_target,
    feature_objective,
    fitted,
    patch_features,
    pca_maps,
    prediction_map,
    prediction_maps,
    sample_images,
    sample_masks,
    sample_pictures,
)
from stop_mim.analysis.runs import RunRecords, read_records
from stop_mim.data.augment import normalise
from stop_mim.masking import Masks
from stop_mim.models.build import build_objective
from stop_mim.training.config import MaskConfig, ObjectiveConfig

N_PATCHES = GRID[0] * GRID[1]
MASKS = Masks(torch.tensor([[0, 1, 2]]), torch.tensor([[[5, 9], [14, 20]]]))


def images(count=1, seed=0):
    return torch.randint(0, 256, (count, 3, *SIZE), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@pytest.fixture
def seer(tmp_path):
    """Every patch has a feature of its own, and masked patch j is predicted to look like patch j + 1."""
    objective = build_objective(tiny_config(tmp_path))
    objective.predict = lambda images, masks, generator=None: 3 * torch.eye(N_PATCHES)[masks.targets + 1]
    objective.target_features = lambda images, masks: 2 * torch.eye(N_PATCHES)[masks.targets]
    return objective


def test_a_map_sums_to_one_and_peaks_where_the_prediction_points(seer):
    maps = prediction_maps(seer, images(), MASKS)
    assert maps.shape == (1, 4, N_PATCHES)
    assert torch.allclose(maps.sum(-1), torch.ones(1, 4))
    assert maps.argmax(-1).tolist() == [[6, 10, 15, 21]]
    # One cosine is 1 and all others are 0.
    assert maps[0, 0, 6].item() == pytest.approx(np.e / (np.e + N_PATCHES - 1))
    assert torch.equal(prediction_map(seer, images()[0], MASKS, patch=14), maps[0, 2].unflatten(0, GRID))


@pytest.mark.parametrize(("kind", "layers"), [("ijepa", 1), ("data2vec", 2)])
def test_real_objectives_give_maps_in_the_space_of_their_targets(tmp_path, kind, layers):
    torch.manual_seed(0)
    config = tiny_config(
        tmp_path, objective=ObjectiveConfig(kind=kind, target_layers=layers), masks=MaskConfig(kind="random")
    )
    objective = feature_objective(build_objective(config).eval())
    masks = sample_masks(RunRecords(tmp_path, config, [], []), 2)
    maps = prediction_maps(objective, images(2), masks)
    assert maps.shape == (2, masks.targets[0].numel(), N_PATCHES)
    assert torch.allclose(maps.sum(-1), torch.ones(maps.shape[:2]))
    # The features of all patches are, at the masked ones, what the loss compares predictions with.
    normalised = normalise(images(2), objective.encoder.mean, objective.encoder.std)
    targets = objective.target_features(normalised, masks).reshape(2, -1, objective.encoder.dim)
    everywhere = all_features(objective, images(2))
    for image in range(2):
        assert torch.allclose(everywhere[image, masks.targets[image].flatten()], targets[image], atol=1e-5)


def test_samples_of_images_and_masks_are_the_same_every_time(stop_run, monkeypatch):
    run = read_records(stop_run)
    pictures = sample_images(run, 3)
    assert pictures.shape == (3, 3, *SIZE)
    assert torch.equal(pictures, sample_images(run, 3))
    assert not torch.equal(pictures[0], pictures[1])
    assert torch.equal(sample_masks(run, 3).targets, sample_masks(run, 3).targets)
    assert len(sample_images(run, 1000)) == 32
    monkeypatch.setattr("stop_mim.analysis.predictions.PICTURE_SIDE", 120)
    large = sample_pictures(run, 3)
    assert large.shape == (3, 3, *(2 * side for side in SIZE)), "the largest multiple of the size below 120 pixels"
    shrunk = resize(large, list(SIZE), antialias=True)
    assert (shrunk.float() - pictures.float()).abs().mean() < 12, "the same scenes, drawn anew"


def test_images_of_any_size_are_cut_to_fit_and_bad_ones_passed_over(stop_run, tmp_path):
    for number, (height, width) in enumerate([(20, 90), (90, 20), (33, 47)]):
        PIL.Image.fromarray(np.full((height, width, 3), 10 * number, np.uint8)).save(tmp_path / f"{number}.png")
    (tmp_path / "3.png").write_bytes(b"no image")
    run = read_records(pretend(stop_run, tmp_path / "run", data=str(tmp_path)))
    assert sample_images(run, 4).shape == (4, 3, *SIZE)
    image = torch.zeros(3, 64, 144, dtype=torch.uint8)
    image[:, :, 24:120] = 255
    assert (fitted(image, SIZE)[:, :, 1:-1] == 255).all()


def test_the_central_target_is_in_the_middle_of_its_block():
    block = torch.tensor([[[7, 8, 9, 13, 14, 15, 19, 20, 21]]])
    assert central_target(Masks(torch.tensor([[0]]), block), GRID) == 14


def test_principal_components_are_colours_with_signs_that_do_not_change():
    generator = torch.Generator().manual_seed(0)
    strengths = torch.tensor([8.0, 4.0, 2.0, 0.1, 0.1])
    features = torch.randn(2, N_PATCHES, 5, generator=generator) * strengths + 5
    colours = pca_maps(features, GRID)
    assert colours.shape == (2, *GRID, 3)
    assert (colours.min(), colours.max()) == (0, 1)
    assert torch.equal(colours, pca_maps(features.clone(), GRID))
    # The components are the axes, in the order of their strength, and red grows with the first of them.
    for component in range(3):
        both = torch.stack([colours[..., component].flatten(), features[..., component].flatten()])
        assert torch.corrcoef(both)[0, 1] > 0.98


def test_patch_features_are_the_frozen_encoders(stop_run):
    encoder = read_records(stop_run).objective.frozen
    found = patch_features(encoder, images(2))
    assert found.shape == (2, N_PATCHES, encoder.dim)
    assert not found.requires_grad
    assert torch.allclose(found.mean(1), encoder.embed(normalise(images(2), encoder.mean, encoder.std)), atol=1e-5)
