"""Encoders by every name, ours and others', in one table; a file that runs code is none."""

import json
import os
from dataclasses import replace

import pytest
import torch
from quick_evaluation import QUICK, complaint, silent
from safetensors.torch import save_file

from stop_mim.evaluation.evaluate import evaluate
from stop_mim.exchange.export import export_encoder
from stop_mim.models.encoder import Dimensions, create_encoder, save_encoder


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
