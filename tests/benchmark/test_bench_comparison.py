"""Other implementations: where they come from, which of them run, and what cannot be compared."""

import sys
from dataclasses import replace

import pytest
import torch

from stop_mim.benchmark.bench import run_bench
from stop_mim.benchmark.comparison import FOLDER, Contender, load_contenders
from stop_mim.benchmark.report import ComparedStep, print_report
from stop_mim.benchmark.timing import Spread, StepMeasurement
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


def test_an_implementation_gets_the_batches_of_a_step_and_tells_its_tokens(tiny, short, monkeypatch):
    given = []

    def make(setting):
        def step(batches):
            given.append([(tuple(images.shape), masks.context.shape[1]) for images, masks in batches])
            return len(given), 3

        return Contender(step, None, note="It is different.")

    monkeypatch.setattr("stop_mim.benchmark.bench.load_contenders", lambda: {"another": make})
    report = run_bench(tiny(), replace(short, compare=True), "tiny")
    one = report.comparison[1]
    assert (one.name, one.masks) == ("another", "in its step")
    # One step to warm up, and two runs of two steps: tokens are the mean of one to five.
    assert (one.context, one.targets) == (3, 3)
    assert given == [[((4, 3, 32, 32), report.tokens["context"])] * 2] * 5
    assert "It is different." in report.notes


@pytest.mark.parametrize(("last", "warns"), [(1.05, False), (1.3, True)])
def test_a_machine_that_changes_its_speed_meanwhile_is_told(tiny, short, monkeypatch, last, warns):
    ceilings = iter([1.0, 1.0, 1.0, last])
    monkeypatch.setattr("stop_mim.benchmark.bench.matrix_ceiling", lambda device, dtype: next(ceilings))
    contenders = {"another": lambda setting: Contender(lambda batches: (1, 1), None)}
    monkeypatch.setattr("stop_mim.benchmark.bench.load_contenders", lambda: contenders)
    report = run_bench(tiny(), replace(short, compare=True), "tiny")
    assert report.ceilings == (1.0, 1.0, 1.0, last)
    assert report.ceiling == 1.0
    assert any("was not steady" in note for note in report.notes) == warns


def test_masks_of_a_collator_are_drawn_for_each_batch(tiny, short, monkeypatch):
    drawn, used = [], []

    def collate():
        drawn.append(Masks(torch.zeros(4, 2, dtype=torch.long), torch.zeros(4, 1, 2, dtype=torch.long)))
        return drawn[-1]

    def step(batches):
        used.extend(masks.context.shape[1] for _, masks in batches)
        return 1, 1

    contenders = {"another": lambda setting: Contender(step, collate)}
    monkeypatch.setattr("stop_mim.benchmark.bench.load_contenders", lambda: contenders)
    report = run_bench(tiny(), replace(short, compare=True), "tiny")
    assert [one.masks for one in report.comparison[1:]] == ["beforehand", "collator"]
    assert len(drawn) == 5 * 2
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


def test_tables_cut_no_word_and_no_number_on_a_narrow_terminal(tiny, short, monkeypatch, capsys):
    def compared(name, masks, rate, memory):
        rates = Spread(rate, rate * 0.9, rate * 1.1)
        return ComparedStep(name, masks, 157, 1138, StepMeasurement(rates.over(256), rates, memory))

    report = run_bench(tiny(), short, "tiny")
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "40")
    for memory in (99 * 2**30, None):
        ours = compared("stop-mim", "on device", 4463.0, memory)
        others = (
            compared("plain PyTorch", "beforehand", 758.4, memory),
            compared("stable-pretraining", "in its step", 12741.0, memory),
        )
        print_report(replace(report, comparison=(ours, *others)))
        text = capsys.readouterr().out
        words = (
            "stop-mim",
            "plain PyTorch",
            "stable-pretraining",
            "beforehand",
            "157+1138",
            "5.88x",
            "12,741 ± 1,274",
            "758.4 ± 75.8",
        )
        assert all(word in text for word in words)
        assert ("99.0" in text) == (memory is not None)
