"""The report as a file: its numbers are the run's, its texts stay text, and incomplete runs have a page too."""

import base64
import json
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import PIL.Image
import pytest
import torch
from analysed_runs import GRID, evaluation, pretend, tiny_config, top1, train_tiny, write_status

from stop_mim.analysis.noise import noise_spectrum
from stop_mim.analysis.predictions import prediction_maps, sample_images, sample_masks
from stop_mim.analysis.report import write_report
from stop_mim.analysis.report_data import MAX_IMAGES, position_maps, spread_out, thinned
from stop_mim.analysis.runs import read_records
from stop_mim.errors import InputError
from stop_mim.models.build import build_objective
from stop_mim.positions import SinCosPositions, StochasticPositions
from stop_mim.results import Score, add_results
from stop_mim.training.checkpoint import Checkpoint, checkpoint_path, save_checkpoint
from stop_mim.training.config import EncoderConfig, MaskConfig, ObjectiveConfig, PositionsConfig, PredictorConfig
from stop_mim.training.run_folder import RunFolder, read_metrics

N_PATCHES = GRID[0] * GRID[1]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\u2028'\""


class Page(HTMLParser):
    """Tags with their attributes, the text of tables and paragraphs, and the data of the script."""

    def __init__(self, page):
        super().__init__()
        self.tags, self._text, self._scripts, self._in_script = [], [], [], False
        self.feed(page)
        self.words = " ".join(" ".join(self._text).split())
        self.data = json.loads(self._scripts[0])
        self.charts = {chart["title"]: chart for chart in self.data["charts"]}

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in_script = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        (self._scripts if self._in_script and self.tags[-1][0] == "script" else self._text).append(data)


@pytest.fixture
def report(tmp_path):
    """Write a report on runs and parse it."""
    return lambda *runs, **options: Page(write_report(list(runs), tmp_path / "report.html", **options).read_text())


def levels(packed, *shape):
    return torch.from_numpy(np.frombuffer(base64.b64decode(packed), np.uint8).copy()).reshape(shape).double() / 255


def write_image(path, size=(48, 40)):
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    return path


def test_charts_and_tables_hold_what_was_measured(stop_run, report):
    page, metrics = report(stop_run), read_metrics(stop_run)
    for title, key in (("Loss", "loss"), ("Learning rate", "lr"), ("|A|", "health/A_norm")):
        lines = [line for line in metrics if key in line]
        (series,) = page.charts[title]["series"]
        assert series["x"] == [line["step"] for line in lines]
        assert series["y"] == pytest.approx([line[key] for line in lines], rel=1e-3)
    spectrum = noise_spectrum(read_records(stop_run).objective.positions)
    assert page.charts["Spectrum of Σ"]["series"][0]["y"] == pytest.approx(spectrum.eigenvalues.tolist(), rel=1e-3)
    assert f"Effective rank of Σ {spectrum.effective_rank:.1f} of 16" in page.words
    assert f"Loss {metrics[-1]['loss']:.4g}" in page.words
    assert "encoder.image_size (32, 48)" in page.words
    assert "Momentum of the target encoder" in page.charts


def test_prediction_maps_are_the_models(stop_run, report):
    shown = report(stop_run).data["predictions"][0]
    run = read_records(stop_run)
    images, masks = sample_images(run, MAX_IMAGES), sample_masks(run, MAX_IMAGES)
    maps = prediction_maps(run.objective, images, masks)
    assert shown["context"] == masks.context.tolist()
    for number in (0, MAX_IMAGES - 1):
        masked, image = masks.targets[number].flatten().tolist(), shown["images"][number]
        assert image["masked"] == image["queries"] == sorted(set(masked))
        packed = levels(image["maps"], len(image["queries"]), N_PATCHES)
        for place, patch in enumerate(image["queries"]):
            expected = maps[number, masked.index(patch)].double()
            low, high = expected.min(), expected.max()
            assert torch.allclose(packed[place], (expected - low) / (high - low), atol=1 / 200)


def test_position_maps_are_cosines_and_noise_lowers_them():
    table = SinCosPositions(GRID, 16)
    maps = position_maps(StochasticPositions(table, None, sigma=0.5, covariance="identity"), budget=10**6)
    assert maps["queries"] == list(range(N_PATCHES))
    low = maps["low"]
    fixed, mean = (low + (1 - low) * levels(maps[kind], N_PATCHES, N_PATCHES) for kind in ("fixed", "mean"))
    expected = torch.cosine_similarity(table.table()[:, None], table.table()[None], dim=2).double()
    assert torch.allclose(fixed, expected, atol=0.01)
    assert 0.5 < mean.diagonal().min() < mean.diagonal().max() < 0.95
    assert "mean" not in position_maps(table, budget=10**6)


def test_long_curves_keep_their_peaks_and_fine_grids_fewer_queries():
    points = [(float(step), 1.0) for step in range(100_000)]
    points[54_321], points[12_345] = (54_321.0, 9.0), (12_345.0, -3.0)
    kept = thinned(points, 300)
    assert len(kept) <= 300
    assert {points[0], points[-1], points[54_321], points[12_345]} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(points[:300], 300) == points[:300]
    assert spread_out((4, 6), 24) == list(range(24))
    assert spread_out((4, 6), 23) == [0, 2, 4, 12, 14, 16]
    assert spread_out((4, 6), 1) == [0]


def test_given_images_are_shown(stop_run, report, tmp_path):
    images = [write_image(tmp_path / f"{number}.png") for number in range(3)]
    data = report(stop_run, images=images).data
    assert len(data["pictures"]) == len(data["features"][0]) == len(data["predictions"][0]["images"]) == 3
    assert levels(data["features"][0][0], N_PATCHES, 3).std() > 0.05


def test_the_page_is_one_file_that_loads_nothing(stop_run, report, tmp_path):
    page, text = report(stop_run), (tmp_path / "report.html").read_text()
    policy = next(attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:")
    sources = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(value.startswith(("#", "data:")) for value in sources)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    again = write_report([stop_run], tmp_path / "again.html").read_text()
    assert re.sub(r"Written on .*? by", "", again) == re.sub(r"Written on .*? by", "", text)


def test_nothing_of_a_run_becomes_markup(stop_run, report, tmp_path):
    results = [evaluation("knn", top1(50.0), label=HOSTILE, data=HOSTILE)]
    run = pretend(stop_run, tmp_path / "<script>alert(1)<&>", results=results)
    sessions = [{"recipe": HOSTILE, "platform": HOSTILE, "packages": {HOSTILE: HOSTILE}}]
    (run / "environment.json").write_text(json.dumps(sessions))
    write_status(run, "failed", 8, HOSTILE)
    plain, page = report(stop_run), report(run)
    for tag in ("script", "img", "iframe", "style", "link"):
        assert sum(found == tag for found, _ in page.tags) == sum(found == tag for found, _ in plain.tags)
    assert page.words.count("</script><script>alert(1)</script>") > 5
    assert page.data["runs"] == ["<script>alert(1)<&>"]


def test_a_name_that_is_not_unicode(stop_run, report, tmp_path):
    assert "run-?" in report(pretend(stop_run, tmp_path / os.fsdecode(b"run-\xff"))).words


def test_the_state_is_that_of_status_json(stop_run, report, tmp_path):
    run = pretend(stop_run, tmp_path / "run")
    for state, step, message, text in [
        ("failed", 5, "the loss is not finite", "failed, step 8 of 8: the loss is not finite"),
        ("finished", 8, "", "finished, step 8 of 8"),
        ("running", 8, "", "running, step 8 of 8, last update 2026-01-02T03:04:05+00:00"),
    ]:
        write_status(run, state, step, message)
        assert text in report(run).words
    (run / "status.json").unlink()
    assert "unknown, step 8 of 8" in report(run).words


def test_incomplete_runs_have_a_page(stop_run, report, tmp_path):
    RunFolder(tmp_path / "begun").create(tiny_config(tmp_path / "begun"), "tiny")
    page = report(tmp_path / "begun")
    assert "No steps were recorded" in page.words
    assert page.words.count("begun has no checkpoint") == 4
    assert page.data["charts"] == []
    early = pretend(stop_run, tmp_path / "early")
    shutil.rmtree(early / "checkpoints")
    page = report(early)
    assert page.charts["Loss"]
    assert page.data["predictions"] == page.data["features"] == [None]
    damaged = pretend(stop_run, tmp_path / "damaged")
    newest = RunFolder(damaged).newest_checkpoint()
    newest.write_bytes(newest.read_bytes()[:-100])
    assert newest.name in report(damaged).words
    page = report(pretend(stop_run, tmp_path / "lost", data=str(tmp_path / "gone")))
    assert "gone' cannot be opened" in page.words
    assert page.data["positions"][0]["queries"]
    assert page.data["features"] == [None]


def test_values_that_are_not_numbers_are_left_out(stop_run, report, tmp_path):
    run = pretend(stop_run, tmp_path / "odd", signs={"loss": float("nan"), "lr": "much"})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    page = report(run)
    assert [page.charts[title]["series"][0]["x"] for title in ("Loss", "Learning rate")] == [list(range(1, 8))] * 2


def test_what_a_model_does_not_have_is_said(stop_run, report, tmp_path):
    page = report(train_tiny(tmp_path / "mae", objective=ObjectiveConfig("mae"), masks=MaskConfig("random")))
    assert "predicts pixels" in page.words
    assert "Momentum of the target encoder" not in page.charts
    assert page.data["predictions"] == [None]
    assert len(page.data["features"][0]) == MAX_IMAGES
    page = report(pretend(stop_run, tmp_path / "fixed", positions=PositionsConfig(kind="sincos")))
    assert "no covariance of noise" in page.words
    assert set(page.data["positions"][0]) == {"queries", "low", "draws", "fixed"}


def test_warnings_follow_from_the_health_signs(stop_run, report, tmp_path):
    assert "vanishing" not in report(stop_run).words
    run = pretend(stop_run, tmp_path / "vanished", signs={"health/A_norm": 1e-3})
    assert "Step 8: A is vanishing" in report(run).words


def test_several_runs_are_compared(stop_run, report, tmp_path):
    other = pretend(stop_run, tmp_path / "other", seed=3, signs={"loss": 0.125}, positions=PositionsConfig(sigma=0.5))
    page = report(stop_run, other)
    assert "2 runs" in page.words
    assert re.search(r"Loss \S+ 0\.125 ", page.words)
    first, second = page.data["runs"]
    assert f"What differs positions.sigma {first} 0.25 {second} 0.5" in page.words
    assert [series["run"] for series in page.charts["Loss"]["series"]] == [0, 1]
    assert page.data["predictions"][0]["context"] == page.data["predictions"][1]["context"]
    twin = pretend(stop_run, tmp_path / "elsewhere" / stop_run.name)
    names = report(stop_run, twin).data["runs"]
    assert [name.split("/")[-1] for name in names] == [stop_run.name] * 2
    assert len(set(names)) == 2


def test_a_sweep_is_opened_by_its_directory_and_its_seeds_are_averaged(stop_run, report, tmp_path):
    sweep = tmp_path / "sweep"
    for variant, sigma, values in (("low", 0.1, (0.5, 0.7, 9.0)), ("high", 1.0, (0.2,))):
        for seed, value in enumerate(values):
            results = [replace(evaluation("linear", top1(100 * value), data="a"), facts={"chance": 10.0})]
            changes = {"seed": seed, "signs": {"loss": value}, "positions": PositionsConfig(sigma=sigma)}
            pretend(stop_run, sweep / variant / f"seed-{seed}", results=results, **changes)
    (sweep / "sweep.json").write_text(json.dumps({"variants": {"low": {}, "high": {}}}))
    for finished in ("low/seed-0", "low/seed-1", "high/seed-0"):
        (sweep / finished / "scores.json").touch()
    # A copy of a run is not counted.
    shutil.copytree(sweep / "low" / "seed-0", sweep / "low" / "seed-0.old")
    page = report(sweep)
    assert page.data["runs"] == ["low", "high/seed-0"]
    low, high = page.charts["Loss"]["series"]
    assert (low["y"][-1], low["low"][-1], low["high"][-1]) == pytest.approx((0.6, 0.5, 0.7))
    assert "low" not in high
    # √(2 · 0.1²) around the mean.
    assert "Loss 0.6 ± 0.14 0.2" in page.words
    assert "linear/top1 low 60.0 ± 14.1 high/seed-0 20.0 chance 10.0" in page.words
    assert "low 2 seeds (0, 1): " in page.words
    (sweep / "sweep.json").write_text("{")
    with pytest.raises(InputError, match=r"sweep\.json"):
        report(sweep)


def test_scores_that_were_measured_differently_are_not_averaged(stop_run, report, tmp_path):
    runs = []
    for seed, value, test in ((0, 60.0, "v1"), (1, 70.0, "v1"), (2, 10.0, "v2")):
        facts = {"image_size": [32, 48], "test_fingerprint": f"of {test}"}
        one = replace(evaluation("linear", top1(value), data="a"), test_data=test, facts=facts)
        seeds = [one, replace(evaluation("knn", top1(value + 1), data="a", neighbours=5), test_data=test)]
        runs.append(pretend(stop_run, tmp_path / f"seed-{seed}", seed=seed, results=seeds))
    first = evaluation("linear", top1(5.0), data="a", encoder="untrained:run")
    same = {"image_size": [32, 48], "test_fingerprint": "of v1"}
    add_results(runs[0] / "results.json", [replace(first, test_data="v1", facts=same)])
    words = report(*runs).words
    assert 'linear/top1 (test_data "v1") knn/top1 (test_data "v1") linear/top1 (test_data "v2")' in words
    assert "65.0 ± 7.1 66.0 ± 7.1 10.0 11.0 untrained 5.0 – – –" in words


def test_scores_are_the_headlines_beside_the_untrained_network(stop_run, report, tmp_path):
    checkpoint = "run/checkpoints/step-00000004.safetensors"
    results = [
        evaluation("linear", top1(50.0, low=45.0, high=55.0), Score("top1", 49.0, layers=1), data="a"),
        evaluation("low-shot", top1(20.0, std=1.5, variant={"amount": "1%"}), label="count", data="b"),
        evaluation("knn", top1(30.0), data="a", encoder=checkpoint),
        evaluation("linear", top1(40.0), data="a", encoder="untrained:run"),
    ]
    words = report(pretend(stop_run, tmp_path / "scored", results=results)).words
    assert "linear/top1 scored 50.0 [45.0, 55.0] 40.0 – knn/top1 scored, step-00000004 30.0" in words
    assert "count/low-shot/1%/top1 20.0 ± 1.5" in words
    assert "linear/last1/top1" in words.split("All scores", 1)[1]


def test_sixteen_images_stay_below_ten_megabytes(tmp_path):
    encoder = EncoderConfig("tiny", image_size=(448, 448), patch_size=14, width=16, depth=1, heads=2)
    config = tiny_config(tmp_path / "large", encoder=encoder, predictor=PredictorConfig(width=8, depth=1, heads=2))
    folder = RunFolder(tmp_path / "large")
    folder.create(config, "large")
    model = {f"model.{name}": tensor for name, tensor in build_objective(config).state_dict().items()}
    save_checkpoint(Checkpoint(8, model, {}), checkpoint_path(folder.checkpoints, 8))
    for step in range(1, 3000):
        folder.record(step, {"epoch": step / 4, "loss": 1 / step, "lr": 1e-3, "gradient_norm": step**0.5})
    images = [write_image(tmp_path / f"{number}.png", (300, 300)) for number in range(MAX_IMAGES)]
    assert 10**5 < write_report([folder.path], tmp_path / "report.html", images).stat().st_size < 10**7


def test_mistakes_are_one_sentence_and_write_nothing(stop_run, tmp_path):
    finer = EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=24, depth=2, heads=2)
    other_grid = pretend(stop_run, tmp_path / "grid", encoder=finer)
    (text := tmp_path / "text.png").write_text("no image")
    small, out = write_image(tmp_path / "small.png", (5, 40)), tmp_path / "report.html"
    for runs, place, images, named in [
        ([tmp_path], out, None, str(tmp_path)),
        ([], out, None, "No run"),
        ([stop_run, stop_run / ".." / stop_run.name], out, None, f"{stop_run} is given 2 times"),
        ([stop_run, other_grid], out, None, "4x6"),
        ([stop_run], tmp_path / "nowhere" / "report.html", None, "nowhere"),
        ([stop_run], out, [text], "text.png"),
        ([stop_run], out, [small], "5x40"),
        ([stop_run], out, [text] * 17, "17"),
    ]:
        with pytest.raises(InputError) as caught:
            write_report(runs, place, images)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not out.exists()
