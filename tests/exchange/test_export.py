"""`stop-mim export`: every format is complete or absent, and its card says where it comes from and how to load it."""

import os
import re
import sys
from dataclasses import replace

import pytest
import torch
import yaml
from timm.models.vision_transformer import VisionTransformer

import stop_mim
from stop_mim.cli import main
from stop_mim.errors import InputError, MissingExtra
from stop_mim.exchange import EXPORTERS
from stop_mim.exchange import export as export_module
from stop_mim.exchange.export import Origin, export_encoder, model_card
from stop_mim.exchange.formats import Exported, Place, require_same_tokens
from stop_mim.exchange.loading import run_of
from stop_mim.models.fingerprint import encoder_fingerprint
from stop_mim.results import Evaluation, Score, add_results

FORMATS = ("timm", "hf", "onnx", "export")
NEEDS = {"hf": ("transformers",), "onnx": ("onnx", "onnxscript", "onnxruntime")}


def require(name):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package, reason=f"needs the package {package}")


@pytest.fixture
def evaluated(run):
    """A run with scores of its encoder, evaluated under another name, and of other encoders under the run's name."""
    own = encoder_fingerprint(stop_mim.load_encoder(run))
    facts = {"date": "2026-11-15T10:00:00+00:00", "encoder_fingerprint": own}
    scores = [Score("top1", 12.34, headline=True), Score("top1", 99.0, layers=1)]
    data, test = "/home/somebody/private/my|data", "wds:/home/somebody/private/{0..9}.tar"
    whole = Evaluation("~/elsewhere", "linear", "class", data, test, {}, 0, facts, scores=scores)
    low = [Score("top1", 1.0, headline=True)]
    others = [
        replace(whole, encoder=str(run), facts=facts | {"encoder_fingerprint": "of older weights"}, scores=low),
        replace(whole, encoder=str(run), facts={}, scores=low),
    ]
    before = replace(whole, encoder=str(run), scores=[Score("top1", 2.0, headline=True)])
    add_results(run / "results.json", [before, whole, *others])
    return run


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_is_exported_and_the_code_of_its_card_loads_it(evaluated, tmp_path, name, capsys, monkeypatch):
    require(name)
    monkeypatch.chdir(tmp_path)
    main(["export", str(evaluated), "--to", name, "--out", "given", "--licence", "apache-2.0"])
    assert "Written: given" in capsys.readouterr().out
    card = (tmp_path / "given" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["license"] == "apache-2.0"
    training, score = ("my-recipe", "scenes:count=16,size=32", "stochastic, sigma 0.25"), ("linear/top1", "12.3%")
    for fact in (*training, *score, "2026-11-15"):
        assert fact in card
    assert "99.0" not in card
    assert "2.0%" not in card, "an older measurement of the same score"
    assert "1.0%" not in card, "the score of another encoder"
    assert "somebody" not in card, "a folder of the author"
    assert r"my\|data, tested on wds:{0..9}.tar" in card.replace(r"\{", "{").replace(r"\}", "}")
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    assert len(code.strip().splitlines()) <= 5
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    names = {}
    exec(re.sub(r"images = .*", "images = given_images", code), {"given_images": images}, names)
    tokens = torch.as_tensor(names["tokens"])
    torch.testing.assert_close(tokens, stop_mim.load_encoder(evaluated)(images), atol=1e-4, rtol=1e-4)


def test_a_program_with_other_tokens_is_refused(encoder):
    for change in (1e-3, float("nan")):
        with pytest.raises(InputError, match="onnxruntime"):
            require_same_tokens(encoder, lambda images, change=change: encoder(images) + change, 1e-4, "onnxruntime")
    require_same_tokens(encoder, encoder, 1e-4, "onnxruntime")


def test_a_folder_is_readable_by_others(ours, tmp_path):
    before = os.umask(0o022)
    try:
        folder = export_encoder(str(ours), "timm", tmp_path / "out")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def test_a_new_format_is_one_function(ours, tmp_path):
    @EXPORTERS.register("numpy")
    def write(encoder, folder, place):
        (folder / "norm.txt").write_text(str(encoder.vit.norm.weight.tolist()))
        return Exported("numpy", [f"open({place.file('norm.txt')})"])

    try:
        folder = export_encoder(str(ours), "numpy", tmp_path / "out")
        assert f"{folder}/norm.txt" in (folder / "README.md").read_text()
    finally:
        del EXPORTERS._entries["numpy"]


def test_mistakes_are_one_sentence_and_write_nothing(ours, tmp_path, capsys, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(export_module, "get_token", lambda: None)
    for arguments, named in [
        (["--to", "timm", "--out", "full"], "full"),
        (["--to", "pdf", "--out", "out"], "pdf"),
        (["--to", "timm", "--out", "out", "--push", "nobody"], "nobody"),
        (["--to", "timm", "--out", "out", "--push", "some/body"], "HF_TOKEN"),
    ]:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            main(["export", str(ours), *arguments])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert named in line
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtra, match=r"stop-mim\[onnx\]"):
        export_encoder(str(ours), "onnx", tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


class Hub:
    """Stands in for the hub and records the calls."""

    calls: list

    def __init__(self, token):
        assert token == "secret"

    def create_repo(self, repository, **options):
        self.calls.append(("create", repository, options))

    def upload_folder(self, *, folder_path, repo_id, commit_message):
        self.calls.append(("upload", repo_id, sorted(path.name for path in folder_path.iterdir())))


def test_pushing(ours, tmp_path, capsys, monkeypatch):
    Hub.calls = []
    monkeypatch.setattr(export_module, "get_token", lambda: "secret")
    monkeypatch.setattr(export_module, "HfApi", Hub)
    main(["export", str(ours), "--to", "timm", "--out", str(tmp_path / "out"), "--push", "me/it"])
    assert Hub.calls == [
        ("create", "me/it", {"private": True, "exist_ok": True}),
        ("upload", "me/it", ["README.md", "config.json", "model.safetensors"]),
    ]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "'hf-hub:me/it'" in card
    assert str(tmp_path) not in card

    def refuse(self, repository, **options):
        raise OSError("no network\nat all")

    monkeypatch.setattr(Hub, "create_repo", refuse)
    with pytest.raises(InputError, match=r"me/it .*\(no network at all\).*out2"):
        export_encoder(str(ours), "hf", tmp_path / "out2", push="me/it")
    assert (tmp_path / "out2" / "model.safetensors").exists()


def test_text_cannot_break_the_card(encoder):
    nasty = "data`|*_<script>\n# heading\n---\n[x](http://y)"
    origin = Origin(nasty, None, nasty, [("linear/top1", nasty, "1.0", "2026-11-15")])
    card = model_card(encoder, origin, Exported("timm", ["import timm"]), licence='mit\n---\nevil: "yes"')
    _, header, body = re.split(r"^---$", card, flags=re.MULTILINE)
    assert yaml.safe_load(header)["license"] == 'mit\n---\nevil: "yes"'
    assert "\n# heading" not in body
    assert not re.search(r"(?<!\\)<script", body)
    row = next(line for line in body.splitlines() if "linear/top1" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 5, "four cells, whatever they hold"


@pytest.mark.parametrize("on_hub", [False, True])
def test_loading_code_of_odd_names_is_python(encoder, tmp_path, on_hub):
    for name in ("timm", "hf", "export"):
        (folder := tmp_path / name).mkdir()
        exported = EXPORTERS[name](encoder, folder, Place("o'clock/it", on_hub))
        compile("\n".join(exported.code), "card", "exec")
        assert ("huggingface_hub" in exported.code[0]) == (on_hub and name == "export")


def test_the_run_of_an_encoder(run, monkeypatch):
    newest = max((run / "checkpoints").glob("*.safetensors"))
    for path in (run, run / "encoder.safetensors", newest):
        assert run_of(path) == run
    monkeypatch.chdir(run)
    assert run_of(".") == run
    (run / "other.pth").write_bytes(b"")
    assert run_of("other.pth") is run_of("timm:vit_tiny_patch16_224") is None
    assert export_module._origin_of(".", stop_mim.load_encoder(".")).recipe == "my-recipe"


def test_what_evaluate_stores_is_in_the_card(run, tmp_path):
    knn, data = "count/knn/neighbours=20/top1", "scenes:count=40,size=32"
    options = ["--task", "knn", "--data", data, "--label", "count"]
    for more in ([], ["--image-size", "64"]):
        main(["evaluate", str(run), *options, *more])
    scores = export_module._origin_of(str(run), stop_mim.load_encoder(run)).scores
    seen = f"{data}, tested on scenes:count=8,size=32,seed="
    names = [(name, re.sub(r"seed=\d+", "seed=", where)) for name, where, *_ in scores]
    assert names == [(knn, seen), (knn, f"{seen}, 64x64 pixels")]
    newest = str(max((run / "checkpoints").glob("*.safetensors")))
    assert export_module._origin_of(f"{newest}#encoder", stop_mim.load_encoder(f"{newest}#encoder")).scores == []


def test_scores_of_the_class_token_are_those_of_the_encoder_too():
    vit = VisionTransformer(32, 8, embed_dim=48, depth=1, num_heads=3, num_classes=0)
    encoder = stop_mim.Encoder(vit)
    found = export_module._fingerprints(encoder)
    assert encoder.pool == "mean"
    encoder.pool = "cls"
    assert len(found) == 2
    assert encoder_fingerprint(encoder) in found


def test_a_card_has_the_name_of_a_file_without_its_folders(ours, encoder, monkeypatch):
    monkeypatch.chdir(ours.parent)
    monkeypatch.setenv("HOME", str(ours.parent))
    for name in (ours.name, f"./{ours.name}", f"../{ours.parent.name}/{ours.name}", f"~/{ours.name}"):
        assert export_module._origin_of(name, encoder).name == ours.name
    (ours.parent / "link.safetensors").symlink_to(ours)
    assert export_module._origin_of("link.safetensors", encoder).name == "link.safetensors"
    write = export_encoder(ours.name, "timm", ours.parent / "model")
    monkeypatch.chdir(write)
    assert export_module._origin_of(".", encoder).name == "model"
    assert export_module._origin_of("timm:vit_tiny_patch16_224", encoder).name == "timm:vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/home/me/a:b/photos", "photos"),
        ("/home/me/2026:photos/", "2026:photos"),
        ("~/photos", "photos"),
        ("wds:/home/me/a:b/{0..9}.tar", "wds:{0..9}.tar"),
        ("wds:https://host/a/{0..9}.tar", "wds:https://host/a/{0..9}.tar"),
        ("https://host/a/b.parquet", "https://host/a/b.parquet"),
        ("photos/train", "photos/train"),
        ("hf:owner/name", "hf:owner/name"),
        ("scenes:count=40,size=32", "scenes:count=40,size=32"),
    ],
)
def test_a_card_names_data_without_the_folders_of_their_author(name, shown):
    assert export_module._short(name) == shown
