"""The folder of a run: never another one's, and after a resume as if there had been no interruption."""

import json
import subprocess
import sys

import pytest
import torch
from tiny_run import quietly, run, tiny_config

from stop_mim.errors import InputError
from stop_mim.training.checkpoint import SUFFIX, checkpoint_path, checkpoints_in
from stop_mim.training.pretrain import resume
from stop_mim.training.run_folder import LOCK_FILE, RunFolder, read_metrics


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def test_a_new_folder_holds_the_configuration(folder):
    config = tiny_config(seed=5)
    with pytest.raises(InputError, match="contains no run"):
        folder.config()
    folder.path.mkdir()
    folder.create(config, "tiny")
    assert RunFolder(folder.path).config() == config
    assert folder.recipe() == "tiny"


def test_a_folder_with_a_run_or_anything_else_is_refused(folder):
    folder.path.mkdir()
    (folder.path / "thesis.tex").write_text("")
    for never in ("thesis.tex", "thesis.tex/run", ""):
        with pytest.raises(InputError, match="choose another --out"):
            RunFolder(folder.path / never).require_new()
    (folder.path / "thesis.tex").unlink()
    folder.create(tiny_config(), "tiny")
    before = folder.config_file.read_bytes()
    for refused in (folder.require_new, lambda: folder.create(tiny_config(seed=1), "tiny")):
        with pytest.raises(InputError, match=f"stop-mim resume {folder.path}"):
            refused()
    assert folder.config_file.read_bytes() == before


def test_records_that_cannot_be_read_are_an_input_error(folder):
    folder.create(tiny_config(), "tiny")
    folder.config_file.write_text('{"optim": 3}')
    folder.environment_file.write_text("")
    for file, reads in (
        ("config", folder.config),
        ("environment", folder.recipe),
        ("environment", lambda: folder.record_environment({})),
    ):
        with pytest.raises(InputError, match=rf"{file}\.json cannot be read"):
            reads()
    assert folder.environment_file.read_text() == ""


@pytest.mark.parametrize("torn", ["", '{"step": 9, "lo', "4\n", "\0\0\0\0"])
def test_a_resumed_run_forgets_what_was_measured_after_its_checkpoint(folder, torn):
    folder.create(tiny_config(), "tiny")
    for step in range(1, 9):
        folder.record(step, {"loss": 1 / step})
    with folder.metrics_file.open("a") as file:
        file.write(torn)
    assert [line["step"] for line in read_metrics(folder.path)] == list(range(1, 9))
    folder.resume_at(6)
    assert [json.loads(line)["step"] for line in folder.metrics_file.read_text().splitlines()] == list(range(1, 7))
    folder.record(7, {"loss": 0.125})
    assert read_metrics(folder.path)[-1] == {"step": 7, "loss": 0.125}
    assert len(read_metrics(folder.path)) == 7


def test_later_checkpoints_are_set_aside(folder):
    folder.create(tiny_config(), "tiny")
    folder.checkpoints.mkdir()
    for step in (4, 8, 12):
        checkpoint_path(folder.checkpoints, step).write_text(str(step))
    folder.resume_at(8)
    assert list(checkpoints_in(folder.checkpoints)) == [4, 8]
    assert folder.newest_checkpoint() == checkpoint_path(folder.checkpoints, 8)
    # Set aside, not removed: somebody may have resumed from the wrong one.
    assert {file.name: file.read_text() for file in folder.checkpoints.iterdir() if "12" in file.name} == {
        "step-00000012.safetensors.superseded": "12"
    }


def test_a_sharded_checkpoint_can_be_set_aside_twice(folder):
    folder.create(tiny_config(), "tiny")
    for contents in ("first", "second"):
        path = checkpoint_path(folder.checkpoints, 8, SUFFIX)
        path.mkdir(parents=True)
        (path / "shard").write_text(contents)
        folder.resume_at(4)
    (aside,) = folder.checkpoints.iterdir()
    assert (aside / "shard").read_text() == "second"


def test_files_of_the_user_are_no_lists_of_bad_images(folder):
    folder.path.mkdir()
    for name in ("bad_images.txt", "bad_images.rank3.txt", "bad_images.probe-test.txt"):
        (folder.path / name).write_text("")
    folder.require_new()
    folder.discard_bad_images()
    (folder.path / "bad_images_of_my_camera.txt").write_text("")
    with pytest.raises(InputError, match="not an empty directory"):
        folder.require_new()
    folder.discard_bad_images()
    assert [path.name for path in folder.path.iterdir()] == ["bad_images_of_my_camera.txt"]


def test_every_session_is_recorded_with_its_versions(folder):
    folder.create(tiny_config(), "tiny")
    folder.record_environment({"resumed_at_step": 4})
    first, second = json.loads(folder.environment_file.read_text())
    assert first["recipe"] == "tiny"
    assert second["resumed_at_step"] == 4
    assert first["packages"]["torch"] == second["packages"]["torch"] == torch.__version__.split("+")[0]
    assert all(first["packages"].get(name) for name in ("timm", "numpy", "safetensors", "torchvision"))
    assert first["threads"] == torch.get_num_threads()
    assert folder.recipe() == "tiny"


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path):
    run(tiny_config(out=tmp_path / "run", stop_after_steps=2))
    holder = "import sys; from stop_mim.files import locked; from pathlib import Path\n"
    holder += "with locked(Path(sys.argv[1])) as is_ours:\n    print(is_ours, flush=True)\n    sys.stdin.read()"
    command = [sys.executable, "-c", holder, str(tmp_path / "run" / LOCK_FILE)]
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        with pytest.raises(InputError, match="is being trained by another process"):
            quietly(resume, tmp_path / "run")
        assert {path: path.read_bytes() for path in before} == before
        # Killed, it leaves the lock file behind, which then holds nobody up, and perhaps partial files.
        other.kill()
    assert (tmp_path / "run" / LOCK_FILE).exists()
    partial = [tmp_path / "run" / name for name in (".encoder.safetensors.a1b2c3d4", ".status.json.a1b2c3d4")]
    partial.append(tmp_path / "run" / "checkpoints" / ".step-00000003.safetensors.a1b2c3d4")
    for file in partial:
        file.write_text("half")
    assert quietly(resume, tmp_path / "run", stop_after_steps=3)[0].step == 3
    assert not any(file.exists() for file in [*partial, tmp_path / "run" / LOCK_FILE])
