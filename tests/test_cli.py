"""What a person types: each mistake is one sentence on stderr, exit code 2, and nothing written."""

import io
import os
import signal
import subprocess
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from stop_mim.cli import COMMANDS, main
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


def complaint(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    # The choice of loader and the like may be told before; the complaint is the last line, and one.
    assert lines[-1].startswith("stop-mim: ")
    assert lines[-1].endswith((".", "?"))
    assert "Traceback" not in captured.err
    return lines[-1]


def test_help_lists_commands_and_recipes(capsys):
    main([])
    assert "pretrain" in capsys.readouterr().out
    main(["pretrain", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)
    main(["--version"])
    assert "stop-mim 0.1.0" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["demo", "stop-vitb16"])
def test_help_of_a_recipe_explains_every_field(capsys, recipe):
    with pytest.raises(SystemExit) as ended:
        main(["pretrain", recipe, "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for text in (
        "--optim.lr",
        "Peak learning rate.",
        "--positions.sigma",
        "the variance of n",
        "--speed.compile",
    ):
        assert text in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "There is no command 'train'"),
        (["pretrain"], "needs the name of a recipe"),
        (["pretrain", "stop-vitz"], "There is no recipe 'stop-vitz'"),
        (["pretrain", "demo", "--optim.lrr", "1"], "no field --optim.lrr: did you mean --optim.lr?"),
        (["pretrain", "demo", "--optim.lr", "fast"], "could not convert string to float: 'fast'"),
        (["pretrain", "demo", "--positions.sigma", "-0.5"], "positions.sigma is -0.5"),
        (["pretrain", "demo", "--encoder.size", "tall"], "invalid choice 'tall'"),
        (["pretrain", "demo", "--masks.target-scale", "0.9", "1.0"], "The masks do not fit a grid of 6x6"),
        (["pretrain", "demo", "--positions.covariance", "full"], "covariance 'full'"),
        (["pretrain", "demo", "--encoder.patch-size", "7"], "encoder.patch_size is 7"),
        (["pretrain", "demo", "--speed.device", "tpu"], "speed.device is 'tpu'"),
        (["pretrain", "demo", "--data", "no/such/folder"], "no/such/folder"),
        (["pretrain", "stop-tiny-imagenet"], "data is not given"),
        (
            ["pretrain", "demo", "--data", "scenes:count=8,size=32"],
            "optim.batch_size is 16 and there are only 8 images",
        ),
        (["resume"], "needs the folder of a run"),
        (["resume", "no/such/run"], "holds no run"),
        (["demo", "--fast"], "no field --fast"),
    ],
)
def test_mistakes_are_one_sentence(capsys, tmp_path, tmp_path_factory, monkeypatch, arguments, words):
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)
    assert words in complaint(capsys, *arguments)
    assert not list(tmp_path.iterdir())


def test_data_that_cannot_be_used_are_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "empty" in complaint(capsys, "pretrain", "demo", "--data", "empty", "--out", "run")
    pq.write_table(pa.table({"text": ["a"], "number": [1]}), tmp_path / "words.parquet")
    sentence = complaint(capsys, "pretrain", "demo", "--data", "words.parquet", "--out", "run")
    assert "text" in sentence
    assert "number" in sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("package", "data", "extra"), [("datasets", "hf:a/b", "hf"), ("braceexpand", "wds:a.tar", "wds")]
)
def test_a_missing_extra_is_named(capsys, tmp_path, monkeypatch, package, data, extra):
    monkeypatch.chdir(tmp_path)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("x.jpg"), io.BytesIO())
    monkeypatch.setitem(sys.modules, package, None)
    sentence = complaint(capsys, "pretrain", "demo", "--data", data)
    assert f"pip install 'stop-mim[{extra}]'" in sentence


def test_too_many_bad_images_stop_the_run_and_are_listed(capsys, tmp_path, photos):
    (photos / "05.jpg").write_bytes((photos / "05.jpg").read_bytes()[:200])
    for loader in ("resident", "streaming"):
        out = tmp_path / loader
        arguments = ["pretrain", "demo", "--data", photos, "--out", out, *TINY, "--speed.loader", loader]
        assert "1 of the 24 images" in complaint(capsys, *arguments, "--speed.workers", "0")
        assert "05.jpg" in (out / "bad_images.txt").read_text()


def test_a_run_is_made_refused_a_second_time_resumed_and_protected(capsys, tmp_path, photos):
    run = tmp_path / "run"
    pretrain = ["pretrain", "demo", "--data", str(photos), "--out", str(run), *TINY, "--stop-after-steps", "3"]
    main(pretrain)
    shown = capsys.readouterr()
    assert f"Go on with: stop-mim resume {run}" in shown.out
    assert "streaming: 24 images" in shown.err
    expected = {
        "config.json",
        "environment.json",
        "status.json",
        "metrics.jsonl",
        "log.txt",
        "tensorboard",
        "checkpoints",
    }
    assert {file.name for file in run.iterdir()} == expected | {"encoder.safetensors"}
    assert "already holds a run" in complaint(capsys, *pretrain)
    main(["resume", str(run), "--speed.workers", "0"])
    assert "Done: 6 steps" in capsys.readouterr().out
    newest = sorted((run / "checkpoints").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    assert str(newest) in complaint(capsys, "resume", run)


def test_the_module_is_what_torchrun_starts():
    asked = subprocess.run([sys.executable, "-m", "stop_mim", "--version"], capture_output=True, text=True, check=True)
    assert asked.stdout.startswith("stop-mim ")


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_threads_wait_without_spinning_unless_somebody_wants_it(monkeypatch, capsys, given):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    main(["--version"])
    assert os.environ["OMP_WAIT_POLICY"] == (given or "PASSIVE")


def test_output_that_nobody_reads_to_its_end_is_no_failure_to_tell_of():
    command = [sys.executable, "-m", "stop_mim", "bench", "demo", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(("by", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("another process", 130)])
def test_who_waits_for_a_run_learns_that_it_was_stopped(capsys, monkeypatch, tmp_path, by, code, rank):
    result = TrainResult(tmp_path, 5, 10, 0.5, by)
    monkeypatch.setattr(pretrain, "train", lambda *arguments, **options: result)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        main(["pretrain", "demo"])
    assert ended.value.code == code
    words = [f"Stopped by {by} after step 5 of 10; saved."] if rank == "0" else []
    assert [line.split(" Go on")[0] for line in capsys.readouterr().out.splitlines()] == words


def test_another_pipe_that_breaks_is_told(capfd, monkeypatch):
    def breaks(arguments):
        raise BrokenPipeError("of a worker")

    monkeypatch.setitem(COMMANDS, "demo", breaks)
    with pytest.raises(BrokenPipeError, match="of a worker"):
        main(["demo"])
