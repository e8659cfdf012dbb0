"""One run of a sweep: trained, probed and written down; continued, refused, diverged or interrupted."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import torch
from mini_sweep import STEPS, install, mini_config, printed, silent

from stop_mim.errors import InputError
from stop_mim.evaluation.results import read_results
from stop_mim.sweeps.grid import with_overrides
from stop_mim.sweeps.outcome import Outcome, read_outcome, write_outcome
from stop_mim.sweeps.plan import make_plan
from stop_mim.sweeps.probe import Probe
from stop_mim.sweeps.scales import SCALES
from stop_mim.sweeps.worker import Inbox, attempt, sentence
from stop_mim.training.pretrain import train
from stop_mim.training.run_folder import read_metrics
from stop_mim.training.trainer import catch_interruption


@pytest.fixture
def job(tmp_path, monkeypatch):
    install(monkeypatch)
    return list(make_plan("mini", mini_config(tmp_path)).jobs(tmp_path, (0,)))[1]


def test_a_run_is_trained_probed_and_written_down(job):
    assert attempt(job, silent()) is True
    outcome = read_outcome(job.folder)
    assert (outcome.error, outcome.steps) == (None, STEPS)
    last = read_metrics(job.folder)[-1]
    assert outcome.metrics["health/A_norm"] == last["health/A_norm"] > 0
    assert outcome.metrics["health/mask_token_norm"] == last["health/mask_token_norm"]
    found = {one["label"]: one for one in read_results(job.folder / "results.json")}
    assert set(found) == {"count", "distance"}
    for label, one in found.items():
        assert outcome.metrics[f"{label}/linear/top1"] == one["metrics"]["linear/top1"]
        assert one["facts"]["train_images"] == 48
        assert one["facts"]["test_images"] == 40
    assert outcome.probe_seconds > 0
    assert outcome.images_per_second > 0


def test_labelled_images_are_probed_by_the_tasks_of_evaluate(job, tmp_path):
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for name, grey in (("dark", 60), ("light", 190)):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for number in range(count):
                noisy = np.clip(random.normal(grey, 20, (32, 32, 3)), 0, 255).astype(np.uint8)
                PIL.Image.fromarray(noisy).save(tmp_path / "images" / split / name / f"{number}.png")
    probe = replace(SCALES["tiny-imagenet"].probe, data=str(tmp_path / "images"), amounts=("2",))
    probe.check()
    short = with_overrides(job.config, {"optim.epochs": 1})
    assert attempt(replace(job, config=short, probe=probe), silent())
    metrics = read_outcome(job.folder).metrics
    # Grey levels are told apart by any encoder.
    assert metrics["linear/top1"] == 100
    assert {"knn/top1@10", "low-shot/2/top1", "health/A_norm", "linear/last1+bn/top1"} <= set(metrics)
    kinds = {name for name in metrics if name.startswith("linear/last")}
    assert kinds == {"linear/last1+bn/top1"}, "of the linear probe's four kinds of features three are left out"
    assert not [name for name in metrics if name.startswith("low-shot") and "@" in name]
    assert {one["task"] for one in read_results(job.folder / "results.json")} == {"linear", "knn", "low-shot"}


def test_probes_without_their_labels_are_refused(tmp_path):
    with pytest.raises(InputError, match="There is no data set"):
        Probe("labelled", str(tmp_path / "nowhere"), tasks=("knn",)).check()
    with pytest.raises(InputError, match="nowhere"):
        Probe("labelled", "scenes:count=48,size=32", tasks=("knn",), list_file=str(tmp_path / "nowhere")).check()


def test_a_run_that_was_stopped_goes_on_to_the_same_end(job, tmp_path):
    whole = replace(job, config=replace(job.config, out=str(tmp_path / "whole")))
    assert attempt(whole, silent())
    train(replace(job.config, stop_after_steps=11), console=silent())
    assert attempt(job, silent())
    assert read_outcome(job.folder).metrics == read_outcome(whole.folder).metrics


def test_what_a_process_left_that_was_killed_before_its_first_step_is_no_hindrance(job):
    job.folder.mkdir(parents=True)
    (job.folder / ".config.json.x7").write_text("{")
    write_outcome(job.folder, Outcome(error="killed"))
    short = replace(job, config=with_overrides(job.config, {"optim.epochs": 1}))
    assert attempt(short, silent())


def test_divergence_is_recorded(job):
    wild = {"optim.lr": 1e30, "optim.start_lr": 1e30, "optim.final_lr": 1e30, "optim.ema_start": 1.0}
    console = silent()
    assert attempt(replace(job, config=with_overrides(job.config, wild)), console) is False
    outcome = read_outcome(job.folder)
    assert outcome.error.startswith("The loss was not finite for 5 steps in a row")
    assert outcome.metrics == {}
    assert "TrainingDiverged" in printed(console)


def test_another_run_in_the_folder_is_refused(job):
    train(with_overrides(job.config, {"positions.sigma": 0.125, "stop_after_steps": 1}), console=silent())
    assert attempt(job, silent()) is False
    assert "holds another run than this sweep's" in read_outcome(job.folder).error


def test_sentences():
    text = "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has …"
    assert sentence(torch.OutOfMemoryError(text)) == (
        "Out of memory (CUDA out of memory): lower --side-by-side or --speed.batch-size-per-device."
    )
    assert sentence(RuntimeError("one\ntwo")) == "RuntimeError: one two"


def test_the_end_of_the_input_interrupts_the_job_that_is_being_done(job):
    reader, writer = os.pipe()
    with os.fdopen(reader) as stream, catch_interruption() as interruption:
        with os.fdopen(writer, "w") as sender:
            inbox = Inbox(stream)
            sender.write(job.to_line() + "\n")
            sender.flush()
            assert inbox.next_job() == job
            assert not interruption
        # The parent is gone: the thread that listens raises the signal, which this waits for.
        inbox._thread.join(10)
        assert interruption.signal_name == "SIGTERM"
        assert inbox.next_job() is None


def test_processes_that_read_images_begin_while_a_worker_listens(job):
    """They close their standard input first of all, which hangs if a thread of their parent was reading it."""
    reading = (
        "from torch.utils.data import DataLoader; from stop_mim.sweeps.worker import Inbox, own_input\n"
        "inbox = Inbox(own_input())\n"
        "print(inbox.next_job().name, flush=True)\n"
        "print(sum(DataLoader(range(8), batch_size=None, num_workers=2)), flush=True)\n"
    )
    command = [sys.executable, "-c", reading]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        process.stdin.write(job.to_line() + "\n")
        process.stdin.flush()
        # The input stays open, as it does while a sweep has more to do.
        assert process.stdout.readline() == f"{job.name}\n"
        alarm = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
        alarm.start()
        assert process.stdout.readline() == "28\n"
        alarm.cancel()
