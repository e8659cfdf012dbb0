"""Fine-tuning: what it learns, how fast each layer learns, mixed images, resuming; the encoder stays as it is."""

import pickle
import random
from contextlib import closing
from dataclasses import replace
from itertools import islice

import numpy as np
import PIL.Image
import pytest
import timm
import torch
from small_trainings import (
    CONDITIONS,
    CPU,
    PLAIN,
    SPEED,
    WHOLE,
    InMemory,
    Killed,
    coloured,
    kill_at,
    make_task,
    scores_of,
    signal_at,
    small_encoder,
)
from timm.data import create_transform
from timm.layers import DropPath
from torch import nn

from stop_mim.data.augment import IMAGENET_MEAN as MEAN
from stop_mim.data.augment import normalise
from stop_mim.data.labelled import LabelledSet
from stop_mim.errors import InputError, TrainingDiverged
from stop_mim.evaluation.finetuning import (
    Classifier,
    FinetuneTraining,
    Mixing,
    RandAugment,
    make_optimiser,
    trainable_copy,
)
from stop_mim.evaluation.tasks.finetune import FinetuneOptions, LowShotFinetuneOptions
from stop_mim.models.encoder import Encoder, FrozenEncoder
from stop_mim.seeds import derive_seed
from stop_mim.training.checkpoint import read_checkpoint
from stop_mim.training.distributed import Ranks

RICH = replace(PLAIN, drop_path=0.3, mixup=0.8, cutmix=1.0, label_smoothing=0.1, erasing_probability=0.5)
SIZE = (16, 16)
NAME = "rand-m9-mstd0.5-inc1"


def parity(count, seed=0):
    """Two patches of four are bright or dark; the class is whether they are alike: nothing that is linear in them."""
    generator = np.random.default_rng(seed)
    bright = generator.integers(0, 2, (count, 2))
    pixels = generator.normal(128, 12, (count, 3, 16, 16))
    pixels[:, :, :8, :8] += 40 * (2 * bright[:, :1, None, None] - 1)
    pixels[:, :, 8:, 8:] += 40 * (2 * bright[:, 1:, None, None] - 1)
    source = InMemory(torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)))
    return LabelledSet(source, (bright[:, 0] == bright[:, 1]).astype(np.int64), np.arange(count))


def training(options=PLAIN, speed=SPEED, seed=0, view="resize_flip", retouch=None):
    protocol = replace(WHOLE, train_view=view)
    conditions = replace(CONDITIONS, speed=speed, seed=seed, protocol=protocol, retouch=retouch)
    return FinetuneTraining(small_encoder(), coloured(96), options, conditions)


def task(encoder, train, test, options=PLAIN, **rest):
    return make_task("finetune", encoder, train, test, **vars(options), **rest)


def test_it_learns_what_a_probe_of_the_frozen_encoder_cannot():
    sets, encoder = (parity(256), parity(160, seed=1)), small_encoder()
    probe = replace(WHOLE, epochs=3, milestones=(2,), lrs=(0.5,))
    assert scores_of(make_task("linear-sgd", encoder, *sets, probe, batch_size=32))["top1"] < 75
    found = scores_of(task(encoder, *sets, replace(PLAIN, epochs=10, lr=1.6e-2)))
    assert [*found] == ["top1", "train_loss"]
    assert found["top1"] > 95
    assert found["train_loss"] < 0.3


def test_the_given_encoder_is_not_changed():
    encoder = small_encoder().requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    scores_of(task(encoder, coloured(64), coloured(16, seed=1), replace(RICH, epochs=1)))
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())
    assert not encoder.training
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    assert not any(isinstance(module, DropPath) for module in encoder.modules())
    # Nor are the global generators. (Python's own is moved by the checks of types in tests.)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]


def test_the_learning_rate_warms_up_and_falls_for_each_layer(tmp_path):
    run, rates = training(replace(PLAIN, epochs=4, layer_decay=0.5, lowest_lr=1e-5)), []
    run.optimiser.register_step_post_hook(
        lambda optimiser, *_: rates.append({group["lr_scale"]: group["lr"] for group in optimiser.param_groups})
    )
    run.train(tmp_path / "state")
    peak = 8e-3 * 32 / 256
    # MAE's schedule: from 0 in the first of four epochs, of three steps each, then a cosine that ends at the lowest rate.
    epochs = np.arange(12) / 3
    falling = 1e-5 + (peak - 1e-5) * 0.5 * (1 + np.cos(np.pi * (epochs - 1) / 3))
    assert [now[1] for now in rates] == pytest.approx(np.where(epochs < 1, peak * epochs, falling).tolist())
    assert all(rate == pytest.approx(scale * now[1]) for now in rates for scale, rate in now.items())


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path):
    runs = [
        training(replace(PLAIN, epochs=1, warmup_epochs=0.0), replace(SPEED, batch_size_per_device=size))
        for size in (None, 5)
    ]
    sizes = []
    runs[1].classifier.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    for number, run in enumerate(runs):
        run.train(tmp_path / str(number))
    assert max(sizes) == 5
    assert sum(sizes) == 96
    assert runs[0].train_loss == pytest.approx(runs[1].train_loss, rel=1e-4)
    for one, other in zip(*(run.classifier.parameters() for run in runs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_a_resumed_run_is_bit_identical(tmp_path):
    def run(name, progress=None):
        one = training(
            replace(RICH, flip_probability=0.5), view="random_resized_crop", retouch=RandAugment(NAME, SIZE, MEAN)
        )
        one.train(tmp_path / name, progress)
        return one.score(coloured(40, seed=1))[0], one.train_loss

    whole = run("whole")
    with pytest.raises(Killed):
        run("parts", kill_at(5))
    assert read_checkpoint(tmp_path / "parts").step == 3, "every epoch is saved"
    with pytest.raises(SystemExit, match="143"):
        run("parts", signal_at(6))
    assert read_checkpoint(tmp_path / "parts").step == 7, "a signal saves the step"
    for seed in (np.random.seed, random.seed, torch.manual_seed):
        seed(99)
    assert run("parts") == whole
    one, other = (read_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert one.state == other.state
    assert one.tensors.keys() == other.tensors.keys()
    assert any(name.startswith("optimiser.exp_avg") for name in one.tensors)
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    assert run("whole", kill_at(1)) == whole, "a finished one is only scored again"


def test_a_loss_that_is_not_finite_ends_it(tmp_path):
    with pytest.raises(TrainingDiverged, match=r"finetune\.lr \(1e\+30\)"):
        training(replace(PLAIN, lr=1e30, warmup_epochs=0.0)).train(tmp_path / "state")


class Foreign(FrozenEncoder):
    """An encoder that is not one of timm's."""

    last_layers = None

    def __init__(self):
        super().__init__(64, 2, (2, 2), (8, 8), MEAN, (0.5,) * 3)
        self.model = nn.Identity()


def test_encoders_that_cannot_be_trained_are_refused():
    with pytest.raises(InputError, match="Foreign"):
        task(Foreign(), coloured(32), coloured(16, seed=1)).check()


@pytest.mark.gpu
def test_on_the_gpu():
    ranks = Ranks(0, 1, 1, torch.device("cuda"))
    sets, options = (coloured(400), coloured(100, seed=1)), replace(RICH, epochs=10)
    found = []
    for one in [task(small_encoder(), *sets, options, ranks=ranks) for _ in range(2)]:
        found.append(scores_of(one))
        # Without this, the second training would continue the first one.
        one.finish()
    assert found[0]["top1"] > 50
    assert found[0] == found[1]


# Parts


def test_published_values_are_the_defaults():
    # MAE's for ImageNet-1k: epochs, learning rate for 256 images, layer-wise decay, weight decay, drop path.
    names = ("epochs", "lr", "layer_decay", "weight_decay", "drop_path")
    published = {
        768: (100, 5e-4, 0.65, 0.05, 0.1),
        1024: (50, 1e-3, 0.75, 0.05, 0.2),
        1280: (50, 1e-3, 0.75, 0.05, 0.3),
    }
    for width, values in published.items():
        filled = FinetuneOptions().filled(width)
        assert tuple(getattr(filled, name) for name in names) == values
    others = (filled.batch_size, filled.mixup, filled.cutmix, filled.label_smoothing, filled.erasing_probability)
    assert others == (1024, 0.8, 1.0, 0.1, 0.25)
    assert (filled.warmup_epochs, filled.lowest_lr, filled.crop_scale, filled.randaugment) == (5, 1e-6, (0.08, 1), NAME)
    assert FinetuneOptions(lr=1.0, drop_path=0.0).filled(768).lr == 1.0
    # I-JEPA's for 1% of it, ViT-L and ViT-H.
    for width, weight_decay in ((1024, 0.05), (1280, 0.4)):
        filled = LowShotFinetuneOptions().filled(width)
        assert (filled.epochs, filled.batch_size, filled.lr * 512 / 256) == (50, 512, pytest.approx(3e-5))
        assert (filled.layer_decay, filled.weight_decay, filled.label_smoothing) == (0.75, weight_decay, 0.1)
        assert filled.drop_path == filled.mixup == filled.cutmix == filled.erasing_probability == 0
        assert filled.randaugment == NAME


def test_randaugment_is_that_of_timms_recipes(tmp_path):
    recipe = create_transform(16, is_training=True, auto_augment=NAME, interpolation="bicubic", mean=MEAN)
    (theirs,) = [step for step in recipe.transforms if type(step).__name__ == "RandAugment"]
    ours, images = pickle.loads(pickle.dumps(RandAugment(NAME, SIZE, MEAN))), coloured(20).source.pixels
    changed = 0
    for seed, image in enumerate(images.permute(0, 2, 3, 1)):
        found = ours(image, seed)
        random.seed(seed)
        np.random.seed(seed)
        assert np.array_equal(found.numpy(), np.asarray(theirs(PIL.Image.fromarray(image.numpy()))))
        changed += not torch.equal(found, image)
    assert changed > 10
    # At full strength, where timm asks Pillow for pixels of 0 bits.
    strongest = RandAugment("rand-m10-inc1", SIZE, MEAN)
    assert all(strongest(images[0].permute(1, 2, 0), seed).shape == (*SIZE, 3) for seed in range(60))
    with pytest.raises(InputError, match=r"finetune\.randaugment is 'strong'"):
        task(small_encoder(), coloured(32), coloured(16, seed=1), replace(PLAIN, randaugment="strong")).check()


def test_every_training_image_is_changed_by_its_own_seed_whoever_reads_it():
    retouch = RandAugment(NAME, SIZE, MEAN)
    seen = []
    for loader, workers in (("resident", 0), ("streaming", 2)):
        run = training(speed=replace(SPEED, loader=loader, workers=workers), retouch=retouch)
        with closing(run.batches(3)) as batches:
            taken = [*islice(batches, 3)]
        seen.append({int(n): image for batch in taken for n, image in zip(batch.indices, batch.images, strict=True)})
    pixels = run.used.source.pixels
    for index in (0, 17, 95):
        expected = retouch(pixels[index].permute(1, 2, 0), derive_seed(0, "retouch", 1, index)).permute(2, 0, 1)
        expected = normalise(expected[None], run.encoder.mean, run.encoder.std)[0]
        for shown in seen:
            torch.testing.assert_close(shown[index], expected, atol=1e-5, rtol=0)


def test_layers_learn_the_slower_the_earlier_they_are():
    classifier = Classifier(trainable_copy(small_encoder(depth=3), 0.0), 4, torch.Generator())
    optimiser = make_optimiser(classifier, replace(PLAIN, layer_decay=0.5, weight_decay=0.05))
    names = {parameter: name for name, parameter in classifier.named_parameters()}
    groups = {names[parameter]: group for group in optimiser.param_groups for parameter in group["params"]}
    scales = {name: group["lr_scale"] for name, group in groups.items()}
    assert scales["head.weight"] == scales["head.bias"] == 1
    for block, scale in enumerate((0.125, 0.25, 0.5)):
        assert scales[f"encoder.vit.blocks.{block}.attn.qkv.weight"] == scale
        assert scales[f"encoder.vit.blocks.{block}.norm1.bias"] == scale
    assert scales["encoder.vit.norm.weight"] == 1  # As MAE's norm after pooling.
    assert scales["encoder.vit.patch_embed.proj.weight"] == 0.0625
    for name, group in groups.items():
        assert group["weight_decay"] == (0.05 if name.endswith("weight") and "norm" not in name else 0), name
    # Sine-cosine positions are fixed, and everything else learns.
    assert {*names.values()} - {*groups} == {"encoder.vit.pos_embed"}


def test_drop_path_is_active_in_training_alone():
    encoder = small_encoder(depth=3)
    dropping = trainable_copy(encoder, 0.6)
    rates = [[m.drop_prob for m in block.modules() if isinstance(m, DropPath)] for block in dropping.vit.blocks]
    assert rates == [[], [pytest.approx(0.3)] * 2, [pytest.approx(0.6)] * 2]
    images = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = encoder(images)
        assert torch.equal(dropping.eval()(images), expected)
        one = dropping.train()(images)
    # With a chance of 0.7 · 0.7 · 0.4 · 0.4 each that nothing is left out, some images differ and few do not.
    assert ((one - expected).abs().amax((1, 2)) > 1e-4).sum() > 8
    assert not any(isinstance(module, DropPath) for module in trainable_copy(dropping, 0.0).modules())


def one_hot_images(labels, classes=3):
    """Images whose channels are the probabilities of their classes."""
    return nn.functional.one_hot(labels, classes).float()[:, :, None, None].expand(-1, -1, 16, 16).clone()


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0)])
def test_what_is_mixed_has_the_target_that_belongs_to_it(mixup, cutmix):
    mixing = Mixing(replace(PLAIN, mixup=mixup, cutmix=cutmix), 3, CPU)
    labels = torch.tensor([0, 1, 2, 0, 1])
    mixed = 0
    for seed in range(20):
        given = one_hot_images(labels)
        images, targets = mixing(given, labels, seed)
        assert torch.equal(given, one_hot_images(labels))
        # Of a pasted box as of a blend, the mean over the pixels is the fraction of each class.
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
    classifier = Classifier(trainable_copy(Encoder(vit), 0.1), 3, torch.Generator())
    optimiser = make_optimiser(classifier, PLAIN)
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


def test_options_that_cannot_work_are_refused_by_name():
    with pytest.raises(InputError, match=r"finetune.warmup_epochs is 101"):
        FinetuneOptions(epochs=100, warmup_epochs=101.0)
    with pytest.raises(InputError, match=r"finetune_low_shot\.lr is"):
        LowShotFinetuneOptions(lr=float("inf"))
