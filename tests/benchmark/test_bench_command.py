"""`stop-mim bench` as a person types it."""

import json

import pytest
import torch

from stop_mim.cli import main

TINY = [
    *("--encoder.image-size", "32", "32", "--encoder.width", "24", "--encoder.depth", "1", "--encoder.heads", "2"),
    *("--predictor.width", "16", "--predictor.depth", "1", "--optim.batch-size", "4", "--speed.device", "cpu"),
    *("--bench.repeats", "2", "--bench.steps", "1", "--bench.warmup", "1"),
]

HUGE = ["--optim.batch-size", "1000000000", "--speed.batch-size-per-device", "1000000000"]


def test_the_demo_is_measured_with_other_sizes_and_written_with_all_that_is_needed_to_repeat_it(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    main(["bench", "demo", *TINY, "--bench.json", "bench.json"])
    shown = capsys.readouterr()
    assert "demo on" in shown.out
    assert "synthetic" in shown.out
    assert "measuring" in shown.err
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]
    written = json.loads((tmp_path / "bench.json").read_text())
    assert (written["format"], written["recipe"]) == ("stop-mim bench 1", "demo")
    assert (written["config"]["encoder"]["width"], written["bench"]["steps"]) == (24, 1)
    assert written["environment"]["packages"]["torch"] == torch.__version__.partition("+")[0]
    speed = written["flops"] / written["step"]["seconds"]["median"]
    assert written["derived"]["part_of_ceiling"] == pytest.approx(speed / written["ceiling"])


def test_a_config_file_without_data_is_measured_with_synthetic_images(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("encoder: {patch_size: 8}\n")
    main(["bench", "--config", "mine.yaml", *TINY])
    shown = capsys.readouterr().out
    assert "mine on" in shown
    assert "synthetic" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--bench.repeats", "0"], "bench.repeats is 0"),
        (["demo", "--bench.json", "no/such/folder/bench.json"], "bench.json"),
        (["demo", *HUGE, "--speed.device", "cpu"], "do not fit into the memory of"),
        (["stop-tiny-imagenet", "--bench.images", "data"], "data is not given"),
    ],
)
def test_mistakes_are_one_sentence(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.out == ""
    assert words in captured.err.strip().splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_several_processes_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["bench", "demo", *TINY])
    assert "without torchrun" in capsys.readouterr().err
