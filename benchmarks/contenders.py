"""Training steps of other implementations of I-JEPA at our sizes; the rows of performance.py measure them."""

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from plain_ijepa import PlainCollator, build_plain, encoder_dimensions, grid_of
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from stop_mim.benchmark.flops import TokenCounts
from stop_mim.masking import Masks
from stop_mim.training.config import TrainConfig
from stop_mim.training.pretrain import Parts
from stop_mim.training.schedules import values_at

STEPS_PER_EPOCH = 1000

Step = Callable[[Tensor, Masks], tuple[int, int]]
"""Takes a training step on images and masks; returns the context and target tokens per image."""
NOTES = {
    "stable-pretraining": (
        "stable-pretraining predicts the patches of all target blocks together, each of them once, in one sequence per "
        "image: that is less work than one sequence per block."
    )
}


def training_step(
    run: Parts,
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[[Tensor, Masks], tuple[Tensor, tuple[int, int]]],
    update: Callable[[float], Any],
) -> Step:
    """Return a step with torch's AdamW and the schedule's first values; `update` gets the momentum of the target."""
    optim = run.config.optim
    values = values_at(0, STEPS_PER_EPOCH, optim)
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    optimiser = torch.optim.AdamW(learned, lr=values.lr, betas=optim.betas, weight_decay=values.weight_decay)

    def step(images: Tensor, masks: Masks) -> tuple[int, int]:
        optimiser.zero_grad()
        with run.autocast:
            loss, tokens = loss_of(images, masks)
        loss.backward()
        optimiser.step()
        update(values.ema_momentum)
        return tokens

    return step


def token_counts(masks: Masks) -> tuple[int, int]:
    return masks.context.shape[1], masks.targets[0].numel()


def plain_step(run: Parts, counts: TokenCounts) -> Step:
    """The plain model, which draws its masks in Python in every step."""
    device, config = run.inputs.ranks.device, run.config
    model = build_plain(config).to(device)
    collator = PlainCollator(config.masks, grid_of(config), counts, run.inputs.per_device)

    def loss_of(images: Tensor, _: Masks) -> tuple[Tensor, tuple[int, int]]:
        masks = collator()
        masks = replace(masks, context=masks.context.to(device), targets=masks.targets.to(device))
        return model(images, masks), token_counts(masks)

    return training_step(run, model.parameters(), loss_of, model.update_target)


def lightly_step(run: Parts, counts: TokenCounts) -> Step:
    """Encoder, predictor and the target's update are lightly's; masks are given."""
    from lightly.models import utils
    from lightly.models.modules.ijepa_timm import IJEPAPredictorTIMM
    from lightly.models.modules.masked_vision_transformer_timm import MaskedVisionTransformerTIMM

    config, device = run.config, run.inputs.ranks.device
    dimensions = encoder_dimensions(config.encoder)
    encoder = MaskedVisionTransformerTIMM(timm_vit(config)).to(device)
    encoder.mask_token.requires_grad_(False)
    target = copy.deepcopy(encoder).requires_grad_(False)
    predictor = IJEPAPredictorTIMM(
        num_patches=counts.grid,
        depth=config.predictor.depth,
        mlp_dim=dimensions.width,
        predictor_embed_dim=config.predictor.width,
        num_heads=config.predictor.heads or dimensions.heads,
    ).to(device)

    def loss_of(images: Tensor, masks: Masks) -> tuple[Tensor, tuple[int, int]]:
        context, blocks = masks.context, list(masks.targets.unbind(1))
        with torch.no_grad():
            wanted = target.encode(images)
            wanted = utils.apply_masks(F.layer_norm(wanted, wanted.shape[-1:]), blocks)
        predicted = predictor(encoder.encode(images, idx_keep=context), [context], blocks)
        return F.smooth_l1_loss(predicted, wanted), token_counts(masks)

    learned = [*encoder.parameters(), *predictor.parameters()]
    return training_step(run, learned, loss_of, lambda momentum: utils.update_momentum(encoder, target, momentum))


def stable_pretraining_step(run: Parts, counts: TokenCounts) -> Step:
    """Model, masks and the target's update are stable-pretraining's; the given masks are ignored."""
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    handlers = logging.root.handlers[:]
    # Its import warns of other packages' changes, and takes over the log of the whole process.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from stable_pretraining.methods import IJEPA
    logging.root.handlers[:] = handlers
    config, masks = run.config, run.config.masks
    model = IJEPA(
        timm_vit(config),
        predictor_embed_dim=config.predictor.width,
        predictor_depth=config.predictor.depth,
        num_targets=counts.blocks,
        target_scale=masks.target_scale,
        target_aspect_ratio=masks.target_aspect,
        context_scale=masks.context_scale,
    ).to(run.inputs.ranks.device)
    model.train()

    def loss_of(images: Tensor, _: Masks) -> tuple[Tensor, tuple[int, int]]:
        output = model(images)
        return output.loss, (int(output.num_context), int(output.num_targets))

    return training_step(run, model.parameters(), loss_of, lambda momentum: model.encoder.update_teacher())


def timm_vit(config: TrainConfig) -> VisionTransformer:
    dimensions = encoder_dimensions(config.encoder)
    return VisionTransformer(
        img_size=config.encoder.image_size,
        patch_size=config.encoder.patch_size,
        embed_dim=dimensions.width,
        depth=dimensions.depth,
        num_heads=dimensions.heads,
        mlp_ratio=dimensions.mlp_ratio,
        class_token=False,
        global_pool="avg",
        fc_norm=False,
        num_classes=0,
    )


CONTENDERS = {"plain": plain_step, "lightly": lightly_step, "stable-pretraining": stable_pretraining_step}
