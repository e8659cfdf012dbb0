"""The whole command: encoders by every name, each task, results in every place, and one sentence for each mistake."""

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from stop_mim.cli import main
from stop_mim.data import videos
from stop_mim.errors import InputError
from stop_mim.evaluation import features as features_module
from stop_mim.evaluation import session as session_module
from stop_mim.evaluation.config import (
    EvaluateConfig,
    KnnConfig,
    LinearOptions,
    LinearSGDOptions,
    LowShotConfig,
    VideoConfig,
)
from stop_mim.evaluation.evaluate import evaluate
from stop_mim.evaluation.finetune import FinetuneConfig
from stop_mim.evaluation.video import PropagationConfig
from stop_mim.exchange.export import export_encoder
from stop_mim.models.encoder import Dimensions, create_encoder, save_encoder
from stop_mim.training.config import (
    CheckpointConfig,
    EncoderConfig,
    LogConfig,
    OptimConfig,
    PredictorConfig,
    SpeedConfig,
    TrainConfig,
)
from stop_mim.training.loop import train

QUICK = EvaluateConfig(
    low_shot=LowShotConfig(("25%", "2"), draws=2),
    knn=KnnConfig((3,)),
    linear_sgd=LinearSGDOptions(epochs=2, batch_size=16),
    finetune=FinetuneConfig(epochs=2, batch_size=16, warmup_epochs=0.5),
    finetune_low_shot=FinetuneConfig(epochs=2, batch_size=8, warmup_epochs=0.5, mixup=0.0, cutmix=0.0),
    video=VideoConfig(propagation=PropagationConfig(short_side=32)),
    speed=SpeedConfig(device="cpu", workers=0),
)


@pytest.fixture
def run(tmp_path):
    """A run of two steps."""
    config = TrainConfig(
        data="scenes:count=16,size=32",
        out=str(tmp_path / "run"),
        encoder=EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=24, depth=2, heads=2),
        predictor=PredictorConfig(width=16, depth=1, heads=2),
        optim=OptimConfig(epochs=1, batch_size=8, warmup_epochs=0.0, ema_start=0.9, ema_final=0.9),
        speed=SpeedConfig(device="cpu"),
        log=LogConfig(tensorboard=False),
        checkpoint=CheckpointConfig(every_steps=1),
    )
    train(config, console=silent())
    return tmp_path / "run"


def silent():
    return Console(file=io.StringIO(), width=160)


def names_of(evaluation):
    return set(evaluation.metrics)


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


def test_encoders_by_every_name_in_one_table(run, colours, tmp_path):
    torch.manual_seed(1)
    save_encoder(create_encoder(Dimensions(24, 1, 2), 32, 8), tmp_path / "mine.safetensors")
    first, last = sorted((run / "checkpoints").glob("*.safetensors"))
    names = [str(run), str(first), str(last), f"untrained:{run}", str(tmp_path / "mine.safetensors")]
    config = replace(QUICK, task=("knn",), data=str(colours), json=tmp_path / "r.json", csv=tmp_path / "r.csv")
    console = silent()
    found = evaluate(names, config, console)
    assert [one.encoder for one in found] == names
    prints = [one.facts["encoder_fingerprint"] for one in found]
    assert prints[0] == prints[2], "the run's encoder is the target of its newest checkpoint"
    assert len(set(prints)) == 4
    assert len(json.loads((tmp_path / "r.json").read_text())["evaluations"]) == 5
    assert (tmp_path / "r.csv").read_text().count("knn/top1@3") == 5
    assert not (tmp_path / "results.json").exists()


def test_a_timm_model_without_its_weights(colours, tmp_path):
    config = replace(QUICK, task=("knn",), data=str(colours), image_size=32)
    (found,) = evaluate(["untrained:timm:vit_tiny_patch16_224"], config, silent())
    assert found.facts["image_size"] == [32, 32]


def released(folder):
    """A file with the key layout of the I-JEPA and StoP releases."""
    encoder = create_encoder(Dimensions(192, 1, 3), 32, 8)
    state = {f"module.{name}": tensor for name, tensor in encoder.vit.state_dict().items()}
    torch.save(
        {"encoder": state, "target_encoder": state, "predictor": {}, "opt": {}, "epoch": 1}, folder / "r.pth.tar"
    )
    return folder / "r.pth.tar"


def timm_file(folder):
    save_file(create_encoder(Dimensions(192, 1, 3), 32, 8).vit.state_dict(), folder / "timm.safetensors")
    return folder / "timm.safetensors"


def hub_folder(kind):
    def write(folder):
        transformers = pytest.importorskip("transformers", reason="needs the extra hf")
        sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        config = getattr(transformers, f"{kind}Config")(**sizes, image_size=32, patch_size=8)
        getattr(transformers, f"{kind}Model")(config).save_pretrained(folder / kind)
        return folder / kind

    return write


def exported(form):
    def write(folder):
        save_encoder(create_encoder(Dimensions(24, 1, 2), 32, 8), folder / "mine.safetensors")
        return export_encoder(str(folder / "mine.safetensors"), form, folder / form)

    return write


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (released, "{}"),
        (released, "{}#encoder"),
        (timm_file, "{}"),
        (exported("timm"), "{}"),
        (exported("hf"), "{}"),
        (hub_folder("IJepa"), "hf:{}"),
        (hub_folder("ViTMAE"), "{}"),
        (hub_folder("Dinov2"), "hf:{}"),
    ],
    ids=["release", "release#encoder", "timm file", "timm folder", "hf folder", "hf I-JEPA", "hf MAE", "hf DINOv2"],
)
def test_encoders_of_others(colours, tmp_path, write, name):
    torch.manual_seed(0)
    name = name.format(write(tmp_path))
    tasks = ("knn",) if "Dinov2" in name else ("knn", "finetune")
    config = replace(
        QUICK, task=tasks, data=str(colours), finetune=replace(QUICK.finetune, epochs=1, warmup_epochs=0.0)
    )
    found = evaluate([name], config, silent())
    assert [one.task for one in found] == list(tasks)
    assert found[0].metrics["knn-centred/top1@3"] > 80, "four plain colours"
    if tasks == ("knn", "finetune"):
        assert 0 <= found[1].metrics["finetune/top1"] <= 100
    assert not list(tmp_path.glob("**/results.json")), "there is no run to keep them"


def test_a_file_that_runs_code_is_not_evaluated(colours, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "marker"),)

    torch.save({"target_encoder": {}, "opt": Evil()}, tmp_path / "evil.pth.tar")
    before = sorted(tmp_path.iterdir())
    sentence = complaint(capsys, tmp_path / "evil.pth.tar", "--task", "knn", "--data", colours)
    assert "can run code" in sentence
    assert sorted(tmp_path.iterdir()) == before


def test_features_are_computed_once(run, colours, monkeypatch):
    config = replace(QUICK, task=("linear", "knn"), data=str(colours))
    evaluate([str(run)], config, silent())

    def never(*arguments, **options):
        raise AssertionError("the features are stored")

    monkeypatch.setattr("stop_mim.evaluation.features.labelled_views", never)
    first, second = evaluate([str(run)], config, silent())
    assert len(json.loads((run / "results.json").read_text())["evaluations"]) == 2
    assert first.metrics["linear/top1"] == 100
    assert second.metrics["knn/top1@3"] > 50


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
    (found,) = evaluate([str(run)], config, silent())
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


def complaint(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *(str(argument) for argument in arguments)])
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert "Traceback" not in captured.err
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("stop-mim: ")
    return last


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
    assert "can only be scored on videos" in complaint(capsys, f"masks:{tmp_path}", *knn)
    assert "cannot be written" in complaint(capsys, run, *knn, "--json", tmp_path / "none" / "r.json")
    shutil.copytree(colours / "train" / "red", tmp_path / "flat")
    assert "has no labels" in complaint(capsys, run, "--task", "linear", "--data", tmp_path / "flat")
    (davis / "Annotations" / "480p" / "square" / "00002.png").unlink()
    assert "00002" in complaint(capsys, f"masks:{tmp_path / 'made'}", "--task", "video", "--data", davis)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_two_processes_share_the_work(run, colours, tmp_path):
    """Features and SGD heads under torchrun are those of one process."""
    options = [
        *("--task", "knn", "linear-sgd", "--data", str(colours), "--knn.neighbours", "3", "--speed.device", "cpu"),
        *("--linear-sgd.epochs", "1", "--linear-sgd.batch-size", "16", "--linear-sgd.lrs", "0.01"),
        *("--json", str(tmp_path / "two.json")),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "stop_mim"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STOP_MIM_CACHE": str(tmp_path / "own")}
    ended = subprocess.run(
        [*command, "evaluate", str(run), *options], env=environment, capture_output=True, text=True, timeout=180
    )
    assert ended.returncode == 0, ended.stderr
    two = json.loads((tmp_path / "two.json").read_text())["evaluations"]
    config = replace(QUICK, task=("knn", "linear-sgd"), data=str(colours), linear_sgd=LinearSGDOptions(1, 16, (0.01,)))
    one = evaluate([str(run)], config, silent())
    assert two[0]["facts"]["processes"] == 2
    assert two[0]["metrics"] == pytest.approx(one[0].metrics)
    heads = {name: value for name, value in one[1].metrics.items() if name.endswith("/top1")}
    assert len(heads) == 5
    # The processes see other batches: of the few test images one or two may be told differently.
    assert {name: two[1]["metrics"][name] for name in heads} == pytest.approx(heads, abs=15)


@pytest.fixture
def alike(tmp_path):
    """Images of one size, of two classes."""
    random = np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 4)):
        for place, name in enumerate(("dark", "light")):
            folder = tmp_path / "alike" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 120, (40, 40, 3)) + 120 * place
                PIL.Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{name}_{number}.png")
    return tmp_path / "alike"


def test_images_are_decoded_for_the_first_encoder_alone(run, alike, monkeypatch):
    config = replace(QUICK, task=("knn",), data=str(alike))
    monkeypatch.setenv("STOP_MIM_DECODED_GIB", "0")
    (expected,) = evaluate([f"untrained:{run}"], config, silent())
    shutil.rmtree(Path(os.environ["STOP_MIM_CACHE"]) / "features")
    monkeypatch.delenv("STOP_MIM_DECODED_GIB")
    monkeypatch.setattr("stop_mim.data.decoded.LEAST_CACHED_BYTES", 1)
    evaluate([str(run)], config, silent())
    monkeypatch.setattr("stop_mim.data.image_source.decode_image", lambda *arguments: pytest.fail("decoded again"))
    (found,) = evaluate([f"untrained:{run}"], config, silent())
    assert found.metrics == expected.metrics
    assert found.facts["data_fingerprint"] == expected.facts["data_fingerprint"]


def test_the_weights_are_looked_at_once_for_all_tasks_before_they_move(run, alike, monkeypatch):
    looked = []

    def fingerprint(encoder, original=features_module.encoder_fingerprint):
        looked.append(next(encoder.parameters()).device)
        return original(encoder)

    for module in (features_module, session_module):
        monkeypatch.setattr(module, "encoder_fingerprint", fingerprint)
    config = replace(QUICK, task=("linear", "knn", "low-shot"), data=str(alike))
    found = evaluate([str(run)], config, silent())
    # Its own, and once in the name of the features of each split.
    assert len(looked) == 3
    assert len({one.facts["encoder_fingerprint"] for one in found}) == 1


def test_the_linear_probe_can_be_of_standardised_features_alone(run, alike):
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
