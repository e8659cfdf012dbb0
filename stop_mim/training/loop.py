"""A run from its first step to its last: new, or continued from a checkpoint as if it had never stopped."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from stop_mim.data.bad_images import BadImages
from stop_mim.data.sources import open_source
from stop_mim.errors import InputError
from stop_mim.models.encoder import save_encoder
from stop_mim.models.objective import Objective
from stop_mim.seeds import derive_seed
from stop_mim.training.acceleration import accelerate, autocast_for
from stop_mim.training.build import build_objective
from stop_mim.training.checkpoint import (
    Checkpoint,
    checkpoint_path,
    collect_tensors,
    prune_checkpoints,
    read_checkpoint,
    restore_tensors,
    save_checkpoint,
)
from stop_mim.training.config import SpeedConfig, TrainConfig
from stop_mim.training.distributed import Ranks, any_rank, broadcast, process_group, share, wait_for_all
from stop_mim.training.feasibility import require_effects
from stop_mim.training.health import HealthMonitor, HealthSigns, measure_health
from stop_mim.training.inputs import StepInputs, choices_of, load_as_before
from stop_mim.training.interruption import Interruption, catch_interruption
from stop_mim.training.interval import Interval
from stop_mim.training.online_probe import OnlineProbe, ProbeData, make_probe, open_probe_data
from stop_mim.training.progress import ProgressDisplay
from stop_mim.training.run_folder import RunFolder, default_path
from stop_mim.training.schedules import ScheduledValues, values_at
from stop_mim.training.step import Batches, Outcome, StepOutcome, TrainingStep, make_optimiser, read_outcomes

MAX_NOT_FINITE_IN_A_ROW = 5


class TrainingDiverged(RuntimeError):
    """The loss was not finite for several steps in a row; nothing of it is in the weights."""


@dataclass(frozen=True)
class TrainResult:
    """Where a run stands when `train` or `resume` returns."""

    folder: Path
    step: int
    total_steps: int
    loss: float
    interrupted_by: str | None

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.total_steps


def train(
    config: TrainConfig,
    recipe: str = "custom",
    console: Console | None = None,
    initialise: Callable[[Objective], str] | None = None,
) -> TrainResult:
    """Run a new configuration to its end, in a folder of its own; `initialise` puts weights in, and says which."""
    require_effects(config)
    with process_group(config.speed.device) as ranks:
        path = Path(broadcast(str(config.out or default_path(recipe)), ranks))
        folder = RunFolder(path)
        folder.require_new()
        if ranks.is_main:
            folder.discard_bad_images()
        wait_for_all(ranks)
        with ProgressDisplay(console, shown=ranks.is_main) as display:
            run = Run(config, folder, ranks, display)
            origin = None if initialise is None else initialise(run.objective)
            if ranks.is_main:
                folder.create(replace(config, out=str(path)), recipe, origin)
            wait_for_all(ranks)
            with folder.held(ranks.is_main):
                if origin is not None:
                    display.say(f"weights    {origin}")
                    folder.log(f"weights    {origin}")
                    # A run that is continued before its next checkpoint must not begin from new weights.
                    run.save()
                return run.train()


def resume(
    path: Path | str,
    checkpoint: Path | None = None,
    speed: SpeedConfig | None = None,
    stop_after_steps: int | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Continue a run from its newest checkpoint, or from the given one; without any, from its start."""
    folder = RunFolder(Path(path))
    begun = folder.config()
    config = replace(begun, speed=speed or begun.speed, stop_after_steps=stop_after_steps)
    chosen = checkpoint or folder.newest_checkpoint()
    found = None if chosen is None else read_checkpoint(chosen)
    weights = folder.initial_weights()
    if found is None and weights is not None:
        raise InputError(
            f"{path} was to begin with {weights}, which it never saved: start it again with another --out."
        )
    with (
        process_group(config.speed.device) as ranks,
        folder.held(ranks.is_main),
        ProgressDisplay(console, shown=ranks.is_main) as display,
    ):
        before = {} if found is None else found.state
        run = Run(load_as_before(config, before, ranks.device), folder, ranks, display)
        if found is not None:
            run.restore(found)
        if (stop_after_steps or run.step) < run.step:
            raise InputError(f"stop_after_steps is {stop_after_steps}, and step {run.step} is done: give a later one.")
        if ranks.is_main:
            folder.forget_after(run.step)
            folder.record_environment({"resumed_at_step": run.step})
        wait_for_all(ranks)
        return run.train()


class Run:
    """All the parts of a run, and the step that it has reached."""

    def __init__(self, config: TrainConfig, folder: RunFolder, ranks: Ranks, display: ProgressDisplay) -> None:
        self.config, self.folder, self.ranks, self.display = config, folder, ranks, display
        self.inputs = StepInputs(config, ranks)
        if not config.data:
            raise InputError(
                "data is not given: add --data with a folder, a parquet file or another name of a data set."
            )
        probe = config.probe
        probe_data = None if probe.data is None else open_probe_data(probe.data, probe.label)
        source = open_source(config.data)
        self.data_fingerprint = source.fingerprint()
        list_file = folder.bad_images_file.with_suffix(".txt" if ranks.is_main else f".rank{ranks.rank}.txt")
        self.loader = self.inputs.open_loader(source, BadImages(source.name, len(source), list_file), display)
        self.loader_choices = choices_of(self.loader)
        self.order = self.inputs.order(self.loader)
        self.steps_per_epoch = self.order.steps_per_epoch
        self.total_steps = config.optim.epochs * self.steps_per_epoch
        milestone_epochs = config.checkpoint.milestone_every_epochs
        self.milestone_steps = None if milestone_epochs is None else milestone_epochs * self.steps_per_epoch
        torch.manual_seed(derive_seed(config.seed, "weights"))
        self.objective = build_objective(config, self.total_steps).to(ranks.device)
        self.optimiser = make_optimiser(self.objective, config.optim, ranks.device)
        self.autocast = autocast_for(config.speed.precision, ranks.device)
        self.probe = self._make_probe(probe_data)
        self.probe_fingerprint = None if probe_data is None else probe_data.fingerprint
        self.step, self.not_finite, self.not_finite_in_a_row = 0, 0, 0
        self.monitor = HealthMonitor()
        self._pending = Interval()
        self._unread: list[Outcome] = []

    def _make_probe(self, data: ProbeData | None) -> OnlineProbe | None:
        """The probe, which only the main process has; the others wait for its images, or fail as it does."""
        if data is None:
            return None
        probe, complaint = None, None
        if self.ranks.is_main:
            try:
                probe = make_probe(
                    self.config.probe,
                    data,
                    self.objective.frozen,
                    self.ranks.device,
                    self.config.seed,
                    self.folder.bad_images_file,
                    progress=lambda done, total: self.display.update("decoding labelled images", done, total),
                )
            except InputError as error:
                complaint = str(error)
        complaint = broadcast(complaint, self.ranks)
        if complaint is not None:
            raise InputError(complaint)
        return probe

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go to the state of a checkpoint."""
        state = checkpoint.state
        if state["data_fingerprint"] != self.data_fingerprint:
            raise InputError(
                f"The data '{self.config.data}' have changed since step {checkpoint.step} was saved: put the old ones back, or "
                "start a new run."
            )
        if state["world_size"] != self.ranks.world_size or state["batch_size_per_device"] != self.inputs.per_device:
            self.display.say(
                f"This run began with {state['world_size']} process(es) of {state['batch_size_per_device']} images: it goes on "
                f"with {self.ranks.world_size} of {self.inputs.per_device}, with other random draws.",
                style="yellow",
            )
        mode = self.loader_choices["loader"]
        if (before := state.get("loader", mode)) != mode:
            self.display.say(
                f"The images were {before} before and are {mode} now: the run goes on with other crops.", style="yellow"
            )
        restore_tensors(checkpoint, self.objective, self.optimiser)
        self.step, self.not_finite = checkpoint.step, state["not_finite"]
        self.not_finite_in_a_row = state["not_finite_in_a_row"]
        self.monitor.first = None if state["first_health"] is None else HealthSigns(**state["first_health"])
        # Checkpoints of earlier versions have neither these losses nor a probe.
        self._pending.losses = list(state.get("pending_losses", []))
        if self.probe is not None and state.get("probe_fingerprint") == self.probe_fingerprint:
            self.probe.restore(checkpoint)
        elif self.probe is not None:
            self.display.say(
                f"The checkpoint of step {checkpoint.step} has no probe of '{self.config.probe.data}' as it is now: the probe "
                "starts anew.",
                style="yellow",
            )

    def train(self) -> TrainResult:
        """Every step from here to the end, to an interruption or to a divergence."""
        end = min(self.total_steps, self.config.stop_after_steps or self.total_steps)
        if self.ranks.is_main:
            self._announce(end)
        with catch_interruption() as interruption:
            try:
                self._train_until(end, interruption)
            finally:
                self.folder.close()
        return TrainResult(
            self.folder.path, self.step, self.total_steps, self._pending.last_loss, interruption.signal_name
        )

    def _train_until(self, end: int, interruption: Interruption) -> None:
        # Closed, its workers end at once; those of a process that failed would be waited for.
        with closing(self.loader.batches(self.order, self.step * self.inputs.batches_per_step)) as images:
            self._train_on(self.inputs.with_masks(images, self.step), end, interruption)

    def _train_on(self, inputs: Iterator[Batches], end: int, interruption: Interruption) -> None:
        step = self._accelerated_step()
        self._pending.restart_clock()
        while self.step < end:
            values = values_at(self.step, self.steps_per_epoch, self.config.optim)
            self.objective.positions.set_step(self.step)
            batches = next(inputs)
            self._unread.append(
                step(batches, values, derive_seed(self.config.seed, "step", self.step, self.ranks.rank))
            )
            self.step += 1
            stopping = any_rank(bool(interruption), self.ranks)
            saves = stopping or self.step == end or self._saves_here()
            if saves or self._is_read_here():
                self._read_outcomes()
            if self.ranks.is_main:
                self._report(values, batches[0][0], end, self._probe_features())
            if saves:
                self.save()
            if stopping:
                interruption.signal_name = interruption.signal_name or "another process"
                return

    def _accelerated_step(self) -> Callable[[Batches, ScheduledValues, int], Outcome]:
        model = share(self.objective, self.ranks)
        clip = self.config.optim.clip_gradient_norm
        step = TrainingStep(model, self.objective, self.optimiser, self.ranks, self.autocast, clip)
        # By the length of the whole run, so that a part that is resumed is computed as it would have been.
        fixed_shapes = self.inputs.masks.has_fixed_counts
        return accelerate(step, self.config.speed, self.total_steps, self._say, self._warn, fixed_shapes)

    def _is_read_here(self) -> bool:
        """Where outcomes are read, all processes at the same step: on the CPU they are at hand at every one."""
        log, probe = self.config.log, self.config.probe
        scored = probe.data is not None and self.step % probe.score_every_steps == 0
        due = self.step % log.every_steps == 0 or self.step % log.health_every_steps == 0 or self.step == 1 or scored
        return self.ranks.device.type == "cpu" or due

    def _read_outcomes(self) -> None:
        """Wait for the steps that were not read yet, and judge them."""
        first = self.step - len(self._unread) + 1
        outcomes, self._unread = read_outcomes(self._unread), []
        for number, outcome in enumerate(outcomes, start=first):
            self._judge(number, outcome)
            self._pending.add(outcome)

    def _saves_here(self) -> bool:
        milestone = self.milestone_steps is not None and self.step % self.milestone_steps == 0
        return milestone or self.step % self.config.checkpoint.every_steps == 0

    def _judge(self, step: int, outcome: StepOutcome) -> None:
        if outcome.updated:
            self.not_finite_in_a_row = 0
            return
        self.not_finite += 1
        self.not_finite_in_a_row += 1
        self._warn(f"Step {step}: the loss or its gradient is not finite ({outcome.loss}); the step was skipped.")
        if self.not_finite_in_a_row >= MAX_NOT_FINITE_IN_A_ROW:
            raise TrainingDiverged(
                f"The loss was not finite for {MAX_NOT_FINITE_IN_A_ROW} steps in a row, the last of them step {step}: "
                "lower optim.lr or set optim.clip_gradient_norm; the last checkpoint holds none of it."
            )

    def _probe_features(self) -> dict[str, float]:
        """Let the probe learn, and be scored, where it is its turn: a function of the step alone."""
        config, probe, encoder = self.config.probe, self.probe, self.objective.frozen
        if probe is None:
            return {}
        if self.step % config.every_steps == 0:
            probe.learn(encoder, self.step // config.every_steps, self.autocast)
        scored = self.step % config.score_every_steps == 0 or self.step == self.total_steps
        return probe.score(encoder, self.autocast) if scored else {}

    def _report(self, values: ScheduledValues, images: Tensor, end: int, scores: dict[str, float]) -> None:
        log, pending = self.config.log, self._pending
        if scores:
            pending.scores = f"probe {scores['probe/linear_top1']:.1f} kNN {scores['probe/knn_top1']:.1f}"
        looks = self.step == 1 or self.step % log.health_every_steps == 0 or self.step == self.total_steps
        signs = self._look_at_health(images) if looks or self.step == end else {}
        due = looks or bool(scores) or self.step % log.every_steps == 0
        if not due and self.step != end:
            return
        rate = len(pending) * self.config.optim.batch_size / pending.seconds()
        measured = {
            "epoch": self.step / self.steps_per_epoch,
            "loss": pending.mean_loss(),
            "gradient_norm": pending.last_gradient_norm,
            "images_per_second": rate,
            "not_finite": self.not_finite,
            "sigma": getattr(self.objective.positions, "sigma", 0.0),
            **asdict(values),
            **signs,
            **scores,
        }
        self.folder.record(self.step, measured)
        text = f"{rate:,.0f} images/s loss {pending.mean_loss():.4f} {pending.health} {pending.scores}"
        self.display.update("training", self.step, end, text)
        # The line of a run that stops early is one more: the next one is the mean that it would have been without it.
        if due:
            pending.restart()

    def _look_at_health(self, images: Tensor) -> dict[str, float]:
        health = measure_health(self.objective, images)
        for warning in self.monitor.warnings(health):
            self._warn(warning)
        self._pending.health = f"RankMe {health.rankme:.0f} |A| {health.A_norm:.2g} |m̃| {health.mask_token_norm:.2g}"
        return {f"health/{name}": value for name, value in asdict(health).items()}

    def _announce(self, end: int) -> None:
        config = self.config
        self.folder.open_events(self.step) if config.log.tensorboard else None
        parameters = sum(parameter.numel() for parameter in self.objective.encoder.parameters()) / 1e6
        rows, columns = self.objective.encoder.grid
        lines = [
            f"run        {self.folder.path}",
            f"data       {config.data}; {self.loader.description}",
            f"masks      {self.inputs.masks}",
            f"encoder    {parameters:.1f} M parameters, {rows}x{columns} patches",
            f"steps      {self.step} to {end} of {self.total_steps}, {self.steps_per_epoch} an epoch, on {self.ranks.device}",
        ]
        if self.probe is not None:
            lines.append(f"probe      {config.probe.data}; {self.probe.description}")
        for line in lines:
            self.display.say(line)
            self.folder.log(line)

    def _say(self, text: str) -> None:
        if self.ranks.is_main:
            self.display.say(text)
            self.folder.log(text)

    def _warn(self, text: str) -> None:
        if self.ranks.is_main:
            self.display.say(f"Warning: {text}", style="bold yellow")
            self.folder.log(f"Warning: {text}")

    def save(self) -> None:
        """Write a checkpoint and the encoder that can be used by others, and drop what is old."""
        if self.ranks.is_main:
            state = {
                "data_fingerprint": self.data_fingerprint,
                "world_size": self.ranks.world_size,
                "batch_size_per_device": self.inputs.per_device,
                "device": self.ranks.device.type,
                **self.loader_choices,
                "not_finite": self.not_finite,
                "not_finite_in_a_row": self.not_finite_in_a_row,
                "first_health": None if self.monitor.first is None else asdict(self.monitor.first),
                "pending_losses": self._pending.losses,
                "probe_fingerprint": self.probe_fingerprint,
            }
            tensors = collect_tensors(self.objective, self.optimiser)
            tensors |= {} if self.probe is None else self.probe.tensors()
            folder, config = self.folder.checkpoints, self.config.checkpoint
            with self.folder.writing():
                save_checkpoint(Checkpoint(self.step, tensors, state), checkpoint_path(folder, self.step))
                save_encoder(self.objective.frozen, self.folder.encoder_file)
                prune_checkpoints(folder, config.keep, self.milestone_steps)
            self.folder.log(f"Saved step {self.step}.")
        wait_for_all(self.ranks)
