"""Tasks on frozen features, quick enough for one process: linear probes, nearest neighbours, few labels."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stop_mim.data.loader import Progress
from stop_mim.evaluation.config import EvaluateConfig, LinearOptions, TaskName
from stop_mim.evaluation.features import Features
from stop_mim.evaluation.knn import knn
from stop_mim.evaluation.label_draws import label_draws
from stop_mim.evaluation.linear import linear_probe
from stop_mim.evaluation.low_shot import low_shot
from stop_mim.evaluation.protocols import LinearProtocol
from stop_mim.evaluation.session import EncoderSession
from stop_mim.evaluation.task_data import TaskData


def feature_settings(task: TaskName, config: EvaluateConfig) -> dict[str, Any]:
    """What decides the numbers of a task, beside data, encoder and protocol."""
    own: dict[TaskName, dict[str, Any]] = {
        "low-shot": {**asdict(config.low_shot), "list_file": str(config.low_shot.list_file or "")},
        "knn": asdict(config.knn),
    }
    # Results from before there was a choice are of the usual one, and to be replaced by the same.
    return own.get(task, {} if config.linear == LinearOptions() else asdict(config.linear))


def feature_scores(
    subject: EncoderSession, task: TaskName, data: TaskData, protocol: LinearProtocol, bar: Progress
) -> Iterator[tuple[str, float]]:
    """Names and values of what a task measures; all processes compute features, and the main one the rest."""
    config, ranks = subject.session.config, subject.session.ranks
    device = ranks.device
    train, train_labels = subject.features(data.train, protocol)
    test, test_labels = subject.features(data.test, protocol)
    if not ranks.is_main:
        return iter(())
    if task in ("linear", "clevr"):
        last = {f"last{layers}": layers for layers in subject.layers}
        return linear_probe(
            {name: subject.chunks(train.last(layers)) for name, layers in last.items()},
            train_labels,
            {name: subject.chunks(test.last(layers)) for name, layers in last.items()},
            test_labels,
            data.classes,
            device,
            standardise=config.linear.standardise,
            seed=config.seed,
            progress=bar,
        )
    if task == "knn":
        chunks = subject.chunks(train.last(1)), subject.chunks(test.last(1))
        return knn(
            chunks[0], train_labels, chunks[1], test_labels, data.classes, device, config.knn.neighbours,
            config.knn.temperature, bar,
        )  # fmt: skip
    few = {
        amount: [_labelled_rows(train.last(1), train_labels, one, device) for one in draws]
        for amount, draws in label_draws(config.low_shot, data.train, config.seed).items()
    }
    return low_shot(few, test.last(1).on(device), test_labels.to(device), data.classes, config.seed, bar)


def _labelled_rows(
    features: Features, labels: Tensor, chosen: np.ndarray, device: torch.device
) -> tuple[Tensor, Tensor]:
    here = torch.isin(features.indices, torch.from_numpy(chosen)).nonzero()[:, 0]
    return features.rows(here).to(device), labels[here].to(device)
