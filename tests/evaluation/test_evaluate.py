"""The whole command: tasks, encoders, results in every place, plugins, several processes, and bad input."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import save_file
from small_trainings import silent

from stop_mim.cli import main
from stop_mim.data import videos
from stop_mim.errors import InputError
from stop_mim.evaluation import evaluate as evaluate_module
from stop_mim.evaluation import subject as subject_module
from stop_mim.evaluation.config import evaluate_config
from stop_mim.evaluation.evaluate import evaluate
from stop_mim.evaluation.task import TASKS, FeatureTask
from stop_mim.evaluation.tasks.finetune import FinetuneOptions, LowShotFinetuneOptions
from stop_mim.evaluation.tasks.knn import KnnOptions
from stop_mim.evaluation.tasks.linear import LinearOptions
from stop_mim.evaluation.tasks.linear_sgd import LinearSGDOptions
from stop_mim.evaluation.tasks.low_shot import LowShotOptions
from stop_mim.evaluation.tasks.video import PropagationConfig, VideoOptions
from stop_mim.models.encoder import Dimensions, create_encoder
from stop_mim.models.encoder_file import save_encoder
from stop_mim.results import Score, find_score, read_results
from stop_mim.training.config import DeviceConfig

QUICK = evaluate_config()(
    untrained="no",
    low_shot=LowShotOptions(("25%", "2"), draws=2),
    knn=KnnOptions((3,)),
    linear_sgd=LinearSGDOptions(epochs=2, batch_size=16),
    finetune=FinetuneOptions(epochs=1, batch_size=16, warmup_epochs=0.5),
    finetune_low_shot=LowShotFinetuneOptions(epochs=2, batch_size=8, warmup_epochs=0.5),
    video=VideoOptions(propagation=PropagationConfig(short_side=32)),
    speed=DeviceConfig(device="cpu", workers=0),
)
LAST = LinearOptions((True,), (1,))


def complaint(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *(str(argument) for argument in arguments)])
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert "Traceback" not in captured.err
    return captured.err.strip().splitlines()[-1]


def value(evaluation, spec):
    return find_score([evaluation], spec)[1].value


# Tasks


def test_every_task_on_a_folder(run, colours):
    console = silent()
    found = evaluate([str(run)], replace(QUICK, data=str(colours)), console)
    tasks = {one.task: one for one in found}
    assert set(tasks) == {"linear", "knn", "low-shot", "linear-sgd", "finetune", "finetune-low-shot"}
    assert set([*tasks][-3:]) == {"linear-sgd", "finetune", "finetune-low-shot"}, "trainings come last"
    # Four plain colours: features of any network tell them apart.
    for spec in ("linear/top1", "linear/last2/batch_norm/top1", "knn/neighbours=3/top1"):
        assert value(tasks[spec.split("/")[0]], spec) == 100
    assert find_score(found, "low-shot/25%/top1")[1].std is not None
    assert value(tasks["low-shot"], "low-shot/2/images") == 8
    for spec in ("linear-sgd/top1", "finetune/top1", "finetune-low-shot/25%/top1"):
        assert spec in console.file.getvalue()
    assert "batch_norm" not in console.file.getvalue(), "only the main score of each task"
    written = read_results(run / "results.json")
    assert [one.task for one in written] == [*tasks]
    for one, other in zip(written, found, strict=True):
        assert (one.seed, one.protocol["name"], one.scores) == (0, "generic", other.scores)
        assert len(one.facts["data_fingerprint"]) == 16
        assert one.facts["image_size"] == [32, 32]
        assert one.facts["versions"]["torch"]
    assert find_score(written, "linear/top1")[1].high == 100
    assert not list((Path(os.environ["STOP_MIM_CACHE"]) / "evaluations").glob("*")), "finished states are removed"


@pytest.mark.parametrize("task", ["linear-sgd", "finetune"])
def test_a_training_is_kept_until_its_scores_are_saved(run, colours, monkeypatch, task):
    config, states = replace(QUICK, task=(task,), data=str(colours)), Path(os.environ["STOP_MIM_CACHE"]) / "evaluations"

    def full(*_):
        raise OSError(28, "No space left on device", "results.json")

    with monkeypatch.context() as patch:
        patch.setattr(evaluate_module, "add_results", full)
        with pytest.raises(OSError, match="No space left"):
            evaluate([str(run)], config, silent())
    assert len([*states.glob("*")]) == 1
    monkeypatch.setattr("stop_mim.training.trainer.Trainer.run", lambda *_: pytest.fail("it is trained again"))
    found = evaluate([str(run)], config, silent())
    assert read_results(run / "results.json")[0].scores == found[0].scores
    assert not [*states.glob("*")]


def test_all_leaves_out_what_does_not_apply_and_says_why(run, colours, monkeypatch, capsys):
    about_depth = type("AboutDepth", (Depth,), {"labels": ("depth",)})
    monkeypatch.setitem(TASKS._entries, "depth", about_depth)
    for name in ("low-shot", "linear-sgd"):
        monkeypatch.setattr(TASKS[name], "in_all", False)
    console = silent(width=400)
    found = evaluate([str(run)], replace(QUICK, data=str(colours), image_size=64, linear=LAST), console)
    assert {one.task for one in found} == {"knn", "linear"}
    notes = [line.strip() for line in console.file.getvalue().splitlines() if " is left out: " in line]
    assert notes == [
        f"The task depth is left out: '{colours}' has no label depth.",
        *(
            f"The task {name} is left out: image_size is 64: fine-tuning runs at the encoder's own size, 32; leave "
            "image_size out."
            for name in ("finetune", "finetune-low-shot")
        ),
    ]
    # A task that is named must run, and a bad option is an error with all, too.
    for task in ("finetune", "depth"):
        with pytest.raises(InputError, match=r"image_size is 64|no label depth: the task depth needs other data"):
            evaluate([str(run)], replace(QUICK, task=("knn", task), data=str(colours), image_size=64), silent())
    bad = complaint(capsys, run, "--data", colours, "--finetune.randaugment", "none")
    assert "randaugment is 'none'" in bad


def test_clevr_tasks_on_scenes(run):
    config = replace(QUICK, task=("clevr",), data="scenes:count=60,size=32", linear=LAST)
    found = evaluate([str(run)], config, silent())
    assert [(one.task, one.label, one.protocol["name"]) for one in found] == [
        ("clevr", "count", "clevr-count"),
        ("clevr", "distance", "clevr-dist"),
    ]
    assert {score.name for score in found[0].scores if score.metric == "top1"} == {"top1", "last1/batch_norm/top1"}


def test_all_tasks_of_scenes_are_those_of_stills_and_of_clips(run, monkeypatch):
    for name, task in TASKS.items():
        monkeypatch.setattr(task, "in_all", name in ("knn", "video"))
    monkeypatch.setitem(videos._SCENE_OPTIONS, "count", 1)
    monkeypatch.setitem(videos._SCENE_OPTIONS, "frames", 4)
    found = evaluate([str(run)], replace(QUICK, data="scenes:count=40,size=32"), silent())
    assert [(one.task, one.label) for one in found] == [("knn", "count"), ("knn", "distance"), ("video", "objects")]


def test_a_list_of_images(run, colours, tmp_path):
    names = [f"{colour}_{number:02d}.png" for colour in ("blue", "green", "red", "yellow") for number in (1, 5, 7)]
    (tmp_path / "few.txt").write_text("\n".join(names))
    few = LowShotOptions(list_file=tmp_path / "few.txt", total_penalty=0.1)
    config = replace(QUICK, task=("low-shot",), data=str(colours), low_shot=few)
    # A shell completes the name of a directory with a slash: it is the same encoder.
    (found,) = evaluate([str(run), f"{run}/"], config, silent())
    assert value(found, "low-shot/list/images") == 12
    assert found.protocol["list_file"] == str(tmp_path / "few.txt")
    # Other names in the same file are another evaluation.
    (tmp_path / "few.txt").write_text("\n".join([*names[:-1], "yellow_09.png"]))
    evaluate([str(run)], config, silent())
    assert [one.task for one in read_results(run / "results.json")] == ["low-shot"] * 2


class Depth(FeatureTask):
    """As a plugin would define it, with more layers than the package's tasks use."""

    help = "how many layers the features are of"
    layers = 6

    def scores(self, train, test):
        yield Score("layers", float(train.features.layers), headline=True, unit="")


@pytest.mark.parametrize(("depth", "tasks"), [(8, ("knn", "depth", "linear")), (3, ("depth",))])
def test_a_task_gets_the_layers_that_it_needs(colours, tmp_path, monkeypatch, depth, tasks):
    monkeypatch.setitem(TASKS._entries, "depth", Depth)
    save_encoder(create_encoder(Dimensions(24, depth, 2), 32, 8), tmp_path / "mine.safetensors")
    found = evaluate([str(tmp_path / "mine.safetensors")], replace(QUICK, task=tasks, data=str(colours)), silent())
    (scored,) = [one for one in found if one.task == "depth"]
    assert value(scored, "depth/layers") == min(6, depth)
    extracted = [*(tmp_path / "cache" / "features").iterdir()]
    assert len(extracted) == 2, "training and test images, once for all tasks"
    if "linear" in tasks:
        assert value(found[2], "linear/last4/batch_norm/top1") == 100, "the last four of six"


def test_the_help_lists_the_tasks_and_their_options(run, capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", str(run), "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    for name, task in TASKS.items():
        assert f"{name}: {task.help}" in text
    assert "--finetune-low-shot.layer-decay" in text


# Videos


def test_videos_of_scenes(run, tmp_path):
    video = replace(QUICK.video, masks=tmp_path / "masks", overlays=True)
    config = replace(QUICK, task=("video",), data="scenes:count=2,size=48,frames=4", video=video)
    found, _ = evaluate([str(run), f"untrained:{run}"], config, silent())
    assert 0 < value(found, "video/J&F") <= 100
    assert len(found.details["sequences"]) == 2
    masks = sorted(path.relative_to(tmp_path / "masks") for path in (tmp_path / "masks").rglob("*0003.png"))
    sequences = [*found.details["sequences"]]
    assert masks == [Path(place, name, "00003.png") for place in ("0-run", "1-run") for name in sequences]


SIZE = (24, 32)


def block(*places):
    """Objects as (number, top, left), eight pixels high and wide."""
    mask = np.zeros(SIZE, dtype=np.uint8)
    for number, top, left in places:
        mask[top : top + 8, left : left + 8] = number
    return mask


def save_masks(folder, masks):
    folder.mkdir(parents=True, exist_ok=True)
    for index, mask in enumerate(masks):
        PIL.Image.fromarray(mask).save(folder / f"{index:05d}.png")


def davis(root, masks):
    save_masks(root / "Annotations/480p/bear", masks)
    frames = root / "JPEGImages/480p/bear"
    frames.mkdir(parents=True)
    for index in range(len(masks)):
        PIL.Image.fromarray(np.zeros((*SIZE, 3), dtype=np.uint8)).save(frames / f"{index:05d}.jpg")
    return root


def mask_scores(truth, predicted, **options):
    (found,) = evaluate([f"masks:{predicted}"], replace(QUICK, task=("video",), data=str(truth), **options), silent())
    return found.details["sequences"]["bear"]


def test_a_mask_of_void_alone_shows_no_object_where_objects_have_numbers(tmp_path):
    numbered, void, empty = block((1, 2, 2), (255, 12, 20)), block((255, 12, 20)), block()
    truth = davis(tmp_path / "davis", [numbered, void, void, numbered, numbered])
    save_masks(tmp_path / "masks/bear", [empty, empty, block((1, 2, 2)), empty, empty])
    assert mask_scores(truth, tmp_path / "masks")["J_mean"] == pytest.approx(1 / 3)


def test_masks_are_scored_without_the_frames(tmp_path):
    truth = davis(tmp_path / "davis", [block((1, 2, left), (2, 12, 20)) for left in range(2, 7)])
    (truth / "ImageSets").mkdir()
    (truth / "ImageSets" / "val.txt").write_text("bear\n", "utf-8-sig")
    save_masks(tmp_path / "masks/bear", [block((1, 2, 4), (2, 12, 20))] * 5)
    with_frames = mask_scores(truth, tmp_path / "masks")
    assert 0.5 < with_frames["J_mean"] < 1
    shutil.rmtree(truth / "JPEGImages")
    assert mask_scores(truth, tmp_path / "masks") == with_frames
    config = replace(QUICK, task=("video",), data=str(truth))
    with pytest.raises(InputError, match="JPEGImages"):
        evaluate([f"masks:{tmp_path / 'masks'}", "timm:vit_tiny_patch16_224"], config, silent())


def test_masks_of_osvos_agree_with_the_official_code(real_data, tmp_path, capsys):
    folder = real_data("davis-sample")
    options = ["--task", "video", "--data", str(folder), "--foreground", "--json", str(tmp_path / "r.json")]
    main(["evaluate", f"masks:{folder / 'results' / 'osvos'}", *options])
    assert "J&F" in capsys.readouterr().out
    ours = json.loads((tmp_path / "r.json").read_text())["sequences"]
    reference = json.loads((folder / "reference_jf.json").read_text())["sequences"]
    assert set(ours) == set(reference)
    for sequence, values in reference.items():
        for key, number in values.items():
            assert ours[sequence][key] == pytest.approx(number, abs=1e-6), (sequence, key)


# Encoders


def test_encoders_by_every_name_in_one_table(run, colours, tmp_path):
    torch.manual_seed(1)
    save_encoder(create_encoder(Dimensions(24, 1, 2), 32, 8), tmp_path / "mine.safetensors")
    first, last = sorted((run / "checkpoints").glob("*.safetensors"))
    others = [str(tmp_path / "mine.safetensors"), "untrained:timm:vit_tiny_patch16_224"]
    names = [str(run), str(first), str(last), f"untrained:{run}", *others]
    config = replace(QUICK, task=("knn",), data=str(colours), json=tmp_path / "r.json", csv=tmp_path / "r.csv")
    config = replace(config, image_size=64)
    found = evaluate(names, config, silent())
    assert [one.encoder for one in found] == names
    prints = [one.facts["encoder_fingerprint"] for one in found]
    assert prints[0] == prints[2], "the run's encoder is the target of its newest checkpoint"
    assert len(set(prints)) == 5
    assert [one.facts["image_size"] for one in found] == [[64, 64]] * 6
    assert [one.encoder for one in read_results(tmp_path / "r.json")] == names
    assert (tmp_path / "r.csv").read_text().count("knn,class") == 6
    assert [one.encoder for one in read_results(run / "results.json")] == names[:4]
    assert [one.encoder for one in read_results(Path("results.json"))] == names[4:], "in the current directory"


def test_a_run_is_scored_beside_its_untrained_network(run, colours, tmp_path):
    config = replace(QUICK, task=("knn", "finetune"), data=str(colours), out=tmp_path / "kept", table=tmp_path / "t.md")
    console = silent()
    config = replace(config, untrained="auto", details=True)
    found = evaluate([str(run)], config, console)
    assert [one.encoder for one in found] == [str(run)] * 2
    kept = read_results(tmp_path / "kept" / "results.json")
    expected = [(str(run), "knn"), (str(run), "finetune"), (f"untrained:{run}", "knn")]
    assert [(one.encoder, one.task) for one in kept] == expected
    assert not (run / "results.json").exists()
    before = value(kept[2], "knn/neighbours=3/top1")
    row = next(line for line in (tmp_path / "t.md").read_text().splitlines() if "knn" in line)
    # Four classes of the same size.
    assert row.split(" | ")[-2:] == [f"{before:.1f}", "25.0 |"]
    assert "finetune/train_loss" in console.file.getvalue()


def test_guessed_heads_are_said_and_recorded(colours, tmp_path):
    save_file(create_encoder(Dimensions(192, 1, 3), 32, 8).vit.state_dict(), tmp_path / "timm.safetensors")
    console = silent(width=400)
    config = replace(QUICK, task=("knn",), data=str(colours))
    (found,) = evaluate([str(tmp_path / "timm.safetensors")], config, console)
    assert "number of heads: 3 are assumed" in console.file.getvalue()
    assert found.facts["guessed_heads"] == 3


@pytest.mark.parametrize("tasks", [("knn", "linear"), ("linear-sgd",), ("finetune",), ("linear-sgd", "knn")])
def test_images_that_cannot_be_read_are_said_and_recorded(run, colours, tmp_path, monkeypatch, tasks):
    monkeypatch.setattr("stop_mim.data.image_source.MAX_BAD_FRACTION", 0.5)
    # One of the same place in both splits.
    for bad in sorted((colours / "train" / "green").iterdir())[:2] + sorted((colours / "test" / "green").iterdir())[:1]:
        bad.write_bytes(bad.read_bytes()[:40])
    console = silent(width=400)
    found = evaluate([str(run)], replace(QUICK, task=tasks, linear=LAST, data=str(colours)), console)
    assert [[*one.facts["unreadable_images"].values()] for one in found] == [[3]] * len(tasks)
    assert console.file.getvalue().count("cannot be read and are left out: 3.") == 1


def test_a_class_token_is_probed_unless_the_mean_is_asked_for(colours, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, image_size=32, patch_size=8))
    model.save_pretrained(tmp_path / "dino")
    console = silent(width=400)
    config = replace(QUICK, task=("knn",), data=str(colours))
    (token,) = evaluate([str(tmp_path / "dino")], config, console)
    assert "has a class token, which is probed" in console.file.getvalue()
    (mean,) = evaluate([str(tmp_path / "dino")], replace(config, pool="mean"), silent())
    assert [token.facts["pool"], mean.facts["pool"]] == ["cls", "mean"]
    assert token.identity() != mean.identity()


# What is shared


def test_features_are_computed_once(run, colours, monkeypatch):
    looked = []

    def fingerprint(encoder, original=subject_module.encoder_fingerprint):
        looked.append(next(encoder.parameters()).device)
        return original(encoder)

    monkeypatch.setattr(subject_module, "encoder_fingerprint", fingerprint)
    config = replace(QUICK, task=("low-shot", "knn"), data=str(colours))
    before = evaluate([str(run)], config, silent())
    assert len(looked) == 1, "the weights are hashed once, before they move to a GPU"
    monkeypatch.setattr("stop_mim.evaluation.features.Batches", lambda *_, **__: pytest.fail("they are stored"))
    after = evaluate([str(run)], config, silent())
    assert [one.scores for one in after] == [one.scores for one in before]
    assert len(read_results(run / "results.json")) == 2


def test_two_processes_share_the_work(run, colours, tmp_path):
    """Heads and fine-tuning: test_two_processes.py."""
    options = ["--task", "knn", "--data", str(colours), "--knn.neighbours", "3", "--speed.device", "cpu"]
    options += ["--json", str(tmp_path / "two.json")]
    assert run_ranks(2, main, ["evaluate", str(run), *options]) == [0, 0]
    shutil.rmtree(tmp_path / "cache")
    (two,) = read_results(tmp_path / "two.json")
    (one,) = evaluate([str(run)], replace(QUICK, task=("knn",), data=str(colours)), silent())
    assert two.facts["processes"] == 2
    assert two.scores == one.scores


# Bad input


def test_bad_input_is_one_sentence_and_changes_nothing(run, colours, tmp_path, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    truth = davis(tmp_path / "davis", [block((1, 2, 2))] * 4)
    save_masks(tmp_path / "made/bear", [block((1, 2, 2))] * 4)
    knn, masks = ("--task", "knn", "--data", colours), f"masks:{tmp_path / 'made'}"
    for arguments, named in (
        (knn, "needs an encoder first"),
        (("runs/none", *knn), "'runs/none'"),
        (("timm:vit_none", *knn), "'vit_none'"),
        ((run, "--task", "knn", "--data", tmp_path / "none"), "none"),
        ((run, "--task", "knn"), "--data"),
        ((run, "--task", "linea", "--data", colours), "'linea': did you mean 'linear'"),
        ((run, "--task", "--data", colours), "task is empty"),
        ((run, *knn, "--image-size", "30"), "image_size is 30"),
        ((run, *knn, "--image-size", "1600000"), "image_size is 1600000: give a number from 1 to 16,384"),
        ((run, *knn, "--seed", 2**63), f"seed is {2**63}: give a number"),
        ((run, *knn, "--pool", "cls"), "pool is cls"),
        ((run, "--task", "finetune", "--data", colours, "--image-size", "64"), "image_size is 64"),
        ((run, *knn, "--protocol", "none"), "'none'"),
        ((run, "--task", "clevr", "knn", "--data", colours), "count or distance"),
        ((run, "--task", "knn", "video", "--data", truth), "videos in DAVIS's layout"),
        ((masks, *knn), "add --task video"),
        ((run, *knn, "--json", tmp_path / "none" / "r.json"), "r.json"),
    ):
        assert named in complaint(capsys, *arguments)
    (truth / "JPEGImages/480p/bear/00001.jpg").unlink()
    assert "00001.png" in complaint(capsys, masks, "--task", "video", "--data", truth)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_outputs_and_labels_are_checked_before_anything_is_computed(run, colours, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate_module, "_evaluation", lambda *_: pytest.fail("it has begun"))
    knn = (run, "--task", "knn", "--data", colours)
    assert "/proc/r.json" in complaint(capsys, *knn, "--json", "/proc/r.json")
    both = ("--json", tmp_path / "r", "--csv", tmp_path / "r")
    assert f"json and csv are both {tmp_path / 'r'}" in complaint(capsys, *knn, *both)
    (run / "results.json").write_text('{"format": "stop-mim results 2", "evaluations": []}')
    assert "is the file that collects all results" in complaint(capsys, *knn, "--json", run / "results.json")
    (run / "results.json").write_text('{"format": "stop-mim results 1", "evaluations": []}')
    assert "move the file away" in complaint(capsys, *knn)
    (run / "results.json").unlink()
    assert not [*run.glob(".results*"), *tmp_path.glob(".r*")]
    (tmp_path / "list.txt").write_text("nobody.png")
    listed = ("--data", colours, "--low-shot.list-file", tmp_path / "list.txt")
    for tasks in (["low-shot"], ["linear", "finetune-low-shot"]):
        assert "'nobody.png'" in complaint(capsys, run, "--task", *tasks, *listed)
    (tmp_path / "list.txt").write_text("blue_00.png\ngreen_00.png\nyellow_00.png")
    assert "class 2 ('red')" in complaint(capsys, run, "--task", "low-shot", *listed)
    for amount, named in (("99", "The class 0 (blue) has 12 images"), ("0%", "low_shot.amounts is")):
        few = (run, "--task", "low-shot", "--data", colours, "--low-shot.amounts", amount)
        assert named in complaint(capsys, *few)


@pytest.mark.parametrize("task", ["knn", "linear-sgd"])
def test_a_cache_that_cannot_be_written_is_noticed_before_the_work(run, colours, monkeypatch, task):
    monkeypatch.setenv("STOP_MIM_CACHE", "/proc/cache")
    for part in ("features.Batches", "labelled_training.LabelledTraining.train"):
        monkeypatch.setattr(f"stop_mim.evaluation.{part}", lambda *_, **__: pytest.fail("something is computed"))
    with pytest.raises(InputError, match="/proc/cache"):
        evaluate([str(run)], replace(QUICK, task=(task,), data=str(colours)), silent())


def test_a_test_on_the_training_images_is_warned_about(run, colours):
    knn = replace(QUICK, task=("knn",), data=str(colours / "train"))
    for test_data, warns in (("train", True), ("test", False)):
        console = silent(width=200)
        evaluate([str(run)], replace(knn, test_data=str(colours / test_data)), console)
        assert ("Warning: " in console.file.getvalue()) == warns, test_data
