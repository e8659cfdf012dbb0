"""Every speed in docs/results/performance.md: each row in a separate process, all compiled together, then measured one by one.

python benchmarks/performance.py --data tiny-imagenet/train.parquet --json performance.json
python benchmarks/performance.py --rows B S --steps 20
"""

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from contenders import CONTENDERS, NOTES

from stop_mim.benchmark.bench import open_run, steps_of
from stop_mim.benchmark.config import BenchConfig
from stop_mim.benchmark.flops import TokenCounts, step_flops
from stop_mim.benchmark.parts import measure_parts
from stop_mim.benchmark.timing import Spread, busy_seconds, matrix_ceiling, measure_step
from stop_mim.sweeps.grid import with_overrides
from stop_mim.training.callbacks.progress import ProgressDisplay
from stop_mim.training.config import TrainConfig
from stop_mim.training.recipes import find_recipe
from stop_mim.training.trial import peak_memory, wait_for

B = {"masks.context_tokens": 49, "masks.target_tokens": 33, "optim.batch_size": 256}
L = {**B, "optim.batch_size": 128}
S = {"masks.context_tokens": 20, "masks.target_tokens": 12, "predictor.depth": 6, "optim.batch_size": 512}
EAGER = {"speed.compile": False, "speed.graph": False}
# Kinds of kernels by their names, the first that fits.
KERNELS = {
    "nvjet|splitk|cublas|cutlass|gemm": "matrix products",
    "sdpa|_forward_kernel|_backward_kernel|flash": "attention",
    "layer_norm": "norms and sums of residuals",
    "gelu": "GELU",
    "lerp": "EMA of the target",
    "fusedoptimizer": "AdamW",
    "multi_tensor": "weight decay, norm of the gradient",
    "reduce_kernel|red_fused": "sums: gradients of biases and norms",
    "_to_copy": "casts",
    "memset|memcpy": "copies",
}

# Name of a row: recipe, what it changes, and how it is measured.
ROWS = {
    "B": ("stop-vitb16", B, "step"),
    "B fixed positions": ("ijepa-vitb16", B, "step"),
    "L": ("stop-vitl16", L, "step"),
    "S": ("stop-tiny-imagenet", S, "data"),
    "S of 2048": ("stop-tiny-imagenet", {**S, "optim.batch_size": 2048}, "data"),
    "parts of B": ("stop-vitb16", B, "parts"),
    "B eager, captured": ("stop-vitb16", {**B, "speed.compile": False}, "step"),
    "B eager": ("stop-vitb16", {**B, **EAGER}, "step"),
    "B plain": ("ijepa-vitb16", {**B, **EAGER}, "plain"),
    "B lightly, masks for nothing": ("ijepa-vitb16", {**B, **EAGER}, "lightly"),
    "B stable-pretraining": ("ijepa-vitb16", {**B, **EAGER}, "stable-pretraining"),
    "L plain": ("ijepa-vitl16", {**L, **EAGER}, "plain"),
    "S eager, captured": ("stop-tiny-imagenet", {**S, "speed.compile": False}, "data"),
    "S eager": ("stop-tiny-imagenet", {**S, **EAGER}, "data"),
    "H/14 of 32, recomputed": ("stop-vith14", {"optim.batch_size": 32, **EAGER, "speed.recompute": True}, "step"),
    "H/14 of 128, recomputed": ("stop-vith14", {"optim.batch_size": 128, **EAGER, "speed.recompute": True}, "step"),
    "H/14 of 32": ("stop-vith14", {"optim.batch_size": 32, **EAGER}, "step"),
}


def chosen_rows(wanted: list[str] | None) -> list[str]:
    """Rows of these names; where no row has the name, those that begin with it."""
    if not wanted:
        return list(ROWS)
    taken = {name for start in wanted for name in ([start] if start in ROWS else ROWS) if name.startswith(start)}
    return [name for name in ROWS if name in taken]


def config_of(name: str, data: str, device: str) -> tuple[TrainConfig, str]:
    recipe, changes, way = ROWS[name]
    # Whole batches, so that all rows and other implementations have the same.
    fixed = {"speed.batch_size_per_device": changes["optim.batch_size"], "speed.device": device}
    config = with_overrides(find_recipe(recipe), {**changes, **fixed})
    return (replace(config, data=data) if way == "data" else config), way


def row_main(name: str, data: str, device_name: str, bench: BenchConfig) -> None:
    """Prepare the row, print "ready", wait for a line, measure, and print the result as JSON."""
    config, way = config_of(name, data, device_name)
    notes: list[str] = []
    torch.manual_seed(0)
    started = time.perf_counter()
    run = open_run(config, way == "data", ProgressDisplay(shown=False), notes.append)
    device, images = run.inputs.ranks.device, run.inputs.per_device * run.inputs.batches_per_step
    counts = TokenCounts.of(run.inputs.draw_masks(0)[0], run.objective.encoder.grid)
    with steps_of(run) as step:
        work = step
        if way in CONTENDERS:
            other = CONTENDERS[way](run, counts)
            notes += [NOTES[way]] if way in NOTES else []
            work = partial(other, next(run.images.starting_at(0)).images, run.inputs.draw_masks(0)[0])
        tokens = work()
        wait_for(device)
        first = time.perf_counter() - started
        for _ in range(bench.warmup):
            work()
        wait_for(device)
        print("ready", file=sys.stderr, flush=True)
        sys.stdin.readline()
        ceiling = matrix_ceiling(device, torch.bfloat16)
        measured = measure_step(work, device, images, bench)
        flops = step_flops(config, counts, images)
        found = {
            "row": name,
            "images_per_second": asdict(measured.images_per_second),
            "milliseconds": asdict(measured.seconds.scaled(1000)),
            "batch": images,
            "tokens": asdict(counts),
            "first_step_seconds": first,
            "peak_gib": peak_memory(device) / 2**30,
            "part_of_ceiling": flops / measured.seconds.median / ceiling,
            "ceiling_tflops": ceiling / 1e12,
            "gflop_an_image": flops / images / 1e9,
            "notes": notes,
        }
        busy = None if way in CONTENDERS else busy_seconds(work, device, 5)
        if busy is not None:
            found["idle_part"] = max(0.0, 1 - busy / measured.seconds.median)
            found["kernels_milliseconds"] = kernel_groups(work, device)
    if way in CONTENDERS:
        notes.append("{} tokens of context, {} of targets in its first step".format(*tokens))
    if way == "parts":
        parts: dict[str, Spread] = measure_parts(run, False, bench.steps, 3, lambda part: None, notes.append)
        found["parts_milliseconds"] = {part: spread.median * 1000 for part, spread in parts.items()}
    print(json.dumps(found), flush=True)


def kernel_groups(work, device: torch.device, steps: int = 3) -> dict[str, float]:
    """Time of a step in kernels of each kind, by their names."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            work()
        wait_for(device)
    groups: dict[str, float] = {}
    for event in profiler.key_averages():
        name = next((group for pattern, group in KERNELS.items() if re.search(pattern, event.key.lower())), "other")
        groups[name] = groups.get(name, 0.0) + event.self_device_time_total / 1e3 / steps
    return dict(sorted(groups.items(), key=lambda item: -item[1]))


def measure_all(names: list[str], options: list[str], at_once: int, json_file: Path | None) -> bool:
    """Measure all rows, `at_once` prepared at the same time; print a row that fails. Return whether none failed."""
    found = []
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    for start in range(0, len(names), at_once):
        rows = {
            name: subprocess.Popen([sys.executable, __file__, "--row", name, *options], **pipes, text=True)
            for name in names[start : start + at_once]
        }
        for process in rows.values():
            # The end of the stream, too, ends the waiting: for a row that fails.
            while (line := process.stderr.readline()) and line.strip() != "ready":
                sys.stderr.write(line)
        for name, process in rows.items():
            output, errors = process.communicate("go\n")
            if process.returncode:
                print(f"{name}: FAILED\n{errors}", flush=True)
                continue
            row = json.loads(output.splitlines()[-1])
            found.append(row)
            print_row(row)
            if json_file is not None:
                json_file.write_text(json.dumps(found, indent=1))
    return len(found) == len(names)


def print_row(row: dict) -> None:
    rate, time_ms, idle = row["images_per_second"], row["milliseconds"], row.get("idle_part", float("nan"))
    print(
        f"{row['row']:55s} {rate['median']:9,.0f} images/s [{rate['low']:,.0f} {rate['high']:,.0f}] "
        f"{time_ms['median']:8.2f} ms  {row['part_of_ceiling']:.1%} of {row['ceiling_tflops']:.0f} TFLOP/s  "
        f"idle {idle:.1%}  {row['peak_gib']:.1f} GiB  first step {row['first_step_seconds']:.0f} s  batch {row['batch']}",
        flush=True,
    )
    for name, value in (row.get("kernels_milliseconds", {}) | row.get("parts_milliseconds", {})).items():
        print(f"    {name:30s} {value:8.2f} ms", flush=True)
    for note in row["notes"]:
        print(f"    {note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="64x64 images for the rows S; without them these rows are left out")
    parser.add_argument("--rows", nargs="*", help="measure these alone, by their names, or by beginnings of names")
    parser.add_argument("--at-once", type=int, default=6, help="rows that are prepared at the same time")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    bench = BenchConfig(steps=given.steps, repeats=given.repeats, warmup=given.warmup)
    if given.row is not None:
        row_main(given.row, given.data, given.device, bench)
        return
    names = [name for name in chosen_rows(given.rows) if given.data or ROWS[name][2] != "data"]
    if missing := [start for start in given.rows or () if not chosen_rows([start])]:
        parser.error(f"no row begins with {', '.join(missing)}: choose from {'; '.join(ROWS)}")
    if not names:
        parser.error("the rows S need --data")
    options = [f"--{name}={getattr(given, name)}" for name in ("data", "steps", "repeats", "warmup", "device")]
    if not measure_all(names, options, given.at_once, given.json):
        sys.exit(1)


if __name__ == "__main__":
    main()
