import shutil
import struct
from dataclasses import replace

import matplotlib
import pytest
import torch
from analysed_runs import pretend, probed
from matplotlib.figure import Figure

from stop_mim.analysis import figures, theory
from stop_mim.analysis.demo_figures import positions_figure
from stop_mim.analysis.drawing import STYLE, save_figure, set_sigma_axis
from stop_mim.analysis.figures import FIGURES, draw_figures
from stop_mim.analysis.runs import open_run, read_records
from stop_mim.errors import InputError
from stop_mim.positions import SinCosPositions, StochasticPositions
from stop_mim.training.config import EncoderConfig, MaskConfig, ObjectiveConfig, PositionsConfig


@pytest.fixture(scope="module")
def sweep(stop_run, tmp_path_factory):
    """Two seeds without noise, of three learned and of two fixed covariances, whose accuracies are known."""
    folder, made = tmp_path_factory.mktemp("sweep"), []
    kinds = {"fixed": PositionsConfig(kind="sincos")}
    kinds |= {f"tied-{sigma}": PositionsConfig(sigma=sigma) for sigma in (0.1, 0.25, 1.0)}
    kinds |= {f"identity-{sigma}": PositionsConfig(sigma=sigma, covariance="identity") for sigma in (0.1, 1.0)}
    for number, (name, positions) in enumerate(kinds.items()):
        for seed in (0, 1):
            signs = probed(
                50.0 + number + 2 * seed, A_norm=10.0 / (1 + positions.sigma), mask_token_norm=positions.sigma
            )
            made.append(pretend(stop_run, folder / f"{name}-{seed}", seed=seed, signs=signs, positions=positions))
    return made


@pytest.fixture
def quick_theory(monkeypatch):
    """The simulations are tested elsewhere: here they need only end."""
    predictor, toy = theory.train_predictor, theory.train_toy
    monkeypatch.setattr(theory, "train_predictor", lambda clean, prior, steps: predictor(clean, prior, steps=3))
    monkeypatch.setattr(theory, "train_toy", lambda task, tying, seed: toy(task, tying, steps=3, seed=seed))
    monkeypatch.setattr(theory, "gradients_at_zero", lambda task, count: GRADIENTS(task, min(count, 1000)))


GRADIENTS = theory.gradients_at_zero


def named(sweep, *names):
    return [path for path in sweep if path.name.rsplit("-", 1)[0] in names]


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def test_all_figures_are_written_as_pdf_and_png(sweep, tmp_path, quick_theory):
    told = []
    files = draw_figures(["all"], sweep, tmp_path / "figures", told.append)
    assert told == []
    assert [file.name for file in files] == [f"figure-{name}.{kind}" for name in FIGURES for kind in ("pdf", "png")]
    assert set(FIGURES) >= {"1", "3", "4", "5", "6", "theory"}
    for file in files:
        content = file.read_bytes()
        assert len(content) > 4000
        assert content.startswith(b"%PDF" if file.suffix == ".pdf" else b"\x89PNG")
    # At 200 dots an inch no picture is narrower than a column.
    widths = [struct.unpack(">I", file.read_bytes()[16:20])[0] for file in files if file.suffix == ".png"]
    assert min(widths) > 700
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == sorted(file.name for file in files)


@pytest.mark.parametrize(
    ("name", "kinds", "axes"),
    [
        ("1", ["tied-0.25"], 3),
        ("1", ["tied-0.25", "fixed"], 4),
        ("3", ["fixed", "tied-0.1", "tied-1.0", "identity-0.1", "identity-1.0"], 1),
        ("4", ["tied-0.1", "tied-1.0"], 3),
        # Three queries without noise, as a sample and as a mean, and the colour bar.
        ("5", ["tied-0.25"], 3 * 3 + 1),
        ("5", ["fixed", "tied-0.25", "identity-0.1"], 3 * 5 + 1),
        # Four images, their contexts and a map for each kind of run.
        ("6", ["tied-0.25"], 4 * 3 + 1),
        ("6", ["fixed", "tied-0.1", "tied-1.0"], 4 * 5 + 1),
        ("covariance", ["tied-0.1", "tied-1.0"], 3),
    ],
)
def test_figures_have_their_axes_and_labels(sweep, name, kinds, axes):
    figure = FIGURES[name](named(sweep, *kinds))
    assert len(figure.axes) == axes
    for one in figure.axes:
        with_ticks = one.get_xticks().size and one.get_yticks().size and one.get_xscale() and not one.images
        if with_ticks and one.get_label() != "<colorbar>" and name != "1":
            assert one.get_xlabel()
            assert one.get_ylabel()


def test_figure_1_shows_scores_beside_those_of_fixed_positions_alone(sweep, stop_run, tmp_path):
    learned = pretend(stop_run, tmp_path / "learned", signs=probed(99.0), positions=PositionsConfig(kind="learned"))
    bars = FIGURES["1"]([*named(sweep, "tied-0.25", "fixed"), learned]).axes[3].patches
    assert [bar.get_height() for bar in bars] == [51.0, 53.0]


def test_nothing_is_cut_off(sweep):
    for name in ("1", "3", "4", "5", "6", "covariance"):
        with matplotlib.rc_context(STYLE):
            figure = FIGURES[name](sweep)
            figure.draw_without_rendering()
        width, height = figure.canvas.get_width_height()
        box = figure.get_tightbbox().transformed(figure.dpi_scale_trans)
        assert box.x0 >= -1, name
        assert box.y0 >= -1, name
        assert box.x1 <= width + 1, name
        assert box.y1 <= height + 1, name


def test_figure_3_shows_means_over_seeds_and_says_how_many(sweep):
    figure = figures.learned_covariance_figure(sweep)
    (axes,) = figure.axes
    tied, identity = (container.lines[0] for container in axes.containers)
    # Kinds are numbered from 0, and the second seed is two points better.
    assert tied.get_ydata().tolist() == [52.0, 53.0, 54.0]
    assert identity.get_ydata().tolist() == [55.0, 56.0]
    assert tied.get_xdata().tolist() == [0.1, 0.25, 1.0]
    bars = axes.containers[0].lines[2][0].get_segments()
    assert bars[0][:, 1].tolist() == pytest.approx([52 - 2**0.5, 52 + 2**0.5])
    level = lines(axes)["fixed positions (σ = 0)"]
    assert set(level.get_ydata()) == {51.0}
    assert figure.legends[0].get_title().get_text() == "mean ± s.d., 2 seeds"
    assert "variance of n" in axes.get_xlabel()
    assert "%" in axes.get_ylabel()


def test_figure_4_shows_norms_and_accuracy_of_tied_runs_alone(sweep):
    figure = figures.sigma_figure(sweep)
    drawn = [lines(axes)["learned, Σ = σAAᵀ (StoP)"] for axes in figure.axes]
    assert drawn[0].get_ydata().tolist() == pytest.approx([10 / 1.1, 8.0, 5.0])
    assert drawn[1].get_ydata().tolist() == pytest.approx([0.1, 0.25, 1.0])
    assert drawn[2].get_ydata().tolist() == [52.0, 53.0, 54.0]
    assert len(figure.axes[0].collections) == 1
    low, high = figure.axes[2].collections[0].get_paths()[0].vertices[1:3, 1], 52 + 2**0.5
    assert low.min() == pytest.approx(52 - 2**0.5)
    assert figure.axes[2].collections[0].get_paths()[0].vertices[:, 1].max() == pytest.approx(high + 2)


def test_sigmas_that_are_close_share_a_label(stop_run):
    runs = [
        replace(records, config=replace(records.config, positions=PositionsConfig(sigma=sigma)))
        for records in [read_records(stop_run)]
        for sigma in (0.001, 0.01, 0.1, 0.25, 1.0, 10.0)
    ]
    axes = Figure().subplots()
    set_sigma_axis(axes, runs)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.001", "0.01", "0.1", "", "1", "10"]
    assert axes.get_xticks()[3] == 0.25
    set_sigma_axis(axes, runs[2:5])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.1", "0.25", "1"]


def test_one_seed_has_no_band_and_the_figure_says_so(sweep):
    figure = figures.sigma_figure([path for path in sweep if path.name.endswith("-0")])
    assert figure.legends[0].get_title().get_text() == "one seed each"
    vertices = figure.axes[2].collections[0].get_paths()[0].vertices[:, 1]
    assert sorted(set(vertices)) == [51.0, 52.0, 53.0]


def test_figures_can_be_drawn_again_to_the_byte(sweep, tmp_path):
    chosen = named(sweep, "tied-0.25")
    first, again = (draw_figures(["covariance"], chosen, tmp_path / part) for part in ("first", "again"))
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_a_figure_needs_nothing_but_the_run_folders(sweep, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(named(sweep, "tied-0.25")[0], moved)
    assert len(draw_figures(["6"], [moved], tmp_path / "out")) == 2


def test_mistakes_are_one_sentence_each(sweep, stop_run, tmp_path):
    finer = EncoderConfig("tiny", image_size=(32, 48), patch_size=4, width=24, depth=2, heads=2)
    other_grid = pretend(stop_run, tmp_path / "finer", encoder=finer)
    other_data = pretend(
        stop_run, tmp_path / "data", data="scenes:count=8,size=40", positions=PositionsConfig(sigma=2.0)
    )
    bare = pretend(stop_run, tmp_path / "bare")
    shutil.rmtree(bare / "checkpoints")
    pixels = pretend(stop_run, tmp_path / "mae", objective=ObjectiveConfig(kind="mae"), masks=MaskConfig(kind="random"))
    tied, fixed = named(sweep, "tied-0.25", "tied-1.0"), named(sweep, "fixed")
    cases = [
        (["2"], tied, "There is no figure '2': choose among 1, 3, 4, 5, 6, covariance, theory and all."),
        ([], tied, "No figure is named: choose among"),
        (["3"], tied, "Figure 3 compares learned and fixed covariances over sigma: name runs with"),
        (["3"], [], "Figure 3 needs runs: name their folders with --runs."),
        (["4"], named(sweep, "tied-0.25"), "Figure 4 is about sigma: name runs with"),
        (["1"], fixed, "Figure 1 is about noise: name a run with stochastic positions"),
        (["5"], fixed, "Figure 5 is about noise: name a run with stochastic positions"),
        (["5"], [*tied, other_grid], "4x6 patches and"),
        (["6"], [*tied, other_data], "figure 6 compares runs on the same images."),
        (["6"], [bare], "has no checkpoint: train it until it has saved one"),
        (["4"], [*tied, tmp_path], "holds no run (no config.json): name the folder of a run."),
        (["4"], [*tied, other_data], "differ in data: compare runs that differ in their noise and seed alone."),
    ]
    for names, runs, sentence in cases:
        with pytest.raises(InputError) as caught:
            draw_figures(names, runs, tmp_path / "out")
        assert sentence in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="does not fit its run's configuration"):
        draw_figures(["6"], [pixels], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for scored in ("1", "4"):
        with pytest.raises(InputError, match="do not all have the score 'guesses': choose one of"):
            draw_figures([scored], sweep, tmp_path / "out", score="guesses")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        draw_figures(["4"], tied, tmp_path / "file" / "below")


def test_of_all_those_that_cannot_be_drawn_are_told(sweep, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "FIGURES", {name: FIGURES[name] for name in ("3", "4", "covariance")})
    told = []
    files = draw_figures(["all"], named(sweep, "tied-0.25"), tmp_path, told.append)
    assert {file.stem for file in files} == {"figure-covariance"}
    assert [text.split(":")[0] for text in told] == ["Figure 3 is left out", "Figure 4 is left out"]


def test_the_theory_needs_no_runs(quick_theory):
    figure = FIGURES["theory"]([])
    assert len(figure.axes) == 4
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)


def test_a_figure_that_fails_leaves_nothing_behind(tmp_path):
    figure = figures.Figure()
    figure.subplots().set_title(r"$\nonsense{$")
    with pytest.raises(ValueError, match="nonsense"):
        save_figure(figure, tmp_path / "figure-x")
    assert list(tmp_path.iterdir()) == []


def test_the_demos_picture_of_positions_works_on_small_grids(stop_run, tmp_path):
    positions = open_run(stop_run).objective.positions
    for grid in ((4, 6), (2, 2), (1, 3)):
        smaller = StochasticPositions(SinCosPositions(grid, positions.dim), torch.nn.Linear(24, positions.dim))
        positions_figure(smaller, tmp_path / "positions.png")
        assert (tmp_path / "positions.png").stat().st_size > 4000
    assert torch.is_grad_enabled()
