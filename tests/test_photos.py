"""Twenty photographs in a messy folder become an encoder, a report and a timm model by the commands of the README."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from stop_mim.cli import main
from stop_mim.training.run_folder import RunFolder

README = Path(__file__).parents[1] / "README.md"
# The recipe's model takes minutes to train.
SMALL = [
    *("--encoder.image-size", "32", "32", "--encoder.width", "24", "--encoder.depth", "1", "--encoder.heads", "2"),
    *("--encoder.patch-size", "8", "--predictor.width", "16", "--predictor.depth", "1", "--optim.epochs", "2"),
    *("--speed.device", "cpu", "--speed.workers", "0", "--log.no-tensorboard"),
]


def photo(draw, height, width):
    return Image.fromarray(draw.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height))


def write_messy_folder(folder):
    """Twenty photographs, one of which is truncated, and three files that are none."""
    draw = np.random.default_rng(0)
    names = [f"IMG_{number:04}.jpg" for number in range(6)]
    names += [f"2023/DSC{number}.JPG" for number in range(5)] + [
        f"2023/summer at sea/{number}.jpeg" for number in range(5)
    ]
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        photo(draw, 40 + number, 60).save(folder / name, "JPEG")
    photo(draw, 50, 50).convert("RGBA").save(folder / "logo.png")
    photo(draw, 40, 600).save(folder / "panorama.jpg")
    photo(draw, 40, 50).save(folder / "2023" / "chat.webp")
    whole = (folder / names[0]).read_bytes()
    (folder / "2023" / "broken.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "2023" / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic")
    (folder / "notes.txt").write_text("from the sea")
    (folder / "Thumbs.db").write_bytes(b"\0")


def test_the_four_commands_of_the_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_messy_folder(tmp_path / "photos")
    block = re.search(
        r"^```\n(stop-mim pretrain stop-photos .*?)^```", README.read_text(), re.DOTALL | re.MULTILINE
    ).group(1)
    pretrain, report, export, load = (shlex.split(line) for line in block.splitlines())
    main([*pretrain[1:], *SMALL])
    told = capsys.readouterr().err
    # What was derived, measured and skipped.
    assert "2 steps (2 epochs of 1), warm-up 0.2 epochs" in told
    assert "20 images per step, 20 at once" in told
    assert re.search(r"measured +[\d.,]+ images/s, [\d.]+ GiB; about \d+ seconds in all", told)
    assert "broken.jpg" in told
    skipped = "1 unreadable; ignored: 1 .db, 1 .heic, 1 .txt"
    assert skipped in told
    assert skipped in (tmp_path / "runs" / "photos" / "log.txt").read_text()
    assert RunFolder(tmp_path / "runs" / "photos").config().data == str(tmp_path / "photos")
    main(report[1:])
    assert skipped in (tmp_path / "report.html").read_text()
    main(export[1:])
    capsys.readouterr()
    assert load[:2] == ["python", "-c"]
    exec(load[2], {})
    assert capsys.readouterr().out == "24\n"


if __name__ == "__main__":
    write_messy_folder(Path(sys.argv[1]))
