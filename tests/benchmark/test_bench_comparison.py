"""Other implementations: where they come from, which of them run, and what cannot be compared."""

import sys
from dataclasses import replace

import pytest
import torch

from stop_mim.benchmark.bench import run_bench
from stop_mim.benchmark.comparison import FOLDER, Contender, load_contenders
from stop_mim.errors import InputError
from stop_mim.masking import Masks


@pytest.fixture
def _clone():
    if not (FOLDER / "compare.py").is_file():
        pytest.skip("needs the benchmarks folder of a clone")


@pytest.mark.usefixtures("_clone")
def test_what_is_not_installed_is_named_and_the_plain_model_is_measured(tiny, short, monkeypatch, capsys):
    for package in ("lightly", "stable_pretraining"):
        monkeypatch.setitem(sys.modules, package, None)
    path = list(sys.path)
    report = run_bench(tiny(), replace(short, compare=True), "tiny")
    rows = [(one.name, one.masks) for one in report.comparison]
    assert rows == [("stop-mim", "on device"), ("plain PyTorch", "beforehand"), ("plain PyTorch", "collator")]
    counts = {(one.context, one.targets) for one in report.comparison}
    assert counts == {(report.tokens["context"], report.tokens["blocks"] * report.tokens["target"])}
    shown = capsys.readouterr().out
    assert "lightly is skipped" in shown
    assert "stable-pretraining is skipped" in shown
    assert "1.00x" in shown
    assert sys.path == path


def test_an_implementation_that_fails_is_named_and_the_others_are_kept(tiny, short, monkeypatch):
    def fails(setting):
        raise TypeError("an argument that it no longer has\nand more")

    contenders = {
        "broken": fails,
        "huge": lambda setting: torch.empty(10**17),
        "another": lambda setting: Contender(lambda batches: (1, 1), None),
    }
    monkeypatch.setattr("stop_mim.benchmark.bench.load_contenders", lambda: contenders)
    report = run_bench(tiny(), replace(short, compare=True), "tiny")
    assert [one.name for one in report.comparison] == ["stop-mim", "another"]
    assert "broken is skipped: it failed with TypeError: an argument that it no longer has" in report.notes
    assert "huge is skipped: it does not fit into memory." in report.notes


def test_a_machine_that_changes_its_speed_meanwhile_is_told(tiny, short, monkeypatch):
    ceilings = iter([1.0, 1.0, 1.05, 1.3])
    monkeypatch.setattr("stop_mim.benchmark.bench.matrix_ceiling", lambda device, dtype: next(ceilings))
    contenders = {"another": lambda setting: Contender(lambda batches: (1, 1), None)}
    monkeypatch.setattr("stop_mim.benchmark.bench.load_contenders", lambda: contenders)
    report = run_bench(tiny(), replace(short, compare=True), "tiny")
    assert report.ceilings == (1.0, 1.0, 1.05, 1.3)
    assert report.ceiling == 1.0
    assert any("was not steady" in note for note in report.notes)


def test_masks_of_a_collator_are_drawn_for_each_batch(tiny, short, monkeypatch):
    drawn, used = [], []

    def collate():
        drawn.append(Masks(torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 1, 2, dtype=torch.long)))
        return drawn[-1]

    def step(batches):
        used.extend(masks.context.shape[1] for _, masks in batches)
        return len(used), 1

    contenders = {"another": lambda setting: Contender(step, collate, note="It is different.")}
    monkeypatch.setattr("stop_mim.benchmark.bench.load_contenders", lambda: contenders)
    report = run_bench(tiny(), replace(short, compare=True), "tiny")
    assert [one.masks for one in report.comparison[1:]] == ["beforehand", "collator"]
    # One step to warm up, and two runs of two steps, of two batches each; tokens are the mean over the steps.
    assert len(drawn) == 5 * 2
    assert report.comparison[1].context == 6
    assert "It is different." in report.notes
    assert used == [report.tokens["context"]] * 10 + [2] * 10


@pytest.mark.parametrize(
    ("kind", "images", "words"),
    [("mae", "synthetic", "objective.kind is mae"), ("ijepa", "data", "bench.images is data")],
)
def test_what_cannot_be_compared_is_refused(tiny, short, kind, images, words):
    with pytest.raises(InputError, match=words):
        run_bench(tiny(kind), replace(short, compare=True, images=images))


def test_a_package_without_its_clone_says_so(tmp_path):
    with pytest.raises(InputError, match="clone of the repository"):
        load_contenders(tmp_path)
