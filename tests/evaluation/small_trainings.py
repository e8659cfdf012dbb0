"""Small labelled sets and encoders for evaluations that train, and what happens to those: interruptions, several processes."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from stop_mim.data.decode import BadImage
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.labelled import LabelledSet
from stop_mim.evaluation.finetune import FinetuneConfig
from stop_mim.evaluation.labelled_training import StateFile
from stop_mim.evaluation.linear_sgd import LinearSGDConfig
from stop_mim.models.encoder import Dimensions, create_encoder
from stop_mim.training.config import SpeedConfig
from stop_mim.training.distributed import Ranks

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 1, CPU)
NOWHERE = StateFile(None, {}, ALONE)
QUICK = LinearSGDConfig(
    epochs=4,
    batch_size=32,
    lrs=(0.5,),
    milestones=(2, 3),
    train_view="resize_flip",
    test_view="resize",
    held_out_part=0.2,
)
PRECONDITIONED = replace(QUICK, preconditioned=True, schedule="cosine", final_factor=0.0, lrs=(0.1,), weight_decay=1e-5)
PLAIN = FinetuneConfig(
    epochs=3,
    batch_size=32,
    lr=8e-3,
    warmup_epochs=1.0,
    layer_decay=1.0,
    drop_path=0.0,
    mixup=0.0,
    cutmix=0.0,
    label_smoothing=0.0,
    erasing_probability=0.0,
    train_view="resize_flip",
    flip_probability=0.0,
    test_view="resize",
)
SPEED = SpeedConfig(workers=0)


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

    def fingerprint(self):
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


class Interrupted(KeyboardInterrupt):
    pass


def interrupt_at(step):
    def progress(done, total):
        if done == step:
            raise Interrupted

    return progress


class HubModel(nn.Module):
    """As transformers' models answer: hidden states of a class token and four patches, before and after one layer."""

    config = SimpleNamespace(hidden_size=3, num_hidden_layers=1, patch_size=8, image_size=16, model_type="vit")

    def __init__(self):
        super().__init__()
        self.layernorm = nn.Linear(3, 3)
        nn.init.eye_(self.layernorm.weight)

    def forward(self, images, output_hidden_states):
        patches = nn.functional.avg_pool2d(images, 8).flatten(2).mT
        tokens = torch.cat([torch.zeros(len(images), 1, 3), patches], 1)
        return SimpleNamespace(hidden_states=(torch.zeros_like(tokens), tokens))


def run_processes(script, folder, count, port, *arguments):
    """Run a script in so many processes that know of each other, to its end."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, os.path.dirname(__file__), str(folder), *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
