"""What an evaluation's names mean, opened before anything is computed: tasks, data, videos, encoders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stop_mim.data.videos import VideoSet, open_videos
from stop_mim.errors import InputError
from stop_mim.evaluation.config import EvaluateConfig, TaskName
from stop_mim.evaluation.encoders import NamedEncoder, open_encoder
from stop_mim.evaluation.results import RESULTS_FILE, read_results
from stop_mim.evaluation.task_data import TaskData, open_task_data

IMAGE_TASKS: tuple[TaskName, ...] = ("linear", "knn", "low-shot", "linear-sgd", "finetune", "finetune-low-shot")
MASKS = "masks:"
CLEVR_LABELS = ("count", "distance")


@dataclass(frozen=True)
class GivenMasks:
    """Masks that somebody else made, to be scored as they are."""

    name: str
    folder: Path
    run: None = None


@dataclass(frozen=True)
class Plan:
    """Every task is done with every encoder, and with every labelling of the data."""

    tasks: list[TaskName]
    data: list[TaskData]
    videos: VideoSet | None
    encoders: list[NamedEncoder | GivenMasks]

    def data_of(self, task: TaskName) -> list[TaskData]:
        """The labellings that a task is done with."""
        return [one for one in self.data if task != "clevr" or one.label in CLEVR_LABELS]


def make_plan(names: Sequence[str], config: EvaluateConfig, say: Callable[[str], None]) -> Plan:
    """Open all of it, so that a wrong name is known before anything is computed."""
    # A folder's name that is completed by a shell ends with a slash.
    names = list(dict.fromkeys(name.rstrip("/") or name for name in names))
    may_be_videos, may_be_images = _kinds_of_data(config.data)
    tasks = _tasks(config, may_be_videos, may_be_images)
    data = _open_data(config, tasks, say) if any(task != "video" for task in tasks) else []
    # The options of scenes are those of the stills: beside them, the usual clips are drawn.
    clips = "scenes" if data and may_be_videos else config.data
    needs_frames = not all(name.startswith(MASKS) for name in names)
    videos = open_videos(clips, config.video.split, needs_frames) if "video" in tasks else None
    return Plan(tasks, data, videos, [_open(name, config.image_size, tasks) for name in names])


def _kinds_of_data(name: str) -> tuple[bool, bool]:
    """Whether the name may be videos, and whether it may be images."""
    if name.partition(":")[0] == "scenes":
        return True, True
    is_davis = bool(name) and any((Path(name).expanduser() / part).is_dir() for part in ("JPEGImages", "Annotations"))
    return is_davis, not is_davis


def _tasks(config: EvaluateConfig, videos: bool, images: bool) -> list[TaskName]:
    asked = list(dict.fromkeys(config.task))
    if not asked:
        raise InputError("task is empty: name one or more tasks, such as linear knn, or all.")
    if "all" in asked:
        return [*(IMAGE_TASKS if images else ()), *(("video",) if videos else ())]
    if not videos and "video" in asked and images and len(asked) > 1:
        raise InputError(f"'{config.data}' holds images and no videos: leave the task video out.")
    if not images and asked != ["video"]:
        raise InputError(
            f"'{config.data}' holds videos in DAVIS's layout: its task is video; other tasks need other data."
        )
    return asked


def _open_data(config: EvaluateConfig, tasks: list[TaskName], say: Callable[[str], None]) -> list[TaskData]:
    data = open_task_data(config.data, config.test_data, config.label, config.seed)
    if "clevr" in tasks and not {one.label for one in data} & {*CLEVR_LABELS}:
        raise InputError(
            f"'{config.data}' has no counts and distances: the task clevr needs CLEVR's folder or scenes as --data."
        )
    for one in data:
        if one.held_out:
            say(
                f"'{config.data}' has no test split: {len(one.test):,} of its images are held out to test on "
                f"(label {one.label}); name others with --test-data."
            )
    if config.test_data is not None and data[0].train.source.fingerprint() == data[0].test.source.fingerprint():
        say(
            f"Warning: '{config.test_data}' holds the training images: scores tell how well those were learned by heart."
        )
    return data


def _open(name: str, image_size: int | None, tasks: list[TaskName]) -> NamedEncoder | GivenMasks:
    if name.startswith(MASKS):
        if tasks != ["video"]:
            raise InputError(f"'{name}' can only be scored on videos: add --task video and --data with DAVIS's folder.")
        return GivenMasks(name, Path(name.removeprefix(MASKS)).expanduser())
    named = open_encoder(name)
    if image_size is not None:
        _fit_size(named, image_size, tasks)
    if named.run is not None:
        read_results(named.run / RESULTS_FILE)
    return named


def _fit_size(named: NamedEncoder, size: int, tasks: list[TaskName]) -> None:
    encoder, (height, width) = named.encoder, named.encoder.patch_size
    if size < 1 or size % height or size % width:
        raise InputError(
            f"image_size is {size}: '{named.name}' has patches of {height}x{width} pixels; give a multiple of them, such "
            f"as {max(height, round(size / height) * height)}."
        )
    if (size, size) != encoder.image_size and any(task.startswith("finetune") for task in tasks):
        raise InputError(f"image_size is {size}: fine-tuning runs at the encoder's own size; leave image_size out.")
    encoder.image_size = (size, size)
