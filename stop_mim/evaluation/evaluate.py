"""The command `evaluate`: every task with every encoder, results written as they come, and a table of the main scores."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from stop_mim.data.stored import Progress
from stop_mim.data.videos import open_videos
from stop_mim.errors import InputError
from stop_mim.evaluation.config import EvaluateConfig, check_arguments
from stop_mim.evaluation.data import TaskData, VideoData, kinds_of_data, open_task_data
from stop_mim.evaluation.subject import MASKS, GivenMasks, Subject, open_subject
from stop_mim.evaluation.task import TASKS, NotApplicable, Task
from stop_mim.exchange.loading import run_of
from stop_mim.files import require_writable, user_path
from stop_mim.records import write_json
from stop_mim.results import (
    RESULTS_FILE,
    UNTRAINED,
    USUAL_LABELS,
    Evaluation,
    add_results,
    details_table,
    headline_table,
    read_results,
    results_document,
    today,
    write_csv,
)
from stop_mim.tables import write_tables
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.distributed import Ranks, process_group, wait_for_all
from stop_mim.training.run_folder import environment
from stop_mim.training.watch import watch

# Up to this many images, a run's network is scored with its initial weights too, unless the user decides.
MOST_IMAGES_OF_BASELINES = 20_000


def evaluate(names: Sequence[str], config: EvaluateConfig, console: Console | None = None) -> list[Evaluation]:
    """Run every task with every encoder, show a table, write the results, and return those of the named encoders.

    Args:
        names: encoders; see `load_encoder`, also untrained:NAME and masks:FOLDER.
        config: an instance of `evaluate_config()`.
        console: where to show progress and table; not given: the standard output.
    """
    console = console or Console()
    check_arguments(names, config)
    # A shell completes the name of a directory with a slash.
    names = list(dict.fromkeys(name.rstrip("/") or name for name in names))
    with process_group(config.speed) as ranks, ProgressDisplay(console, shown=ranks.is_main) as display:
        watch.mark("start-up, opening data and encoders")
        work = _open_work(names, config, ranks, display)
        measured: list[Evaluation] = []
        for task in work:
            watch.mark(f"the task {task.name} with {task.subject.name}")
            measured.append(_evaluation(task, ranks))
            if ranks.is_main:
                add_results(_results_file(task.subject, config), measured[-1:])
                task.finish()
        unreadable: dict[str, int] = {}
        for one in measured:
            # A later task of the same encoder counts what earlier ones found, too.
            for name, count in one.facts.get("unreadable_images", {}).items():
                unreadable[name] = max(count, unreadable.get(name, 0))
        for name, count in sorted(unreadable.items()):
            display.say(f"Images of '{name}' that cannot be read and are left out: {count}.")
    found = [one for one in measured if one.encoder in names]
    if ranks.is_main:
        files = list(dict.fromkeys(_results_file(task.subject, config) for task in work))
        _show_and_write(found, [one for file in files for one in read_results(file)], config, console)
        for path in files:
            console.print(f"Written to {path}", highlight=False, markup=False, soft_wrap=True)
    return found


def _show_and_write(
    found: list[Evaluation], known: Sequence[Evaluation], config: EvaluateConfig, console: Console
) -> None:
    """Show the tables, then write the files that the user asked for."""
    table = headline_table(found, known)
    console.print(table)
    if config.details:
        console.print(details_table(found))
    else:
        console.print("All scores: --details, or the files.", style="dim")
    if config.table is not None:
        write_tables(config.table, [table])
    if config.json is not None:
        write_json(config.json, results_document(found))
    if config.csv is not None:
        write_csv(config.csv, found)


def _results_file(subject: Subject | GivenMasks, config: EvaluateConfig) -> Path:
    """Return the file that keeps the scores of an encoder."""
    return (config.out or subject.run or Path()) / RESULTS_FILE


def _evaluation(task: Task, ranks: Ranks) -> Evaluation:
    scores = list(task.run())
    wait_for_all(ranks)
    around, subject, data, config = environment(), task.subject, task.data, task.config
    facts = {
        **subject.facts(),
        **data.facts(),
        "date": today(),
        "versions": around["packages"],
        "python": around["python"],
        "gpu": around["gpu"],
        "device": str(ranks.device),
        "processes": ranks.world_size,
    }
    if task.needs == "images":
        facts["data_fingerprint"] = task.training_images().fingerprint()
    about = (subject.name, task.name, data.label, config.data, data.test_name)
    return Evaluation(*about, task.settings(), config.seed, facts, task.details, scores)


def _open_work(names: list[str], config: EvaluateConfig, ranks: Ranks, display: ProgressDisplay) -> list[Task]:
    """Open and check everything before anything is computed."""
    tasks = _choose_tasks(config)
    data = _open_data(config, tasks, all(name.startswith(MASKS) for name in names), display.say)
    bar = partial(_bar, display)
    baselines = _baselines(names, config, tasks, data)
    subjects = [open_subject(name, config, ranks, bar) for name in [*names, *baselines]]
    for number, subject in enumerate(subjects):
        if isinstance(subject, Subject):
            if len(names) > 1 and number < len(names):
                subject.place = f"{number}-{Path(subject.name).name.replace(':', '-')}"
            for note in subject.notes():
                display.say(note)
        elif any(task.needs != "videos" for task in tasks.values()):
            raise InputError(
                f"'{subject.name}' can only be scored on videos: add --task video and --data with DAVIS's folder."
            )
    for path in {_results_file(subject, config) for subject in subjects}:
        _check_results_file(path, config)
    work = []
    for subject in subjects:
        for name, task in tasks.items():
            for one in data[name] if subject.name not in baselines or _frozen(task) else ():
                if not task.labels or one.label in task.labels:
                    label = "" if one.label in USUAL_LABELS else one.label
                    progress = bar(" ".join(filter(None, [subject.name, name, label])))
                    work.append(task(name, config, subject, one, progress))
    applicable, notes = [], dict[str, None]()
    for one in work:
        try:
            one.check()
        except NotApplicable as error:
            if "all" not in config.task:
                raise
            notes[f"The task {one.name} is left out: {error}"] = None
        else:
            applicable.append(one)
    for note in notes | dict.fromkeys(note for one in applicable for note in one.notes()):
        display.say(note)
    return applicable


def _frozen(task: type[Task]) -> bool:
    """Whether a task scores frozen features of images: a network with its initial weights is then a fair baseline."""
    return task.needs == "images" and not task.trains


def _baselines(
    names: list[str], config: EvaluateConfig, tasks: dict[str, type[Task]], data: dict[str, list[Any]]
) -> list[str]:
    """Return the names of runs' networks with their initial weights that are scored too."""
    frozen = [name for name, task in tasks.items() if _frozen(task)]
    if config.untrained == "no" or not frozen:
        return []
    labelled = data[frozen[0]][0]
    if config.untrained == "auto" and len(labelled.train) + len(labelled.test) > MOST_IMAGES_OF_BASELINES:
        return []
    runs = [name for name in names if run_of(name) == user_path(name).resolve()]
    return [name for name in (f"{UNTRAINED}{run}" for run in runs) if name not in names]


def _choose_tasks(config: EvaluateConfig) -> dict[str, type[Task]]:
    kinds = kinds_of_data(config.data)
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
    """Return the data of each task: all labellings of the images, which tasks share, or videos."""
    on_images = {name: task for name, task in tasks.items() if task.needs == "images"}
    images = _open_images(config, on_images, say) if on_images else []
    data: dict[str, list[Any]] = dict.fromkeys(on_images, images)
    # The options of scenes are those of images: with these, the default clips are drawn.
    clips = "scenes" if images and "videos" in kinds_of_data(config.data) else config.data
    for name in tasks.keys() - on_images.keys():
        split = tasks[name].video_split(config)
        data[name] = [VideoData(open_videos(clips, split, needs_frames=not only_masks), config.data)]
    return data


def _open_images(config: EvaluateConfig, tasks: dict[str, type[Task]], say: Callable[[str], None]) -> list[TaskData]:
    data = open_task_data(config.data, config.test_data, config.label, config.seed)
    for name, task in tasks.items():
        if task.labels and not {one.label for one in data} & {*task.labels}:
            lacks = f"'{config.data}' has no label {' or '.join(task.labels)}"
            if "all" not in config.task:
                raise InputError(f"{lacks}: the task {name} needs other data, such as CLEVR or scenes.")
            say(f"The task {name} is left out: {lacks}.")
    for one in data:
        if one.held_out:
            say(
                f"'{config.data}' has no test split: {len(one.test):,} of its images are held out for testing "
                f"(label {one.label}); --test-data names other test images."
            )
    if config.test_data is not None and data[0].train.source.fingerprint() == data[0].test.source.fingerprint():
        say(f"Warning: '{config.test_data}' holds the training images: the scores are not test scores.")
    return data


def _check_results_file(path: Path, config: EvaluateConfig) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    require_writable(str(path), path, "make the directory writable, or give another one with --out")
    for asked in (config.json, config.csv):
        if asked is not None and asked.resolve() == path.resolve():
            raise InputError(f"{asked} is the file that collects all results: give another file.")
    read_results(path)


def _bar(display: ProgressDisplay, name: str) -> Progress:
    """Return a progress bar that shows the rate."""
    first: tuple[float, int] | None = None

    def show(done: int, total: int) -> None:
        nonlocal first
        now = time.perf_counter()
        first = first or (now, done)
        rate = (done - first[1]) / max(now - first[0], 1e-9)
        display.update(name, done, total, f"{rate:,.1f}/s" if rate else "")

    return show
