"""Speed of evaluations, and their agreement with scikit-learn on the same features.

python benchmarks/evaluation.py speed
python benchmarks/evaluation.py agreement RUN DATA
"""

import argparse
import json
import os
import resource
import tempfile
import time

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from stop_mim import create_encoder, load_encoder
from stop_mim.data.augment import TestView, normalise
from stop_mim.data.image_source import ImageSource
from stop_mim.evaluation.config import evaluate_config
from stop_mim.evaluation.data import open_task_data
from stop_mim.evaluation.features import LabelledFeatures, extract_features
from stop_mim.evaluation.logistic import TrainingFeatures, choose_penalty
from stop_mim.evaluation.subject import Subject, feature_task
from stop_mim.models.accuracy import top_accuracy
from stop_mim.training.config import DeviceConfig
from stop_mim.training.distributed import Ranks, choose_device
from stop_mim.training.trial import wait_for


class Noise(ImageSource):
    """Images of noise that cost nothing to read: drawn once, and repeated."""

    def __init__(self, count, size, stacked=True, drawn=2048):
        super().__init__(f"noise:{count}")
        self.count, self.stack = count, stacked
        self.images = torch.randint(0, 256, (min(count, drawn), 3, size, size), dtype=torch.uint8)
        if stacked:
            self.images = self.images.repeat(-(-count // len(self.images)), 1, 1, 1)[:count]

    def __len__(self):
        return self.count

    def read(self, index):
        return self.images[index % len(self.images)]

    def size(self, index):
        return tuple(self.images.shape[2:])

    def describe(self, index):
        return f"{self.name}#{index}"

    def fingerprint(self, times=True):
        return self.name

    def stacked(self):
        return self.images if self.stack else None


def timed(device, work):
    wait_for(device)
    start = time.perf_counter()
    result = work()
    wait_for(device)
    return time.perf_counter() - start, result


def clusters(count, dim, classes, device):
    generator = torch.Generator(device).manual_seed(0)
    labels = torch.randint(classes, (count,), device=device, generator=generator)
    centres = torch.randn(classes, dim, device=device, generator=generator)
    return 0.15 * centres[labels] + torch.randn(count, dim, device=device, generator=generator), labels


def feature_scores(task, train, labels, test, test_labels, classes, device, **options):
    parts = LabelledFeatures.in_memory(train, labels), LabelledFeatures.in_memory(test, test_labels)
    found = feature_task(task, classes, device, **options).scores(*parts)
    return {score.name: score.value for score in found}


def probe_speed(device, scale):
    count, test = int(50_000 * scale), int(10_000 * scale)
    features, labels = clusters(count + test, 384, 100, device)
    sets = (features[:count], labels[:count], features[count:], labels[count:])
    seconds, scores = timed(device, lambda: feature_scores("linear", *sets, 100, device))
    return {"linear probe, seconds": seconds, "images": count, "features": 384, "top1": scores["top1"]}


def knn_speed(device, scale):
    count, queries = int(1_000_000 * scale), int(10_000 * scale)
    features, labels = clusters(count + queries, 768, 1000, device)
    sets = (features[:count], labels[:count], features[count:], labels[count:])
    seconds, scores = timed(device, lambda: feature_scores("knn", *sets, 1000, device))
    return {"kNN, seconds": seconds, "keys": count, "queries": queries, "20-NN": scores["neighbours=20/top1"]}


def subject_of(encoder, device, **speed):
    config = evaluate_config()(speed=DeviceConfig(**speed))
    subject = Subject("encoder", encoder, None, config, Ranks(0, 1, 1, device))
    subject.need_layers(4)
    return subject


def extract(subject, source, size):
    """Extract features into a cache of their own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STOP_MIM_CACHE"] = folder
        extract_features(subject, source, TestView((size, size)))


def extraction_speed(device, scale, repeats=3):
    count, batch = int(65_536 * scale), 256
    encoder, source = create_encoder("small", 224, 16), Noise(count, 224)
    subject = subject_of(encoder, device, batch_size_per_device=batch, workers=2)
    encoder.to(device)

    def bare():
        images = normalise(source.images[:batch].to(device))
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            for _ in range(max(1, count // batch)):
                encoder.embed(images, 4)

    bare()
    ratios, rates = [], []
    for _ in range(repeats):
        bare_seconds, _ = timed(device, bare)
        seconds, _ = timed(device, lambda: extract(subject, source, 224))
        ratios.append(bare_seconds / seconds)
        rates.append(count / seconds)
    return {
        "extraction, fraction of the bare forward's speed": sorted(ratios)[repeats // 2],
        "images/s": max(rates),
        "images": count,
    }


def memory(device, scale):
    """Memory of the process with four times as many images."""
    subject = subject_of(create_encoder("tiny", 32, 16), device, batch_size_per_device=512, workers=0)
    peaks = []
    for count in (int(65_536 * scale), int(262_144 * scale)):
        extract(subject, Noise(count, 32, stacked=False), 32)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    return {"peak GiB of the process": peaks[0], "with four times the images": peaks[1]}


SPEEDS = {"probe": probe_speed, "knn": knn_speed, "extraction": extraction_speed, "memory": memory}


def speed(options):
    device = choose_device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}))
    for measure in options.measure:
        print(json.dumps(SPEEDS[measure](device, options.scale)), flush=True)


def agreement(options):
    device = choose_device(options.device)
    subject = subject_of(load_encoder(options.encoder), device)
    (data,) = open_task_data(options.data)
    found = [subject.features(part, subject.protocol(data)).last_layer(device) for part in (data.train, data.test)]
    parts = [tensor[: options.most] for pair in found for tensor in pair]
    train, train_labels, test, test_labels = parts
    penalty = choose_penalty([train], train_labels, data.classes, device).penalty
    ours, probe = timed(device, lambda: TrainingFeatures([train], train_labels, data.classes, device).fit([penalty])[0])
    arrays = [part.cpu().numpy() for part in parts]
    scaler = StandardScaler().fit(arrays[0])
    start = time.perf_counter()
    reference = LogisticRegression(C=1 / (penalty * len(train)), max_iter=20_000, tol=1e-7)
    reference.fit(scaler.transform(arrays[0]), arrays[1])
    linear = {
        "linear, ours": top_accuracy(probe.logits(test), test_labels),
        "scikit-learn": 100 * reference.score(scaler.transform(arrays[2]), arrays[3]),
        "penalty": penalty,
        "seconds": ours,
        "scikit-learn's": time.perf_counter() - start,
    }
    print(json.dumps(linear), flush=True)
    found = feature_scores("knn", *parts, data.classes, device)
    neighbours = KNeighborsClassifier(
        20, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / 0.07)
    ).fit(arrays[0], arrays[1])
    theirs = 100 * neighbours.score(arrays[2], arrays[3])
    print(json.dumps({"20-NN, ours": found["neighbours=20/top1"], "scikit-learn": theirs}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    timing = commands.add_parser("speed")
    timing.add_argument("--scale", type=float, default=1.0, help="fraction of the full sizes")
    timing.add_argument("--measure", nargs="+", choices=SPEEDS, default=list(SPEEDS))
    timing.set_defaults(run=speed)
    comparing = commands.add_parser("agreement")
    comparing.add_argument("encoder")
    comparing.add_argument("data")
    comparing.add_argument("--most", type=int, default=10**9, help="most images of each split")
    comparing.set_defaults(run=agreement)
    for command in (timing, comparing):
        command.add_argument("--device", default="auto")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
