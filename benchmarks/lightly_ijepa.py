"""lightly's I-JEPA, put together from its public modules as something to be measured."""

import copy

import torch
import torch.nn.functional as F
from contenders import Contender, encoder_dimensions
from plain_ijepa import STEPS_PER_EPOCH, grid_of
from timm.models.vision_transformer import VisionTransformer

from stop_mim.masking import Masks
from stop_mim.training.schedules import values_at


def lightly_contender(setting):
    """Encoder, predictor, collator and the target's update are lightly's; the rest is a loop as in the plain model."""
    from lightly.data.ijepa_collate import IJEPAMaskCollator
    from lightly.models import utils
    from lightly.models.modules.ijepa_timm import IJEPAPredictorTIMM
    from lightly.models.modules.masked_vision_transformer_timm import MaskedVisionTransformerTIMM

    config, masks, grid = setting.config, setting.config.masks, grid_of(setting.config)
    dimensions, predictor_config = encoder_dimensions(config.encoder), config.predictor
    encoder = MaskedVisionTransformerTIMM(timm_vit(config)).to(setting.device)
    encoder.mask_token.requires_grad_(False)
    target = copy.deepcopy(encoder).requires_grad_(False)
    predictor = IJEPAPredictorTIMM(
        num_patches=grid[0] * grid[1],
        depth=predictor_config.depth,
        mlp_dim=dimensions.width,
        predictor_embed_dim=predictor_config.width,
        num_heads=predictor_config.heads or dimensions.heads,
    ).to(setting.device)
    values = values_at(0, STEPS_PER_EPOCH, config.optim)
    learned = [parameter for part in (encoder, predictor) for parameter in part.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(learned, lr=values.lr, betas=config.optim.betas, weight_decay=values.weight_decay)

    def loss_of(images, context, blocks):
        with torch.no_grad():
            wanted = target.encode(images)
            wanted = utils.apply_masks(F.layer_norm(wanted, wanted.shape[-1:]), blocks)
        return F.smooth_l1_loss(predictor(encoder.encode(images, idx_keep=context), [context], blocks), wanted)

    def step(batches):
        optimiser.zero_grad()
        for images, given in batches:
            with setting.autocast:
                loss = loss_of(images, given.context, list(given.targets.unbind(1))) / len(batches)
            loss.backward()
        optimiser.step()
        utils.update_momentum(encoder, target, values.ema_momentum)
        return given.context.shape[1], given.targets[0].numel()

    collator = IJEPAMaskCollator(
        input_size=config.encoder.image_size,
        patch_size=config.encoder.patch_size,
        enc_mask_scale=masks.context_scale,
        pred_mask_scale=masks.target_scale,
        aspect_ratio=masks.target_aspect,
        nenc=1,
        npred=setting.counts.blocks,
        min_keep=1,
    )

    def collate():
        # It collates images too; numbers in their place cost nothing.
        _, contexts, blocks = collator([0] * setting.per_device)
        return Masks(contexts[0], torch.stack(blocks, dim=1))

    return Contender(step, collate)


def timm_vit(config):
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
