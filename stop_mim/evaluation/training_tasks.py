"""Tasks that train on augmented images, shared by all processes and resumed where they stopped: SGD heads, fine-tuning."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stop_mim.data.cache import cache_folder, require_writable_cache
from stop_mim.data.image_source import digest
from stop_mim.data.labelled import LabelledSet
from stop_mim.data.loader import Progress
from stop_mim.evaluation.config import EvaluateConfig, TaskName
from stop_mim.evaluation.finetune import FinetuneConfig, finetune
from stop_mim.evaluation.label_draws import label_draws
from stop_mim.evaluation.linear_sgd import LinearSGDConfig, config_for, linear_sgd
from stop_mim.evaluation.protocols import LinearProtocol
from stop_mim.evaluation.session import EncoderSession
from stop_mim.evaluation.task_data import TaskData

TRAINING_TASKS = ("linear-sgd", "finetune", "finetune-low-shot")


def training_settings(task: TaskName, config: EvaluateConfig, protocol: LinearProtocol) -> dict[str, Any]:
    """What decides the numbers of a task, beside data and encoder."""
    options, few = config.low_shot, {}
    if task == "finetune-low-shot":
        few = {"amount": options.amounts[0], "list_file": str(options.list_file or "")}
    return {**asdict(_training_config(task, config, protocol)), **few}


def training_scores(
    subject: EncoderSession, task: TaskName, data: TaskData, protocol: LinearProtocol, bar: Progress
) -> Iterator[tuple[str, float]]:
    """Names and values of what a task measures, the same in all processes."""
    config, ranks = subject.session.config, subject.session.ranks
    train, name = data.train, str(task)
    if task == "finetune-low-shot":
        amount, draws = next(iter(label_draws(config.low_shot, train, config.seed).items()))
        train, name = LabelledSet(train.source, train.labels, draws[0]), f"finetune-low-shot/{amount}"
    chosen = _training_config(task, config, protocol)
    state = _state_file(subject, name, data, asdict(chosen))
    require_writable_cache(state.parent)
    arguments: dict[str, Any] = {"ranks": ranks, "progress": bar, "speed": config.speed, "state_file": state}
    if isinstance(chosen, LinearSGDConfig):
        yield from linear_sgd(subject.encoder, train, data.test, chosen, **arguments)
    else:
        for metric, value in finetune(subject.encoder, train, data.test, chosen, **arguments):
            yield metric.replace("finetune", name, 1), value
    if ranks.is_main:
        state.unlink(missing_ok=True)


def _training_config(
    task: TaskName, config: EvaluateConfig, protocol: LinearProtocol
) -> LinearSGDConfig | FinetuneConfig:
    if task == "linear-sgd":
        options = config.linear_sgd
        return config_for(protocol, options.epochs, options.batch_size, options.lrs, config.seed)
    tuned = config.finetune if task == "finetune" else config.finetune_low_shot
    return replace(tuned, train_view=protocol.train_view, test_view=protocol.test_view, seed=config.seed)


def _state_file(subject: EncoderSession, task: str, data: TaskData, settings: dict[str, Any]) -> Path:
    """Where a long evaluation is kept while it is under way; it is removed when it is done."""
    parts = [subject.fingerprint, subject.encoder.image_size, task, data.train.fingerprint(), settings]
    return cache_folder() / "evaluations" / f"{digest(parts)}.safetensors"
