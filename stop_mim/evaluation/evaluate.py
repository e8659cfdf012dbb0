"""Every evaluation of any encoder: tasks by name, features shared among them, results kept as they come."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from rich.console import Console
from torch import Tensor

from stop_mim.data.cache import cache_folder
from stop_mim.data.decoded import DecodedSource
from stop_mim.data.image_lists import draw_fraction, draw_per_class, read_image_list
from stop_mim.data.image_source import ImageSource, digest
from stop_mim.data.labelled import LabelledSet
from stop_mim.data.loader import Progress, common_size, resident_budget
from stop_mim.data.videos import open_videos
from stop_mim.errors import InputError
from stop_mim.evaluation.config import EvaluateConfig, LinearOptions, TaskName
from stop_mim.evaluation.encoders import NamedEncoder, open_encoder
from stop_mim.evaluation.features import (
    Features,
    View,
    centre_view,
    encoder_fingerprint,
    extract_features,
    features_folder,
)
from stop_mim.evaluation.finetune import FinetuneConfig, finetune
from stop_mim.evaluation.knn import knn
from stop_mim.evaluation.labelled_training import images_at_a_time
from stop_mim.evaluation.linear import Chunks, linear_probe
from stop_mim.evaluation.linear_sgd import LinearSGDConfig, config_for, linear_sgd
from stop_mim.evaluation.low_shot import low_shot
from stop_mim.evaluation.protocols import LinearProtocol, find_protocol, fitted, guess_protocol
from stop_mim.evaluation.results import (
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
from stop_mim.evaluation.segmentation import VideoScores, score_masks
from stop_mim.evaluation.task_data import TaskData, open_task_data
from stop_mim.evaluation.video import segment_videos
from stop_mim.training.distributed import Ranks, process_group, wait_for_all
from stop_mim.training.inputs import workers_for
from stop_mim.training.progress import ProgressDisplay
from stop_mim.training.run_folder import environment

IMAGE_TASKS: tuple[TaskName, ...] = ("linear", "knn", "low-shot", "linear-sgd", "finetune", "finetune-low-shot")
# All processes take part in these; the others are quick, and done by one.
SHARED_TASKS = ("linear-sgd", "finetune", "finetune-low-shot")
MASKS = "masks:"
CLEVR_LABELS = ("count", "distance")


def evaluate(names: Sequence[str], config: EvaluateConfig, console: Console | None = None) -> list[Evaluation]:
    """Do every task with every encoder, show a table, and write the results down."""
    console = console or Console()
    if not names:
        raise InputError("evaluate needs an encoder first: a run's folder, a file, timm:NAME, hf:NAME or masks:FOLDER.")
    _check_outputs(config)
    if not config.linear.standardise:
        raise InputError("linear.standardise is empty: give True, False or both.")
    with process_group(config.speed.device) as ranks, ProgressDisplay(console, shown=ranks.is_main) as display:
        session = Session(config, ranks, display)
        found: list[Evaluation] = []
        for named in session.encoders(names):
            for evaluation in session.evaluations(named):
                found.append(evaluation)
                if ranks.is_main and isinstance(named, NamedEncoder) and named.run is not None:
                    add_results(named.run / RESULTS_FILE, [evaluation])
            session.forget_features()
    if ranks.is_main:
        if config.json is not None:
            write_json(config.json, results_document(found))
        if config.csv is not None:
            write_csv(config.csv, found)
        console.print(results_table(found))
        for path in {
            named.run for named in session.opened if isinstance(named, NamedEncoder) and named.run is not None
        }:
            console.print(f"Written to {path / RESULTS_FILE}", highlight=False, markup=False, soft_wrap=True)
    return found


def _check_outputs(config: EvaluateConfig) -> None:
    for path in (config.json, config.csv):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InputError(f"{path} cannot be written: name a file in a folder that exists.")


@dataclass(frozen=True)
class GivenMasks:
    """Masks that somebody else made, to be scored as they are."""

    name: str
    folder: Path


class Session:
    """The data, opened once, and the features of one encoder, computed once."""

    def __init__(self, config: EvaluateConfig, ranks: Ranks, display: ProgressDisplay) -> None:
        self.config, self.ranks, self.display = config, ranks, display
        self.opened: list[NamedEncoder | GivenMasks] = []
        self._features: dict[str, Features] = {}
        self._fingerprints: dict[str, str] = {}
        self._folders: dict[tuple[object, ...], Path] = {}
        videos, images = self._kinds_of_data()
        self.tasks = self._tasks(videos, images)
        wants_images = any(task != "video" for task in self.tasks)
        self.data = self._open_data() if wants_images else []
        # The options of scenes are those of the stills: beside them, the usual clips are drawn.
        clips = "scenes" if self.data and videos else config.data
        self.videos = open_videos(clips, config.video.split) if "video" in self.tasks else None

    def _kinds_of_data(self) -> tuple[bool, bool]:
        """Whether the name may be videos, and whether it may be images."""
        name = self.config.data
        if name.partition(":")[0] == "scenes":
            return True, True
        is_davis = bool(name) and (Path(name).expanduser() / "JPEGImages").is_dir()
        return is_davis, not is_davis

    def _tasks(self, videos: bool, images: bool) -> list[TaskName]:
        asked = list(dict.fromkeys(self.config.task))
        if "all" in asked:
            return [*(IMAGE_TASKS if images else ()), *(("video",) if videos else ())]
        if not videos and "video" in asked and images and len(asked) > 1:
            raise InputError(f"'{self.config.data}' holds images and no videos: leave the task video out.")
        return asked

    def _open_data(self) -> list[TaskData]:
        config = self.config
        data = open_task_data(config.data, config.test_data, config.label, config.seed)
        if self.tasks == ["clevr"] and not {one.label for one in data} & {*CLEVR_LABELS}:
            raise InputError(
                f"'{config.data}' has no counts and distances: the task clevr needs CLEVR's folder or scenes as --data."
            )
        for one in data:
            if one.held_out:
                self.display.say(
                    f"'{config.data}' has no test split: {len(one.test):,} of its images are held out to test on "
                    f"(label {one.label}); name others with --test-data."
                )
        return data

    def encoders(self, names: Sequence[str]) -> list[NamedEncoder | GivenMasks]:
        """Open all of them, so that a wrong name is known before anything is computed."""
        for name in dict.fromkeys(names):
            if name.startswith(MASKS):
                if self.tasks != ["video"]:
                    raise InputError(
                        f"'{name}' can only be scored on videos: add --task video and --data with DAVIS's folder."
                    )
                self.opened.append(GivenMasks(name, Path(name.removeprefix(MASKS)).expanduser()))
            else:
                named = open_encoder(name)
                self._fit_size(named)
                if named.run is not None:
                    read_results(named.run / RESULTS_FILE)
                self.opened.append(named)
        return self.opened

    def _fit_size(self, named: NamedEncoder) -> None:
        size, encoder = self.config.image_size, named.encoder
        if size is None:
            return
        if size < 1 or size % encoder.patch_size[0] or size % encoder.patch_size[1]:
            height, width = encoder.patch_size
            raise InputError(
                f"image_size is {size}: '{named.name}' has patches of {height}x{width} pixels; give a multiple of them, such "
                f"as {max(height, round(size / height) * height)}."
            )
        if (size, size) != encoder.image_size and any(task.startswith("finetune") for task in self.tasks):
            raise InputError(f"image_size is {size}: fine-tuning runs at the encoder's own size; leave image_size out.")
        encoder.image_size = (size, size)

    def forget_features(self) -> None:
        """Before the next encoder."""
        self._features = {}

    def evaluations(self, named: NamedEncoder | GivenMasks) -> Iterator[Evaluation]:
        """Every task, with every labelling of the data."""
        if isinstance(named, GivenMasks):
            yield self._video(named)
            return
        self._look_at_weights(named)
        named.encoder.to(self.ranks.device).eval()
        for task in self.tasks:
            if task == "video":
                yield self._video(named)
                continue
            for data in self.data:
                if task != "clevr" or data.label in CLEVR_LABELS:
                    yield self._image_task(named, task, data)

    def _look_at_weights(self, named: NamedEncoder) -> None:
        """All that is named after the weights, while they are in this machine's memory: from a GPU each is fetched alone."""
        self._fingerprint(named)
        if any(task not in SHARED_TASKS and task != "video" for task in self.tasks):
            for data in self.data:
                for labelled in (data.train, data.test):
                    self._folder(named, labelled.source, self._view(named, data))

    def _fingerprint(self, named: NamedEncoder) -> str:
        if named.name not in self._fingerprints:
            self._fingerprints[named.name] = encoder_fingerprint(named.encoder)
        return self._fingerprints[named.name]

    def _folder(self, named: NamedEncoder, source: ImageSource, view: View) -> Path:
        key = named.name, id(source), view
        if key not in self._folders:
            layers, device = self._layers(named), self.ranks.device
            self._folders[key] = features_folder(named.encoder, source, view, layers, device)
        return self._folders[key]

    def _view(self, named: NamedEncoder, data: TaskData) -> View:
        size = named.encoder.image_size
        return centre_view(fitted(self._protocol(data), data.train.source, size).test_view, size)

    def _image_task(self, named: NamedEncoder, task: TaskName, data: TaskData) -> Evaluation:
        protocol = fitted(self._protocol(data), data.train.source, named.encoder.image_size)
        values = self._run(named, task, data, protocol)
        metrics = dict(values) if self.ranks.is_main or task in SHARED_TASKS else {}
        wait_for_all(self.ranks)
        facts = {
            "data_fingerprint": data.train.fingerprint(),
            "test_fingerprint": data.test.fingerprint(),
            "train_images": len(data.train),
            "test_images": len(data.test),
            "test_held_out": data.held_out,
            "classes": data.classes,
            "image_size": list(named.encoder.image_size),
        }
        chosen = self._settings(task, protocol)
        return self._evaluation(named, task, data.label, data.test.source.name, chosen, metrics, facts)

    def _evaluation(
        self,
        named: NamedEncoder | GivenMasks,
        task: str,
        label: str,
        test_name: str,
        protocol: dict[str, Any],
        metrics: dict[str, float],
        facts: dict[str, Any],
        details: dict[str, Any] | None = None,
    ) -> Evaluation:
        if isinstance(named, NamedEncoder):
            facts = {"encoder_fingerprint": self._fingerprint(named), **facts}
        around = environment()
        facts |= {"date": today(), "versions": around["packages"], "python": around["python"], "gpu": around["gpu"]}
        facts |= {"device": str(self.ranks.device), "processes": self.ranks.world_size}
        config = self.config
        return Evaluation(
            named.name, task, label, config.data, test_name, protocol, config.seed, metrics, facts, details or {}
        )

    def _protocol(self, data: TaskData) -> LinearProtocol:
        if self.config.protocol != "auto":
            return find_protocol(self.config.protocol)
        return find_protocol("clevr-dist") if data.label == "distance" else guess_protocol(data.train.source)

    def _settings(self, task: TaskName, protocol: LinearProtocol) -> dict[str, Any]:
        """All that decided the numbers, beside data and encoder."""
        config = self.config
        # Results from before there was a choice are of the usual one, and to be replaced by the same.
        fast_linear = {} if config.linear == LinearOptions() else asdict(config.linear)
        own: dict[TaskName, Any] = {
            "linear": lambda: fast_linear,
            "clevr": lambda: fast_linear,
            "linear-sgd": lambda: asdict(self._sgd(protocol)),
            "low-shot": lambda: {**asdict(config.low_shot), "list_file": str(config.low_shot.list_file or "")},
            "knn": lambda: asdict(config.knn),
            "finetune": lambda: asdict(self._tuned(config.finetune, protocol)),
            "finetune-low-shot": lambda: {**asdict(self._tuned(config.finetune_low_shot, protocol)), **self._few()},
        }
        return {"name": protocol.name, "test_view": protocol.test_view, **own.get(task, dict)()}

    def _few(self) -> dict[str, Any]:
        return {"amount": self.config.low_shot.amounts[0], "list_file": str(self.config.low_shot.list_file or "")}

    def _run(
        self, named: NamedEncoder, task: TaskName, data: TaskData, protocol: LinearProtocol
    ) -> Iterator[tuple[str, float]]:
        config, device = self.config, self.ranks.device
        bar = self._bar(f"{named.name} {task} {data.label if data.label != 'class' else ''}".strip())
        if task in SHARED_TASKS:
            return self._train(named, task, data, protocol, bar)
        train, train_labels, test, test_labels = self._featured(named, data, protocol)
        if not self.ranks.is_main:
            return iter(())
        last = {"last1": 1, f"last{self._layers(named)}": self._layers(named)}
        if task in ("linear", "clevr"):
            return linear_probe(
                {name: self._chunks(train.last(layers)) for name, layers in last.items()},
                train_labels,
                {name: self._chunks(test.last(layers)) for name, layers in last.items()},
                test_labels,
                data.classes,
                device,
                standardise=config.linear.standardise,
                seed=config.seed,
                progress=bar,
            )
        if task == "knn":
            chunks = self._chunks(train.last(1)), self._chunks(test.last(1))
            return knn(
                chunks[0], train_labels, chunks[1], test_labels, data.classes, device, config.knn.neighbours,
                config.knn.temperature, bar,
            )  # fmt: skip
        few = {
            amount: [self._labelled_rows(train.last(1), train_labels, one) for one in draws]
            for amount, draws in self._draws(data).items()
        }
        return low_shot(few, test.last(1).on(device), test_labels.to(device), data.classes, config.seed, bar)

    def _labelled_rows(self, features: Features, labels: Tensor, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        here = torch.isin(features.indices, torch.from_numpy(chosen)).nonzero()[:, 0]
        return features.rows(here).to(self.ranks.device), labels[here].to(self.ranks.device)

    def _train(
        self, named: NamedEncoder, task: TaskName, data: TaskData, protocol: LinearProtocol, bar: Progress
    ) -> Iterator[tuple[str, float]]:
        config, train = self.config, data.train
        arguments: dict[str, Any] = {"ranks": self.ranks, "progress": bar, "speed": config.speed}
        if task == "linear-sgd":
            chosen = self._sgd(protocol)
            arguments["state_file"] = state = self._state_file(named, task, data, asdict(chosen))
            yield from linear_sgd(named.encoder, train, data.test, chosen, **arguments)
        else:
            tuned = self._tuned(config.finetune if task == "finetune" else config.finetune_low_shot, protocol)
            if task == "finetune-low-shot":
                amount, draws = next(iter(self._draws(data).items()))
                train = LabelledSet(train.source, train.labels, draws[0])
                task_name = f"finetune-low-shot/{amount}"
            else:
                task_name = "finetune"
            arguments["state_file"] = state = self._state_file(named, task_name, data, asdict(tuned))
            for name, value in finetune(named.encoder, train, data.test, tuned, **arguments):
                yield name.replace("finetune", task_name, 1), value
        if self.ranks.is_main:
            state.unlink(missing_ok=True)

    def _state_file(self, named: NamedEncoder, task: str, data: TaskData, settings: dict[str, Any]) -> Path:
        """Where a long evaluation is kept while it is under way; it is removed when it is done."""
        parts = [self._fingerprint(named), named.encoder.image_size, task, data.train.fingerprint(), settings]
        return cache_folder() / "evaluations" / f"{digest(parts)}.safetensors"

    def _sgd(self, protocol: LinearProtocol) -> LinearSGDConfig:
        options = self.config.linear_sgd
        return config_for(protocol, options.epochs, options.batch_size, options.lrs, self.config.seed)

    def _tuned(self, config: FinetuneConfig, protocol: LinearProtocol) -> FinetuneConfig:
        return replace(config, train_view=protocol.train_view, test_view=protocol.test_view, seed=self.config.seed)

    def _draws(self, data: TaskData) -> dict[str, list[np.ndarray]]:
        """For each amount of labels the images of each draw, by their numbers in the source."""
        options, seed, own = self.config.low_shot, self.config.seed, data.train.indices
        if options.list_file is not None:
            return {"list": [_within(read_image_list(options.list_file, data.train.source), own, options.list_file)]}
        if options.draws < 1 or not options.amounts:
            raise InputError(f"low_shot.draws is {options.draws}: give at least one draw, and at least one amount.")
        classes = data.train.classes
        return {
            amount: [own[_draw(amount, classes, seed, draw)] for draw in range(options.draws)]
            for amount in options.amounts
        }

    def _layers(self, named: NamedEncoder) -> int:
        return min(4, named.encoder.depth)

    def _featured(
        self, named: NamedEncoder, data: TaskData, protocol: LinearProtocol
    ) -> tuple[Features, Tensor, Features, Tensor]:
        """Features and labels of the training and the test images."""
        parts: list[Any] = []
        for labelled in (data.train, data.test):
            features = _only(self._source_features(named, labelled.source, protocol), labelled.indices)
            parts += [features, torch.from_numpy(labelled.labels.astype(np.int64))[features.indices]]
        return parts[0], parts[1], parts[2], parts[3]

    def _source_features(self, named: NamedEncoder, source: ImageSource, protocol: LinearProtocol) -> Features:
        view = centre_view(protocol.test_view, named.encoder.image_size)
        folder = self._folder(named, source, view)
        if str(folder) not in self._features:
            speed = self.config.speed
            workers, size = workers_for(speed, self.ranks), common_size(source)
            decoding = self._bar(f"decoding {source.name}")
            self._features[str(folder)] = extract_features(
                named.encoder,
                source if size is None else DecodedSource(source, size, workers, decoding),
                view,
                self._layers(named),
                self.ranks,
                folder,
                images_at_a_time(speed),
                workers,
                self._bar(f"{named.name} features of {source.name}"),
            )
        return self._features[str(folder)]

    def _chunks(self, features: Features) -> Chunks:
        """In the device's memory if there is room, else as they lie on disk."""
        device = self.ranks.device
        fits = features.size_on_device() <= resident_budget(device, self.ranks.processes_on_host)
        return [features.on(device)] if fits else list(features.chunks)

    def _video(self, named: NamedEncoder | GivenMasks) -> Evaluation:
        config, videos = self.config, self.videos
        assert videos is not None
        foreground = config.foreground
        bar = self._bar(f"{named.name} video", unit="frames")
        scores: VideoScores | None = None
        if self.ranks.is_main:
            if isinstance(named, GivenMasks):
                scores = score_masks(videos, named.folder, foreground, bar)
            else:
                out = config.video.masks
                if out is not None and len(self.opened) > 1:
                    out = out / f"{self.opened.index(named)}-{Path(named.name).name.replace(':', '-')}"
                settings, overlays = config.video.propagation, config.video.overlays
                scores = segment_videos(
                    named.encoder, videos, out, settings, foreground, overlays, bar, self.ranks.device
                )
        wait_for_all(self.ranks)
        protocol: dict[str, Any] = {"name": "davis", "foreground": foreground}
        if isinstance(named, NamedEncoder):
            protocol |= asdict(config.video.propagation)
        metrics = dict(scores.named_values()) if scores is not None else {}
        details = scores.as_json() if scores is not None else {}
        facts = {"data_fingerprint": videos.fingerprint(), "sequences": len(videos)}
        return self._evaluation(named, "video", "objects", config.data, protocol, metrics, facts, details)

    def _bar(self, name: str, unit: str = "") -> Progress:
        started: list[tuple[float, int]] = []

        def show(done: int, total: int) -> None:
            now = time.perf_counter()
            if not started:
                started.append((now, done))
            since, first = started[0]
            rate = (done - first) / (now - since) if now > since else 0.0
            self.display.update(name, done, total, f"{rate:,.1f} {unit}/s".replace(" /s", "/s") if rate else "")

        return show


def _only(features: Features, indices: np.ndarray) -> Features:
    """Those of the images with these numbers; without copying, if they are all."""
    here = torch.isin(features.indices, torch.from_numpy(np.asarray(indices, dtype=np.int64)))
    if here.all():
        return features
    rows: Int[Tensor, " n"] = here.nonzero()[:, 0]
    return Features((features.rows(rows),), features.indices[rows], features.layer_dim)


def _draw(amount: str, classes: np.ndarray, seed: int, draw: int) -> np.ndarray:
    maker: Callable[[], np.ndarray] | None = None
    try:
        if amount.endswith("%"):
            part = float(amount[:-1]) / 100
            maker = lambda: draw_fraction(classes, part, seed, draw)  # noqa: E731
        else:
            count = int(amount)
            maker = lambda: draw_per_class(classes, count, seed, draw)  # noqa: E731
    except ValueError:
        raise InputError(
            f"low_shot.amounts has '{amount}': give a part such as 1% or images a class such as 5."
        ) from None
    return maker()


def _within(chosen: np.ndarray, own: np.ndarray, path: Path) -> np.ndarray:
    outside = np.setdiff1d(chosen, own)
    if len(outside):
        raise InputError(
            f"{len(outside)} of the images that {path} names are held out to be tested on: give test images with --test-data."
        )
    return np.sort(chosen)
