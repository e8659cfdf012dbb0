"""Result records: names, files that add up, the table, and how a score is found."""

import csv
import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from stop_mim.errors import InputError
from stop_mim.results import (
    Evaluation,
    Score,
    accuracy,
    accuracy_interval,
    add_results,
    find_score,
    read_results,
    results_document,
    results_table,
    write_csv,
    write_json,
)

SCORES = [
    accuracy(1, 80.0, 10, headline=True),
    accuracy(1, 70.0, 10, layers=4, variant={"batch_norm": True, "lr": 0.01}),
    Score("penalty", 1e-3, unit=""),
]
ONE = Evaluation(
    "runs/a",
    "linear",
    "class",
    "data",
    "data",
    {"name": "generic", "lrs": (0.1,)},
    0,
    {"image_size": [32, 32], "encoder_fingerprint": "e"},
    scores=SCORES,
)


def test_the_interval_is_wilsons():
    # By hand from the formula: 8 of 10, z = 1.96.
    assert accuracy_interval(80, 10) == pytest.approx((49.02, 94.33), abs=0.01)
    hits = torch.binomial(torch.full((4000,), 400.0), torch.tensor(0.3), generator=torch.Generator().manual_seed(0))
    bounds = [accuracy_interval(float(hit) / 4, 400) for hit in hits]
    assert sum(low <= 30 <= high for low, high in bounds) / 4000 == pytest.approx(0.95, abs=0.012)


def test_names_of_scores():
    assert [score.name for score in SCORES] == ["top1", "last4/batch_norm/lr=0.01/top1", "penalty"]
    assert Score("top1", 1.0, variant={"batch_norm": False, "amount": "1%", "draw": 2}).name == "1%/draw=2/top1"
    assert ONE.name_of(SCORES[0]) == "linear/top1"
    assert replace(ONE, label="distance").name_of(SCORES[0]) == "distance/linear/top1"


def test_the_newest_score_of_a_name_is_found():
    count, distance = (replace(ONE, label=label) for label in ("count", "distance"))
    newer = replace(count, scores=[replace(SCORES[0], value=90.0)])
    everything = [count, distance, newer]
    assert find_score(everything, "distance/linear/top1") == (distance, SCORES[0])
    assert find_score(everything, "count/linear/top1")[1].value == 90
    assert find_score(everything, "linear/top1")[0] is newer
    assert find_score(everything, "count/linear/last4/batch_norm/lr=0.01/top1") == (count, SCORES[1])
    with pytest.raises(InputError, match="'knn/top1': choose one of count/linear/top1, distance/linear/top1"):
        find_score(everything, "knn/top1")


def test_the_same_evaluation_replaces_the_old_one(tmp_path):
    path = tmp_path / "results.json"
    assert read_results(path) == []
    others = [replace(ONE, **change) for change in ({"task": "knn"}, {"seed": 1}, {"label": "count"})]
    others += [replace(ONE, facts={**ONE.facts, name: "other"}) for name in ("image_size", "encoder_fingerprint")]
    others.append(replace(ONE, facts={**ONE.facts, "data_fingerprint": "other"}))
    for evaluation in [ONE, *others, replace(ONE, scores=SCORES[:1])]:
        add_results(path, [evaluation])
    found = read_results(path)
    assert [one.identity() for one in found] == [one.identity() for one in [*others, ONE]]
    assert found[-1].scores == SCORES[:1]
    assert found[0].scores == SCORES
    assert ONE.measurement() == replace(ONE, encoder="runs/b", facts={}).measurement() != others[0].measurement()


@pytest.mark.parametrize(
    "text", ['{"mine": 1}', '{"format": "stop-mim results 1", "evaluations": []}', "[]", "no JSON"]
)
def test_another_file_is_not_overwritten(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"results\.json"):
        add_results(path, [ONE])
    assert path.read_text() == text


def shown(evaluations, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(results_table(evaluations))
    return console.file.getvalue()


def test_the_table_compares_the_headlines_of_encoders():
    draws = replace(
        ONE, task="low-shot", scores=[Score("top1", 50.0, variant={"amount": "1%"}, headline=True, std=2.5)]
    )
    others = [replace(ONE, encoder=f"[b]runs/with/a/long/name/{letter}[/b]") for letter in "bcd"]
    text = shown([ONE, *others, draws])
    assert "80.0 [49.0, 94.3]" in text
    assert "low-shot/1%/top1" in text
    assert "50.0 ± 2.5" in text
    assert text.count("linear/top1") == 1
    assert "penalty" not in text
    assert "70.0" not in text
    # Where the screen is narrow, names of encoders are folded, those of scores are not.
    assert "low-shot/1%/top1" in shown([ONE, *others, draws], width=60)


def test_files_for_other_programs(tmp_path):
    write_csv(tmp_path / "r.csv", [ONE])
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert [(row["layers"], row["metric"], float(row["value"])) for row in rows] == [
        ("", "top1", 80.0),
        ("4", "top1", 70.0),
        ("", "penalty", 0.001),
    ]
    assert json.loads(rows[1]["variant"]) == {"batch_norm": True, "lr": 0.01}
    assert float(rows[0]["low"]) == pytest.approx(49.02, abs=0.01)
    video = replace(ONE, task="video", details={"J&F": 0.5, "sequences": {"dog": {"J_mean": 0.5}}})
    write_json(tmp_path / "r.json", results_document([video, ONE]))
    assert read_results(tmp_path / "r.json")[1].scores == SCORES
    assert json.loads((tmp_path / "r.json").read_text())["sequences"] == {"dog": {"J_mean": 0.5}}
    assert "sequences" not in results_document([video, video])
