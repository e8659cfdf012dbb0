"""Experiment trackers get the lines of metrics.jsonl, and a resumed run continues its own run there.

The packages are replaced by what the callbacks use of them.
"""

import sys
from types import SimpleNamespace

import pytest
from tiny_run import go_on, quietly, run, tiny_config

from stop_mim.errors import InputError
from stop_mim.training.config import LogConfig
from stop_mim.training.pretrain import train
from stop_mim.training.run_folder import read_metrics
from stop_mim.training.step import TrainingStep


class Wandb:
    """Runs by id: what was logged, and how they were finished."""

    def __init__(self):
        self.runs = {}

    def init(self, *, project, name, id, resume, dir, config):
        assert (project, resume) == ("photos", "allow")
        opened = self.runs.setdefault(id, SimpleNamespace(name=name, config=config, lines=[], codes=[], metrics=[]))
        return SimpleNamespace(
            define_metric=lambda *what, **how: opened.metrics.append((what, how)),
            log=opened.lines.append,
            finish=lambda exit_code: opened.codes.append(exit_code),
        )


class MLflow:
    """Runs by id: their tags, parameters, metrics and how they ended."""

    def __init__(self):
        self.runs, self.current = {}, None

    def set_experiment(self, name):
        assert name == "photos"

    def search_runs(self, experiment_names, filter_string, output_format):
        assert (experiment_names, output_format) == (["photos"], "list")
        name, value = filter_string.removeprefix("tags.").split(" = ")
        found = [key for key, one in self.runs.items() if one.tags.get(name) == value.strip("'")]
        return [SimpleNamespace(info=SimpleNamespace(run_id=key)) for key in found]

    def start_run(self, run_id=None, run_name=None, tags=None):
        run_id = run_id or f"run-{len(self.runs)}"
        self.current = self.runs.setdefault(
            run_id, SimpleNamespace(name=run_name, tags=tags, params={}, lines=[], ends=[])
        )

    def log_params(self, params):
        self.current.params |= params

    def log_metrics(self, metrics, step):
        self.current.lines.append({"step": step, **metrics})

    def end_run(self, status):
        self.current.ends.append(status)


@pytest.mark.parametrize("kind", [Wandb, MLflow])
def test_all_lines_of_a_run_and_of_its_second_session_arrive_in_one_place(tmp_path, monkeypatch, kind):
    package, name = kind(), kind.__name__.lower()
    monkeypatch.setitem(sys.modules, name, package)
    log = LogConfig(1, 1000, tensorboard=False, **{name: "photos"})
    run(tiny_config(out=tmp_path / "run", log=log, stop_after_steps=2))
    go_on(tmp_path / "run", stop_after_steps=3)
    (found,) = package.runs.values()
    assert found.name == "run"
    assert found.lines == read_metrics(tmp_path / "run")
    assert [line["step"] for line in found.lines] == [1, 2, 3]
    if kind is Wandb:
        assert (found.config["optim"]["batch_size"], found.codes) == (8, [0, 0])
        assert found.metrics == [(("*",), {"step_metric": "step"})] * 2
    else:
        assert (found.params["optim.batch_size"], found.ends) == ("8", ["FINISHED"] * 2)
    # Another run is another one there, and a failure is told.
    monkeypatch.setattr(TrainingStep, "__call__", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tiny_config(out=tmp_path / "other", log=log))
    assert len(package.runs) == 2
    other = list(package.runs.values())[1]
    assert (other.codes if kind is Wandb else other.ends) == ([1] if kind is Wandb else ["FAILED"])


def test_a_tracker_that_fails_is_refused_at_the_start_and_does_not_end_a_run_later(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise ConnectionError("no route to host")

    package = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", package)
    config = tiny_config(out=tmp_path / "run", log=LogConfig(1, 1000, False, mlflow="photos"), stop_after_steps=3)
    monkeypatch.setattr(package, "log_metrics", fail)
    result, text = quietly(train, config)
    assert result.step == 3
    assert text.count("mlflow failed (no route to host)") == 1
    monkeypatch.setattr(package, "set_experiment", fail)
    with pytest.raises(InputError, match=r"log\.mlflow is 'photos'.*no route to host"):
        go_on(tmp_path / "run")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_before_anything_is_written(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"log\.{name} needs .* pip install 'stop-mim\[{name}\]'"):
        run(tiny_config(out=tmp_path / "run", log=LogConfig(**{name: "photos"})))
    assert not (tmp_path / "run").exists()
