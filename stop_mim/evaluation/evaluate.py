"""The command `evaluate`: every task with every encoder, results written as they come, and a table of them all."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from stop_mim.data.stored import Progress
from stop_mim.data.videos import open_videos
from stop_mim.errors import InputError
from stop_mim.evaluation.config import EvaluateConfig
from stop_mim.evaluation.data import TaskData, VideoData, kinds_of_data, open_task_data
from stop_mim.evaluation.subject import MASKS, GivenMasks, Subject, open_encoder, set_image_size
from stop_mim.evaluation.task import TASKS, Task, options_of
from stop_mim.files import require_writable
from stop_mim.results import (
    RESULTS_FILE,
    Evaluation,
    add_results,
    read_results,
    results_document,
    results_table,
    today,
    write_csv,
    write_json,
)
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.distributed import Ranks, process_group, wait_for_all
from stop_mim.training.run_folder import environment


def evaluate(names: Sequence[str], config: EvaluateConfig, console: Console | None = None) -> list[Evaluation]:
    """Run every task with every encoder, show a table, and write the results.

    Args:
        names: encoders; see `load_encoder`, also untrained:NAME and masks:FOLDER.
        config: an instance of `evaluate_config()`.
        console: where to show progress and table; not given: the standard output.
    """
    console = console or Console()
    if not names:
        raise InputError(
            "evaluate needs an encoder first: a run directory, a file, timm:NAME, hf:NAME or masks:FOLDER."
        )
    _check_outputs(config)
    # A shell completes the name of a directory with a slash.
    names = list(dict.fromkeys(name.rstrip("/") or name for name in names))
    with process_group(config.speed.device) as ranks, ProgressDisplay(console, shown=ranks.is_main) as display:
        work = _open_work(names, config, ranks, display)
        found: list[Evaluation] = []
        for task in work:
            found.append(_evaluation(task, ranks))
            if ranks.is_main and task.subject.run is not None:
                add_results(task.subject.run / RESULTS_FILE, found[-1:])
    if ranks.is_main:
        console.print(results_table(found))
        if config.json is not None:
            write_json(config.json, results_document(found))
        if config.csv is not None:
            write_csv(config.csv, found)
        for path in dict.fromkeys(task.subject.run for task in work if task.subject.run is not None):
            console.print(f"Written to {path / RESULTS_FILE}", highlight=False, markup=False, soft_wrap=True)
    return found


def _evaluation(task: Task, ranks: Ranks) -> Evaluation:
    scores = list(task.run())
    wait_for_all(ranks)
    around, subject, data, config = environment(), task.subject, task.data, task.config
    facts = {**subject.facts(), **data.facts(), "date": today(), "versions": around["packages"]}
    facts |= {"python": around["python"], "gpu": around["gpu"], "device": str(ranks.device)}
    facts["processes"] = ranks.world_size
    return Evaluation(
        subject.name,
        task.name,
        data.label,
        config.data,
        data.test_name,
        task.settings(),
        config.seed,
        facts,
        task.details,
        scores,
    )


def _open_work(names: list[str], config: EvaluateConfig, ranks: Ranks, display: ProgressDisplay) -> list[Task]:
    """Open and check everything before anything is computed."""
    tasks = _choose_tasks(config)
    data = _open_data(config, tasks, all(name.startswith(MASKS) for name in names), display.say)
    bar = partial(_bar, display)
    subjects = [_open_subject(name, config, tasks, ranks, bar) for name in names]
    for number, subject in enumerate(subjects if len(subjects) > 1 else []):
        if isinstance(subject, Subject):
            subject.place = f"{number}-{Path(subject.name).name.replace(':', '-')}"
    for path in {subject.run / RESULTS_FILE for subject in subjects if subject.run is not None}:
        _check_results_file(path, config)
    work = []
    for subject in subjects:
        for name, task in tasks.items():
            for one in data[task.needs]:
                if not task.labels or one.label in task.labels:
                    about = one.label if one.label not in ("class", VideoData.label) else ""
                    progress = bar(" ".join(filter(None, [subject.name, name, about])))
                    work.append(task(name, config, subject, one, progress))
    for one in work:
        one.check()
    return work


def _choose_tasks(config: EvaluateConfig) -> dict[str, type[Task]]:
    kinds = kinds_of_data(config.data)
    if not config.task:
        raise InputError("task is empty: name one or more tasks, such as linear knn, or all.")
    if "all" in config.task:
        names = [name for name, task in TASKS.items() if task.in_all and task.needs in kinds]
        return {name: TASKS[name] for name in sorted(names, key=lambda name: TASKS[name].trains)}
    tasks = {name: TASKS.find(name) for name in config.task}
    for name, task in tasks.items():
        if task.needs == "images" and "images" not in kinds:
            raise InputError(
                f"'{config.data}' holds videos in DAVIS's layout: the task {name} needs images; choose the task video."
            )
    return tasks


def _open_data(
    config: EvaluateConfig, tasks: dict[str, type[Task]], only_masks: bool, say: Callable[[str], None]
) -> dict[str, list[Any]]:
    """Return the labellings of images, and the videos, as far as tasks need them."""
    needs = {task.needs for task in tasks.values()}
    images = _open_images(config, tasks, say) if "images" in needs else []
    videos = []
    if "videos" in needs:
        # The options of scenes are those of images: beside these, the usual clips are drawn.
        name = "scenes" if images and "videos" in kinds_of_data(config.data) else config.data
        opened = open_videos(name, options_of(config, "video").split, needs_frames=not only_masks)
        videos.append(VideoData(opened, config.data))
    return {"images": images, "videos": videos}


def _open_images(config: EvaluateConfig, tasks: dict[str, type[Task]], say: Callable[[str], None]) -> list[TaskData]:
    data = open_task_data(config.data, config.test_data, config.label, config.seed)
    for name, task in tasks.items():
        if task.needs == "images" and task.labels and not {one.label for one in data} & {*task.labels}:
            raise InputError(
                f"'{config.data}' has no label {' or '.join(task.labels)}: the task {name} needs other data, such as CLEVR "
                "or scenes."
            )
    for one in data:
        if one.held_out:
            say(
                f"'{config.data}' has no test split: {len(one.test):,} of its images are held out to test on "
                f"(label {one.label}); name others with --test-data."
            )
    if config.test_data is not None and data[0].train.source.fingerprint() == data[0].test.source.fingerprint():
        say(f"Warning: '{config.test_data}' holds the training images: the scores are of images with known labels.")
    return data


def _open_subject(
    name: str, config: EvaluateConfig, tasks: dict[str, type[Task]], ranks: Ranks, bar: Callable[[str], Progress]
) -> Subject | GivenMasks:
    if name.startswith(MASKS):
        if any(task.needs != "videos" for task in tasks.values()):
            raise InputError(f"'{name}' can only be scored on videos: add --task video and --data with DAVIS's folder.")
        return GivenMasks(name, Path(name.removeprefix(MASKS)).expanduser(), ranks)
    encoder, run = open_encoder(name)
    if config.image_size is not None:
        set_image_size(encoder, config.image_size, name)
    return Subject(name, encoder, run, config, max(options_of(config, "linear").layers), ranks, bar)


def _check_outputs(config: EvaluateConfig) -> None:
    for path in (config.json, config.csv):
        if path is not None:
            require_writable(str(path), path)
    if config.json is not None and config.csv is not None and config.json.resolve() == config.csv.resolve():
        raise InputError(f"json and csv are both {config.json}: name two files.")


def _check_results_file(path: Path, config: EvaluateConfig) -> None:
    require_writable(str(path), path, "make the run directory writable, or evaluate a copy of its encoder elsewhere")
    for asked in (config.json, config.csv):
        if asked is not None and asked.resolve() == path.resolve():
            raise InputError(f"{asked} is where the run keeps the results of all its evaluations: name another file.")
    read_results(path)


def _bar(display: ProgressDisplay, name: str) -> Progress:
    """Return a progress bar that shows the rate."""
    started: list[tuple[float, int]] = []

    def show(done: int, total: int) -> None:
        now = time.perf_counter()
        if not started:
            started.append((now, done))
        since, first = started[0]
        rate = (done - first) / (now - since) if now > since else 0.0
        display.update(name, done, total, f"{rate:,.1f}/s" if rate else "")

    return show
