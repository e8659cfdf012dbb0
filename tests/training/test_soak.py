"""Long tests, which run with `pytest -m slow`: faults for ten minutes, and 20,000 steps without growth.

pytest -m slow tests/training/test_soak.py            # STOP_MIM_SOAK_SECONDS=120 for a shorter one
"""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_process import Command, at_step, check_good, few_images, full_disk, killed_after
from tiny_run import assert_same_checkpoint, checkpoint_at, tiny_config

from stop_mim import cli
from stop_mim.training.checkpoint import checkpoints_in
from stop_mim.training.config import CheckpointConfig, LogConfig, OptimConfig, SpeedConfig
from stop_mim.training.recipes import find_recipe
from stop_mim.training.run_folder import RunFolder

SECONDS = float(os.environ.get("STOP_MIM_SOAK_SECONDS") or 600)
STEPS = 60
STEPS_OF_HYGIENE = int(os.environ.get("STOP_MIM_SOAK_STEPS") or 20_000)

pytestmark = pytest.mark.slow


def demo_run(folder, images):
    """The demo's model on a folder of images, which two workers decode."""
    demo = find_recipe("demo")
    config = replace(
        demo,
        data=str(images),
        out=str(folder),
        optim=replace(demo.optim, epochs=STEPS // 4, batch_size=8, warmup_epochs=1.0),
        speed=SpeedConfig(device="cpu", precision="fp32", workers=2),
        log=LogConfig(every_steps=1, health_every_steps=20),
        checkpoint=CheckpointConfig(every_steps=5, keep=3),
    )
    RunFolder(folder).create(config, "demo")
    return folder


def kill_worker():
    for worker in multiprocessing.active_children()[:1]:
        os.kill(worker.pid, signal.SIGKILL)


def damage_newest(folder, chance):
    """Between two sessions: one bit of the newest checkpoint, if there is an older one."""
    steps = checkpoints_in(folder / "checkpoints")
    if len(steps) > 1:
        path = steps[max(steps)]
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content[: chance.choice([len(content), len(content) // 2])])


def session(folder, images, chance):
    """Continue the run with one random fault; return the fault's name and the exit code."""
    done = max(checkpoints_in(folder / "checkpoints"), default=0)
    step, name = done + chance.randrange(1, 12), chance.choice(["kill", "signal", "disk", "worker", "data", "damage"])
    away = images.with_name("away")
    faults = {
        "kill": killed_after(chance.uniform(0.1, 2)),
        "signal": at_step(step, lambda: os.kill(os.getpid(), chance.choice([signal.SIGTERM, signal.SIGUSR1]))),
        "disk": at_step(step, full_disk(chance.choice([2_000, 100_000, 2_000_000]))),
        "worker": at_step(step, kill_worker),
        "data": at_step(step, lambda: images.rename(away)),
    }
    if name == "damage":
        damage_newest(folder, chance)
        faults[name] = faults["signal"]
    command = Command(["resume", folder, "--or-older"], folder.parent / "output.txt", faults[name])
    code = command.wait(300)
    if away.exists():
        away.rename(images)
    assert code in (0, 2, -signal.SIGPROF, 128 + signal.SIGTERM, 128 + signal.SIGUSR1), command.text()
    if code == 2:
        command.sentence()
    check_good(folder, every=5)
    return name, code


def test_random_faults_for_minutes_change_nothing(tmp_path):
    images, chance, faults = few_images(tmp_path / "images"), random.Random(0), Counter()
    cli.main(["resume", str(demo_run(tmp_path / "quiet", images))])
    expected, started, runs = checkpoint_at(tmp_path / "quiet", STEPS), time.monotonic(), 0
    while time.monotonic() - started < SECONDS:
        folder, runs = demo_run(tmp_path / f"run-{runs}", images), runs + 1
        while max(checkpoints_in(folder / "checkpoints"), default=0) < STEPS:
            faults[session(folder, images, chance)] += 1
        assert Command(["resume", folder], tmp_path / "output.txt").wait(300) == 0
        assert_same_checkpoint(checkpoint_at(folder, STEPS), expected)
        assert not list(folder.rglob(".*"))
    print(f"{runs} runs of {STEPS} steps, {sum(faults.values())} sessions with a fault: {dict(faults)}")


def resident_kib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def test_memory_handles_and_logs_stay_bounded_over_20000_steps(tmp_path):
    seen, every = [], STEPS_OF_HYGIENE // 20
    config = tiny_config(
        few_images(tmp_path / "images"),
        tmp_path / "run",
        optim=OptimConfig(epochs=STEPS_OF_HYGIENE // 4, batch_size=8, warmup_epochs=1.0),
        speed=SpeedConfig(device="cpu", workers=0),
        log=LogConfig(every_steps=every // 2, health_every_steps=every),
        checkpoint=CheckpointConfig(every_steps=every),
    )
    RunFolder(tmp_path / "run").create(config, "tiny")

    def measure():
        from stop_mim.training.trainer import Trainer

        take = Trainer.take_step

        def take_and_measure(trainer, batches):
            if trainer.done % every == 0:
                seen.append((resident_kib(), len(os.listdir("/proc/self/fd"))))
                (tmp_path / "seen.txt").write_text(repr(seen))
            return take(trainer, batches)

        Trainer.take_step = take_and_measure

    command = Command(["resume", tmp_path / "run"], tmp_path / "output.txt", measure)
    assert command.wait(3600) == 0, command.text()
    memory, handles = zip(*eval((tmp_path / "seen.txt").read_text()), strict=True)
    assert len(memory) == 20
    # The first steps fill caches.
    assert max(memory[-5:]) < 1.02 * max(memory[3:8]), memory
    assert max(handles) <= handles[1] + 1, handles
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert sizes["metrics.jsonl"] < 100_000
    assert sizes["log.txt"] < 20_000
    assert len(sizes) < 12, sizes
