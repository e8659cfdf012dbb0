"""Small labelled sets, videos, encoders and tasks for tests, and what happens to trainings: kills and signals."""

import io
import os
import signal
from dataclasses import replace

import numpy as np
import torch
from rich.console import Console

from stop_mim.data.decode import BadImage
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.labelled import LabelledSet
from stop_mim.data.videos import Video
from stop_mim.evaluation.config import evaluate_config
from stop_mim.evaluation.data import TaskData
from stop_mim.evaluation.features import LabelledFeatures
from stop_mim.evaluation.labelled_training import Conditions
from stop_mim.evaluation.protocols import Protocol
from stop_mim.evaluation.subject import Subject, feature_task
from stop_mim.evaluation.task import TASKS
from stop_mim.evaluation.tasks.finetune import FinetuneOptions
from stop_mim.models.encoder import Dimensions, create_encoder
from stop_mim.options import AugmentConfig
from stop_mim.training.config import DeviceConfig
from stop_mim.training.distributed import Ranks

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 1, CPU)
SPEED = DeviceConfig(workers=0)
WHOLE = Protocol("whole", 4, (2, 3), lrs=(0.5,), train_view="resize_flip", test_view="resize")
NEWTON = replace(WHOLE, preconditioned=True, milestones=(), final_factor=0.0, lrs=(0.1,), weight_decay=1e-5)
PLAIN = FinetuneOptions(
    epochs=3,
    batch_size=32,
    lr=8e-3,
    warmup_epochs=1.0,
    layer_decay=1.0,
    weight_decay=0.05,
    drop_path=0.0,
    randaugment="",
    mixup=0.0,
    cutmix=0.0,
    label_smoothing=0.0,
    erasing_probability=0.0,
    flip_probability=0.0,
)
CONDITIONS = Conditions(WHOLE, AugmentConfig(flip_probability=0.0), 0, ALONE, SPEED)


def silent(width=160):
    return Console(file=io.StringIO(), width=width)


class InMemory(ImageSource):
    """Decoded images; without `together` they are read one by one, and bad ones cannot be."""

    def __init__(self, pixels, bad=(), together=True):
        super().__init__("toy")
        self.pixels, self.bad, self.together, self.reads = pixels, set(bad), together, []

    def __len__(self):
        return len(self.pixels)

    def read(self, index):
        self.reads.append(index)
        if index in self.bad:
            raise BadImage(self.describe(index), "torn")
        return self.pixels[index]

    def size(self, index):
        return tuple(self.pixels.shape[-2:])

    def describe(self, index):
        return f"image {index}"

    def fingerprint(self, times=True):
        return digest([self.pixels.numpy().tobytes()])

    def stacked(self):
        return self.pixels if self.together else None


def coloured(count, classes=4, noise=22, seed=0, **options):
    """A colour for each class, which neighbouring classes share in part, with a grain."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % classes)
    colours = np.random.default_rng(9).integers(60, 196, (classes, 3))
    pixels = colours[labels][:, :, None, None] + random.normal(0, noise, (count, 3, 1, 1))
    pixels = pixels + random.normal(0, 20, (count, 3, 16, 16))
    source = InMemory(torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)), **options)
    return LabelledSet(source, labels, np.arange(count))


def small_encoder(depth=2, width=64, seed=0):
    torch.manual_seed(seed)
    return create_encoder(Dimensions(width, depth, 2), 16, 8).eval()


def make_task(name, encoder, train, test, protocol=WHOLE, speed=SPEED, ranks=ALONE, progress=None, seed=0, **options):
    """A task of these sets, with this protocol instead of the data's; `options` are those of the task."""
    kind = TASKS[name]
    config = evaluate_config()(speed=speed, seed=seed, **{name.replace("-", "_"): kind.Options(**options)})
    subject = Subject("toy", encoder, None, config, ranks)
    subject.protocol = lambda data: protocol
    data = TaskData("class", int(train.classes.max()) + 1, train, test, held_out=False)
    return kind(name, config, subject, data, progress or (lambda done, total: None))


def scores_of(task):
    task.check()
    return {score.name: score.value for score in task.run()}


def feature_scores(name, train, labels, test, test_labels, classes=5, layers=1, progress=None, **options):
    """The scores of a task of these features, by name; each row has so many layers."""
    task = feature_task(name, classes, **options)
    task.progress = progress or task.progress
    parts = (LabelledFeatures.in_memory(*part, layers) for part in ((train, labels), (test, test_labels)))
    return {score.name: score for score in task.scores(*parts)}


class MemoryVideo(Video):
    """A video of masks alone."""

    def __init__(self, name, masks):
        self.name, self.masks = name, masks

    def __len__(self):
        return len(self.masks)

    def frame(self, index):
        raise AssertionError("frames are not looked at to score masks")

    def has_mask(self, index):
        return self.masks[index] is not None

    def mask(self, index):
        return self.masks[index]

    def fingerprint(self, times=True):
        return self.name


class Killed(Exception):
    pass


def kill_at(step):
    """End the training at a step without saving it."""

    def progress(done, total):
        if done == step:
            raise Killed

    return progress


def signal_at(step, number=signal.SIGTERM):
    """Ask the training to stop; it takes one more step."""

    def progress(done, total):
        if done == step:
            os.kill(os.getpid(), number)

    return progress
