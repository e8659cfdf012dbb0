"""The command: four forms, each whole or not there, with a card that tells where it comes from."""

import builtins
import importlib.util
import json
import os
import re

import pytest
import torch
import yaml

import stop_mim
from stop_mim.cli import main
from stop_mim.errors import InputError, MissingExtra
from stop_mim.exchange import export as export_module
from stop_mim.exchange.export import export_encoder, origin_of
from stop_mim.exchange.folder import write_folder
from stop_mim.exchange.model_card import Origin, Score, escape, loading_code, model_card, shown
from stop_mim.exchange.programs import _compare
from stop_mim.models.encoder import save_encoder

FORMS = ("timm", "hf", "onnx", "export")
NEEDS = {"hf": ("transformers",), "onnx": ("onnx", "onnxscript", "onnxruntime")}


def require(form):
    for package in NEEDS.get(form, ()):
        pytest.importorskip(package, reason=f"needs the package {package}")


@pytest.fixture
def results(run):
    evaluation = {
        "encoder": str(run),
        "task": "linear",
        "data": "/home/somebody/private/my|data",
        "metrics": {"linear/top1": 12.34, "linear/last1/top1": 99.0, "low-shot/1%/top1": 5.0, "knn/top1@20": 7.0},
        "facts": {"date": "2026-11-15T10:00:00+00:00"},
    }
    other = {
        **evaluation,
        "encoder": str(run / "checkpoints" / "step-00000001.safetensors"),
        "metrics": {"linear/top1": 1.0},
    }
    document = {"format": "stop-mim results 1", "evaluations": [evaluation, other]}
    (run / "results.json").write_text(json.dumps(document))
    return run


@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_out_and_its_own_card_loads_it(results, tmp_path, form, capsys, monkeypatch):
    require(form)
    monkeypatch.chdir(tmp_path)
    main(["export", str(results), "--to", form, "--out", "given", "--licence", "apache-2.0"])
    assert "Written: given" in capsys.readouterr().out
    card = (tmp_path / "given" / "README.md").read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["license"] == "apache-2.0"
    for fact in ("my-recipe", "scenes:count=16,size=32", "stochastic, sigma 0.25", "apache-2.0", "12.3", "2026-11-15"):
        assert escape(fact) in card
    assert "linear/last1" not in card
    assert "| 1.0 |" not in card, "that is the score of a checkpoint"
    assert "somebody" not in card, "where the data lie is nobody's business"
    assert r"my\|data" in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    assert len(code.strip().splitlines()) <= 5
    # The card's own lines, on images of ours.
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    names = {}
    exec(re.sub(r"images = .*", "images = given_images", code), {"given_images": images}, names)
    tokens = torch.as_tensor(names["tokens"])
    torch.testing.assert_close(tokens, stop_mim.load_encoder(results)(images), atol=1e-4, rtol=1e-4)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("form", ["onnx", "export"])
def test_programs_take_any_number_of_images(encoder, images, tmp_path, form):
    require(form)
    save_encoder(encoder, tmp_path / "ours.safetensors")
    folder = export_encoder(str(tmp_path / "ours.safetensors"), form, tmp_path / "out")
    if form == "export":
        program = torch.export.load(folder / "model.pt2").module()
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        assert session.get_inputs()[0].shape[0] == "batch"

        def program(batch):
            return torch.from_numpy(session.run(None, {"images": batch.numpy()})[0])

    for count in (1, 2, 3):
        torch.testing.assert_close(program(images[:count]), encoder(images[:count]), atol=1e-4, rtol=1e-4)


def test_large_weights_lie_beside_their_program(encoder, images, tmp_path, monkeypatch):
    require("onnx")
    import onnxruntime

    save_encoder(encoder, tmp_path / "ours.safetensors")
    monkeypatch.setattr("stop_mim.exchange.programs.LARGEST_MESSAGE", 0)
    folder = export_encoder(str(tmp_path / "ours.safetensors"), "onnx", tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.onnx", "model.onnx.data"]
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    tokens = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    torch.testing.assert_close(tokens, encoder(images), atol=1e-4, rtol=1e-4)


def test_a_program_that_differs_is_not_kept(encoder):
    with pytest.raises(InputError, match="gives other tokens"):
        _compare(encoder, lambda images: encoder(images) + 1e-3, 1e-4, "onnxruntime")
    with pytest.raises(InputError, match="gives other tokens"):
        _compare(encoder, lambda images: encoder(images) * float("nan"), 1e-4, "onnxruntime")
    _compare(encoder, encoder, 1e-4, "onnxruntime")


def test_a_folder_is_whole_or_not_there(tmp_path):
    place = tmp_path / "new" / "folder"

    def crash(folder):
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(place, crash)
    assert list(place.parent.iterdir()) == []
    place.mkdir()
    write_folder(place, lambda folder: (folder / "file").write_text("whole"))
    assert [path.name for path in place.parent.rglob("*")] == ["folder", "file"]
    assert place.stat().st_mode & 0o777 == 0o777 & ~_umask()
    for taken in (place, place / "file"):
        with pytest.raises(InputError, match="exists and is not an empty folder"):
            write_folder(taken, crash)
    with pytest.raises(InputError, match="cannot be written"):
        write_folder(place / "file" / "below", crash)
    assert (place / "file").read_text() == "whole"


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def complaint(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, arguments)])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_mistakes_are_one_sentence_and_write_nothing(encoder, tmp_path, capsys, monkeypatch):
    path, out = tmp_path / "ours.safetensors", tmp_path / "out"
    save_encoder(encoder, path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert "needs an encoder first" in complaint(capsys, "--to", "timm")
    assert "to is not given" in complaint(capsys, path, "--out", out)
    assert "out is not given" in complaint(capsys, path, "--to", "timm")
    assert "'pdf'" in complaint(capsys, path, "--to", "pdf", "--out", out)
    assert "not an empty folder" in complaint(capsys, path, "--to", "timm", "--out", tmp_path / "full")
    assert "There is no encoder" in complaint(capsys, tmp_path / "none", "--to", "timm", "--out", out)
    assert "push is 'nobody'" in complaint(capsys, path, "--to", "timm", "--out", out, "--push", "nobody")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "no token" in complaint(capsys, path, "--to", "timm", "--out", out, "--push", "some/body")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "onnx" else real(name, *rest))
    assert "stop-mim[onnx]" in complaint(capsys, path, "--to", "onnx", "--out", out)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_encoder_that_fails_midway_leaves_nothing(encoder, tmp_path, monkeypatch):
    save_encoder(encoder, tmp_path / "ours.safetensors")

    def crash(encoder, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setitem(export_module.WRITERS, "timm", crash)
    with pytest.raises(KeyboardInterrupt):
        export_encoder(str(tmp_path / "ours.safetensors"), "timm", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["ours.safetensors"]


class Hub:
    """Stands in for the hub: remembers what it was asked for."""

    calls: list

    def __init__(self, token):
        assert token == "secret"

    def create_repo(self, repository, **options):
        self.calls.append(("create", repository, options))

    def upload_folder(self, *, folder_path, repo_id, commit_message):
        self.calls.append(("upload", repo_id, sorted(path.name for path in folder_path.iterdir())))


@pytest.fixture
def hub(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs the extra hf")
    Hub.calls = []
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "secret")
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub


def test_pushing(encoder, tmp_path, hub, capsys, monkeypatch):
    save_encoder(encoder, tmp_path / "ours.safetensors")
    main(
        [
            *("export", str(tmp_path / "ours.safetensors"), "--to", "timm", "--out", str(tmp_path / "out")),
            "--push",
            "me/it",
        ]
    )
    assert hub.calls == [
        ("create", "me/it", {"private": True, "exist_ok": True}),
        ("upload", "me/it", ["README.md", "config.json", "model.safetensors"]),
    ]
    assert "pushed to me/it" in capsys.readouterr().out.replace("\n", " ")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "'hf-hub:me/it'" in card
    assert str(tmp_path) not in card

    def refuse(self, repository, **options):
        raise OSError("no network\nat all")

    monkeypatch.setattr(Hub, "create_repo", refuse)
    with pytest.raises(InputError, match=r"me/it could not be pushed \(no network at all\): .*out2 is whole"):
        export_encoder(str(tmp_path / "ours.safetensors"), "hf", tmp_path / "out2", push="me/it")
    assert (tmp_path / "out2" / "model.safetensors").exists()


def test_pushing_needs_the_package(monkeypatch):
    real_import = builtins.__import__

    def without_hub(name, *rest, **more):
        if name == "huggingface_hub":
            raise ImportError(name)
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_hub)
    with pytest.raises(MissingExtra, match=r"stop-mim\[hf\]"):
        export_module.require_push("me/it")


def test_text_cannot_break_the_card(encoder):
    nasty = "data`|*_<script>\n# heading\n---\n[x](http://y)"
    origin = Origin(nasty, None, nasty, [Score(nasty, "linear/top1", 1.0, "2026-11-15")])
    card = model_card(encoder, origin, "timm", "out", licence='mit\n---\nevil: "yes"')
    _, header, body = re.split(r"^---$", card, flags=re.MULTILINE)
    assert yaml.safe_load(header)["license"] == 'mit\n---\nevil: "yes"'
    assert "\n# heading" not in body
    assert not re.search(r"(?<!\\)<script", body)
    row = next(line for line in body.splitlines() if "linear/top1" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 5, "four cells, whatever they hold"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pushed", [False, True])
def test_five_lines_that_are_python(encoder, form, pushed):
    lines = loading_code(encoder, form, "o'clock/it", pushed)
    assert len(lines) <= 5
    compile("\n".join(lines), "card", "exec")
    assert ("huggingface_hub" in lines[0]) == (pushed and form in ("onnx", "export"))


def test_where_an_encoder_comes_from(run, tmp_path, monkeypatch):
    newest = max((run / "checkpoints").glob("*.safetensors"))
    for path in (run, run / "encoder.safetensors", newest):
        origin = origin_of(str(path))
        assert (origin.name, origin.recipe, origin.config.optim.batch_size) == ("run", "my-recipe", 8)
    monkeypatch.chdir(run)
    assert origin_of(".").name == "run"
    assert origin_of("timm:vit_tiny_patch16_224").config is None
    (run / "other.pth").write_bytes(b"")
    assert origin_of("other.pth").config is None, "a file that only lies there"
    assert shown("/home/me/photos/") == "photos"
    assert shown("hf:owner/name") == "hf:owner/name"
    (run / "results.json").write_text("[]")
    with pytest.raises(InputError, match="does not hold results"):
        origin_of(str(run))
