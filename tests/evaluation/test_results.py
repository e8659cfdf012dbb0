"""Results: added to what is there, in the place of the same ones; a table, JSON and CSV."""

import csv
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from stop_mim.errors import InputError
from stop_mim.evaluation.results import (
    Evaluation,
    add_results,
    read_results,
    results_document,
    results_table,
    write_csv,
    write_json,
)

ONE = Evaluation(
    "runs/a",
    "linear",
    "class",
    "data",
    "data",
    {"name": "generic", "lrs": (0.1,)},
    0,
    {"linear/top1": 80.0, "linear/penalty": 1e-3},
    {"test_images": 10},
)


def test_the_same_evaluation_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "results.json"
    add_results(path, [ONE])
    add_results(path, [replace(ONE, task="knn")])
    add_results(path, [replace(ONE, metrics={"linear/top1": 90.0})])
    add_results(path, [replace(ONE, seed=1)])
    found = read_results(path)
    assert [(one["task"], one["seed"]) for one in found] == [("knn", 0), ("linear", 0), ("linear", 1)]
    assert found[1]["metrics"] == {"linear/top1": 90.0}


def test_a_file_of_something_else_is_not_overwritten(tmp_path):
    path = tmp_path / "results.json"
    path.write_text('{"mine": 1}')
    with pytest.raises(InputError, match="move it away"):
        add_results(path, [ONE])
    assert path.read_text() == '{"mine": 1}'


def shown(evaluations, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(results_table(evaluations))
    return console.file.getvalue()


def test_the_table_compares_encoders():
    draws = replace(ONE, task="low-shot", metrics={"low-shot/1%/top1": 50.0, "low-shot/1%/top1_std": 2.5})
    text = shown([ONE, replace(ONE, encoder="[b]bold[/b]", metrics={"linear/top1": 70.0}), draws])
    assert "80.0 [49.0, 94.3]" in text
    assert "[b]bold[/b]" in text
    assert "50.0 ± 2.5" in text
    assert "penalty" not in text
    assert text.count("linear/top1") == 1


def test_the_table_has_what_was_chosen_and_the_files_have_every_head(tmp_path):
    heads = {f"linear_sgd/last1+bn@{lr}/top1": 10.0 for lr in ("0.001", "0.01")}
    chosen = {"linear_sgd/last1+bn/lr": 0.01, "linear_sgd/last1+bn/top1": 20.0, "linear_sgd/top1": 30.0}
    sgd = replace(ONE, task="linear-sgd", metrics={**heads, **chosen})
    text = shown([sgd, replace(ONE, task="knn", metrics={"knn/top1@20": 40.0})])
    rows = [line.split("│")[1].strip() for line in text.splitlines() if "│" in line]
    assert rows == ["linear_sgd/last1+bn/top1", "linear_sgd/top1", "knn/top1@20"]
    write_csv(tmp_path / "r.csv", [sgd])
    written = {row["metric"] for row in csv.DictReader((tmp_path / "r.csv").read_text().splitlines())}
    assert written == set(sgd.as_json()["metrics"]) == {*heads, *chosen}


def test_scores_keep_their_names_on_a_narrow_screen():
    metrics = {"linear/last4+bn/top1": 80.0, "linear/last4/top1": 70.0}
    encoders = [replace(ONE, encoder=f"runs/with/a/long/name/{letter}", metrics=metrics) for letter in "abcd"]
    text = shown(encoders, width=80)
    assert all(name in text for name in metrics)


def test_files_for_other_programs(tmp_path):
    write_csv(tmp_path / "r.csv", [ONE])
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert [(row["metric"], row["value"]) for row in rows] == [("linear/top1", "80.0"), ("linear/penalty", "0.001")]
    assert float(rows[0]["low"]) == pytest.approx(49.02, abs=0.01)
    video = replace(ONE, task="video", details={"J&F": 0.5, "sequences": {"dog": {"J_mean": 0.5}}})
    write_json(tmp_path / "r.json", results_document([video, ONE]))
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["sequences"] == {"dog": {"J_mean": 0.5}}
    assert document["evaluations"][1]["intervals"]["linear/top1"][0] == pytest.approx(49.02, abs=0.01)
    assert "sequences" not in results_document([video, video])
