"""The command line: commands, recipes and fields; every mistake of a user is one sentence and exit code 2."""

import contextlib
import difflib
import io
import itertools
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import stop_mim
from stop_mim.errors import InputError

# What a command needs of the package is imported when it runs, so that --help need not wait for torch.
if TYPE_CHECKING:
    from stop_mim.training.loop import TrainResult

Options = TypeVar("Options")
EXIT_FAILURE, EXIT_INPUT, EXIT_OF_SIGNALS = 1, 2, 128
HELP = ("-h", "--help")


@dataclass(frozen=True)
class DemoOptions:
    """Train a small StoP model on the embedded scenes; compare it with an untrained one and with pixels."""

    out: str = "stop-mim-demo"
    """Folder of the run; if it is there already, a number is added."""
    seed: int = 0
    """Seed of the run."""


def demo(arguments: list[str]) -> None:
    """Train a small model on the embedded scenes and see what it learned: three minutes, no data, no GPU."""
    options = parse(DemoOptions(), arguments, "stop-mim demo")
    from stop_mim.demo import run_demo
    from stop_mim.training.recipes import find_recipe

    run_demo(replace(find_recipe("demo"), out=options.out, seed=options.seed))


def pretrain(arguments: list[str]) -> None:
    """Train an encoder on your images: stop-mim pretrain RECIPE --data NAME [--init FILE] [--GROUP.FIELD VALUE …]."""
    from stop_mim.training.config import TrainConfig
    from stop_mim.training.loop import train
    from stop_mim.training.recipes import find_recipe

    if not _names_recipe("pretrain", "--data NAME [--init FILE]", arguments):
        return

    @dataclass(frozen=True)
    class PretrainOptions(TrainConfig):
        """A pretraining run."""

        init: str | None = None
        """Weights to begin with: a run, a checkpoint or a .pth.tar of a release (all of them), or an encoder by any name."""

    name, names = arguments[0], [field.name for field in fields(TrainConfig)]
    defaults = find_recipe(name)
    chosen = parse(
        PretrainOptions(**{field: getattr(defaults, field) for field in names}),
        arguments[1:],
        f"stop-mim pretrain {name}",
    )
    more: dict[str, Any] = {}
    if chosen.init is not None:
        from stop_mim.exchange.initial_weights import initialise

        more["initialise"] = partial(initialise, name=chosen.init)
    _tell_end(train(TrainConfig(**{field: getattr(chosen, field) for field in names}), recipe=name, **more))


def resume(arguments: list[str]) -> None:
    """Continue a run as if it had never stopped: stop-mim resume RUN."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in HELP):
        raise InputError("resume needs the folder of a run first: stop-mim resume RUN.")
    from stop_mim.training.config import SpeedConfig
    from stop_mim.training.loop import resume as resume_run
    from stop_mim.training.run_folder import RunFolder

    asked_for_help = arguments[0] in HELP
    speed = SpeedConfig() if asked_for_help else RunFolder(Path(arguments[0])).config().speed

    @dataclass(frozen=True)
    class ResumeOptions:
        """Continue a run from its newest checkpoint; what changes results is the run's own and cannot be changed."""

        speed: SpeedConfig
        """Where and how fast it goes on."""
        checkpoint: Path | None = None
        """Checkpoint to continue from, instead of the newest one."""
        stop_after_steps: int | None = None
        """Stop (and save) when so many steps of the whole run are done."""

    options = parse(ResumeOptions(speed), arguments[not asked_for_help :], "stop-mim resume RUN")
    _tell_end(resume_run(arguments[0], options.checkpoint, options.speed, options.stop_after_steps))


def evaluate(arguments: list[str]) -> None:
    """Score encoders: stop-mim evaluate ENCODER [ENCODER …] --task TASK --data NAME."""
    from stop_mim.evaluation.config import evaluate_config

    names = _leading_words(arguments)
    config = parse(evaluate_config()(), arguments[len(names) :], "stop-mim evaluate ENCODER …")
    from stop_mim.evaluation.evaluate import evaluate as evaluate_encoders

    evaluate_encoders(names, config)


def export(arguments: list[str]) -> None:
    """Hand an encoder to others: stop-mim export RUN --to timm|hf|onnx|export --out FOLDER [--push OWNER/NAME]."""

    @dataclass(frozen=True)
    class ExportOptions:
        """Write the encoder of a run, of a release or of any other name as a new folder, with a model card."""

        to: Literal["timm", "hf", "onnx", "export"] | None = None
        """timm: safetensors for timm; hf: an IJepaModel for transformers; onnx: ONNX; export: a program of torch.export."""
        out: Path | None = None
        """Folder to write, which must not be there yet."""
        push: str | None = None
        """Push the folder to this OWNER/NAME of the Hugging Face hub too; a new repository is private."""
        licence: str | None = None
        """Licence of the weights for the model card, such as apache-2.0."""

    asked_for_help = any(argument in HELP for argument in arguments)
    if not asked_for_help and (not arguments or arguments[0].startswith("-")):
        raise InputError("export needs an encoder first: stop-mim export RUN --to timm|hf|onnx|export --out FOLDER.")
    options = parse(ExportOptions(), arguments if asked_for_help else arguments[1:], "stop-mim export RUN")
    if options.to is None or options.out is None:
        raise InputError(
            f"{'to' if options.to is None else 'out'} is not given: 'stop-mim export --help' shows what it is."
        )
    from stop_mim.exchange.export import export_encoder

    export_encoder(arguments[0], options.to, options.out, options.push, options.licence)
    _print(f"Written: {options.out}{f', and pushed to {options.push}' if options.push else ''}.")


def sweep(arguments: list[str]) -> None:
    """Compare variants over seeds, as the paper's ablations do: stop-mim sweep NAME [--scale SCALE] [--dry-run]."""
    from stop_mim.sweeps.config import SweepConfig
    from stop_mim.sweeps.grid import SWEEPS

    if arguments and arguments[0] in HELP:
        _print_table("stop-mim sweep NAME [options]", "sweep", {name: grid.summary for name, grid in SWEEPS.items()})
        _print("stop-mim sweep NAME --help shows every option.")
        return
    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"sweep needs the name of a sweep first: choose one of {', '.join(SWEEPS)}.")
    config = parse(SweepConfig(), arguments[1:], f"stop-mim sweep {arguments[0]}")
    from stop_mim.sweeps.runner import run_sweep

    result = run_sweep(arguments[0], config)
    if result.interrupted_by:
        sys.exit(_exit_code(result.interrupted_by))
    if result.failed and not config.dry_run:
        sys.exit(EXIT_FAILURE)


def figure(arguments: list[str]) -> None:
    """Draw the paper's figures from runs: stop-mim figure 1|3|4|5|6|covariance|theory|all --runs RUN [RUN …]."""

    @dataclass(frozen=True)
    class FigureOptions:
        """Draw figures as PDF and PNG, from the folders of runs alone."""

        runs: tuple[Path, ...] = ()
        """Folders of runs; several seeds of the same settings are averaged."""
        out: Path = Path("figures")
        """Folder of the figures."""
        score: str | None = None
        """The accuracy of figures 1, 3 and 4, such as distance/linear/top1; not given: the nearest to the paper's protocol."""

    names = _leading_words(arguments)
    options = parse(FigureOptions(), arguments[len(names) :], "stop-mim figure NAME")
    if not names:
        raise InputError("figure needs the name of a figure first: 1, 3, 4, 5, 6, covariance, theory or all.")
    from stop_mim.analysis.figures import draw_figures

    for path in draw_figures(names, options.runs, options.out, _print, options.score):
        _print(f"Written: {path}")


def report(arguments: list[str]) -> None:
    """Write a page to look at, one file that opens anywhere: stop-mim report RUN [RUN …] -o report.html."""

    @dataclass(frozen=True)
    class ReportOptions:
        """Write one self-contained HTML file about runs, finished or not; several runs are compared."""

        out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report.html")
        """File to write."""
        images: tuple[Path, ...] = ()
        """Images to look at with the runs' encoders, at most sixteen; not given: some of the first run's data."""

    names = _leading_words(arguments)
    options = parse(ReportOptions(), arguments[len(names) :], "stop-mim report RUN …")
    if not names:
        raise InputError("report needs the folder of a run first: stop-mim report RUN [RUN …] -o report.html.")
    from stop_mim.analysis.report import write_report

    write_report([Path(name) for name in names], options.out, options.images or None, Console())


def bench(arguments: list[str]) -> None:
    """Measure a recipe's training step and its parts on this machine: stop-mim bench RECIPE [--bench.compare]."""
    from stop_mim.benchmark.config import BenchConfig
    from stop_mim.training.config import TrainConfig
    from stop_mim.training.recipes import find_recipe

    if not _names_recipe("bench", "[--bench.compare] [--bench.scaling]", arguments):
        return

    @dataclass(frozen=True)
    class BenchOptions(TrainConfig):
        """A pretraining run whose step is measured; nothing is trained, and no run is written."""

        bench: BenchConfig = field(default_factory=BenchConfig)

    name, names = arguments[0], [one.name for one in fields(TrainConfig)]
    defaults = find_recipe(name)
    chosen = parse(
        BenchOptions(**{one: getattr(defaults, one) for one in names}), arguments[1:], f"stop-mim bench {name}"
    )
    images = chosen.bench.images
    if images == "auto":
        images = "data" if chosen.data != defaults.data else "synthetic"
    from stop_mim.benchmark.bench import run_bench

    config = TrainConfig(**{one: getattr(chosen, one) for one in names})
    run_bench(config, replace(chosen.bench, images=images), name)


def _names_recipe(command: str, options: str, arguments: list[str]) -> bool:
    """Whether a recipe comes first, or else only help was asked for, which is given here."""
    from stop_mim.training.recipes import RECIPES, summary

    if arguments and arguments[0] in HELP:
        title = f"stop-mim {command} RECIPE {options} [--GROUP.FIELD VALUE …]"
        _print_table(title, "recipe", {name: summary(name) for name in RECIPES})
        _print(f"stop-mim {command} RECIPE --help shows every field with its value in that recipe.")
        return False
    if not arguments or arguments[0].startswith("-"):
        raise InputError(f"{command} needs the name of a recipe first: choose one of {', '.join(RECIPES)}.")
    return True


def _leading_words(arguments: list[str]) -> list[str]:
    return list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "demo": demo,
    "pretrain": pretrain,
    "resume": resume,
    "evaluate": evaluate,
    "sweep": sweep,
    "figure": figure,
    "report": report,
    "export": export,
    "bench": bench,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a mistake of the user's ends the process with one sentence and exit code 2."""
    # Before torch is loaded: threads that wait by spinning hold up all others where cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _dispatch(given)
        sys.stdout.flush()
    except InputError as error:
        _fail(str(error), EXIT_INPUT)
    except KeyboardInterrupt:
        _fail("Interrupted.", _exit_code("SIGINT"))
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        # What is still to be written at the end must not complain of it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_exit_code("SIGPIPE"))
    except Exception as error:
        # Looked up by name, so that a command that never trains never imports the trainer.
        if type(error).__name__ != "TrainingDiverged":
            raise
        _fail(str(error), EXIT_FAILURE)


def _output_is_closed() -> bool:
    """Whether who read the output has gone, as head does; other pipes are between processes, and must not break."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _dispatch(given: list[str]) -> None:
    if not given or given[0] in HELP:
        summaries = {name: (command.__doc__ or "").strip() for name, command in COMMANDS.items()}
        _print_table("stop-mim COMMAND [options]", "command", summaries)
        _print("stop-mim COMMAND --help tells more.")
    elif given[0] == "--version":
        _print(f"stop-mim {stop_mim.__version__}")
    elif given[0] in COMMANDS:
        COMMANDS[given[0]](given[1:])
    else:
        raise InputError(f"There is no command '{given[0]}': choose one of {', '.join(COMMANDS)}.")


def parse(default: Options, arguments: list[str], program: str) -> Options:
    """Options from the command line, with the given ones as default; a mistake is an InputError."""
    if any(argument in HELP for argument in arguments):
        return tyro.cli(type(default), default=default, args=arguments, prog=program)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(complaint):
            options, unknown = tyro.cli(
                type(default), default=default, args=arguments, prog=program, return_unknown_args=True
            )
    except SystemExit:
        raise InputError(_sentence(complaint.getvalue(), program)) from None
    if unknown:
        raise InputError(_unknown(unknown[0], default, program))
    return options


def _sentence(complaint: str, program: str) -> str:
    """The message of tyro's box, on one line."""
    parts = re.split(r"\n\s*-{8,}\s*\n", complaint)
    text = " ".join((parts[1] if len(parts) > 1 else complaint).split()).rstrip(".")
    # A value that our own checks refused comes with our own sentence.
    own = re.fullmatch(r"Error parsing [\w.-]+: (\w[\w.]* is .*:.*)", text)
    return f"{own[1]}." if own else f"{text}: '{program} --help' shows every field."


def _unknown(argument: str, default: object, program: str) -> str:
    if not argument.startswith("-"):
        return f"'{argument}' is one word too many: '{program} --help' shows what can be given."
    name = argument.split("=")[0].lstrip("-").replace("_", "-")
    close = difflib.get_close_matches(name, [*_field_names(default)], n=1, cutoff=0.5)
    hint = f"did you mean --{close[0]}? " if close else ""
    return f"There is no field {argument.split('=')[0]}: {hint}'{program} --help' shows every field."


def _field_names(options: object, prefix: str = "") -> Iterable[str]:
    for name in getattr(options, "__dataclass_fields__", {}):
        value = getattr(options, name)
        if hasattr(value, "__dataclass_fields__"):
            yield from _field_names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}".replace("_", "-")


def _tell_end(result: "TrainResult") -> None:
    """Say how a run ended, once where there are several processes, and end as one whom a signal stopped."""
    text = f"Done: {result.total_steps} steps. The encoder: {result.folder / 'encoder.safetensors'}"
    if not result.finished:
        why = f"Stopped by {result.interrupted_by}" if result.interrupted_by else "Stopped"
        saved = f"{why} after step {result.step} of {result.total_steps}; saved."
        text = f"{saved} Go on with: stop-mim resume {result.folder}"
    if os.environ.get("RANK", "0") == "0":
        _print(text)
    if result.interrupted_by:
        sys.exit(_exit_code(result.interrupted_by))


def _exit_code(interrupted_by: str) -> int:
    """As shells tell a signal; a run may also have been stopped by another of its processes."""
    return EXIT_OF_SIGNALS + signal.Signals.__members__.get(interrupted_by, signal.SIGINT)


def _print_table(title: str, heading: str, rows: dict[str, str]) -> None:
    table = Table(heading, "", title=escape(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, text in rows.items():
        table.add_row(escape(name), escape(text))
    Console().print(table)


def _print(text: str) -> None:
    Console().print(escape(text), highlight=False, soft_wrap=True)


def _fail(sentence: str, code: int) -> NoReturn:
    print(f"stop-mim: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
