"""The parts of fine-tuning: how fast each layer learns, paths that are dropped, images that are mixed, settings."""

from dataclasses import replace

import pytest
import timm
import torch
from small_trainings import CPU, PLAIN, small_encoder
from timm.layers import DropPath
from torch import nn

from stop_mim.errors import InputError
from stop_mim.evaluation.finetune import (
    Classifier,
    FinetuneConfig,
    LowShotFinetuneConfig,
    Mixing,
    make_optimiser,
    trainable_copy,
    with_drop_path,
)
from stop_mim.models.encoder import Encoder


def test_layers_learn_the_slower_the_earlier_they_are():
    encoder = small_encoder(depth=3)
    classifier = Classifier(trainable_copy(encoder, 0.0), 4, torch.Generator())
    optimiser = make_optimiser(classifier, replace(PLAIN, layer_decay=0.5, weight_decay=0.05), CPU)
    names = {parameter: name for name, parameter in classifier.named_parameters()}
    groups = {names[parameter]: group for group in optimiser.param_groups for parameter in group["params"]}
    scales = {name: group["lr_scale"] for name, group in groups.items()}
    assert scales["head.weight"] == scales["head.bias"] == 1
    for block, scale in enumerate((0.125, 0.25, 0.5)):
        assert scales[f"encoder.vit.blocks.{block}.attn.qkv.weight"] == scale
        assert scales[f"encoder.vit.blocks.{block}.norm1.bias"] == scale
    assert scales["encoder.vit.norm.weight"] == 0.5
    assert scales["encoder.vit.patch_embed.proj.weight"] == 0.0625
    assert all(group["weight_decay"] == (0.05 if names_matrix(name) else 0) for name, group in groups.items())
    # Sine-cosine positions are fixed, and everything else learns.
    assert names.keys() - {classifier.encoder.vit.pos_embed} == {
        parameter for group in optimiser.param_groups for parameter in group["params"]
    }


def names_matrix(name):
    return name.endswith("weight") and "norm" not in name


def test_drop_path_is_active_in_training_alone():
    encoder = small_encoder(depth=3)
    dropping = with_drop_path(encoder, 0.6)
    rates = [
        [module.drop_prob for module in block.modules() if isinstance(module, DropPath)] for block in blocks(dropping)
    ]
    assert rates == [[], [pytest.approx(0.3)] * 2, [pytest.approx(0.6)] * 2]
    images = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = encoder(images)
        assert torch.equal(dropping.eval()(images), expected)
        one, other = dropping.train()(images), dropping(images)
    assert not torch.allclose(one, expected)
    assert not torch.allclose(one, other)
    # With a chance of 0.7 · 0.7 · 0.4 · 0.4 each that nothing is left out, some images differ and few do not.
    changed = (one - expected).abs().amax((1, 2)) > 1e-4
    assert changed.sum() > 8
    assert not any(isinstance(module, DropPath) for module in with_drop_path(dropping, 0.0).modules())


def blocks(encoder):
    return encoder.vit.blocks


def one_hot_images(labels, classes=3):
    """Images whose channels are the probabilities of their classes."""
    return nn.functional.one_hot(labels, classes).float()[:, :, None, None].expand(-1, -1, 16, 16).clone()


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_what_is_mixed_has_the_target_that_belongs_to_it(mixup, cutmix):
    mixing = Mixing(replace(PLAIN, mixup=mixup, cutmix=cutmix), 3, CPU)
    labels = torch.tensor([0, 1, 2, 0, 1])
    mixed = 0
    for seed in range(20):
        given = one_hot_images(labels)
        images, targets = mixing(given, labels, seed)
        assert torch.equal(given, one_hot_images(labels))
        # Of a pasted box as of a blend, the mean over the pixels is the part of each class.
        torch.testing.assert_close(images.mean((2, 3)), targets, atol=1e-5, rtol=0)
        assert targets[4].tolist() == [0, 1, 0]  # The odd one stays as it is.
        mixed += bool((targets[:4].amax(1) < 1).any())
        again = mixing(given, labels, seed)
        assert torch.equal(again[0], images)
        assert torch.equal(again[1], targets)
    assert mixed > 10


def test_without_mixing_targets_are_smoothed_and_boxes_erased():
    labels = torch.tensor([0, 1, 2, 0])
    images, targets = Mixing(replace(PLAIN, label_smoothing=0.3), 3, CPU)(one_hot_images(labels), labels, 0)
    assert torch.equal(images, one_hot_images(labels))
    assert targets[1].tolist() == pytest.approx([0.1, 0.8, 0.1])
    erased, _ = Mixing(replace(PLAIN, erasing_probability=1.0), 3, CPU)(one_hot_images(labels), labels, 0)
    part = (erased != one_hot_images(labels)).any(1).float().mean((1, 2))
    assert (part > 0.01).all()
    assert (part < 0.5).all()


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_timms_own_models_learn_in_all_that_a_prediction_depends_on(pool):
    vit = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        embed_dim=24,
        depth=2,
        num_heads=2,
        num_classes=0,
        global_pool=pool,
        dynamic_img_size=True,
        reg_tokens=1,
    )
    encoder = Encoder(vit)
    classifier = Classifier(trainable_copy(encoder, 0.1), 3, torch.Generator())
    optimiser = make_optimiser(classifier, PLAIN, CPU)
    # The head begins at almost zero; a larger one lets every gradient be seen.
    nn.init.normal_(classifier.head.weight)
    classifier(torch.randn(8, 3, 32, 32)).square().sum().backward()
    learned = {parameter for group in optimiser.param_groups for parameter in group["params"]}
    for name, parameter in classifier.named_parameters():
        # A process that waits for the gradient of an unused weight would wait for ever.
        assert (parameter.grad is not None) == (parameter in learned) == parameter.requires_grad, name
    assert classifier.encoder.vit.pos_embed in learned
    undecayed = {p for group in optimiser.param_groups for p in group["params"] if not group["weight_decay"]}
    assert {classifier.encoder.vit.cls_token, classifier.encoder.vit.reg_token} <= undecayed


def test_named_recipes_can_be_varied():
    full, low_shot = FinetuneConfig(), LowShotFinetuneConfig()
    assert low_shot.epochs > full.epochs
    assert low_shot.lr < full.lr
    assert low_shot.mixup == low_shot.cutmix == 0
    assert replace(low_shot, epochs=30).epochs == 30
    for config, group in ((full, "finetune"), (low_shot, "finetune_low_shot")):
        with pytest.raises(InputError, match=rf"{group}\.warmup_epochs is .*: give at most the 2 epochs"):
            replace(config, epochs=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("batch_size", 0),
        ("lr", 0.0),
        ("lr", float("inf")),
        ("lowest_lr", -1.0),
        ("warmup_epochs", 101.0),
        ("layer_decay", 0.0),
        ("layer_decay", 1.1),
        ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)),
        ("clip_gradient_norm", 0.0),
        ("drop_path", 1.0),
        ("mixup", -0.1),
        ("cutmix", float("nan")),
        ("label_smoothing", 1.0),
        ("erasing_probability", 1.1),
        ("held_out_part", 1.0),
        ("held_out_images", 0),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_name(field, value):
    with pytest.raises(InputError, match=f"finetune.{field} is"):
        replace(FinetuneConfig(), **{field: value})


@pytest.mark.parametrize("field", ["train_view", "test_view"])
def test_a_misspelt_choice_is_refused_by_name(field):
    config = FinetuneConfig()
    # As it would come from a file: in tests, a call with it is refused by its type before.
    object.__setattr__(config, field, "nonsense")
    with pytest.raises(InputError, match=f"finetune.{field} is nonsense: choose"):
        config.__post_init__()
