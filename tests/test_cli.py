"""The command line: help, options, and errors as one sentence on stderr with exit code 2 and nothing written."""

import errno
import io
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stop_mim.cli import COMMANDS, main
from stop_mim.errors import TrainingDiverged
from stop_mim.training import pretrain
from stop_mim.training.pretrain import TrainResult
from stop_mim.training.recipes import RECIPES

TINY = [
    *("--encoder.image-size", "32", "32", "--encoder.patch-size", "8", "--encoder.width", "24", "--encoder.depth", "1"),
    *("--encoder.heads", "2", "--predictor.width", "16", "--predictor.depth", "1", "--optim.batch-size", "8"),
    *("--optim.epochs", "2", "--optim.warmup-epochs", "1", "--speed.device", "cpu"),
]


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    draws = np.random.default_rng(0)
    for number in range(24):
        pixels = draws.integers(0, 255, (40, 36 + number % 3, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.jpg")
    return folder


def complaint(capsys, *arguments, code=2):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert ended.value.code == code
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("stop-mim: ")
    assert last.endswith((".", "?"))
    return last


def shown(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_help_lists_commands_recipes_sweeps_and_fields(capsys):
    assert all(f"• {name} " in shown(capsys) for name in COMMANDS)
    text = shown(capsys, "pretrain", "--help")
    assert all(f"• {name} " in text for name in RECIPES)
    assert "ViT-B/16 on ImageNet-1k" in text
    assert "• tokens Noise on no tokens" in shown(capsys, "sweep", "--help")
    fields = shown(capsys, "pretrain", "stop-vitb16", "--help")
    for words in ("--optim.lr FLOAT", "earning rate", "--positions.sigma", "--speed.compile", "--init"):
        assert words in fields
    assert "(default: 600)" in fields, "the values are those of the recipe"


def test_help_and_mistakes_do_not_wait_for_torch():
    """All in one process, which must not have imported torch in the end."""
    lines = [
        "--version",
        "--help",
        "pretrian demo",
        "pretrain --help",
        "pretrain stop-vitb1",
        "pretrain demo --optim.lrr 1",
        "pretrain demo --optim.lr fast",
        "pretrain demo --positions.sigma -1",
        "pretrain stop-photos --data no/such/folder",
        "sweep tokens --optim.lrr 1",
        "resume no/such/run",
        "export no/such/run --to timm --out x",
        "evaluate . --help",
        "evaluate . --data tests --task knnn",
        "evaluate . --task knn",
        "evaluate . --data tests --task knn --low-shot.amounts 0%",
        "evaluate . --data no/such/data --task knn",
        "evaluate . no/such/run --data tests --task knn",
        "evaluate . --data tests --task knn --json no/such/r.json",
        "figure 11",
        "figure 4 --runs no/such/run",
        "report no/such/run",
    ]
    program = f"""
import sys
from stop_mim.cli import main
for line in {lines}:
    try:
        main(line.split())
    except SystemExit as ended:
        assert ended.code == (0 if "--help" in line else 2), line
    assert "torch" not in sys.modules, line
"""
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pretrian"], "'pretrian': did you mean 'pretrain'?"),
        ([""], "There is no command '': choose one of demo, pretrain,"),
        (["pretrain"], "needs the name of a recipe"),
        (["pretrain", "stop-vitb1"], "'stop-vitb1': did you mean 'stop-vitb16'?"),
        (["pretrain", "demo", "--optim.lrr", "1"], "--optim.lrr: did you mean --optim.lr?"),
        (["sweep", "--vary", "optim.lrr", "1", "2"], "There is no field 'optim.lrr': did you mean 'optim.lr'?"),
        (["sweep", "--seeds", "0", "--vary", "optim.lr", "1e-3"], "optim.lr 1e-3: give at least two values"),
        (
            ["sweep", "--vary", "optim.lr", "5e-4", "0.0005"],
            "optim.lr 5e-4 0.0005: give at least two values, each once",
        ),
        (["sweep", "--vary", "optim.lr", "0.10000001", "0.1"], "'lr-0.1': give values that differ"),
        (["sweep", "sigma", "--vary", "positions.sigma", "1", "2"], "which the variant 'sigma-0' sets itself"),
        (
            ["sweep", "sigma", "--positions.sigma", "0.7"],
            "--positions.sigma 0.7 is given, but every variant of this sweep sets",
        ),
        (["sweep", "--vary", "optim.lr", "1", "2", "--optim.lr", "3"], "--optim.lr 3 is given, but every variant"),
        (["sweep", "--vary", "optim.epochs", "1", "2", "--epochs", "3"], "--epochs 3 is given, but every variant"),
        (
            ["sweep", "--vary", "log.tensorboard", "true", "false", "--log.no-tensorboard"],
            "--log.no-tensorboard is given, but every variant",
        ),
        (["sweep", "tokens", "--epochs", "3", "--optim.epochs", "5"], "--epochs 3 and --optim.epochs 5 are both given"),
        (["sweep", "--vary", "speed.compile", "True", "maybe"], "--speed.compile is 'maybe'"),
        (["sweep", "--vary"], "--vary has no value"),
        (["sweep", "--vary", "seed", "1", "2"], "a sweep sets seed in every run: give --seeds instead"),
        (["sweep", "--vary", "out", "a", "b"], "a sweep sets out in every run: give --out instead"),
        (["sweep", "tokens", "--recipe"], "--recipe has no value: give a text"),
        (["sweep", "--vary", "log.no-tensorboard", "true", "false"], "did you mean 'log.tensorboard'?"),
        (["pretrain", "demo", "--lr", "1"], "--lr: did you mean --optim.lr?"),
        (["pretrain", "demo", "more"], "'more'"),
        (["pretrain", "demo", "/"], "'/' is not expected: write the option before it, such as --data."),
        (["evaluate", "timm:x", "--data", "scenes", "--task", "all", "clevr"], "task is all clevr: give all alone"),
        (
            ["evaluate", "timm:x", "--data", "scenes", "--task", "knn", "--table", "a.md", "--json", "./a.md"],
            "table and json are both a.md: give two files.",
        ),
        (["evaluate", "vit_base_patch16_224", "--data", "scenes", "--task", "knn"], "write timm:NAME"),
        (["pretrain", "demo", "--data", "a.PARQUET", "b.PARQUET"], "'b.PARQUET' is not expected: write patterns"),
        (["pretrain", "demo", "optim.lr=1e-3"], "'optim.lr' is not expected: did you mean --optim.lr?"),
        (["pretrain", "demo", "--augment.crop-scale", "0.3", "1.0", "0.5"], "'0.5' is not expected: --help"),
        (["pretrain", "demo", "--steps", "10"], "did you mean --stop-after-steps?"),
        (["pretrain", "demo", "--objective.name", "mae"], "did you mean --objective."),
        (["pretrain", "demo", "--optim.clip", "1"], "did you mean --optim.clip-gradient-norm?"),
        (["pretrain", "demo", "--log.tensorboard", "no"], "--log.no-tensorboard"),
        (["pretrain", "demo", "--seed", "0", "1"], "'1' is not expected: the option before it takes no more values"),
        (["pretrain", "demo", "-"], "no option -: --help"),
        (["pretrain", "demo", "--optim.lr", "fast"], "--optim.lr is 'fast': give a number."),
        (["pretrain", "demo", "--optim.lr"], "--optim.lr has no value: give a number."),
        (["pretrain", "demo", "--encoder.image-size", "3"], "--encoder.image-size is '3': give 2 whole numbers."),
        (["sweep", "tokens", "--seeds", "a"], "--seeds is 'a': give one or more whole numbers."),
        (["sweep", "tokens", "--seed", "3"], "give --seeds 3."),
        (["pretrain", "demo", "--optim.learning-rate", "1"], "did you mean --optim.lr?"),
        (["pretrain", "ijepa"], "did you mean 'ijepa-vitb16' or 'ijepa-vitl16'"),
        (["pretrain", "demo", "--positions.sigma", "-0.5"], "positions.sigma is -0.5"),
        (["pretrain", "demo", "--encoder.size", "tall"], "--encoder.size is 'tall'"),
        (["pretrain", "demo", "--masks.target-scale", "0.9", "1.0"], "6x6"),
        (["pretrain", "demo", "--speed.device", "tpu"], "speed.device is 'tpu'"),
        (["pretrain", "demo", "--data", "no/such/folder"], "no/such/folder"),
        (["pretrain", "stop-tiny-imagenet"], "data is not given"),
        (["pretrain", "--config", "stop-vitb16"], "--config is 'stop-vitb16'"),
        (["pretrain", "--config"], "--config has no value: give a file such as RUN/config.json."),
        (["pretrain", "stop-photos", "--config", "missing.yaml"], "'stop-photos' and --config are both given"),
        (["pretrain", "--config", "missing.yaml"], "missing.yaml: No such file"),
        (["pretrain", "demo", "--data", "scenes:count=8,size=32"], "optim.batch_size is 16"),
        (
            ["pretrain", "demo", "--launch.gpus", "8"],
            "--launch.gpus 8 has no effect without --launch: add --launch slurm",
        ),
        (["sweep", "tokens", "--job", "slurm_account=x"], "--job slurm_account=x has no effect without --launch"),
        (["figure", "theory", "--launch.gpus", "8"], "There is no option --launch.gpus"),
        (["resume"], "RUN is not given"),
        (["resume", "no/such/run"], "no/such/run"),
        (["resume", "--speed.device", "cpu", "run"], "needs a run directory first: write it before --speed.device."),
        (["export", "timm:x", "--to", "timm"], "--out is not given"),
        (["export", "timm:x"], "--to is not given: choose timm, hf, onnx or export."),
        (["export", "timm:x", "--to", "tim", "--out", "x"], "--to is 'tim': choose timm, hf, onnx or export."),
        (["figure", "all", "--runs", "/"], "/ contains no run (no config.json)"),
        (["figure", "theory", "--out", f"{__file__}/figures"], "choose another --out"),
        (["demo", "--out", f"{__file__}/run"], "choose another --out"),
        (["figure", "sigma"], "There is no figure 'sigma': choose one of 1, 3, 4, 5, 6, covariance,"),
        (["report"], "No run is given"),
        (
            ["sweep", "tokens", "--low-shot-list", "missing.txt", "--scale", "imagenet", "--data", "scenes"],
            "missing.txt: No such file",
        ),
        (
            ["sweep", "tokens", "--low-shot-list", __file__, "--scale", "imagenet", "--data", "scenes:count=9,size=32"],
            f"names in {__file__} are not in scenes",
        ),
    ],
)
def test_mistakes_are_one_sentence(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert words in complaint(capsys, *arguments)
    assert not list(tmp_path.iterdir())


def test_words_and_options_reach_their_commands(monkeypatch, tmp_path):
    given = {}
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "photos"):
        Path(name).mkdir()

    def note(name):
        return lambda *arguments: given.update({name: arguments}) or []

    for place in ("analysis.figures.draw_figures", "analysis.report.write_report", "evaluation.evaluate.evaluate"):
        monkeypatch.setattr(f"stop_mim.{place}", note(place.split(".")[-1]))
    monkeypatch.setattr("stop_mim.exchange.export.export_encoder", note("export"))
    main(["figure", "4", "5", "--runs", "a", "b", "--score", "linear/top1"])
    assert (given["draw_figures"][0], given["draw_figures"][1]) == (("4", "5"), (Path("a"), Path("b")))
    main(["report", "a", "b", "-o", "page.html"])
    assert given["write_report"][:2] == ((Path("a"), Path("b")), Path("page.html"))
    main(["evaluate", "hf:a", "timm:b", "--task", "linear", "knn", "--data", "photos", "--knn.neighbours", "5"])
    names, config = given["evaluate"]
    assert (names, config.task, config.data) == (("hf:a", "timm:b"), ("linear", "knn"), "photos")
    assert config.knn.neighbours == (5,)
    main(["export", "timm:a", "--to", "timm", "--out", "folder", "--licence", "mit"])
    assert given["export"] == ("timm:a", "timm", Path("folder"), None, "mit")


def test_a_comma_separates_the_elements_of_a_varied_tuple_and_stays_in_a_name(monkeypatch):
    given = {}
    monkeypatch.setattr("stop_mim.sweeps.run.run_sweep", lambda *_, axes: given.update(axes))
    data, scales = ["scenes:count=8,size=32", "scenes:count=9,size=32"], ["0.1,0.2", "0.2,0.3"]
    main(["sweep", "--vary", "data", *data, "--vary", "masks.target-scale", *scales])
    assert given == {"data": data, "masks.target_scale": [(0.1, 0.2), (0.2, 0.3)]}
    given.clear()
    main(["sweep", "--vary", "speed.compile", "None", "True", "--vary", "log.tensorboard", "true", "false"])
    assert given == {"speed.compile": [None, True], "log.tensorboard": [True, False]}


def test_tyro_reports_mistakes_itself_where_it_cannot_be_asked(capsys, monkeypatch):
    monkeypatch.setattr("stop_mim.parsing.tyro_errors", None)
    for option in (["--optim.lr", "fast"], ["--positions.sigma", "-0.5"]):
        with pytest.raises(SystemExit) as ended:
            main(["pretrain", "demo", *option])
        assert ended.value.code == 2
        assert option[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "data", "extra"), [("datasets", "hf:a/b", "hf"), ("braceexpand", "wds:a.tar", "wds")]
)
def test_a_missing_extra_is_named(capsys, tmp_path, monkeypatch, package, data, extra):
    monkeypatch.chdir(tmp_path)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("x.jpg"), io.BytesIO())
    monkeypatch.setitem(sys.modules, package, None)
    assert f"pip install 'stop-mim[{extra}]'" in complaint(capsys, "pretrain", "demo", "--data", data)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (TrainingDiverged("The loss is not finite."), 1, "The loss is not finite."),
        (
            OSError(errno.ENOSPC, "No space left on device", "/runs/x/a.pt"),
            2,
            "/runs/x/a.pt: No space left on device: free some space, or choose another path.",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "a", None, "b"),
            2,
            "b: Permission denied: check the permissions, or choose another path.",
        ),
        (OSError("the disk is gone"), 2, "the disk is gone."),
        (KeyboardInterrupt(), 130, "Interrupted."),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "a\x1b[31m\nb"),
            2,
            r"a\x1b[31m b: No such file: check the path.",
        ),
    ],
)
def test_errors_end_a_command_with_a_sentence(capsys, monkeypatch, error, code, words):
    def fail(self):
        raise error

    monkeypatch.setattr(COMMANDS["demo"], "__call__", fail)
    assert complaint(capsys, "demo", code=code) == f"stop-mim: {words}"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), BrokenPipeError("of a worker")])
def test_other_errors_are_bugs_and_keep_their_traceback(capfd, monkeypatch, error):
    def fail(self):
        raise error

    monkeypatch.setattr(COMMANDS["demo"], "__call__", fail)
    with pytest.raises(type(error), match=str(error)):
        main(["demo"])


def test_a_run_is_made_refused_a_second_time_resumed_and_protected(capsys, tmp_path, photos):
    run = tmp_path / "run"
    pretrain = ["pretrain", "demo", "--data", str(photos), "--out", str(run), *TINY, "--stop-after-steps", "3"]
    main(pretrain)
    assert f"Continue with: stop-mim resume {run}" in capsys.readouterr().out
    expected = {"config.json", "environment.json", "metrics.jsonl", "log.txt", "tensorboard", "checkpoints"}
    assert {file.name for file in run.iterdir()} >= expected | {"encoder.safetensors"}
    assert str(run) in complaint(capsys, *pretrain)
    main(["resume", str(run), "--speed.workers", "0"])
    assert "Done: 6 steps" in capsys.readouterr().out
    newest = sorted((run / "checkpoints").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    assert str(newest) in complaint(capsys, "resume", run)


def test_the_warm_up_follows_the_epochs_and_a_file_takes_the_place_of_a_recipe(monkeypatch, tmp_path):
    def trained(*arguments):
        given = []
        monkeypatch.setattr(
            pretrain,
            "train",
            lambda *options, **more: given.append((*options, more)) or TrainResult(tmp_path, 6, 6, 0.5, None),
        )
        main(["pretrain", *arguments])
        ((config, more),) = given
        return config, more["recipe"]

    config, _ = trained("demo", "--optim.epochs", "3")
    assert (config.optim.epochs, config.optim.warmup_epochs) == (3, 0.3)
    photos = ("stop-photos", "--data", "scenes")
    config, _ = trained(*photos, "--optim.epochs=3", "--optim.warmup-epochs", "2", "--data.max-bad", "5%")
    assert (config.optim.epochs, config.optim.warmup_epochs, config.max_bad) == (3, 2, "5%")
    assert config.optim.derive == ("batch_size", "lr", "start_lr", "final_lr")
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: demo\noptim: {epochs: 50}\ndata: photos\n")
    for first in (["--seed", "7", "--config", str(file)], [f"--config={file}"], [str(file)]):
        config, name = trained(*first, "--optim.epochs", "10", "--seed", "7")
        assert (config.optim.epochs, config.optim.warmup_epochs, config.data, config.seed) == (10, 1, "photos", 7)
        assert name == "mine"


def test_a_resumed_run_keeps_its_own_speed_options(capsys, tmp_path, photos, monkeypatch):
    run = tmp_path / "run"
    main(["pretrain", "demo", "--data", str(photos), "--out", str(run), *TINY, "--stop-after-steps", "1"])
    given = []
    monkeypatch.setattr(
        pretrain, "resume", lambda *options, **more: given.extend(options) or TrainResult(run, 6, 6, 0.5, None)
    )
    main(["resume", str(run), "--speed.workers", "2", "--stop-after-steps", "5"])
    assert (given[2].device, given[2].workers, given[3]) == ("cpu", 2, 5)


@pytest.mark.parametrize(
    ("by", "code", "rank"), [("SIGTERM", 143, "0"), ("SIGINT", 130, "1"), ("another process", 130, "0")]
)
def test_an_interrupted_run_exits_as_its_signal_does(capsys, monkeypatch, tmp_path, by, code, rank):
    monkeypatch.setattr(pretrain, "train", lambda *arguments, **options: TrainResult(tmp_path, 5, 10, 0.5, by))
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        main(["pretrain", "demo"])
    assert ended.value.code == code
    words = [f"Stopped by {by} after step 5 of 10; saved."] if rank == "0" else []
    assert [line.split(" Continue")[0] for line in capsys.readouterr().out.splitlines()] == words


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_wait_without_spinning_unless_the_user_wants_it(monkeypatch, capsys, given):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    main(["--version"])
    assert os.environ["OMP_WAIT_POLICY"] == (given or "PASSIVE")


def test_output_that_is_not_read_to_its_end_is_no_error():
    command = [sys.executable, "-m", "stop_mim", "bench", "demo", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE
