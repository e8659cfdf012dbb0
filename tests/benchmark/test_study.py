"""benchmarks/study.py: the commands of docs/experiments.md are run as they stand there, and are accepted."""

import importlib
import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stop_mim import cli
from stop_mim.registry import load_plugins
from stop_mim.sweeps.grid import SWEEPS
from stop_mim.sweeps.plan import make_plan

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("study")


@pytest.fixture
def images(tmp_path):
    """Return a folder with the labels of 100 classes; the images are empty."""
    for name, count in (("train", 150), ("val", 1)):
        labels = np.repeat(np.arange(100), count)
        table = pa.table(
            {"image": [{"bytes": b"", "path": str(number)} for number in range(len(labels))], "label": labels}
        )
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "data" / f"{name}.parquet")
    return tmp_path / "data"


PAGE = """# Log

```python
# split.py
open("few.parquet", "w").write("split once")
```

## 1. One

**Command**; `mine.py`:

```python
# mine.py
DEPTH = 3
```

```
stop-mim sweep mine --out "a folder" \\
    --epochs 2
stop-mim evaluate runs/one
```

## 2. Two

Needs commit 1234abc.

```
stop-mim sweep two
```

## 3. Three

Nothing to run.
"""


@pytest.fixture
def small(study, tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(study, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(study, "PROGRAM", ("echo", "ran"))
    return study


def test_commands_run_beside_their_data_and_modules(small, images, tmp_path, capfd):
    given = ["1", "--data", str(images), "--out", str(tmp_path / "runs"), "--seeds", "4", "5"]
    assert small.main(given) == 0
    assert capfd.readouterr().out.splitlines() == [
        "ran sweep mine --out a folder --epochs 2 --seeds 4 5",
        "ran evaluate runs/one",
    ]
    folder = tmp_path / "runs" / "experiment-1"
    assert (folder / "mine.py").read_text() == "# mine.py\nDEPTH = 3\n"
    assert (folder / "train.parquet").resolve() == images / "train.parquet"
    (tmp_path / "runs" / "images" / "few.parquet").write_text("kept")
    small.main(given)
    assert (folder / "few.parquet").read_text() == "kept", "the images are not split again"
    other = images.rename(tmp_path / "other")
    shutil.copytree(other, images)
    for _ in range(2):
        with pytest.raises(SystemExit, match="choose another --out"):
            small.main(["1", "--data", str(other), "--out", str(tmp_path / "runs")])
        # The second time, the first dataset is no longer there.
        shutil.rmtree(images, ignore_errors=True)


def test_a_command_that_fails_ends_the_experiment(small, images, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(small, "PROGRAM", ("false",))
    assert small.main(["1", "--data", str(images), "--out", str(tmp_path)]) == 1
    assert "evaluate" not in capfd.readouterr().err.partition("+ stop-mim")[2]


def test_commands_that_are_stopped_may_save_first(small, images, tmp_path, monkeypatch, capfd):
    # The signal goes to the script alone, which passes it on.
    stop = f"trap 'echo saved; exit 143' TERM; kill -TERM {os.getpid()}; while :; do sleep 0.1; done"
    monkeypatch.setattr(small, "PROGRAM", ("sh", "-c", stop))
    assert small.main(["1", "--data", str(images), "--out", str(tmp_path)]) == 143
    assert capfd.readouterr().out == "saved\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("given", "named"), [("2", "commit 1234abc"), ("3", "choose from 1, 2"), ("1 --data nowhere", "nowhere")]
)
def test_what_cannot_be_run_is_refused(small, images, tmp_path, given, named, capsys):
    with pytest.raises(SystemExit) as ended:
        small.main(["--data", str(images), "--out", str(tmp_path / "runs"), *given.split()])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_every_command_of_the_log_is_accepted(study, images, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(study, "PROGRAM", ("echo", "ran"))
    monkeypatch.setattr("stop_mim.training.pretrain.train", lambda *_, **__: ran.append("pretrain"))
    monkeypatch.setattr("stop_mim.evaluation.evaluate.evaluate", lambda *_: ran.append("evaluate"))
    monkeypatch.setattr(cli, "_report_end", lambda _: None)
    monkeypatch.setattr("stop_mim.sweeps.run.run_sweep", lambda *given, axes: ran.append(make_plan(*given, axes=axes)))
    monkeypatch.setattr(cli, "_require_paths", lambda *_: None)
    known, ran = {*SWEEPS}, []
    texts = study.experiments(study.PAGE.read_text())
    runnable = [number for number, text in texts.items() if number and "Needs commit" not in text]
    assert runnable == [number for number in range(1, max(texts) + 1) if number not in (7, 9)]
    for number in runnable:
        ran.clear()
        folder = tmp_path / f"experiment-{number}"
        assert study.main([str(number), "--data", str(images), "--out", str(tmp_path)]) == 0
        commands = [shlex.split(line)[1:] for line in capfd.readouterr().out.splitlines()]
        monkeypatch.chdir(folder)
        with monkeypatch.context() as plugins:
            plugins.syspath_prepend(folder)
            plugins.setenv(
                "STOP_MIM_PLUGINS", ",".join(file.stem for file in folder.glob("*.py") if file.stem != "split")
            )
            load_plugins()
            for command in commands:
                monkeypatch.setattr(sys, "argv", ["stop-mim", *command])
                cli.main()
        assert len(ran) == len(commands) > 0
    for name in {*SWEEPS} - known:
        del SWEEPS._entries[name]


@pytest.fixture
def figure(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("study_figure")


def test_differences_are_paired_by_seed_in_both_kinds_of_records(figure, tmp_path):
    runs = [("none/seed-1", 10, 20), ("none/seed-2", 11, 21), ("more/seed-2", 13, 29), ("more-lr5e-4", 99, 99)]
    singles = [{"name": name, "scores": {"linear_held": one, "linear_test": two}} for name, one, two in runs]
    (tmp_path / "runs.json").write_text(json.dumps({"runs": singles}))
    variants = {"none": {"1": 1.0, "2": 2.0}, "more": {"1": 1.5, "2": 4.0}}
    summary = {name: {"scores": {"linear/top1": {"by_seed": seeds}}} for name, seeds in variants.items()}
    (tmp_path / "sweep.json").write_text(json.dumps({"summary": {"variants": summary}}))
    pairs = (figure.Pairs("runs:more", "runs:none"), figure.Pairs("sweep:more", "sweep:none"))
    assert figure.differences(tmp_path, pairs, "linear") == [5.0, 0.5, 2.0]
    single = (figure.Pairs("runs:more-lr5e-4", "runs:more-lr5e-4"),)
    assert figure.differences(tmp_path, single, "linear") == [0.0], "a name that ends in a number is no seed"


def test_every_row_of_the_figure_has_enough_pairs(figure):
    for row in figure.ROWS:
        for score in ("linear", "20-NN", "1% of the labels"):
            assert len(figure.differences(figure.RAW, row.pairs, score)) >= figure.LEAST_PAIRS, (row, score)
    assert len(figure.draw(figure.RAW).axes) == len(figure.SCORES)
