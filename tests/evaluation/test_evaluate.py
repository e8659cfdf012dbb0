"""The whole command: each task, results in every place, and one sentence for each mistake."""

import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from quick_evaluation import QUICK, complaint, names_of, silent
from rich.console import Console

from stop_mim.cli import main
from stop_mim.data import videos
from stop_mim.errors import InputError
from stop_mim.evaluation.config import LinearOptions, LowShotConfig
from stop_mim.evaluation.evaluate import evaluate


def test_every_task_on_a_folder(run, colours):
    console = silent()
    found = evaluate([str(run)], replace(QUICK, data=str(colours)), console)
    tasks = {one.task: one for one in found}
    assert list(tasks) == ["linear", "knn", "low-shot", "linear-sgd", "finetune", "finetune-low-shot"]
    assert {f"linear/{name}/top1" for name in ("last1", "last1+bn", "last2", "last2+bn")} < names_of(tasks["linear"])
    # Four plain colours: features of any network tell them apart.
    assert tasks["linear"].metrics["linear/top1"] == 100
    assert tasks["knn"].metrics["knn-centred/top1@3"] == 100
    assert {"low-shot/25%/top1_std", "low-shot/2/top1"} < names_of(tasks["low-shot"])
    assert tasks["low-shot"].metrics["low-shot/2/images"] == 8
    assert "linear_sgd/last2+bn/top1" in tasks["linear-sgd"].metrics
    assert "finetune/top1" in tasks["finetune"].metrics
    assert "finetune-low-shot/25%/top1" in tasks["finetune-low-shot"].metrics
    written = json.loads((run / "results.json").read_text())["evaluations"]
    assert [one["task"] for one in written] == list(tasks)
    for one in written:
        assert one["seed"] == 0
        assert one["protocol"]["name"] == "generic"
        assert len(one["facts"]["data_fingerprint"]) == 16
        assert one["facts"]["versions"]["torch"]
    assert written[0]["intervals"]["linear/top1"][1] == 100
    assert "linear/top1" in console.file.getvalue()
    assert not list((Path(os.environ["STOP_MIM_CACHE"]) / "evaluations").glob("*")), "finished states are removed"


def test_clevr_tasks_on_scenes(run):
    found = evaluate([str(run)], replace(QUICK, task=("clevr",), data="scenes:count=60,size=32"), silent())
    assert [(one.task, one.label, one.protocol["name"]) for one in found] == [
        ("clevr", "count", "clevr-count"),
        ("clevr", "distance", "clevr-dist"),
    ]


def test_all_tasks_of_scenes_are_those_of_stills_and_of_clips(run, monkeypatch):
    monkeypatch.setattr("stop_mim.evaluation.plan.IMAGE_TASKS", ("knn",))
    monkeypatch.setitem(videos._SCENE_OPTIONS, "count", 1)
    monkeypatch.setitem(videos._SCENE_OPTIONS, "frames", 4)
    found = evaluate([str(run)], replace(QUICK, data="scenes:count=40,size=32"), silent())
    assert [(one.task, one.label) for one in found] == [("knn", "count"), ("knn", "distance"), ("video", "objects")]


def test_a_list_of_images(run, colours, tmp_path):
    names = [f"{colour}_{number:02d}.png" for colour in ("blue", "green", "red", "yellow") for number in (1, 5, 7)]
    (tmp_path / "few.txt").write_text("\n".join(names))
    config = replace(
        QUICK, task=("low-shot",), data=str(colours), low_shot=LowShotConfig(list_file=tmp_path / "few.txt")
    )
    # A shell completes the name of a folder with a slash: it is the same encoder.
    (found,) = evaluate([str(run), f"{run}/"], config, silent())
    assert found.metrics["low-shot/list/images"] == 12
    (tmp_path / "few.txt").write_text("\n\n")
    with pytest.raises(InputError, match="is empty"):
        evaluate([str(run)], config, silent())


def test_videos_of_scenes(run, tmp_path):
    name = "scenes:count=2,size=48,frames=6"
    video = replace(QUICK.video, masks=tmp_path / "masks", overlays=True)
    (found,) = evaluate([str(run)], replace(QUICK, task=("video",), data=name, video=video), silent())
    assert 0 < found.metrics["video/J&F"] <= 100
    assert len(found.details["sequences"]) == 2
    sequence = next(iter(found.details["sequences"]))
    assert len(list((tmp_path / "masks" / sequence).glob("*.png"))) == 6


@pytest.fixture
def davis(tmp_path):
    """Two frames scored of a square that moves, and masks of it that somebody made."""
    for number in range(4):
        frame = np.zeros((40, 60, 3), np.uint8)
        mask = np.zeros((40, 60), np.uint8)
        mask[10:20, 5 + number : 25 + number] = 255
        for path, pixels in (
            (tmp_path / "davis" / "JPEGImages" / "480p" / "square" / f"{number:05d}.jpg", frame),
            (tmp_path / "davis" / "Annotations" / "480p" / "square" / f"{number:05d}.png", mask),
            (tmp_path / "made" / "square" / f"{number:05d}.png", np.roll(mask, 5, 1)),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(pixels).save(path)
    return tmp_path / "davis"


def test_masks_of_somebody_else(davis, tmp_path, capsys):
    options = ["--task", "video", "--data", str(davis), "--foreground", "--json", str(tmp_path / "r.json")]
    main(["evaluate", f"masks:{tmp_path / 'made'}", *options])
    document = json.loads((tmp_path / "r.json").read_text())
    scores = document["sequences"]["square"]
    assert scores["J_mean"] == pytest.approx(15 / 25)
    assert {f"{letter}_{name}" for letter in "JF" for name in ("mean", "recall", "decay")} <= set(scores)
    assert "J&F" in capsys.readouterr().out


def test_masks_of_osvos_agree_with_the_official_code(real_data, tmp_path):
    davis = real_data("davis-sample")
    options = ["--task", "video", "--data", str(davis), "--foreground", "--json", str(tmp_path / "r.json")]
    main(["evaluate", f"masks:{davis / 'results' / 'osvos'}", *options])
    ours = json.loads((tmp_path / "r.json").read_text())["sequences"]
    reference = json.loads((davis / "reference_jf.json").read_text())["sequences"]
    assert set(ours) == set(reference)
    for sequence, values in reference.items():
        for name, value in values.items():
            assert ours[sequence][name] == pytest.approx(value, abs=1e-6), (sequence, name)


def test_mistakes_are_one_sentence(run, colours, davis, tmp_path, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    knn = ("--task", "knn", "--data", colours)
    assert "needs an encoder first" in complaint(capsys, *knn)
    assert "There is no encoder 'runs/none'" in complaint(capsys, "runs/none", *knn)
    assert "timm has no model 'vit_none'" in complaint(capsys, "timm:vit_none", *knn)
    assert "There is no data set" in complaint(capsys, run, "--task", "knn", "--data", tmp_path / "none")
    assert "data is not given" in complaint(capsys, run, "--task", "knn")
    assert "'linea'" in complaint(capsys, run, "--task", "linea", "--data", colours)
    assert "image_size is 30" in complaint(capsys, run, *knn, "--image-size", "30")
    assert "There is no protocol 'none'" in complaint(capsys, run, *knn, "--protocol", "none")
    assert "low_shot.amounts has 'some'" in complaint(
        capsys, run, "--task", "low-shot", "--data", colours, "--low-shot.amounts", "some"
    )
    assert "needs CLEVR's folder or scenes" in complaint(capsys, run, "--task", "clevr", "--data", colours)
    assert "needs CLEVR's folder or scenes" in complaint(capsys, run, "--task", "clevr", "knn", "--data", colours)
    assert "task is empty" in complaint(capsys, run, "--task", "--data", colours)
    assert "can only be scored on videos" in complaint(capsys, f"masks:{tmp_path}", *knn)
    assert "cannot be written" in complaint(capsys, run, *knn, "--json", tmp_path / "none" / "r.json")
    shutil.copytree(colours / "train" / "red", tmp_path / "flat")
    assert "has no labels" in complaint(capsys, run, "--task", "linear", "--data", tmp_path / "flat")
    (davis / "Annotations" / "480p" / "square" / "00002.png").unlink()
    assert "00002" in complaint(capsys, f"masks:{tmp_path / 'made'}", "--task", "video", "--data", davis)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_where_results_go_is_checked_before_anything_is_computed(run, colours, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("stop_mim.evaluation.evaluate.EncoderSession", None)
    knn = ("--task", "knn", "--data", colours)
    assert "/proc/r.json cannot be written: it is in a folder that" in complaint(
        capsys, run, *knn, "--json", "/proc/r.json"
    )
    both = ("--json", tmp_path / "r", "--csv", tmp_path / "r")
    assert f"json and csv are both {tmp_path / 'r'}" in complaint(capsys, run, *knn, *both)
    (run / "results.json").write_text('{"format": "stop-mim results 1", "evaluations": []}')
    assert "is where the run keeps" in complaint(capsys, run, *knn, "--json", run / "results.json")
    assert not [*run.glob(".results*"), *tmp_path.glob(".r*")]


def test_labels_are_drawn_before_anything_is_computed(run, colours, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("stop_mim.evaluation.evaluate.EncoderSession", None)
    (tmp_path / "list.txt").write_text("nobody.png")
    listed = ("--data", colours, "--low-shot.list-file", tmp_path / "list.txt")
    for tasks in (["low-shot"], ["linear", "finetune-low-shot"]):
        assert "'nobody.png' first" in complaint(capsys, run, "--task", *tasks, *listed)
    (tmp_path / "list.txt").write_text("blue_00.png\ngreen_00.png\nyellow_00.png")
    assert "list.txt names no image of the class 2 ('red')" in complaint(capsys, run, "--task", "low-shot", *listed)
    for amount in ("0%", "101%", "nan%", "0", "-3", "0.5", "%"):
        said = complaint(capsys, run, "--task", "low-shot", "--data", colours, f"--low-shot.amounts={amount}")
        assert f"low_shot.amounts has '{amount}': give a part such as 1%" in said
    said = complaint(capsys, run, "--task", "low-shot", "--data", colours, "--low-shot.amounts", "99")
    assert "The class 0 (blue) has 12 images" in said


@pytest.mark.parametrize("task", ["knn", "linear-sgd", "finetune"])
def test_a_cache_that_cannot_be_written_is_told_before_the_work(run, colours, monkeypatch, task):
    def never(*_):
        raise AssertionError("nothing is computed")

    monkeypatch.setenv("STOP_MIM_CACHE", "/proc/cache")
    for part in ("features.labelled_views", "training_tasks.linear_sgd", "training_tasks.finetune"):
        monkeypatch.setattr(f"stop_mim.evaluation.{part}", never)
    with pytest.raises(
        InputError, match=r"^The cache folder /proc/cache/.* cannot be written \(.*\): set STOP_MIM_CACHE"
    ):
        evaluate([str(run)], replace(QUICK, task=(task,), data=str(colours)), silent())


def test_a_full_disk_is_one_sentence(run, colours, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stop_mim.evaluation.features.write_atomically", full)
    with pytest.raises(
        InputError, match=r"chunk-000000\.safetensors cannot be written \(.*No space left.*\): make room"
    ):
        evaluate([str(run)], replace(QUICK, task=("knn",), data=str(colours)), silent())


def test_the_numbers_are_shown_even_if_their_file_cannot_be_written(run, colours, tmp_path, monkeypatch):
    def full(*_):
        raise InputError("the disk is full")

    monkeypatch.setattr("stop_mim.evaluation.evaluate.write_json", full)
    console = silent()
    with pytest.raises(InputError, match="the disk is full"):
        evaluate([str(run)], replace(QUICK, task=("knn",), data=str(colours), json=tmp_path / "r.json"), console)
    assert "knn/top1@3" in console.file.getvalue()


def test_the_linear_probe_can_be_of_some_features_alone(run, alike):
    config = replace(QUICK, task=("linear",), data=str(alike))
    (both,) = evaluate([str(run)], config, silent())
    (one,) = evaluate([str(run)], replace(config, linear=LinearOptions((True,))), silent())
    assert {name for name in names_of(both) - names_of(one) if name.endswith("top1")} == {
        "linear/last1/top1",
        "linear/last2/top1",
    }
    assert one.metrics["linear/last2+bn/top1"] == both.metrics["linear/last2+bn/top1"]
    assert one.protocol["standardise"] == (True,)
    assert "standardise" not in both.protocol
    with pytest.raises(InputError, match="standardise is empty"):
        evaluate([str(run)], replace(config, linear=LinearOptions(())), silent())
    (last,) = evaluate([str(run)], replace(config, linear=LinearOptions((True,), (1,))), silent())
    assert {name.split("/")[1] for name in names_of(last) if name.startswith("linear/last")} == {"last1+bn"}
    assert last.metrics["linear/last1+bn/top1"] == both.metrics["linear/last1+bn/top1"]
    for wrong in ((), (1, 0)):
        with pytest.raises(InputError, match="layers is"):
            evaluate([str(run)], replace(config, linear=LinearOptions(layers=wrong)), silent())


def test_a_test_on_the_training_images_is_told(run, colours):
    knn = replace(QUICK, task=("knn",), data=str(colours / "train"))
    for test_data, warns in (("train", True), ("test", False)):
        console = Console(file=io.StringIO(), width=200)
        evaluate([str(run)], replace(knn, test_data=str(colours / test_data)), console)
        assert ("Warning: " in console.file.getvalue()) == warns, test_data
        assert ("learned by heart" in console.file.getvalue()) == warns
