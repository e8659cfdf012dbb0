"""The report as a file: its numbers are the run's, its texts stay text, and a run of which little is left has a page too."""

import json
import os
import re
import shutil

import numpy as np
import PIL.Image
import pytest
import torch
from analysed_runs import GRID, pretend, tiny_config, train_tiny
from parsed_page import Parsed, levels
from rich.console import Console

from stop_mim.analysis.covariance import noise_spectrum
from stop_mim.analysis.predictions import prediction_maps, sample_images, sample_masks
from stop_mim.analysis.report import embedded_json, scores_of, settings, write_report
from stop_mim.analysis.report_data import MAX_IMAGES
from stop_mim.analysis.runs import open_run
from stop_mim.errors import InputError
from stop_mim.training.build import build_objective
from stop_mim.training.checkpoint import Checkpoint, checkpoint_path, save_checkpoint
from stop_mim.training.config import EncoderConfig, MaskConfig, ObjectiveConfig, PositionsConfig, PredictorConfig
from stop_mim.training.run_folder import RunFolder, read_metrics

N_PATCHES = GRID[0] * GRID[1]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\u2028'\""


@pytest.fixture
def report(tmp_path):
    """The parsed page on some runs."""

    def make(*runs, **options):
        return Parsed(write_report(list(runs), tmp_path / "report.html", **options).read_text())

    return make


def write_image(path, size=(48, 40)):
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(path)
    return path


def test_the_charts_hold_what_was_measured(stop_run, report):
    charts = {chart["title"]: chart for chart in report(stop_run).data["charts"]}
    metrics = read_metrics(stop_run)
    for title, name in (
        ("Loss", "loss"),
        ("Learning rate", "lr"),
        ("|A|", "health/A_norm"),
        ("|m̃|", "health/mask_token_norm"),
    ):
        lines = [line for line in metrics if name in line]
        (series,) = charts[title]["series"]
        assert series["x"] == [line["step"] for line in lines]
        assert series["y"] == pytest.approx([line[name] for line in lines], rel=1e-3)
    assert {chart["section"] for chart in charts.values()} == {"loss", "health", "noise"}


def test_the_spectrum_is_that_of_the_checkpoint(stop_run, report):
    page = report(stop_run)
    spectrum = noise_spectrum(open_run(stop_run).objective.positions)
    chart = next(chart for chart in page.data["charts"] if chart["title"] == "Spectrum of Σ")
    assert chart["series"][0]["y"] == pytest.approx(spectrum.eigenvalues.tolist(), rel=1e-3)
    assert f"{spectrum.effective_rank:.1f} of 16" in page.words


def test_prediction_maps_are_the_models(stop_run, report):
    shown = report(stop_run).data["predictions"][0]
    run = open_run(stop_run)
    images, masks = sample_images(run, MAX_IMAGES), sample_masks(run, MAX_IMAGES)
    maps = prediction_maps(run.objective, images, masks)
    assert shown["context"] == masks.context.tolist()
    for number in (0, MAX_IMAGES - 1):
        masked = masks.targets[number].flatten().tolist()
        image = shown["images"][number]
        assert image["masked"] == image["queries"] == sorted(set(masked))
        packed = levels(image["maps"], len(image["queries"]), N_PATCHES)
        for place, patch in enumerate(image["queries"]):
            low, high = image["low"][place], image["high"][place]
            expected = maps[number, masked.index(patch)].double()
            assert torch.allclose(low + (high - low) * packed[place], expected, atol=(high - low) / 200 + 1e-4)


def test_pictures_and_feature_maps_are_as_many_as_asked_for(stop_run, report, tmp_path):
    images = [write_image(tmp_path / f"{number}.png") for number in range(3)]
    data = report(stop_run, images=images).data
    assert len(data["pictures"]) == len(data["features"][0]["maps"]) == len(data["predictions"][0]["images"]) == 3
    assert all(url.startswith(("data:image/png;base64,", "data:image/webp;base64,")) for url in data["pictures"])
    assert levels(data["features"][0]["maps"][0], N_PATCHES, 3).std() > 0.05
    assert len(report(stop_run).data["pictures"]) == MAX_IMAGES


def test_the_page_is_one_file_that_may_load_nothing(stop_run, report, tmp_path):
    page = report(stop_run)
    text = (tmp_path / "report.html").read_text()
    policy = next(attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:")
    sources = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert sources
    assert all(value.startswith(("#", "data:")) for value in sources)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert ("html", {"lang": "en"}) in page.tags
    assert sum(tag == "table" for tag, _ in page.tags) == sum(tag == "caption" for tag, _ in page.tags) > 1


def test_nothing_of_a_run_becomes_markup(stop_run, report, tmp_path):
    run = pretend(
        stop_run,
        tmp_path / "<script>alert(1)<&>",
        results=[{"label": HOSTILE, "data": HOSTILE, "metrics": {"knn/top1@20": 50.0}}],
    )
    (run / "environment.json").write_text(
        json.dumps([{"recipe": HOSTILE, "platform": HOSTILE, "packages": {HOSTILE: HOSTILE}}])
    )
    with (run / "log.txt").open("a") as file:
        file.write(f"2026-01-01 00:00:00 Warning: {HOSTILE}\n")
    (run / "demo.json").write_text(json.dumps({HOSTILE: {HOSTILE: 1.0}}))
    plain, page = report(stop_run), report(run)
    for tag in ("script", "img", "iframe", "style", "link"):
        assert sum(found == tag for found, _ in page.tags) == sum(found == tag for found, _ in plain.tags)
    assert "<script>alert(1)<&>" in page.words
    assert page.words.count("</script><script>alert(1)</script>") > 5
    assert page.data["runs"] == ["<script>alert(1)<&>"]


def test_embedded_json_says_the_same_and_ends_no_script():
    text = embedded_json({HOSTILE: ["ü", 1.5, None]})
    assert not set("<>&\u2028ü") & set(text)
    assert json.loads(text) == {HOSTILE: ["ü", 1.5, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded_json(float("nan"))


def test_a_name_that_is_no_text_is_no_obstacle(stop_run, report, tmp_path):
    run = pretend(stop_run, tmp_path / os.fsdecode(b"run-\xff"))
    assert "run-?" in report(run).words


def test_a_run_that_recorded_nothing_has_a_page(report, tmp_path):
    RunFolder(tmp_path / "begun").create(tiny_config(tmp_path / "begun"), "tiny")
    page = report(tmp_path / "begun")
    assert "no step recorded" in page.words
    assert page.words.count("It has not saved a checkpoint") == 4
    assert page.data["charts"] == []
    assert page.data["positions"] == [None]


def test_a_run_without_a_checkpoint_has_its_curves(stop_run, report, tmp_path):
    run = pretend(stop_run, tmp_path / "early")
    shutil.rmtree(run / "checkpoints")
    page = report(run)
    assert "It has not saved a checkpoint" in page.words
    assert any(chart["title"] == "Loss" for chart in page.data["charts"])
    assert page.data["predictions"] == page.data["features"] == [None]


def test_a_damaged_checkpoint_and_lost_data_are_said(stop_run, report, tmp_path):
    damaged = pretend(stop_run, tmp_path / "damaged")
    newest = RunFolder(damaged).newest_checkpoint()
    newest.write_bytes(newest.read_bytes()[:-100])
    assert "cannot be read" in report(damaged).words
    lost = pretend(stop_run, tmp_path / "lost", data=str(tmp_path / "gone"))
    page = report(lost)
    assert "gone' cannot be opened here" in page.words
    assert page.data["positions"][0]["queries"]
    assert page.data["features"] == [None]


def test_lines_that_are_not_numbers_are_left_out(stop_run, report, tmp_path):
    run = pretend(stop_run, tmp_path / "odd", signs={"loss": float("nan"), "lr": "much"})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    charts = {chart["title"]: chart["series"][0] for chart in report(run).data["charts"]}
    assert charts["Loss"]["x"] == charts["Learning rate"]["x"] == list(range(1, 8))


def test_mae_has_no_prediction_maps_and_says_so(report, tmp_path):
    run = train_tiny(tmp_path / "mae", objective=ObjectiveConfig("mae"), masks=MaskConfig("random"))
    page = report(run)
    assert "MAE predicts pixels" in page.words
    assert page.data["predictions"] == [None]
    assert len(page.data["features"][0]["maps"]) == MAX_IMAGES


def test_fixed_positions_have_no_noise_to_show(stop_run, report, tmp_path):
    page = report(pretend(stop_run, tmp_path / "fixed", positions=PositionsConfig(kind="sincos")))
    assert "have no covariance of noise" in page.words
    assert "the maps with noise are left out" in page.words
    assert set(page.data["positions"][0]) == {"queries", "low", "high", "draws", "fixed"}


def test_warnings_of_the_log_are_shown_with_their_time(stop_run, report, tmp_path):
    run = pretend(stop_run, tmp_path / "warned")
    with (run / "log.txt").open("a") as file:
        file.write("2026-01-02 03:04:05 Warning: A is vanishing: lower sigma.\n")
    words = report(run).words
    assert "2026-01-02 03:04:05 A is vanishing: lower sigma." in words
    assert "1 warning in the log." in words
    assert "None in the log." in report(stop_run).words


def test_several_runs_are_compared(stop_run, report, tmp_path):
    other = pretend(stop_run, tmp_path / "other", seed=3, signs={"loss": 0.125}, positions=PositionsConfig(sigma=0.5))
    page = report(stop_run, other)
    assert "2 runs compared" in page.words
    assert "0.125" in page.words
    assert "positions.sigma 0.25 0.5" in page.words
    assert "seed 0 3" in page.words
    assert (
        "optim.lr"
        not in page.words.split("Loss and schedules")[0].split("Every field in which")[1].split("whole conf")[0]
    )
    loss = next(chart for chart in page.data["charts"] if chart["title"] == "Loss")
    assert [series["run"] for series in loss["series"]] == [0, 1]
    assert len(page.data["predictions"]) == 2
    assert page.data["predictions"][0]["context"] == page.data["predictions"][1]["context"]


def test_runs_of_the_same_name_are_told_apart_by_their_paths(stop_run, report, tmp_path):
    twin = pretend(stop_run, tmp_path / "elsewhere" / stop_run.name)
    assert report(stop_run, twin).data["runs"] == [str(stop_run), str(twin)]


def test_scores_come_with_intervals_or_spreads():
    results = [
        {
            "task": "linear",
            "label": "class",
            "data": "a",
            "metrics": {"linear/top1": 50.0, "linear/loss": 2.0},
            "intervals": {"linear/top1": [45.0, 55.0]},
        },
        {
            "task": "low-shot",
            "label": "count",
            "data": "b",
            "metrics": {"low-shot/1%/top1": 20.0, "low-shot/1%/top1_std": 1.5, "low-shot/1%/top1@0": 19.0},
        },
        {
            "task": "knn",
            "label": "class",
            "data": "a",
            "encoder": "runs/x/checkpoints/step-00000004.safetensors",
            "metrics": {"knn/top1@20": 30.0},
        },
    ]
    assert scores_of(results, with_data=True) == {
        "linear/top1 · a": "50.0 [45.0, 55.0]",
        "low-shot/1%/top1 · count · b": "20.0 ± 1.5",
        "knn/top1@20 · a · step-00000004": "30.0",
    }
    assert list(scores_of(results))[1] == "low-shot/1%/top1 · count"


def test_settings_are_in_words(tmp_path):
    positions = PositionsConfig(
        sigma=0.5, sigma_start=0.1, covariance="diagonal", apply_to="both", convention="release"
    )
    words = settings(tiny_config(tmp_path, positions=positions, masks=MaskConfig("random")), "mine")
    assert words["Recipe"] == "mine"
    assert words["Encoder"] == "tiny: width 24, depth 2, 2 heads"
    assert words["Images"] == "32×48 pixels in patches of 8: 4×6"
    assert words["Positions"] == "stochastic: σ = 0.1 → 0.5, diagonal Σ, on both tokens, release's convention"
    assert words["Masks"] == "75% of the patches, random"


def test_sixteen_images_stay_below_ten_megabytes(tmp_path):
    image_size, patch_size = 448, 14
    encoder = EncoderConfig(
        "tiny", image_size=(image_size, image_size), patch_size=patch_size, width=16, depth=1, heads=2
    )
    config = tiny_config(tmp_path / "large", encoder=encoder, predictor=PredictorConfig(width=8, depth=1, heads=2))
    folder = RunFolder(tmp_path / "large")
    folder.create(config, "large")
    model = {f"model.{name}": tensor for name, tensor in build_objective(config).state_dict().items()}
    save_checkpoint(Checkpoint(8, model, {}), checkpoint_path(folder.checkpoints, 8))
    for step in range(1, 3000):
        folder.record(step, {"epoch": step / 4, "loss": 1 / step, "lr": 1e-3, "gradient_norm": step**0.5})
    images = [write_image(tmp_path / f"{number}.png", (300, 300)) for number in range(MAX_IMAGES)]
    page = write_report([folder.path], tmp_path / "report.html", images)
    assert 10**5 < page.stat().st_size < 10**7


def test_the_same_runs_give_the_same_page(stop_run, tmp_path):
    pages = [write_report([stop_run], tmp_path / f"{name}.html").read_text() for name in "ab"]
    first, second = (re.sub(r"Written on .*? by", "", page) for page in pages)
    assert first == second


def test_the_console_hears_where_the_page_is(stop_run, tmp_path):
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115
    write_report([stop_run], tmp_path / "[bold]report.html", console=console)
    assert "[bold]report.html (0." in console.export_text()
    console.file.close()


def test_what_cannot_be_reported_is_said_in_a_sentence(stop_run, tmp_path):
    def complaint(runs, out=tmp_path / "report.html", **options):
        with pytest.raises(InputError) as caught:
            write_report(runs, out, **options)
        sentence = str(caught.value)
        assert sentence.endswith(".")
        assert "\n" not in sentence
        assert not (tmp_path / "report.html").exists()
        return sentence

    other_grid = pretend(
        stop_run,
        tmp_path / "grid",
        encoder=EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=24, depth=2, heads=2),
    )
    text = tmp_path / "text.png"
    text.write_text("no image")
    small = write_image(tmp_path / "small.png", (5, 40))
    assert "holds no run" in complaint([tmp_path])
    assert "No run is given" in complaint([])
    assert "given twice" in complaint([stop_run, stop_run / ".." / stop_run.name])
    assert "4x6 patches" in complaint([stop_run, other_grid])
    assert "in a folder that does not exist" in complaint([stop_run], tmp_path / "nowhere" / "report.html")
    assert "it is a folder" in complaint([stop_run], tmp_path)
    assert "text.png cannot be read (not an image" in complaint([stop_run], images=[text])
    assert "none.png cannot be read (No such file" in complaint([stop_run], images=[tmp_path / "none.png"])
    assert "5x40 pixels, less than a patch of 8x8" in complaint([stop_run], images=[small])
    assert "at most 16" in complaint([stop_run], images=[small] * 17)
    assert not list(tmp_path.glob(".report*"))
