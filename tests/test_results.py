"""Result records: names, files that add up, the table, and how a score is found."""

import csv
import io
import json
import multiprocessing
from dataclasses import replace

import pytest
from rich.console import Console

from stop_mim.errors import InputError
from stop_mim.records import write_json
from stop_mim.results import (
    Evaluation,
    Score,
    accuracy,
    accuracy_interval,
    add_results,
    details_table,
    find_score,
    headline_table,
    read_results,
    results_document,
    write_csv,
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
    # Of none or all of 10, one end is z² / (10 + z²) away from the accuracy.
    assert accuracy_interval(0, 10) == pytest.approx((0, 27.75), abs=0.01)
    assert accuracy_interval(100, 10) == pytest.approx((72.25, 100), abs=0.01)


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
    facts = ("image_size", "encoder_fingerprint", "data_fingerprint", "test_fingerprint")
    others += [replace(ONE, facts={**ONE.facts, name: "other"}) for name in facts]
    others += [replace(ONE, **{name: "other"}) for name in ("encoder", "data", "test_data")]
    others.append(replace(ONE, protocol={**ONE.protocol, "lrs": (0.2,)}))
    for evaluation in [ONE, *others, replace(ONE, scores=SCORES[:1])]:
        add_results(path, [evaluation])
    found = read_results(path)
    assert [one.identity() for one in found] == [one.identity() for one in [*others, ONE]]
    assert found[-1].scores == SCORES[:1]
    assert found[0].scores == SCORES
    elsewhere = replace(ONE, encoder="runs/b", facts={**ONE.facts, "encoder_fingerprint": "other"})
    assert ONE.measurement() == elsewhere.measurement() != others[0].measurement()
    for name in ("image_size", "pool"):
        assert replace(ONE, facts={**ONE.facts, name: "other"}).measurement() != ONE.measurement()
    (tmp_path / "link.json").symlink_to("missing/results.json")
    add_results(tmp_path / "link.json", [ONE])
    assert read_results(tmp_path / "missing" / "results.json")[0].identity() == ONE.identity()


def add_some(path, task):
    for seed in range(20):
        add_results(path, [replace(ONE, task=task, seed=seed)])


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    (tmp_path / "link.json").symlink_to("results.json")
    paths = [tmp_path / "results.json", tmp_path / "link.json"] * 2
    forks = multiprocessing.get_context("fork")
    processes = [forks.Process(target=add_some, args=(path, f"task{n}")) for n, path in enumerate(paths)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(read_results(paths[0])) == 80
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "link.json"}


@pytest.mark.parametrize(
    "text", ['{"mine": 1}', '{"format": "stop-mim results 1", "evaluations": []}', "[]", "no JSON"]
)
def test_another_file_is_not_overwritten(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"results\.json"):
        add_results(path, [ONE])
    assert path.read_text() == text


def shown(table, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_the_short_table_has_the_main_score_beside_the_untrained_encoder_and_chance():
    one = replace(ONE, facts={**ONE.facts, "chance": 10.0})
    before = replace(one, encoder="untrained:runs/a", scores=[replace(SCORES[0], value=31.0)])
    table = headline_table([one], [before])
    assert table.note == "chance: always the most frequent class."
    assert list(table.head) == ["score", "%", "95% interval", "untrained", "chance"]
    assert table.rows == [["linear/top1", "80.0", "[49.0, 94.3]", "31.0", "10.0"]]
    others = [replace(before, protocol={"name": "imagenet"})]
    others += [
        replace(before, facts={**before.facts, name: "x"}) for name in ("image_size", "pool", "test_fingerprint")
    ]
    assert [headline_table([one], [other]).rows[0][3] for other in others] == ["–"] * 4
    token = replace(one, facts={**one.facts, "pool": "cls"})
    assert "runs/a (class token) on" in headline_table([token]).caption
    assert headline_table([token, replace(one, encoder="b")]).rows[0][1] == "runs/a (class token)"
    assert headline_table([before]).rows == [["linear/top1", "31.0", "[49.0, 94.3]", "–", "10.0"]]


def test_several_encoders_have_a_row_each():
    draws = replace(
        ONE, task="low-shot", scores=[Score("top1", 50.0, variant={"amount": "1%"}, headline=True, std=2.5)]
    )
    others = [replace(ONE, encoder=name) for name in ("[b]timm:x[/b]", "untrained:runs/a")]
    table = headline_table([ONE, *others, draws])
    assert [row[:2] for row in table.rows] == [
        ["linear/top1", "runs/a"],
        ["linear/top1", "[b]timm:x[/b]"],
        ["low-shot/1%/top1", "runs/a"],
    ]
    assert [row[4] for row in table.rows] == ["80.0", "–", "–"]
    assert table.rows[2][3] == "± 2.5"
    assert table.note == "±: standard deviation over draws."
    # Where the screen is narrow, names are folded, numbers are not.
    assert "low-shot/1%/top1" in shown(table, width=90)
    assert "[49.0, 94.3]" in shown(table, width=60)
    assert "[b]timm:x[/b]" in shown(table)


def test_details_have_every_score():
    text = shown(details_table([ONE]))
    assert "linear/last4/batch_norm/lr=0.01/top1" in text
    assert "0.001" in text


def test_the_trained_encoder_is_found_before_the_untrained_one():
    before = replace(ONE, encoder="untrained:runs/a", scores=[replace(SCORES[0], value=31.0)])
    assert find_score([ONE, before], "linear/top1")[0] is ONE
    assert find_score([before], "linear/top1")[0] is before


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
