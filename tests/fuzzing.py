"""Damaged files of every kind that the package reads: each is read, or refused with a sentence, in bounded time and memory.

python tests/fuzzing.py SECONDS [KIND …]
"""

import io
import json
import random
import re
import resource
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from unittest import mock

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from stop_mim.analysis import figures
from stop_mim.analysis.runs import read_records
from stop_mim.cli import main
from stop_mim.data.data_files import find_files
from stop_mim.data.decode import BadImage, decode_image
from stop_mim.data.sources import scenes
from stop_mim.data.sources.parquet import ParquetSource
from stop_mim.data.sources.shards import ShardSource
from stop_mim.errors import InputError
from stop_mim.exchange.loading import load_encoder
from stop_mim.models.build import build_encoder, build_objective
from stop_mim.models.config import EncoderConfig, PositionsConfig, PredictorConfig
from stop_mim.models.encoder_file import save_encoder
from stop_mim.results import Evaluation, Score, add_results
from stop_mim.training.callbacks.health import HealthSigns
from stop_mim.training.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from stop_mim.training.config import TrainConfig
from stop_mim.training.config_file import read_config
from stop_mim.training.run_folder import RunFolder

SECONDS_EACH, MORE_BYTES = 60, 2**30
JUNK = [None, True, -1, 10**30, 1e30, float("nan"), "", "\x1b[2J", [], {}, [[1]], {"a": 1}, 2**40]


def picture(kind="PNG"):
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def write_parquet(path):
    rows = [{"bytes": picture(), "path": "a.png"}] * 5
    pq.write_table(pa.table({"image": rows, "label": [0, 1, 0, 1, 0]}), path)


def write_tar(path):
    with tarfile.open(path, "w") as archive:
        files = {"a.png": picture(), "a.cls": b"1", "b.jpg": picture("JPEG"), "b.json": b'{"label": 2}'}
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def tiny_encoder():
    torch.manual_seed(0)
    return build_encoder(EncoderConfig("tiny", image_size=(16, 16), patch_size=8, width=16, depth=1, heads=2))


def write_run(folder, sigma=0.25):
    """A run with a checkpoint, health signs and scores, as if it had been trained."""
    run, config = RunFolder(folder), tiny_run_config(folder, sigma)
    (images := folder.with_name("images")).mkdir(exist_ok=True)
    (images / "a.png").write_bytes(picture())
    run.create(config, "tiny")
    for step in range(1, 4):
        values = {f"health/{one.name}": step for one in fields(HealthSigns)}
        run.record(step, {"loss": 1.0 / step, "lr": 1e-3, "epoch": step / 4, "probe/knn_top1": 9.0 * step, **values})
    run.write_status("running", 3, 9)
    weights = {f"model.{name}": tensor for name, tensor in build_objective(config).state_dict().items()}
    save_checkpoint(Checkpoint(3, weights, {}), folder / "checkpoints" / "step-00000003.safetensors")
    scores = [Score("top1", 50.0, 1, {"lr": 0.1}, True, low=40.0, high=60.0)]
    more = ("linear", "class", "a", "a", {"name": "x"}, 0)
    runs = [Evaluation(name, *more, {"chance": 10.0}, scores=scores) for name in ("run", "untrained:run")]
    add_results(folder / "results.json", runs)


def tiny_run_config(folder, sigma):
    return TrainConfig(
        # Relative: a damaged absolute path may be that of a folder with all files of the machine.
        data="images",
        out=str(folder),
        encoder=EncoderConfig("tiny", image_size=(32, 32), patch_size=8, width=16, depth=1, heads=2),
        predictor=PredictorConfig(width=16, depth=1, heads=2),
        positions=PositionsConfig(sigma=sigma),
    )


def read_images(source):
    for index in range(len(source)):
        try:
            source.read(index)
        except BadImage:
            continue


def read_run(folder):
    records = read_records(folder)
    records.scores()
    assert records.last_step >= 0
    assert records.total_steps is None or records.total_steps >= 0
    run = RunFolder(folder)
    run.skipped()
    run.recipe()
    # A config without data means all scenes, which take a minute to draw.
    with mock.patch.dict(scenes._DEFAULTS, count=16):
        run_command(["report", str(folder), "--out", str(folder.parent / "report.html")])
    sessions = run.environment_file.read_bytes()
    run.resume_at(2)
    # Thousands of sessions would make every later report slow.
    run.environment_file.write_bytes(sessions)


def write_runs(folder):
    """The run, and two others that figures compare it with."""
    for path, sigma in ((folder, 0.25), (folder.with_name("more"), 0.5), (folder.with_name("none"), 0.0)):
        write_run(path, sigma)


def draw_runs(folder):
    runs = (str(folder.with_name(name)) for name in ("none", folder.name, "more"))
    # Ticks, labels and layout without the files, which take most of the time.
    with mock.patch.object(figures, "save_figure", lambda figure, path: [figure.draw_without_rendering()][1:]):
        run_command(["figure", "loss", "4", "--runs", *runs])


def run_command(arguments):
    """Run a command in this process: it works, or it ends with exit code 2 and one sentence."""
    errors, code = io.StringIO(), 0
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    sentence = errors.getvalue()
    if (code, sentence) != (0, "") and not (code == 2 and re.fullmatch("stop-mim: .+\n", sentence)):
        raise RuntimeError(f"exit code {code}: {sentence}")


# Kind: how the file is called and written, and what reads it.
KINDS = {
    **{
        kind: (
            f"a.{kind}",
            lambda path: path.write_bytes(picture(path.suffix[1:])),
            lambda path: decode_image(path.read_bytes(), "a"),
        )
        for kind in ("png", "jpeg", "tiff", "webp")
    },
    "parquet": ("a.parquet", write_parquet, lambda path: read_images(ParquetSource(find_files([str(path)]), "a"))),
    "tar": ("a.tar", write_tar, lambda path: read_images(ShardSource(str(path)))),
    "encoder": ("a.safetensors", lambda path: save_encoder(tiny_encoder(), path), load_encoder),
    "checkpoint": (
        "step-00000001.safetensors",
        lambda path: save_checkpoint(Checkpoint(1, {"model.a": torch.ones(9)}, {"run": {}}), path),
        read_checkpoint,
    ),
    "release": (
        "a.pth.tar",
        lambda path: torch.save({"target_encoder": tiny_encoder().vit.state_dict(), "epoch": 3}, path),
        load_encoder,
    ),
    "config": ("config.json", lambda path: RunFolder(path.parent).write_config(TrainConfig()), read_config),
    "yaml": (
        "a.yaml",
        lambda path: path.write_text("data: a\nseed: 3\noptim:\n  lr: 1e-3\n  betas: [0.9, 0.95]\n"),
        read_config,
    ),
    **{
        f"run {name}": (f"run/{name}", lambda path: write_run(path.parent), lambda path: read_run(path.parent))
        for name in ("config.json", "metrics.jsonl", "status.json", "results.json", "environment.json")
    },
    **{
        f"figures of {name}": (f"run/{name}", lambda path: write_runs(path.parent), lambda path: draw_runs(path.parent))
        for name in ("config.json", "metrics.jsonl", "results.json")
    },
}


def mutated(content, chance):
    """Bytes flipped, removed, repeated or inserted, the end cut off, or one value of JSON replaced."""
    if content[:1] in b"{[" and chance.random() < 0.6:
        return _mutated_json(content, chance)
    content = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 8, 64])):
        place, length = chance.randrange(len(content) + 1), chance.choice([1, 2, 4, 100])
        kind = chance.randrange(5)
        if kind == 0 and place < len(content):
            content[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del content[place : place + length]
        elif kind == 2:
            content[place:place] = content[place : place + length]
        elif kind == 3:
            content[place : place + length] = chance.choice([b"\0", b"\xff", b"9", b"["]) * length
        elif chance.random() < 0.1:
            del content[place:]
    return bytes(content)


def _mutated_json(content, chance):
    lines = content.splitlines() if content.startswith(b'{"step"') else [content]
    place = chance.randrange(len(lines))
    document = json.loads(lines[place])
    if chance.random() < 0.05:
        lines[place] = b"[" * 100_000
        return b"\n".join(lines)
    parent, key, value = None, None, document
    while isinstance(value, dict | list) and value and (parent is None or chance.random() < 0.8):
        parent, key = value, chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = parent[key]
    if parent is None or (isinstance(parent, dict) and chance.random() < 0.2):
        document = chance.choice(JUNK) if parent is None else (parent.pop(key), document)[1]
    else:
        parent[key] = chance.choice(JUNK)
    lines[place] = json.dumps(document).encode()
    return b"\n".join(lines)


def fuzz(kind, seeds, folder):
    """Read a mutation for each seed; return what went wrong, by seed."""
    name, write, read = KINDS[kind]
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    whole, failures = path.read_bytes(), {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, _too_long)
    for seed in seeds:
        path.write_bytes(mutated(whole, random.Random(f"{kind} {seed}")))
        signal.alarm(SECONDS_EACH)
        try:
            with warnings.catch_warnings(), chdir(folder):
                warnings.simplefilter("ignore")
                read(path)
        except (InputError, BadImage):
            pass
        except Exception:
            failures[seed] = traceback.format_exc()
        finally:
            signal.alarm(0)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        if grown > MORE_BYTES:
            failures[seed] = f"{grown / 2**30:.1f} GiB of memory"
            before += grown // 1024
    return failures


def _too_long(number, frame):
    raise RuntimeError(f"more than {SECONDS_EACH} seconds")


def fuzz_all(seconds, kinds):
    """Fuzz all kinds in turn, with new seeds, until the time is over."""
    started, seed, count, failed = time.monotonic(), 0, 0, 0
    while time.monotonic() - started < seconds:
        for kind in kinds or KINDS:
            with tempfile.TemporaryDirectory() as folder:
                for number, text in fuzz(kind, range(seed, seed + 100), folder).items():
                    failed += 1
                    print(f"--- {kind} {number}\n{text}", flush=True)
                count += 100
        seed += 100
    print(f"{count} files, {failed} failures, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    fuzz_all(float(sys.argv[1]), sys.argv[2:])
