"""The command line. A command is a dataclass: tyro reads its fields from the arguments, and calling it runs the command.

Modules that import torch are imported inside functions, so that help and mistyped commands answer at once.
"""

import dataclasses
import difflib
import errno
import functools
import inspect
import operator
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args

import tyro
from rich.console import Console
from rich.markup import escape
from tyro.conf import Positional, Suppress, UseAppendAction, arg, subcommand

from stop_mim import __version__
from stop_mim.analysis import FIGURES
from stop_mim.benchmark.config import BenchConfig, PlanConfig
from stop_mim.errors import InputError, ProcessLost, TrainingDiverged, printable
from stop_mim.evaluation.config import check_arguments, evaluate_config
from stop_mim.exchange import EXPORTERS
from stop_mim.files import user_path
from stop_mim.launch import LaunchConfig
from stop_mim.options import Compat
from stop_mim.parsing import given_options, one_of, parse, refuse_unknown
from stop_mim.registry import Registry, load_plugins, unknown_name
from stop_mim.sweeps.grid import SWEEPS, is_switch, varied
from stop_mim.sweeps.plan import SweepConfig, base_config
from stop_mim.training.config import SpeedConfig, TrainConfig, flat, require_data
from stop_mim.training.config_file import read_config, run_name
from stop_mim.training.derived import following
from stop_mim.training.recipes import RECIPES, find_recipe, with_compat

if TYPE_CHECKING:
    from stop_mim.training.pretrain import TrainResult

EXIT_FAILURE, EXIT_INPUT, EXIT_OF_SIGNALS = 1, 2, 128
HELP = ("-h", "--help")

COMMANDS: Registry[Any] = Registry("command")
CONFIG_FILES = (".json", ".yaml", ".yml")
GIVEN: ContextVar[Sequence[str]] = ContextVar("arguments", default=())
"""The arguments of the command line: the defaults of some options depend on others."""

# Commands whose first argument is a name, and the registry of these names.
NAMED: dict[str, Registry[Any]] = {"pretrain": RECIPES, "bench": RECIPES, "plan": RECIPES, "sweep": SWEEPS}
# What to do about failed file operations.
REMEDIES = {
    errno.ENOENT: "check the path",
    errno.EACCES: "check the permissions, or choose another path",
    **dict.fromkeys((errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR), "choose another path"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space, or choose another path"),
}


def _recipes(kind: Callable[..., Any]) -> Any:
    """Return a subcommand for each recipe and for the config file that is given, with their values as defaults.

    Where --optim.epochs is given, the defaults of what is counted in epochs follow it.
    """
    given, asked = given_options(GIVEN.get()), GIVEN.get()[1:2]

    def options(name: str) -> Any:
        compat = _asked_compat() if name in asked else "corrected"
        return kind(name, following(find_recipe(name, compat), given), compat=compat)

    found = {name: (options(name), RECIPES.summary(name)) for name in RECIPES}
    for name in filter(_is_config_file, asked):
        path = user_path(name)
        config = following(with_compat(read_config(path), _asked_compat()), given)
        found[name] = (kind(run_name(path), config), f"The configuration in {name}.")
    return one_of(found)


def _is_config_file(name: str) -> bool:
    return Path(name).suffix in CONFIG_FILES


def _asked_compat() -> Compat:
    """Return the value of --compat; tyro rejects an invalid one later."""
    asked = given_options(GIVEN.get()).get("compat")
    return next((compat for compat in get_args(Compat) if compat == asked), "corrected")


def _sweeps() -> Any:
    """Return a subcommand for each sweep."""
    return one_of({name: (SweepOptions(name, SweepConfig()), SWEEPS.summary(name)) for name in SWEEPS})


@COMMANDS.register("demo")
@dataclass(frozen=True)
class Demo:
    """Train a small model on synthetic scenes and compare it with an untrained one: three minutes, no data, no GPU."""

    out: Path = Path("stop-mim-demo")
    """Run directory; a number is added if it exists."""
    seed: int = 0
    """Seed of the run."""

    def __call__(self) -> None:
        from stop_mim.demo import run_demo

        run_demo(dataclasses.replace(find_recipe("demo"), out=str(self.out), seed=self.seed))


@dataclass(frozen=True)
class RecipeOptions:
    """A recipe with the options of the command line."""

    recipe: Suppress[str]
    config: Annotated[TrainConfig, arg(name="")]
    compat: Compat = "corrected"
    """corrected: the recipe; release: as the released code (docs/method.md); paper-text: sigma is a variance, crops only."""


@dataclass(frozen=True)
class PretrainOptions(RecipeOptions):
    """A recipe to train."""

    init: str | None = None
    """Initial weights: a run, a checkpoint or a .pth.tar of a release (all weights), or any encoder's name."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)


@COMMANDS.register("pretrain")
@dataclass(frozen=True)
class Pretrain:
    """Train an encoder on your images.

    stop-mim pretrain RECIPE --data NAME [--compat release] [--init FILE] [--GROUP.FIELD VALUE …]

    stop-mim pretrain --config RUN/config.json [--GROUP.FIELD VALUE …]

    `stop-mim pretrain RECIPE --help` lists all options. A config file is JSON or YAML.
    """

    run: Annotated[Any, arg(constructor_factory=lambda: _recipes(PretrainOptions), name="")]

    def __call__(self) -> None:
        require_data(self.run.config)
        _require_datasets(self.run.config.data, self.run.config.probe.data)
        from stop_mim.training.pretrain import train

        more: dict[str, Any] = {}
        if self.run.init is not None:
            from stop_mim.exchange.initial_weights import initialise

            more["initialise"] = partial(initialise, name=self.run.init)
        name = self.run.recipe if self.run.compat == "corrected" else f"{self.run.recipe}-{self.run.compat}"
        _report_end(train(self.run.config, recipe=name, **more))


@COMMANDS.register("resume")
@dataclass(frozen=True)
class Resume:
    """Continue a run from its newest checkpoint as if it had not stopped."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Run directory."""
    speed: SpeedConfig
    checkpoint: Path | None = None
    """Checkpoint to continue from, instead of the newest one."""
    or_older: bool = False
    """Continue from the newest intact checkpoint if the newest one is damaged; for unattended restarts."""
    data: str | None = None
    """New location of the run's data, if they have moved; an exact copy works too."""
    stop_after_steps: int | None = None
    """Stop and save after this step of the whole run."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __call__(self) -> None:
        from stop_mim.training.pretrain import resume

        given = (self.run, self.checkpoint, self.speed, self.stop_after_steps)
        _report_end(resume(*given, or_older=self.or_older, data=self.data))


@COMMANDS.register("evaluate")
@dataclass(frozen=True)
class Evaluate:
    """Score encoders: linear probes, kNN, few labels, fine-tuning, video.

    stop-mim evaluate ENCODER [ENCODER …] --task TASK [TASK …] --data NAME
    """

    encoders: Annotated[Positional[tuple[str, ...]], arg(metavar="ENCODER …")]
    """Run directories, encoder files, timm:NAME, hf:NAME, untrained:RUN or masks:FOLDER."""
    config: Annotated[Any, arg(constructor_factory=evaluate_config, name="")]
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __call__(self) -> None:
        check_arguments(self.encoders, self.config)
        _require_paths("encoder", *self.encoders)
        _require_datasets(self.config.data, self.config.test_data)
        from stop_mim.evaluation.evaluate import evaluate

        evaluate(self.encoders, self.config)


@dataclass(frozen=True)
class SweepOptions:
    """A sweep with the options of the command line."""

    name: Suppress[str]
    config: Annotated[SweepConfig, arg(name="")]
    vary: Annotated[UseAppendAction[tuple[tuple[str, ...], ...]], arg(metavar="FIELD VALUE …")] = ()
    """A field of `pretrain` and its values, such as optim.lr 5e-4 1e-3; may be given several times, for a grid."""


@COMMANDS.register("sweep")
@dataclass(frozen=True)
class Sweep:
    """Compare variants over seeds, as in the paper's ablations.

    stop-mim sweep NAME [--dry-run] [--GROUP.FIELD VALUE …]

    stop-mim sweep --vary FIELD VALUE VALUE … [--vary FIELD VALUE VALUE …]

    Options with a group, such as --optim.lr, go to `pretrain`, those of device and loading also to `evaluate`.
    """

    run: Annotated[Any, arg(constructor_factory=_sweeps, name="")]

    def __call__(self, overrides: Sequence[str] = ()) -> None:
        given = given_options(overrides)
        if "seed" in given:
            raise InputError(f"--seed is {given['seed']}: a sweep has several seeds; give --seeds {given['seed']}.")
        default = following(base_config(self.run.config), given)
        base, unknown = parse(TrainConfig, overrides, default=default, prog="stop-mim sweep")
        refuse_unknown(unknown, self, base)
        axes = self._axes(base)
        sets = [variant.keys() for variant in varied(SWEEPS.find(self.run.name)(), axes).variants.values()]
        # A switch is turned off by its name with no- before it.
        options = {
            path.replace(".no_", "."): f"--{path.replace('_', '-')} {value}".strip() for path, value in given.items()
        }
        if self.run.config.epochs is not None:
            epochs = f"--epochs {self.run.config.epochs}"
            if "optim.epochs" in options:
                raise InputError(f"{epochs} and {options['optim.epochs']} are both given: leave one out.")
            options["optim.epochs"] = epochs
        for path in set(options).intersection(*sets):
            raise InputError(f"{options[path]} is given, but every variant of this sweep sets {path}: leave it out.")
        from stop_mim.sweeps.run import run_sweep

        summary = run_sweep(self.run.name, self.run.config, base, axes=axes)
        if summary is not None and summary.interrupted_by:
            sys.exit(_exit_code(summary.interrupted_by))
        if summary is not None and summary.failed:
            sys.exit(EXIT_FAILURE)

    def _axes(self, base: Any) -> dict[str, list[Any]]:
        """Return the fields of --vary with their values, each of the field's type."""
        axes: dict[str, list[Any]] = {}
        fields = dict(flat(dataclasses.asdict(base)))
        for given in self.run.vary:
            if not given:
                raise InputError("--vary has no value: give a field and its values, such as optim.lr 5e-4 1e-3.")
            given_path, *texts = given
            path, flag = given_path.replace("-", "_"), given_path.replace("_", "-")
            if path not in fields:
                raise unknown_name("field", path, fields)
            if instead := {"seed": "--seeds", "out": "--out"}.get(path):
                raise InputError(f"--vary has {path}, and a sweep sets {path} in every run: give {instead} instead.")
            values = axes.setdefault(path, [])
            group, dot, name = flag.rpartition(".")
            switches = {"true": [f"--{flag}"], "false": [f"--{group}{dot}no-{name}"]} if is_switch(base, path) else {}
            for text in texts:
                # The elements of a tuple are separated by commas, which other values, such as names of data, may have.
                elements = text.split(",") if isinstance(fields[path], tuple) else [text]
                options = switches.get(text.lower(), [f"--{flag}", *elements])
                config, unknown = parse(TrainConfig, options, default=base, prog="stop-mim sweep")
                refuse_unknown(unknown, base)
                values.append(operator.attrgetter(path)(config))
            if len(texts) < 2 or any(value in values[:i] for i, value in enumerate(values)):
                raise InputError(f"--vary {' '.join([path, *texts])}: give at least two values, each once.")
        return axes


@COMMANDS.register("figure")
@dataclass(frozen=True)
class Figure:
    """Draw the paper's figures from runs, as PDF and PNG."""

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="NAME …")]
    """Figures by name, or all."""
    runs: tuple[Path, ...] = ()
    """Run directories, or directories of sweeps; seeds of the same settings are averaged."""
    out: Path = Path("figures")
    """Directory of the figures."""
    score: str | None = None
    """Accuracy that figures 1, 3 and 4 show, such as distance/linear/top1; default: the closest to the paper's protocol."""

    def __call__(self) -> None:
        if not self.names:
            raise InputError(f"figure needs the name of a figure first: choose one of {', '.join(FIGURES)}, or all.")
        for name in self.names:
            if name not in (*FIGURES, "all"):
                raise unknown_name("figure", name, FIGURES)
        _require_paths("run", *map(str, self.runs))
        from stop_mim.analysis.figures import draw_figures

        for path in draw_figures(self.names, self.runs, self.out, _print, self.score):
            _print(f"Written: {path}")


@COMMANDS.register("report")
@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML file about runs, finished or not."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN …")]
    """Run directories, or directories of sweeps; several runs are compared, and their seeds averaged."""
    out: Annotated[Path, arg(aliases=["-o"])] = Path("report.html")
    """File to write."""
    images: tuple[Path, ...] = ()
    """At most 16 images on which to show the encoders' features; default: images of the first run's data."""

    def __call__(self) -> None:
        _require_paths("run", *map(str, self.runs))
        from stop_mim.analysis.report import write_report

        write_report(self.runs, self.out, self.images or None, Console())


@COMMANDS.register("export")
@dataclass(frozen=True)
class Export:
    """Export an encoder for timm, transformers, ONNX or torch.export, with a model card."""

    encoder: Annotated[Positional[str], arg(metavar="ENCODER")]
    """Run directory, encoder file, or any other name of an encoder."""
    to: Annotated[str, arg(constructor_factory=lambda: Literal[tuple(EXPORTERS)])]
    """timm: safetensors for timm; hf: an IJepaModel for transformers; onnx: ONNX; export: a torch.export program."""
    out: Path
    """Directory to write; it must be new or empty."""
    push: str | None = None
    """Also push the directory to this OWNER/NAME on the Hugging Face hub; a new repository is private."""
    licence: str | None = None
    """Licence of the weights for the model card, such as apache-2.0."""

    def __call__(self) -> None:
        _require_paths("encoder", self.encoder)
        from stop_mim.exchange.export import export_encoder

        export_encoder(self.encoder, self.to, self.out, self.push, self.licence)
        _print(f"Written: {self.out}{f', and pushed to {self.push}' if self.push else ''}.")


@COMMANDS.register("models")
@dataclass(frozen=True)
class Models:
    """List the encoders that can be loaded by name, and which of them are downloaded."""

    def __call__(self) -> None:
        from stop_mim.exchange.releases import models_table

        Console().print(models_table(), highlight=False)


@dataclass(frozen=True)
class BenchOptions(RecipeOptions):
    """A recipe to measure."""

    bench: BenchConfig = field(default_factory=BenchConfig)


@COMMANDS.register("bench")
@dataclass(frozen=True)
class Bench:
    """Measure a recipe's training step and its parts on this machine."""

    run: Annotated[Any, arg(constructor_factory=lambda: _recipes(BenchOptions), name="")]

    def __call__(self) -> None:
        from stop_mim.benchmark.bench import run_bench

        config, bench = self.run.config, self.run.bench
        if bench.images == "auto":
            usual = find_recipe(self.run.recipe) if self.run.recipe in RECIPES else TrainConfig()
            bench = dataclasses.replace(bench, images="synthetic" if config.data == usual.data else "data")
        run_bench(config, bench, self.run.recipe)


@dataclass(frozen=True)
class PlanOptions(RecipeOptions):
    """A recipe to plan."""

    plan: Annotated[PlanConfig, arg(name="")] = field(default_factory=PlanConfig)


@COMMANDS.register("plan")
@dataclass(frozen=True)
class Plan:
    """Estimate memory and communication of a recipe on several GPUs, and how to spread it over them.

    stop-mim plan RECIPE --gpus 64 --memory 80 [--images-per-second N] [--GROUP.FIELD VALUE …]
    """

    run: Annotated[Any, arg(constructor_factory=lambda: _recipes(PlanOptions), name="")]

    def __call__(self) -> None:
        from stop_mim.benchmark.scaling import choose, layouts, options_of, plan_table

        config, plan = self.run.config, self.run.plan
        found = layouts(config, plan)
        Console().print(plan_table(self.run.recipe, config, plan, found))
        best = choose(found, plan)
        if best is None:
            raise InputError(
                f"{self.run.recipe} does not fit {plan.gpus} GPUs of {plan.memory:g} GiB: use more of them."
            )
        _print(f"Use: {options_of(best)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Bad input and failed file operations end the process with one sentence and exit code 2."""
    # Before torch is loaded: threads that spin while they wait slow down all others where cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except InputError as error:
        _fail(str(error), EXIT_INPUT)
    except (TrainingDiverged, ProcessLost) as error:
        _fail(str(error), EXIT_FAILURE)
    except KeyboardInterrupt:
        _fail("Interrupted.", _exit_code("SIGINT"))
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        # Python flushes stdout once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_exit_code("SIGPIPE"))
    except OSError as error:
        path = error.filename2 or error.filename
        parts = [os.fsdecode(path)] if isinstance(path, str | bytes | Path) else []
        parts.append(error.strerror or str(error) or type(error).__name__)
        _fail(": ".join([*parts, *filter(None, [REMEDIES.get(error.errno or 0)])]) + ".", EXIT_INPUT)


def _run(given: list[str]) -> None:
    if given == ["--version"]:
        _print(f"stop-mim {__version__}")
        return
    load_plugins()
    given = _config_first(given) or ["--help"]
    GIVEN.set(given)
    if given[:1] == ["sweep"] and "--vary" in given and given[1].startswith("-"):
        given.insert(1, "vary")
    if given[0] not in HELP:
        COMMANDS.find(given[0])
        _check_name(*given[:2])
    kinds = [Annotated[kind, subcommand(name, **_settings(name, given))] for name, kind in COMMANDS.items()]
    command, unknown = parse(functools.reduce(operator.or_, kinds), given, prog="stop-mim")
    if not isinstance(command, Sweep):
        refuse_unknown(unknown, command)
    _check_launch(given_options(given))
    if isinstance(command, Sweep):
        command(unknown)
    else:
        launch = getattr(command.run if isinstance(command, Pretrain) else command, "launch", None)
        if launch is not None and launch.is_job:
            _submit(given, command, launch)
        else:
            command()


def _check_launch(given: Mapping[str, str]) -> None:
    """Raise InputError for options of a job without --launch; the command inside of a job has `--launch local`."""
    for path, value in given.items():
        if (path.startswith("launch.") or path == "job") and "launch" not in given:
            option = f"--{path.replace('_', '-')} {value}".strip()
            raise InputError(f"{option} has no effect without --launch: add --launch slurm, or leave it out.")


def _submit(given: Sequence[str], command: Any, launch: LaunchConfig) -> None:
    """Submit a command as a job, and print how to follow it."""
    from stop_mim.launch import submit
    from stop_mim.training.run_folder import RunFolder, default_path

    run: Path | None = command.run if isinstance(command, Resume) else None
    if isinstance(command, Pretrain):
        run = Path(command.run.config.out or default_path(command.run.recipe)).absolute()
        RunFolder(run).require_new()
        given = [*given, "--out", str(run)]
    logs = launch.logs or (Path("stop-mim-logs") if run is None else run.with_name(f"{run.name}-logs"))
    job, files = submit(given, launch, logs.absolute(), run)
    _print(f"Submitted job {job}. {'The log' if len(files) == 1 else 'The log of the first process'}: {files[0]}")


@dataclass(frozen=True)
class ConfigFile:
    """The option that replaces the name of a recipe."""

    config: Annotated[str | None, arg(metavar="a file such as RUN/config.json")] = None


def _config_first(given: list[str]) -> list[str]:
    """Return the arguments with the file of --config in the place of the recipe's name."""
    if NAMED.get(given[0] if given else "") is not RECIPES:
        return given
    named, others = parse(ConfigFile, given[1:], add_help=False)
    if named.config is None:
        return given
    if others and not others[0].startswith("-"):
        raise InputError(
            f"'{others[0]}' and --config are both given: leave one out; a line 'recipe: {others[0]}' in the file names it."
        )
    if not _is_config_file(named.config):
        raise InputError(
            f"--config is '{named.config}': give a file such as RUN/config.json, or one that ends in .yaml."
        )
    return [given[0], named.config, *others]


def _check_name(command: str, name: str = "") -> None:
    """Raise InputError if a command that needs the name of a recipe or sweep is not followed by one, or by --help."""
    if command not in NAMED or name in HELP or (command != "sweep" and _is_config_file(name)):
        return
    registry = NAMED[command]
    if not name or name.startswith("-"):
        raise InputError(f"{command} needs the name of a {registry.kind} first: choose one of {', '.join(registry)}.")
    registry.find(name)


def _require_paths(kind: str, *names: str) -> None:
    """Raise InputError, with the closest path, for a run, an encoder or a dataset that does not exist."""
    for name in names:
        path = user_path(name.partition("#")[0])
        # Names with a prefix such as timm:, of the hub, and patterns are not paths.
        if any(sign in name for sign in ":*?[{") or name.startswith(("-", "stop-mim/")) or path.exists():
            continue
        others = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, others, n=1)
        remedy = "check the path."
        if close:
            remedy = f"did you mean '{path.parent / close[0]}'?"
        elif kind == "encoder":
            remedy = "check the path, or write timm:NAME or hf:NAME for a model of timm or of Hugging Face."
        raise InputError(f"There is no {kind} '{name}': {remedy}")


def _require_datasets(*names: str | None) -> None:
    """Raise InputError for paths of datasets that do not exist, before torch is imported."""
    # A plugin may open other names.
    if "stop_mim.data.sources" not in sys.modules:
        _require_paths("dataset", *(name for name in names if name not in (None, "", "scenes")))


def _settings(name: str, given: Sequence[str]) -> dict[str, Any]:
    """Return the help of a command, and its default if that depends on the arguments."""
    text = inspect.cleandoc(COMMANDS[name].__doc__)
    settings: dict[str, Any] = {"description": text if name == given[0] else text.splitlines()[0]}
    if name == given[0] == "figure" and {*HELP} & {*given}:
        lines = (f"  - {figure}: {FIGURES.summary(figure)}" for figure in FIGURES)
        settings["description"] += "\n\n" + "\n".join(lines)
    if name == given[0] == "resume" and len(given) > 1 and given[1] not in HELP:
        # The run's own config has the defaults of its options.
        if given[1].startswith("-"):
            raise InputError(f"resume needs a run directory first: write it before {given[1]}.")
        _require_paths("run", given[1])
        from stop_mim.training.run_folder import RunFolder

        settings["default"] = Resume(tyro.MISSING, RunFolder(Path(given[1])).config().speed)
    return settings


def _report_end(result: "TrainResult") -> None:
    """Print how a run ended, once for several processes, and exit as a process stopped by a signal does."""
    text = f"Done: {result.total_steps} steps. The encoder: {result.folder / 'encoder.safetensors'}"
    if not result.finished:
        reason = f"Stopped by {result.interrupted_by}" if result.interrupted_by else "Stopped"
        saved = f"{reason} after step {result.step} of {result.total_steps}; saved."
        text = f"{saved} Continue with: stop-mim resume {result.folder}"
    if os.environ.get("RANK", "0") == "0":
        _print(text)
    if result.interrupted_by:
        sys.exit(_exit_code(result.interrupted_by))


def _exit_code(interrupted_by: str) -> int:
    """Return the exit code of a signal, as shells do; a run may also be stopped by another of its processes."""
    return EXIT_OF_SIGNALS + signal.Signals.__members__.get(interrupted_by, signal.SIGINT)


def _output_is_closed() -> bool:
    """Whether the reader of stdout is gone, as with `| head`; a broken pipe between processes is a bug instead."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _print(text: str) -> None:
    Console().print(escape(printable(text)), highlight=False, soft_wrap=True)


def _fail(sentence: str, code: int) -> NoReturn:
    print(f"stop-mim: {printable(' '.join(sentence.split()))}", file=sys.stderr)
    sys.exit(code)
