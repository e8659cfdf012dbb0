"""A tiny run with a probe of colours, and what is left of it."""

from contextlib import nullcontext
from dataclasses import replace

import torch
from tiny_run import CPU, tiny_config

from stop_mim.training.config import ProbeConfig
from stop_mim.training.online_probe import make_probe, open_probe_data

# Batches at 2, 4, 6 …, scores at 7, 14 and 21: a stop at 10 is in the middle of what the loss is averaged over.
PROBE = ProbeConfig(batch_size=16, every_steps=2, score_every_steps=7, lr=0.02, neighbours=5, memory=40)
NAMES = ("probe/linear_top1", "probe/knn_top1", "probe/loss")


def probing(colours, out, **groups):
    return tiny_config(out=out, probe=replace(PROBE, data=str(colours)), **groups)


def a_probe(colours, objective, config=PROBE, seed=0):
    return make_probe(config, open_probe_data(str(colours)), objective.target, CPU, seed)


def learn(probe, objective, batches):
    for batch in range(batches):
        probe.learn(objective.target, batch, nullcontext())


def is_colour(pixels, number):
    """Whether an image's strongest channel is that of the class: blue, green, red."""
    return pixels.float().mean((-2, -1)).argmax(-1) == 2 - torch.as_tensor(number)
