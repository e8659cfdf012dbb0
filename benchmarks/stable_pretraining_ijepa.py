"""stable-pretraining's I-JEPA as something to be measured."""

import logging
import os
import warnings

import torch
from contenders import Contender
from lightly_ijepa import timm_vit
from plain_ijepa import STEPS_PER_EPOCH

from stop_mim.training.schedules import values_at

NOTE = (
    "stable-pretraining predicts the patches of all target blocks together, each of them once, in one sequence an image: "
    "that is less to do than one sequence a block."
)


def stable_pretraining_contender(setting):
    """Model, masks and the target's update are stable-pretraining's; the rest is a loop as in the plain model."""
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    handlers = logging.root.handlers[:]
    # Its import warns of other packages' changes, and takes over the log of the whole process.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from stable_pretraining.methods import IJEPA
    logging.root.handlers[:] = handlers
    config, masks = setting.config, setting.config.masks
    model = IJEPA(
        timm_vit(config),
        predictor_embed_dim=config.predictor.width,
        predictor_depth=config.predictor.depth,
        num_targets=setting.counts.blocks,
        target_scale=masks.target_scale,
        target_aspect_ratio=masks.target_aspect,
        context_scale=masks.context_scale,
    ).to(setting.device)
    model.train()
    values = values_at(0, STEPS_PER_EPOCH, config.optim)
    learned = [parameter for _, parameter in model.named_parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(learned, lr=values.lr, betas=config.optim.betas, weight_decay=values.weight_decay)

    def step(batches):
        optimiser.zero_grad()
        for images, _ in batches:
            with setting.autocast:
                output = model(images)
            (output.loss / len(batches)).backward()
        optimiser.step()
        model.encoder.update_teacher()
        return int(output.num_context), int(output.num_targets)

    return Contender(step, None, NOTE)
