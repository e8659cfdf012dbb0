"""Pretrain a recipe on Tiny ImageNet and probe it: frozen features of the trained, of the untrained encoder, and pixels.

python benchmarks/tiny_imagenet.py --recipe stop-tiny-imagenet --train train.parquet --val val.parquet --epochs 30
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from stop_mim.data.augment import resize_batch
from stop_mim.data.bad_images import BadImages
from stop_mim.data.loader import store_images
from stop_mim.data.sources import open_source
from stop_mim.evaluation.features import pixel_features, pooled_features
from stop_mim.evaluation.knn import knn
from stop_mim.evaluation.linear import linear_probe
from stop_mim.models.encoder import load_encoder
from stop_mim.seeds import derive_seed
from stop_mim.training.build import build_encoder
from stop_mim.training.distributed import choose_device
from stop_mim.training.loop import train
from stop_mim.training.recipes import find_recipe
from stop_mim.training.run_folder import read_metrics


def labelled_images(name, device):
    source = open_source(name)
    stored = store_images(source, (64, 64), BadImages(name, len(source)), device=device)
    return stored.pixels, torch.as_tensor(source.labels["class"], device=device)


def probe(features, labels):
    scores = dict(linear_probe(features[0], labels[0], features[1], labels[1]))
    return scores | dict(knn(features[0], labels[0], features[1], labels[1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="stop-tiny-imagenet")
    parser.add_argument("--train", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    config = find_recipe(options.recipe)
    optim = replace(
        config.optim, epochs=options.epochs, batch_size=options.batch_size, warmup_epochs=max(1, options.epochs // 10)
    )
    speed = replace(config.speed, compile=options.compile)
    config = replace(config, data=options.train, seed=options.seed, optim=optim, speed=speed, out=str(options.out))
    result = train(config, recipe=options.recipe)
    device = choose_device("auto")
    images, labels = zip(*(labelled_images(name, device) for name in (options.train, options.val)), strict=True)
    torch.manual_seed(derive_seed(options.seed, "weights"))
    encoders = {
        "untrained": build_encoder(config.encoder).to(device),
        "trained": load_encoder(result.folder).to(device),
    }
    scores = {
        name: probe([pooled_features(encoder, part) for part in images], labels) for name, encoder in encoders.items()
    }
    scores["pixels 16x16"] = probe([pixel_features(resize_batch(part, (16, 16))) for part in images], labels)
    metrics = read_metrics(result.folder)
    rates = sorted(line["images_per_second"] for line in metrics[5:]) or [float("nan")]
    health = [line for line in metrics if "health/rankme" in line]
    summary = {
        "recipe": options.recipe,
        "epochs": options.epochs,
        "seed": options.seed,
        "loss": [metrics[0]["loss"], metrics[-1]["loss"]],
        "rankme": [round(line["health/rankme"], 1) for line in health],
        "A_norm": [round(line["health/A_norm"], 2) for line in health],
        "mask_token_norm": [round(line["health/mask_token_norm"], 2) for line in health],
        "images_per_second_median": rates[len(rates) // 2],
        "scores": scores,
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2))
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
