"""The rows of benchmarks/performance.py: each can be built, and tells what it measures."""

import importlib
import io
import json
import sys
from pathlib import Path

import pytest

from stop_mim.benchmark.config import BenchConfig
from stop_mim.masking import build_masks

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def performance(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("performance")


def test_every_row_has_the_sizes_that_it_is_named_after(performance):
    for name in performance.ROWS:
        config, way = performance.config_of(name, "images.parquet", "cpu")
        height, width = (side // config.encoder.patch_size for side in config.encoder.image_size)
        masks = build_masks(config.masks, (height, width))
        if name.startswith("H/14"):
            continue
        wanted = (20, 12) if name.startswith("S") else (49, 33)
        assert (masks.context_tokens, masks.target_tokens) == wanted, name
        assert config.optim.batch_size == {"S": 2048 if "2048" in name else 512, "L": 128}.get(name[0], 256), name
        assert (config.data == "images.parquet") == (way == "data"), name


@pytest.mark.parametrize("way", ["data", "plain", "parts"])
def test_a_row_is_measured(performance, way, monkeypatch, capsys):
    monkeypatch.setitem(performance.ROWS, "small", ("demo", {"positions.kind": "sincos", "optim.batch_size": 16}, way))
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
    performance.row_main("small", "scenes:count=40,size=64", "cpu", BenchConfig(steps=1, repeats=1, warmup=1))
    output = capsys.readouterr()
    assert output.err == "ready\n"
    row = json.loads(output.out.splitlines()[-1])
    assert row["images_per_second"]["median"] * row["milliseconds"]["median"] == pytest.approx(1000 * row["batch"])
    assert row["batch"] == 16
    assert row["part_of_ceiling"] > 0
    assert ("parts_milliseconds" in row) == (way == "parts")
    performance.print_row(row)
    assert "images/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--rows", "B", "nothing"], "no row begins with nothing"), (["--rows", "S"], "--data")]
)
def test_rows_that_cannot_be_measured_are_an_error(performance, monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(performance, "measure_all", lambda *given: True)
    monkeypatch.setattr(sys, "argv", ["performance.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        performance.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
