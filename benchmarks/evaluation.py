"""Speed of evaluations, and their agreement with scikit-learn on the same features.

python benchmarks/evaluation.py speed
python benchmarks/evaluation.py agreement RUN DATA
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from stop_mim import create_encoder, load_encoder
from stop_mim.benchmark.timing import wait_for
from stop_mim.data.augment import TestView, normalise
from stop_mim.data.image_source import ImageSource
from stop_mim.evaluation.data import open_task_data
from stop_mim.evaluation.features import encoder_fingerprint, extract_features, features_folder
from stop_mim.evaluation.logistic import TrainingFeatures, choose_penalty
from stop_mim.evaluation.probes import knn, linear_probe
from stop_mim.evaluation.protocols import choose_protocol
from stop_mim.training.distributed import Ranks, choose_device


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

    def fingerprint(self):
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


def by_name(scores):
    return {score.name: score.value for score in scores}


def probe_speed(device, scale):
    count, test = int(50_000 * scale), int(10_000 * scale)
    features, labels = clusters(count + test, 384, 100, device)
    sets = ({1: [features[:count]]}, labels[:count], {1: [features[count:]]}, labels[count:])
    seconds, scores = timed(device, lambda: by_name(linear_probe(*sets, 100, device)))
    return {"linear probe, seconds": seconds, "images": count, "features": 384, "top1": scores["top1"]}


def knn_speed(device, scale):
    count, queries = int(1_000_000 * scale), int(10_000 * scale)
    features, labels = clusters(count + queries, 768, 1000, device)
    sets = ([features[:count]], labels[:count], [features[count:]], labels[count:])
    seconds, scores = timed(device, lambda: by_name(knn(*sets, 1000, device, (10, 20, 100, 200))))
    # Centred features double the work.
    return {"kNN, seconds": seconds / 2, "keys": count, "queries": queries, "20-NN": scores["neighbours=20/top1"]}


def extraction_speed(device, scale, repeats=3):
    count, batch = int(65_536 * scale), 256
    encoder = create_encoder("small", 224, 16).to(device).eval()
    source = Noise(count, 224)
    ranks, view = Ranks(0, 1, 1, device), TestView((224, 224))

    def bare():
        images = normalise(source.images[:batch].to(device))
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            for _ in range(max(1, count // batch)):
                encoder.embed(images, 4)

    def stored():
        with tempfile.TemporaryDirectory() as folder:
            extract_features(encoder, source, view, 4, ranks, Path(folder), batch)

    bare()
    ratios, rates = [], []
    for _ in range(repeats):
        bare_seconds, _ = timed(device, bare)
        seconds, _ = timed(device, stored)
        ratios.append(bare_seconds / seconds)
        rates.append(count / seconds)
    return {
        "extraction, fraction of the bare forward's speed": sorted(ratios)[repeats // 2],
        "images/s": max(rates),
        "images": count,
    }


def memory(device, scale):
    """Memory of the process with four times as many images."""
    encoder = create_encoder("tiny", 32, 16).to(device).eval()
    peaks = []
    for count in (int(65_536 * scale), int(262_144 * scale)):
        source = Noise(count, 32, stacked=False)
        with tempfile.TemporaryDirectory() as folder:
            extract_features(encoder, source, TestView((32, 32)), 4, Ranks(0, 1, 1, device), Path(folder), 512, 0)
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
    encoder = load_encoder(options.encoder).to(device)
    (data,) = open_task_data(options.data)
    protocol = choose_protocol("auto", data.train.source, data.label, encoder.image_size)
    parts = []
    for labelled in (data.train, data.test):
        view = protocol.test_view_of(encoder)
        folder = features_folder(encoder_fingerprint(encoder), labelled.source, view, 1, device)
        features = extract_features(encoder, labelled.source, view, 1, Ranks(0, 1, 1, device), folder)
        chosen = torch.isin(features.indices, torch.from_numpy(labelled.indices)).nonzero()[:, 0][: options.most]
        labels = torch.from_numpy(labelled.labels)[features.indices[chosen]]
        parts += [features.rows(chosen).to(device), labels.to(device)]
    train, train_labels, test, test_labels = parts
    penalty = choose_penalty([train], train_labels, data.classes, device).penalty
    ours, probe = timed(device, lambda: TrainingFeatures([train], train_labels, data.classes, device).fit([penalty])[0])
    arrays = [part.cpu().numpy() for part in parts]
    scaler = StandardScaler().fit(arrays[0])
    start = time.perf_counter()
    reference = LogisticRegression(C=1 / (penalty * len(train)), max_iter=20_000, tol=1e-7)
    reference.fit(scaler.transform(arrays[0]), arrays[1])
    linear = {
        "linear, ours": 100 * probe.accuracy(test, test_labels),
        "scikit-learn": 100 * reference.score(scaler.transform(arrays[2]), arrays[3]),
        "penalty": penalty,
        "seconds": ours,
        "scikit-learn's": time.perf_counter() - start,
    }
    print(json.dumps(linear), flush=True)
    found = by_name(knn([train], train_labels, [test], test_labels, data.classes, device, (20,)))
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
