"""Every evaluation of any encoder: tasks by name, results kept as they come, a table of them all."""

from collections.abc import Iterator, Sequence

from rich.console import Console

from stop_mim.errors import InputError
from stop_mim.evaluation.config import EvaluateConfig, TaskName
from stop_mim.evaluation.encoders import NamedEncoder
from stop_mim.evaluation.feature_tasks import feature_scores, feature_settings
from stop_mim.evaluation.label_draws import check_label_draws
from stop_mim.evaluation.plan import GivenMasks, Plan, make_plan
from stop_mim.evaluation.results import (
    RESULTS_FILE,
    Evaluation,
    add_results,
    results_document,
    results_table,
    write_csv,
    write_json,
)
from stop_mim.evaluation.session import EncoderSession, Session
from stop_mim.evaluation.task_data import TaskData
from stop_mim.evaluation.training_tasks import TRAINING_TASKS, training_scores, training_settings
from stop_mim.evaluation.video_task import video_task
from stop_mim.files import require_writable
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.distributed import process_group, wait_for_all


def evaluate(names: Sequence[str], config: EvaluateConfig, console: Console | None = None) -> list[Evaluation]:
    """Do every task with every encoder, show a table, and write the results down."""
    console = console or Console()
    if not names:
        raise InputError("evaluate needs an encoder first: a run's folder, a file, timm:NAME, hf:NAME or masks:FOLDER.")
    _check_outputs(config)
    if not config.linear.standardise:
        raise InputError("linear.standardise is empty: give True, False or both.")
    if not config.linear.layers or min(config.linear.layers) < 1:
        raise InputError(f"linear.layers is {config.linear.layers}: give numbers of layers, such as 1 4.")
    with process_group(config.speed.device) as ranks, ProgressDisplay(console, shown=ranks.is_main) as display:
        session = Session(config, ranks, display)
        plan = make_plan(names, config, display.say)
        _check_results_files(config, plan)
        if {"low-shot", "finetune-low-shot"} & {*plan.tasks}:
            for data in plan.data:
                check_label_draws(config.low_shot, data, config.seed)
        found: list[Evaluation] = []
        for named in plan.encoders:
            for evaluation in _evaluations(session, plan, named):
                found.append(evaluation)
                if ranks.is_main and named.run is not None:
                    add_results(named.run / RESULTS_FILE, [evaluation])
    if ranks.is_main:
        console.print(results_table(found))
        if config.json is not None:
            write_json(config.json, results_document(found))
        if config.csv is not None:
            write_csv(config.csv, found)
        for path in {named.run for named in plan.encoders if named.run is not None}:
            console.print(f"Written to {path / RESULTS_FILE}", highlight=False, markup=False, soft_wrap=True)
    return found


def _check_outputs(config: EvaluateConfig) -> None:
    """Before anything is computed, since the work would be lost if its results could not be written."""
    for path in (config.json, config.csv):
        if path is not None:
            require_writable(str(path), path)
    if config.json is not None and config.csv is not None and config.json.resolve() == config.csv.resolve():
        raise InputError(f"json and csv are both {config.json}: name two files.")


def _check_results_files(config: EvaluateConfig, plan: Plan) -> None:
    for path in {named.run / RESULTS_FILE for named in plan.encoders if named.run is not None}:
        remedy = "let the run's folder be written, or evaluate a copy of its encoder elsewhere"
        require_writable(str(path), path, remedy)
        for asked in (config.json, config.csv):
            if asked is not None and asked.resolve() == path.resolve():
                raise InputError(
                    f"{asked} is where the run keeps the results of all its evaluations: name another file."
                )


def _evaluations(session: Session, plan: Plan, named: NamedEncoder | GivenMasks) -> Iterator[Evaluation]:
    """Every task, with every labelling of the data."""
    if isinstance(named, GivenMasks):
        yield video_task(session, plan, named)
        return
    subject = EncoderSession(session, named)
    if any(task not in TRAINING_TASKS and task != "video" for task in plan.tasks):
        subject.find_folders(plan.data)
    named.encoder.to(session.ranks.device).eval()
    for task in plan.tasks:
        if task == "video":
            yield video_task(session, plan, subject)
        else:
            for data in plan.data_of(task):
                yield _image_task(subject, task, data)


def _image_task(subject: EncoderSession, task: TaskName, data: TaskData) -> Evaluation:
    session, protocol = subject.session, subject.protocol(data)
    trains = task in TRAINING_TASKS
    bar = session.bar(f"{subject.name} {task} {data.label if data.label != 'class' else ''}".strip())
    metrics = dict((training_scores if trains else feature_scores)(subject, task, data, protocol, bar))
    wait_for_all(session.ranks)
    facts = {
        "encoder_fingerprint": subject.fingerprint,
        "data_fingerprint": data.train.fingerprint(),
        "test_fingerprint": data.test.fingerprint(),
        "train_images": len(data.train),
        "test_images": len(data.test),
        "test_held_out": data.held_out,
        "classes": data.classes,
        "image_size": list(subject.encoder.image_size),
    }
    own = training_settings(task, session.config, protocol) if trains else feature_settings(task, session.config)
    settings = {"name": protocol.name, "test_view": protocol.test_view, **own}
    return session.record(subject.name, task, data.label, data.test.source.name, settings, metrics, facts)
