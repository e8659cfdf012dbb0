"""Recipes: named functions that return a configuration.

A variant is `dataclasses.replace`, or an option on the command line. A plugin adds its own with `RECIPES.register(name)`.
"""

from collections.abc import Callable
from dataclasses import replace

from stop_mim.errors import InputError
from stop_mim.options import AugmentConfig, Compat, MaskConfig
from stop_mim.registry import Registry
from stop_mim.training.config import (
    CheckpointConfig,
    EncoderConfig,
    LogConfig,
    ObjectiveConfig,
    OptimConfig,
    PositionsConfig,
    PredictorConfig,
    TrainConfig,
)

Recipe = Callable[[], TrainConfig]
RECIPES: Registry[Recipe] = Registry("recipe")

SINCOS = PositionsConfig(kind="sincos")
STOP = PositionsConfig()


def recipe(function: Recipe) -> Recipe:
    """Register a function under its name, with hyphens."""
    return RECIPES.register(function.__name__.replace("_", "-"))(function)


def find_recipe(name: str, compat: Compat = "corrected") -> TrainConfig:
    """Return the configuration of a recipe, or of the version of it that `compat` names."""
    return with_compat(RECIPES.find(name)(), compat)


def with_compat(config: TrainConfig, compat: Compat) -> TrainConfig:
    """Return a recipe as it is ("corrected"), as the releases' code trains, or as the paper's text describes it.

    docs/method.md lists what differs.
    """
    if compat == "corrected":
        return config
    if config.objective.kind != "ijepa":
        raise InputError(
            f"compat is {compat}, which exists only for I-JEPA and StoP, and the objective is {config.objective.kind}: "
            "leave it out."
        )
    positions, augment = config.positions, replace(config.augment, jitter_probability=0.0)
    if compat == "paper-text":
        plain = replace(augment, flip_probability=0.0, blur_probability=0.0, grey_probability=0.0)
        return replace(config, positions=replace(positions, sigma=0.25, convention="paper"), augment=plain)
    # I-JEPA's own release neither changes colours nor leaves out m̃, and it trains fixed positions only.
    is_stop = positions.kind == "stochastic"
    flip, blur, grey = (0.5, 0.5, 0.2) if is_stop else (0.0, 0.0, 0.0)
    return replace(
        config,
        encoder=replace(config.encoder, initialisation="release"),
        positions=replace(positions, convention="release") if is_stop else positions,
        masks=replace(config.masks, compat="release"),
        augment=replace(augment, flip_probability=flip, blur_probability=blur, grey_probability=grey),
        optim=replace(config.optim, decay_mask_token=True, ema_start=0.996),
    )


@recipe
def demo() -> TrainConfig:
    """A very small StoP model on synthetic scenes, as trained by `stop-mim demo`: two minutes on two CPU cores.

    stop-mim demo
    Linear probe with 1,000 labels: counting 22.1, distance 30.8 (untrained encoder 15.9 and 22.2; seed 0, 2026-11-16).
    """
    return TrainConfig(
        data="scenes:count=3000,size=64",
        encoder=EncoderConfig(size="tiny", image_size=(48, 48), patch_size=8, width=96, depth=2, heads=2),
        predictor=PredictorConfig(width=64, depth=4),
        augment=AugmentConfig(flip_probability=0.5),
        optim=OptimConfig(
            epochs=14, batch_size=16, lr=1e-3, start_lr=1e-4, final_lr=1e-5, warmup_epochs=1.4, ema_start=0.99
        ),
        log=LogConfig(every_steps=50, health_every_steps=250),
    )


@recipe
def stop_tiny_imagenet() -> TrainConfig:
    """StoP, ViT-S/8 at 64x64, predictor 3x192, for Tiny ImageNet on one GPU.

    stop-mim pretrain stop-tiny-imagenet --data tiny-imagenet/train.parquet
    100 classes (50,000 images), one H200, 29,000 images/s: eight minutes. Fixed positions (ijepa-tiny-imagenet): linear probe
    44.0, 20-NN 34.4, five labels a class 18.2 (one seed, 2026-11-16). StoP was run for 54 epochs of 45,000 images: 38.8, 29.0
    and 12.5; fixed positions had 38.5, 28.6 and 13.0 then. Other models in nine minutes (one seed, 2026-11-18,
    docs/experiments.md): StoP with --encoder.patch-size 4 --optim.epochs 100: 43.3 and 31.6; fixed positions with
    --encoder.size base --predictor.width 384 --augment.crop-scale 0.2 1 --optim.epochs 130: 45.1 and 33.6.
    """
    return TrainConfig(
        data="",
        encoder=EncoderConfig(size="small", image_size=(64, 64), patch_size=8),
        predictor=PredictorConfig(width=192, depth=3),
        augment=AugmentConfig(flip_probability=0.5),
        optim=OptimConfig(epochs=280, batch_size=256, lr=5e-4, start_lr=1e-4, final_lr=1e-5, warmup_epochs=25),
    )


@recipe
def stop_photos() -> TrainConfig:
    """StoP, ViT-S/16 at 224x224, for any folder of photographs; batch, length and learning rate follow from the images.

    stop-mim pretrain stop-photos --data photos/
    I-JEPA instead of StoP: --positions.kind sincos. The values here are for a large folder on a GPU; the rules are in
    docs/guides/own-images.md.
    """
    return TrainConfig(
        data="",
        max_bad="10%",
        encoder=EncoderConfig(size="small"),
        predictor=PredictorConfig(width=192, depth=6),
        augment=AugmentConfig(flip_probability=0.5),
        optim=OptimConfig(
            epochs=100,
            batch_size=256,
            lr=5e-4,
            start_lr=5e-5,
            final_lr=5e-6,
            warmup_epochs=10,
            derive=("batch_size", "epochs", "lr", "start_lr", "final_lr", "warmup_epochs"),
        ),
        log=LogConfig(trial_steps=3),
        checkpoint=CheckpointConfig(every_steps=500),
    )


def _imagenet(encoder: EncoderConfig, predictor_depth: int, optim: OptimConfig) -> TrainConfig:
    return TrainConfig(
        data="",
        encoder=encoder,
        predictor=PredictorConfig(width=384, depth=predictor_depth),
        positions=SINCOS,
        optim=optim,
        checkpoint=CheckpointConfig(milestone_every_epochs=50),
    )


def _stop(config: TrainConfig, sigma: float = 0.25) -> TrainConfig:
    """Return what StoP's authors trained instead of this I-JEPA: noise of this standard deviation, flip, blur and grey."""
    return replace(
        config,
        positions=PositionsConfig(sigma=sigma, convention="std"),
        augment=AugmentConfig(flip_probability=0.5, blur_probability=0.5, grey_probability=0.2),
    )


HUGE_OPTIM = OptimConfig(epochs=300, lr=1e-3, final_lr=1e-6, warmup_epochs=40)


@recipe
def ijepa_vitb16() -> TrainConfig:
    """I-JEPA, ViT-B/16 on ImageNet-1k: 600 epochs, predictor 6x384, no augmentation but crops.

    torchrun --nproc-per-node 8 -m stop_mim pretrain ijepa-vitb16 --data imagenet --speed.batch-size-per-device 256
    The paper's model reached 70.9 in linear probing (last layer); this recipe has not been run in full.
    """
    return _imagenet(EncoderConfig(size="base"), 6, OptimConfig(epochs=600))


@recipe
def ijepa_vitl16() -> TrainConfig:
    """I-JEPA, ViT-L/16 on ImageNet-1k: 600 epochs, predictor 12x384, no augmentation but crops.

    torchrun --nproc-per-node 8 -m stop_mim pretrain ijepa-vitl16 --data imagenet --speed.batch-size-per-device 128
    The paper's model reached 76.1 in linear probing (last layer); this recipe has not been run in full.
    """
    return _imagenet(EncoderConfig(size="large"), 12, OptimConfig(epochs=600))


@recipe
def ijepa_vith14() -> TrainConfig:
    """I-JEPA, ViT-H/14 on ImageNet-1k: 300 epochs, predictor 12x384, no augmentation but crops.

    torchrun --nproc-per-node 8 -m stop_mim pretrain ijepa-vith14 --data imagenet --speed.batch-size-per-device 64
    The paper's model reached 78.2 in linear probing (last layer); this recipe has not been run in full.
    """
    return _imagenet(EncoderConfig(size="huge", patch_size=14), 12, HUGE_OPTIM)


@recipe
def stop_vitb16() -> TrainConfig:
    """StoP as its authors trained it, ViT-B/16 on ImageNet-1k: 600 epochs (300 in the ablations), flip, blur, grey.

    torchrun --nproc-per-node 8 -m stop_mim pretrain stop-vitb16 --data imagenet --speed.batch-size-per-device 256
    The paper's model reached 72.6 in linear probing (last layer); this recipe has not been run in full.
    """
    return _stop(ijepa_vitb16())


@recipe
def stop_vitl16() -> TrainConfig:
    """StoP as its authors trained it, ViT-L/16 on ImageNet-1k: 600 epochs, flip, blur, grey.

    torchrun --nproc-per-node 8 -m stop_mim pretrain stop-vitl16 --data imagenet --speed.batch-size-per-device 128
    The paper's model reached 77.1 in linear probing (last layer); this recipe has not been run in full.
    """
    return _stop(ijepa_vitl16())


@recipe
def stop_vith14() -> TrainConfig:
    """StoP as its authors trained it, ViT-H/14 on ImageNet-1k: 300 epochs, schedules held after epoch 250, sigma 0.2.

    torchrun --nproc-per-node 8 -m stop_mim pretrain stop-vith14 --data imagenet --speed.batch-size-per-device 64
    The paper's model reached 79.0 in linear probing (last layer); this recipe has not been run in full.
    """
    return _stop(replace(ijepa_vith14(), optim=replace(HUGE_OPTIM, hold_after_epoch=250)), sigma=0.2)


@recipe
def stop_vith16() -> TrainConfig:
    """StoP as its authors trained the ViT-H/16 that they released: stop-vith14 with patches of 16 pixels.

    torchrun --nproc-per-node 8 -m stop_mim pretrain stop-vith16 --data imagenet --speed.batch-size-per-device 64
    The paper reports no score of this model; this recipe has not been run in full.
    """
    return replace(stop_vith14(), encoder=EncoderConfig(size="huge"))


MAE_OPTIM = OptimConfig(
    epochs=1600,
    batch_size=4096,
    lr=2.4e-3,
    start_lr=0.0,
    final_lr=0.0,
    warmup_epochs=40,
    weight_decay=0.05,
    final_weight_decay=0.05,
    betas=(0.9, 0.95),
)


def _mae(encoder: EncoderConfig) -> TrainConfig:
    """Return the published configuration; the learning rate is 1.5e-4 per 256 images of a batch."""
    return TrainConfig(
        data="",
        objective=ObjectiveConfig(kind="mae"),
        encoder=encoder,
        predictor=PredictorConfig(width=512, depth=8, heads=16),
        positions=SINCOS,
        masks=MaskConfig(kind="random", mask_ratio=0.75),
        augment=AugmentConfig(crop_scale=(0.2, 1.0), flip_probability=0.5),
        optim=MAE_OPTIM,
        checkpoint=CheckpointConfig(milestone_every_epochs=100),
    )


@recipe
def mae_vitb16() -> TrainConfig:
    """MAE, ViT-B/16 on ImageNet-1k: 1600 epochs, decoder 8x512, 75% of the patches masked (shorter: --optim.epochs 800).

    torchrun --nproc-per-node 8 -m stop_mim pretrain mae-vitb16 --data imagenet --speed.batch-size-per-device 512
    Unlike the published model, the encoder has no class token. This recipe has not been run in full.
    """
    return _mae(EncoderConfig(size="base"))


@recipe
def mae_vitl16() -> TrainConfig:
    """MAE, ViT-L/16 on ImageNet-1k: 1600 epochs, decoder 8x512, 75% of the patches masked (shorter: --optim.epochs 800).

    torchrun --nproc-per-node 8 -m stop_mim pretrain mae-vitl16 --data imagenet --speed.batch-size-per-device 256
    Unlike the published model, the encoder has no class token. This recipe has not been run in full.
    """
    return _mae(EncoderConfig(size="large"))


@recipe
def mae_vith14() -> TrainConfig:
    """MAE, ViT-H/14 on ImageNet-1k: 1600 epochs, decoder 8x512, 75% of the patches masked (shorter: --optim.epochs 800).

    torchrun --nproc-per-node 8 -m stop_mim pretrain mae-vith14 --data imagenet --speed.batch-size-per-device 128
    Unlike the published model, the encoder has no class token. This recipe has not been run in full.
    """
    return _mae(EncoderConfig(size="huge", patch_size=14))


@recipe
def mae_tiny_imagenet() -> TrainConfig:
    """MAE, ViT-S/8 on 64x64 images, decoder 4x192: the data, encoder and length of stop-tiny-imagenet.

    stop-mim pretrain mae-tiny-imagenet --data tiny-imagenet/train.parquet
    One H200, 20 epochs instead of 280, 45,000 images: linear probe 31.5, 20-NN 18.3; with StoP (stop-mae-tiny-imagenet) 31.8
    and 18.3 (three seeds, 2026-11-18, docs/experiments.md). This recipe has not been run in full.
    """
    config = stop_tiny_imagenet()
    optim = replace(config.optim, weight_decay=0.05, final_weight_decay=0.05, betas=(0.9, 0.95))
    return replace(
        _mae(config.encoder), predictor=PredictorConfig(width=192, depth=4), optim=optim, checkpoint=config.checkpoint
    )


@recipe
def data2vec_vitb16() -> TrainConfig:
    """data2vec, ViT-B/16 on ImageNet-1k: 800 epochs, targets from the top 6 layers, 120 of 196 patches masked in blocks.

    torchrun --nproc-per-node 8 -m stop_mim pretrain data2vec-vitb16 --data imagenet --speed.batch-size-per-device 128
    Unlike the published model, the encoder has no relative positions, layer scale or class token, and drops no paths (the
    published rate is 0.25). This recipe has not been run in full.
    """
    return TrainConfig(
        data="",
        objective=ObjectiveConfig(kind="data2vec", target_layers=6, beta=2.0),
        encoder=EncoderConfig(size="base"),
        positions=SINCOS,
        masks=MaskConfig(kind="blockwise", mask_ratio=0.61, target_scale=(0.08, 0.4), target_aspect=(0.3, 3.3)),
        augment=AugmentConfig(crop_scale=(0.08, 1.0), flip_probability=0.5, jitter_probability=1.0),
        optim=OptimConfig(
            epochs=800,
            lr=2e-3,
            start_lr=1e-6,
            final_lr=1e-5,
            warmup_epochs=10,
            weight_decay=0.05,
            final_weight_decay=0.05,
            clip_gradient_norm=3.0,
            ema_start=0.9998,
            ema_final=0.9998,
        ),
        checkpoint=CheckpointConfig(milestone_every_epochs=100),
    )


@recipe
def data2vec_tiny_imagenet() -> TrainConfig:
    """data2vec, ViT-S/8 on 64x64 images, targets from the top 6 layers: the data and length of stop-tiny-imagenet.

    stop-mim pretrain data2vec-tiny-imagenet --data tiny-imagenet/train.parquet
    The teacher's momentum is lower than published, because the run has far fewer steps.
    """
    config = stop_tiny_imagenet()
    optim = replace(config.optim, weight_decay=0.05, final_weight_decay=0.05, clip_gradient_norm=3.0, ema_final=0.9998)
    return replace(
        data2vec_vitb16(), encoder=config.encoder, augment=config.augment, optim=optim, checkpoint=config.checkpoint
    )


def register_twin(name: str, original: str, positions: PositionsConfig, summary: str) -> None:
    """Register a recipe that differs from another only in its positions."""
    recipe = RECIPES[original]

    def twin() -> TrainConfig:
        return replace(recipe(), positions=positions)

    command = (recipe.__doc__ or "").splitlines()[2].replace(original, name)
    twin.__doc__ = f"{summary}\n\n{command}\n    "
    RECIPES.register(name)(twin)


register_twin(
    "ijepa-tiny-imagenet",
    "stop-tiny-imagenet",
    SINCOS,
    "I-JEPA counterpart of stop-tiny-imagenet: fixed sine-cosine positions and a learned mask token.",
)
for size in ("vitb16", "vitl16", "vith14", "tiny-imagenet"):
    register_twin(
        f"stop-mae-{size}",
        f"mae-{size}",
        STOP,
        f"StoP counterpart of mae-{size}: stochastic positions of the decoder's masked tokens (the paper reports no gain).",
    )
for size in ("vitb16", "tiny-imagenet"):
    register_twin(
        f"stop-data2vec-{size}",
        f"data2vec-{size}",
        STOP,
        f"StoP counterpart of data2vec-{size}: stochastic positions of masked patches, with the patch embedding as A.",
    )
