"""A disk that is really full, under export and evaluate: one sentence, nothing half-written, old files intact."""

import shutil
import subprocess

import pytest

from stop_mim.cli import main
from stop_mim.models.encoder import Dimensions, create_encoder
from stop_mim.models.encoder_file import save_encoder


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of 400 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def encoder(tmp_path):
    save_encoder(create_encoder(Dimensions(24, 1, 2), 32, 8), tmp_path / "encoder.safetensors")
    return str(tmp_path / "encoder.safetensors")


def fill(disk, free):
    """Leave so many bytes of the disk."""
    (disk / "filled").write_bytes(bytes(shutil.disk_usage(disk).free - free))


def refuses(disk, capsys, path, *arguments):
    """The command ends with a sentence about the path, and leaves the disk as it was."""
    before = {file: file.read_bytes() for file in disk.rglob("*") if file.is_file()}
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    (sentence,) = (line for line in error.splitlines() if line.startswith("stop-mim: "))
    assert str(path) in sentence
    assert "No space left on device" in sentence
    assert "Traceback" not in error
    assert {file: file.read_bytes() for file in disk.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("form", ["timm", "export"])
def test_export(disk, encoder, capsys, form):
    (disk / "old").mkdir()
    (disk / "old" / "README.md").write_text("an older export")
    fill(disk, free=8192)
    refuses(disk, capsys, disk / "new", "export", encoder, "--to", form, "--out", disk / "new")
    assert not (disk / "new").exists()


def test_evaluate(disk, encoder, colours, capsys, monkeypatch):
    knn = ["evaluate", encoder, "--task", "knn", "--data", str(colours)]
    knn += ["--speed.device", "cpu", "--speed.workers", "0"]
    main([*knn, "--out", str(disk)])
    fill(disk, free=0)
    refuses(disk, capsys, disk / "results.json", *knn, "--out", disk, "--seed", "1")
    refuses(disk, capsys, disk / "r.csv", *knn, "--csv", disk / "r.csv")
    monkeypatch.setenv("STOP_MIM_CACHE", str(disk / "cache"))
    refuses(disk, capsys, disk / "cache", *knn)
    masks = ["--video.masks", disk / "masks", "--video.propagation.short-side", "32"]
    video = ["evaluate", encoder, "--task", "video", "--data", "scenes:count=1,size=32,frames=3", *masks]
    refuses(disk, capsys, disk / "masks", *video, "--speed.device", "cpu")
