"""Released and published models by name, from a server that speaks the hub's protocol, with a checksum."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest
import torch

import stop_mim
from stop_mim.cli import main
from stop_mim.errors import InputError
from stop_mim.exchange.export import export_encoder
from stop_mim.exchange.initial_weights import initialise
from stop_mim.models.build import build_objective
from stop_mim.models.encoder import Encoder
from stop_mim.training.config import EncoderConfig, PositionsConfig, PredictorConfig, TrainConfig

COMMIT = "c" * 40


class Hub(BaseHTTPRequestHandler):
    """A hub with the files of `repositories`, all stored as large files; `listed` overrides the checksums that it lists."""

    repositories: ClassVar[dict] = {}
    listed: ClassVar[dict] = {}
    downloads: ClassVar[list] = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            self.answer_info("/".join(parts[2:4]))
        else:
            assert parts[2] == "resolve", self.path
            self.answer_file("/".join(parts[:2]), "/".join(parts[4:]))

    def answer_info(self, repository):
        if repository not in self.repositories:
            self.send_error(404)
            return
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "blobId": "b",
                "lfs": {"sha256": self.listed.get(name, sha256(data)), "size": len(data), "pointerSize": 130},
            }
            for name, data in self.repositories[repository].items()
        ]
        body = json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
        self.answer(body.encode(), {"Content-Type": "application/json"})

    def answer_file(self, repository, name):
        data = self.repositories[repository][name]
        if self.command == "GET":
            self.downloads.append(name)
        tag, size = f'"{sha256(data)}"', str(len(data))
        self.answer(data, {"ETag": tag, "X-Linked-Etag": tag, "X-Linked-Size": size, "X-Repo-Commit": COMMIT})

    def answer(self, body, headers):
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "repositories", {})
    monkeypatch.setattr(Hub, "listed", {})
    monkeypatch.setattr(Hub, "downloads", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def _released(hub, released):
    Hub.repositories["amirbar1/StoP"] = {"vit-b16.pth.tar": released.read_bytes(), "README.md": b"# StoP"}


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_release_is_downloaded_once_with_its_licence_and_then_needs_no_network(released, hub, capsys, monkeypatch):
    name = "release:stop-vitb16"
    assert same(stop_mim.load_encoder(name), stop_mim.load_encoder(released))
    assert "non-commercial" in capsys.readouterr().err
    assert same(stop_mim.load_encoder(f"{name}#encoder"), stop_mim.load_encoder(f"{released}#encoder"))
    assert Hub.downloads == ["vit-b16.pth.tar"]
    hub.shutdown()
    hub.server_close()
    assert same(stop_mim.load_encoder(name), stop_mim.load_encoder(released))
    assert capsys.readouterr().err == ""
    for missing in ("release:stop-vitl16", "stop-mim/demo", "timm:vit_tiny_patch16_224", "hf:somebody/vit"):
        with pytest.raises(
            InputError, match=r"cache of the Hugging Face hub, and http://127.0.0.1.* cannot be reached"
        ):
            stop_mim.load_encoder(missing)


def test_a_file_with_another_checksum_is_refused_and_not_kept():
    Hub.listed["vit-b16.pth.tar"] = "0" * 64
    for _ in range(2):
        with pytest.raises(InputError, match=r"vit-b16.pth.tar of amirbar1/StoP has the sha256 .* lists 000000000000"):
            stop_mim.load_encoder("release:stop-vitb16")
    assert len(Hub.downloads) == 2


def test_what_the_hub_does_not_have_is_named():
    with pytest.raises(InputError, match=r"has no file vit-l16\.pth\.tar"):
        stop_mim.load_encoder("release:stop-vitl16")
    with pytest.raises(InputError, match="did you mean 'stop-vitb16'"):
        stop_mim.load_encoder("release:stop-vitb")
    with pytest.raises(InputError, match="stop-mim/nothing could not be loaded from the Hugging Face hub"):
        stop_mim.load_encoder("stop-mim/nothing")


def test_a_model_of_transformers_and_a_published_one(transformers, tmp_path, ours):
    shape = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 96}
    transformers.IJepaModel(transformers.IJepaConfig(**shape, image_size=32, patch_size=8)).save_pretrained(
        tmp_path / "ijepa"
    )
    export_encoder(str(ours), "timm", tmp_path / "timm")
    for repository, folder in (("facebook/ijepa_vith14_1k", "ijepa"), ("stop-mim/small", "timm")):
        files = (tmp_path / folder).iterdir()
        Hub.repositories[repository] = {file.name: file.read_bytes() for file in files}
    names = {"release:ijepa-vith14-1k": "ijepa", "hf:facebook/ijepa_vith14_1k": "ijepa", "stop-mim/small": "timm"}
    for name, folder in names.items():
        loaded = stop_mim.load_encoder(name)
        assert isinstance(loaded, Encoder)
        assert same(loaded, stop_mim.load_encoder(tmp_path / folder))
    assert "README.md" not in Hub.downloads


@pytest.mark.parametrize(
    ("config", "kind"),
    [({"model_type": "swin", "patch_size": 4}, "swin"), ({"architecture": "resnet18"}, "model of another library")],
)
def test_a_model_that_is_not_plain_is_refused_before_its_weights_are_downloaded(config, kind):
    weights = {"model.safetensors": b"many", "preprocessor_config.json": b"{}"}
    Hub.repositories["some/body"] = {"config.json": json.dumps(config).encode(), **weights}
    with pytest.raises(InputError, match=f"hf:some/body is a '{kind}', not a plain Vision Transformer"):
        stop_mim.load_encoder("hf:some/body")
    assert Hub.downloads == ["config.json"]


def test_the_name_is_one_of_an_encoder_everywhere(tmp_path, capsys):
    encoder = EncoderConfig("tiny", (64, 64), depth=2)
    config = TrainConfig(encoder=encoder, predictor=PredictorConfig(48, 2), positions=PositionsConfig("sincos"))
    assert "all weights of" in initialise(build_objective(config), "release:stop-vitb16")
    main(["export", "release:stop-vitb16", "--to", "timm", "--out", str(tmp_path / "timm")])
    assert "cc-by-nc-4.0" in (tmp_path / "timm" / "README.md").read_text()
    with torch.device("meta"):
        untrained = stop_mim.load_encoder("untrained:release:ijepa-vitg16-22k")
    assert (untrained.dim, untrained.grid) == (1408, (14, 14))
    capsys.readouterr()
    main(["models"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.rstrip().endswith("downloaded")] == ["release:stop-vitb16"]
