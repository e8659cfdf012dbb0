"""Run an experiment of docs/experiments.md again, with the commands that stand there.

    python benchmarks/study.py 12 --data tiny-imagenet-100
    python benchmarks/study.py 12 --data tiny-imagenet-100 --seeds 4 5 --side-by-side 2

DATA is a folder with train.parquet and val.parquet. Runs and scores are written to OUT/experiment-N; the same command continues
there. Options that this script does not know go to the experiment's sweeps.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "experiments.md"
PROGRAM = (sys.executable, "-m", "stop_mim")
# Signals that ask to stop.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Small models fill a GPU better with NVIDIA MPS.
PRELUDE = """set -euo pipefail
trap : INT TERM HUP
stop-mim() {{
    if [ "$1" = sweep ]; then {program} "$@" {more}; else {program} "$@"; fi
}}
if command -v nvidia-cuda-mps-control >/dev/null && nvidia-cuda-mps-control -d; then
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
fi
"""


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a text in this language; commands have none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for kind, block in found if kind == language]


def experiments(page: str) -> dict[int, str]:
    """Return the text of each experiment by its number; 0 is what comes before the first."""
    first, *parts = re.split(r"^## (\d+)\. ", page, flags=re.MULTILINE)
    return {0: first} | {int(number): text for number, text in zip(parts[::2], parts[1::2], strict=True)}


def write_modules(text: str, folder: Path) -> list[Path]:
    """Write the Python blocks of a text to the files that their first lines name; return the files."""
    written = []
    for block in blocks(text, "python"):
        name = block.partition("\n")[0].removeprefix("# ")
        written.append(folder / name)
        written[-1].write_text(block)
    return written


def link(files: Iterable[Path], folder: Path) -> None:
    """Link these files into a folder, unless it has them."""
    for file in files:
        place = folder / file.name
        if not os.path.lexists(place):
            place.symlink_to(file.resolve())
        elif place.resolve() != file.resolve():
            sys.exit(f"study.py: {place} is another file than {file}: choose another --out.")


def script(text: str, more: list[str]) -> str:
    """Return the commands of an experiment as a bash script; `more` is added to its sweeps."""
    return PRELUDE.format(program=shlex.join(PROGRAM), more=shlex.join(more)) + "".join(blocks(text, ""))


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, help="number of the experiment")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and val.parquet")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="folder of all experiments")
    options, more = parser.parse_known_args(given)
    found = experiments(PAGE.read_text())
    if not blocks(found.get(options.number, ""), ""):
        parser.error(f"number is {options.number}: choose from {', '.join(str(n) for n in found if n)}.")
    text = found[options.number]
    if commit := re.search(r"Needs commit (\w+)", text):
        parser.error(f"experiment {options.number} needs commit {commit[1]}: check it out, and type the commands.")
    files = [options.data / name for name in ("train.parquet", "val.parquet")]
    if missing := [str(file) for file in files if not file.exists()]:
        parser.error(f"--data is {options.data}: {', '.join(missing)} does not exist.")
    images, folder = options.out / "images", options.out / f"experiment-{options.number}"
    for one in (images, folder):
        one.mkdir(parents=True, exist_ok=True)
    link(files, images)
    (split,) = write_modules(found[0], images)
    if not (images / "few.parquet").exists():
        subprocess.run([sys.executable, split.name], cwd=images, check=True)
    link(images.glob("*.parquet"), folder)
    write_modules(text, folder)
    print("".join(blocks(text, "")), "".join(f" {one}" for one in more), sep="", file=sys.stderr, flush=True)
    paths = [str(folder.resolve()), str(PAGE.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # In a process group of their own, the commands get Ctrl-C and signals to this script once, from here, and save their runs.
    process = subprocess.Popen(["bash", "-c", script(text, more)], cwd=folder, env=environment, process_group=0)
    asked = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, lambda given, _: os.killpg(process.pid, given)) for number in asked}
    try:
        return process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
