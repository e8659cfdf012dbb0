"""How far linear heads trained by SGD are from the fast probe.

python benchmarks/linear_sgd.py ENCODER DATA --images-a-class 50 500
    on the very same features, without augmentation
python benchmarks/linear_sgd.py ENCODER DATA --images-a-class 50 500 --end-to-end
    as `stop-mim evaluate --task linear linear-sgd` runs them, and the network with its initial weights if ENCODER is a run
"""

import argparse
import itertools
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from stop_mim import load_encoder
from stop_mim.data.augment import AugmentConfig, TestView
from stop_mim.data.batches import Batch
from stop_mim.data.labelled import LabelledSet, draw_per_class
from stop_mim.evaluation.config import evaluate_config
from stop_mim.evaluation.data import open_task_data
from stop_mim.evaluation.features import LabelledFeatures, extract_features
from stop_mim.evaluation.labelled_training import Conditions
from stop_mim.evaluation.linear_heads import LinearTraining
from stop_mim.evaluation.protocols import PROTOCOLS
from stop_mim.evaluation.subject import Subject, feature_task
from stop_mim.evaluation.task import TASKS
from stop_mim.evaluation.tasks.linear_sgd import LinearSGDOptions
from stop_mim.models.accuracy import top_accuracy
from stop_mim.training.config import DeviceConfig
from stop_mim.training.distributed import Ranks

PLAIN_LRS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class StoredTraining(LinearTraining):
    """Heads that learn from stored features of whole images."""

    stored: torch.Tensor

    def batches(self, first):
        classes = torch.from_numpy(self.used.labels).to(self.stored.device)
        for number in itertools.count(first):
            indices = self.order.indices(number)
            yield Batch(self.stored[indices], classes[indices], indices)

    def features(self, images):
        return images

    @torch.no_grad()
    def scores(self, features, labels):
        self.heads.eval()
        return [top_accuracy(logits, labels.to(logits.device)) for logits in self.heads.logits(features)]


def protocols(epochs):
    generic, imagenet = (PROTOCOLS[name] for name in ("generic", "imagenet"))
    if epochs is not None:
        generic, imagenet = generic.shortened(epochs), imagenet.shortened(epochs)
    plain = replace(generic, preconditioned=False, weight_decay=5e-4)
    return {
        "generic": generic,
        "plain, 0.01 alone, milestones": imagenet,
        f"plain, {len(PLAIN_LRS)} rates, cosine": replace(plain, lrs=PLAIN_LRS),
    }


def compare(encoder, data, stored, images_a_class, arguments, ranks):
    chosen = np.sort(draw_per_class(data.train.classes, images_a_class, arguments.seed, 0))
    train = LabelledSet(data.train.source, data.train.labels, data.train.indices[chosen])
    test_labels = torch.from_numpy(data.test.classes)
    start = time.perf_counter()
    task = feature_task("linear", data.classes, ranks.device, arguments.seed)
    learned = LabelledFeatures.in_memory(stored[0][train.indices], torch.from_numpy(train.classes), 4)
    found = task.scores(learned, LabelledFeatures.in_memory(stored[1], test_labels, 4))
    fast = {score.name: score.value for score in found if score.metric == "top1"}
    print(f"{len(train)} images, fast: {fast['top1']:.2f} ({time.perf_counter() - start:.0f} s)", flush=True)
    print({name: round(value, 2) for name, value in fast.items()}, flush=True)
    for name, protocol in protocols(arguments.epochs).items():
        conditions = Conditions(protocol, AugmentConfig(), arguments.seed, ranks, DeviceConfig())
        run = StoredTraining(encoder, train, 256, conditions)
        run.stored, start = stored[0], time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            run.train(Path(folder) / "state")
        held_out = run.scores(stored[0][run.held_out.indices], torch.from_numpy(run.held_out.classes))
        tested, best = run.scores(stored[1], test_labels), int(np.argmax(held_out))
        print(
            f"{len(train)} images, {name}, {protocol.epochs} epochs: {run.heads.heads[best]} {tested[best]:.2f} "
            f"({time.perf_counter() - start:.0f} s)"
        )
        for head, score in zip(run.heads.heads, tested, strict=True):
            print(f"    {head} {score:.2f}", flush=True)


def end_to_end(name, arguments, ranks):
    options = LinearSGDOptions(epochs=arguments.epochs)
    config = evaluate_config()(protocol="generic", seed=arguments.seed, linear_sgd=options)
    subject = Subject(name, load_encoder(name), None, config, ranks)
    data = open_task_data(arguments.data, arguments.test_data)[0]
    if arguments.classes:
        train, test = (part.part(np.flatnonzero(part.classes < arguments.classes)) for part in (data.train, data.test))
        data = replace(data, classes=arguments.classes, train=train, test=test)
    for images_a_class in arguments.images_a_class:
        chosen = np.sort(draw_per_class(data.train.classes, images_a_class, arguments.seed, 0))
        part = replace(data, train=data.train.part(chosen))
        for task in ("linear", "linear-sgd"):
            start = time.perf_counter()
            one = TASKS[task](task, config, subject, part, lambda done, total: None)
            best = {score.name: score for score in one.run()}["top1"]
            seconds = time.perf_counter() - start
            one.finish()
            print(f"{name}, {len(part.train)} images, {task}: {best.text} ({seconds:.0f} s)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("encoder")
    parser.add_argument("data")
    parser.add_argument("--images-a-class", type=int, nargs="+", default=[50])
    parser.add_argument("--test-data")
    parser.add_argument("--classes", type=int, help="end to end: the first classes alone")
    parser.add_argument("--end-to-end", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    ranks = Ranks(0, 1, 1, torch.device(arguments.device))
    if arguments.end_to_end:
        baseline = [f"untrained:{arguments.encoder}"] if Path(arguments.encoder).is_dir() else []
        for name in [arguments.encoder, *baseline]:
            end_to_end(name, arguments, ranks)
        return
    encoder, data = load_encoder(arguments.encoder).eval(), open_task_data(arguments.data, arguments.test_data)[0]
    if encoder.depth < 4:
        parser.error(f"{arguments.encoder} has {encoder.depth} layers: name an encoder of at least four")
    view, stored = TestView(encoder.image_size, None, encoder.mean, encoder.std), []
    subject = Subject(arguments.encoder, encoder, None, evaluate_config()(), ranks)
    subject.need_layers(4)
    for part in (data.train, data.test):
        features = extract_features(subject, part.source, view)
        assert len(features) == len(part.source), "this needs images that can all be read"
        stored.append(features.on(ranks.device))
    stored[1] = stored[1][data.test.indices]
    for images_a_class in arguments.images_a_class:
        compare(encoder, data, stored, images_a_class, arguments, ranks)


if __name__ == "__main__":
    main()
