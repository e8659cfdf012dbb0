import shutil
import struct
from dataclasses import replace

import matplotlib
import pytest
from analysed_runs import pretend, probed
from matplotlib.figure import Figure

from stop_mim.analysis import FIGURES, figures, theory
from stop_mim.analysis.figures import STYLE, draw_figures, set_sigma_axis
from stop_mim.analysis.runs import read_records
from stop_mim.errors import InputError
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
            noise = positions.sigma * (1 if positions.covariance == "tied" else 8) * (1 + seed)
            A_norm = 10.0 / (1 + positions.sigma)
            signs = probed(50.0 + number + 2 * seed, A_norm, positions.sigma, noise)
            made.append(pretend(stop_run, folder / f"{name}-{seed}", seed=seed, signs=signs, positions=positions))
    return made


@pytest.fixture(autouse=True)
def _small_pictures(monkeypatch):
    monkeypatch.setattr("stop_mim.analysis.predictions.PICTURE_SIDE", 48)


@pytest.fixture
def quick_theory(monkeypatch):
    """The simulations are tested elsewhere: here they need only end."""
    predictor, toy, gradients = theory.train_predictor, theory.train_toy, theory.gradients_at_zero
    monkeypatch.setattr(theory, "train_predictor", lambda clean, prior, steps: predictor(clean, prior, steps=3))
    monkeypatch.setattr(theory, "train_toy", lambda task, tying, steps, seed: toy(task, tying, steps=3, seed=seed))
    monkeypatch.setattr(theory, "gradients_at_zero", lambda task, count: gradients(task, min(count, 1000)))


def named(sweep, *names):
    return [path for path in sweep if path.name.rsplit("-", 1)[0] in names]


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def assert_nothing_is_cut_off(figure):
    with matplotlib.rc_context(STYLE):
        figure.draw_without_rendering()
    width, height = figure.canvas.get_width_height()
    box = figure.get_tightbbox().transformed(figure.dpi_scale_trans)
    assert min(box.x0, box.y0) >= -1
    assert box.x1 <= width + 1
    assert box.y1 <= height + 1


def test_all_figures_have_their_axes_and_labels_and_nothing_is_cut_off(sweep, tmp_path, quick_theory, monkeypatch):
    told, drawn, runs = [], [], named(sweep, "fixed", "tied-0.1", "tied-1.0", "identity-0.1")
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure) or [path])
    draw_figures(["all"], runs, tmp_path, told.append)
    assert told == []
    # Of 5, 6 and positions with the colour bar: three queries of seven kinds, four images with five pictures, five panels.
    axes = dict(zip(FIGURES, (4, 2, 3, 3 * 7 + 1, 4 * 5 + 1, 3, 4, 3, 6), strict=True))
    assert {name: len(figure.axes) for name, figure in zip(FIGURES, drawn, strict=True)} == axes
    for name, figure in zip(FIGURES, drawn, strict=True):
        assert_nothing_is_cut_off(figure)
        for one in figure.axes:
            if one.get_xticks().size and not one.images and one.get_label() != "<colorbar>" and name != "1":
                assert one.get_xlabel()
                assert any(beside.get_ylabel() for beside in one.get_shared_y_axes().get_siblings(one))


def test_a_figure_is_written_as_pdf_and_png_the_same_to_the_byte_every_time(sweep, tmp_path):
    """With its samples of noise."""
    pdf, png = draw_figures(["1"], named(sweep, "tied-0.25"), tmp_path / "first")
    assert {path.name for path in (tmp_path / "first").iterdir()} == {"figure-1.pdf", "figure-1.png"}
    assert pdf.read_bytes().startswith(b"%PDF")
    # At 200 dots an inch a picture is not narrower than a column.
    assert struct.unpack(">I", png.read_bytes()[16:20])[0] > 700
    for file, again in zip(
        (pdf, png), draw_figures(["1"], named(sweep, "tied-0.25"), tmp_path / "second"), strict=True
    ):
        assert file.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(("name", "axes"), [("1", 3), ("positions", 5)])
def test_figures_do_without_what_one_run_does_not_have(sweep, name, axes):
    """Scores of runs without noise in figure 1, and their predictions."""
    assert len(FIGURES[name](named(sweep, "tied-0.25"), None).axes) == axes


def test_figure_1_shows_scores_beside_those_of_fixed_positions_alone(sweep, stop_run, tmp_path):
    learned = pretend(stop_run, tmp_path / "learned", signs=probed(99.0), positions=PositionsConfig(kind="learned"))
    bars = FIGURES["1"]([*named(sweep, "tied-0.25", "fixed"), learned], None).axes[3].patches
    assert [bar.get_height() for bar in bars] == [51.0, 53.0]


def test_figure_3_shows_means_over_seeds_and_says_how_many(sweep):
    figure = figures.learned_covariance_figure(sweep)
    axes, at_power = figure.axes
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
    # The same scores at the noise of the models, averaged over the seeds.
    tied, identity = (container.lines[0] for container in at_power.containers)
    assert tied.get_ydata().tolist() == [52.0, 53.0, 54.0]
    assert tied.get_xdata().tolist() == pytest.approx([0.15, 0.375, 1.5])
    assert identity.get_xdata().tolist() == pytest.approx([1.2, 12.0])


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


def test_mistakes_are_one_sentence_each(sweep, stop_run, tmp_path):
    finer = EncoderConfig("tiny", image_size=(32, 48), patch_size=4, width=24, depth=2, heads=2)
    other_grid = pretend(stop_run, tmp_path / "finer", encoder=finer)
    sigma = PositionsConfig(sigma=2.0)
    other_data = pretend(stop_run, tmp_path / "data", data="scenes:count=8,size=40", positions=sigma)
    bare = pretend(stop_run, tmp_path / "bare")
    shutil.rmtree(bare / "checkpoints")
    pixels = pretend(stop_run, tmp_path / "mae", objective=ObjectiveConfig(kind="mae"), masks=MaskConfig(kind="random"))
    tied, fixed = named(sweep, "tied-0.25", "tied-1.0"), named(sweep, "fixed")
    for names, runs, score, named_value in [
        (["2"], tied, None, "'2'"),
        (["3"], tied, None, "positions.covariance"),
        (["3"], [], None, "--runs"),
        (["4"], named(sweep, "tied-0.25"), None, "positions.sigma"),
        (["1"], fixed, None, "stochastic"),
        (["5"], fixed, None, "stochastic"),
        (["5"], [*tied, other_grid], None, "4x6"),
        (["6"], [*tied, other_data], None, "scenes:count=8,size=40"),
        (["6"], [bare], None, "bare"),
        (["6"], [pixels], None, "mae"),
        (["4"], [*tied, tmp_path], None, "config.json"),
        (["4"], [*tied, other_data], None, "differ in data"),
        (["1"], sweep, "guesses", "'guesses'"),
        (["4"], sweep, "guesses", "'guesses'"),
    ]:
        with pytest.raises(InputError) as caught:
            draw_figures(names, runs, tmp_path / "out", score=score)
        assert named_value in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_of_all_those_that_cannot_be_drawn_are_left_out(sweep, tmp_path, monkeypatch):
    monkeypatch.setattr(FIGURES, "_entries", {name: FIGURES[name] for name in ("3", "4", "loss")})
    monkeypatch.setattr(FIGURES, "_listed", {})
    told = []
    files = draw_figures(["all"], named(sweep, "tied-0.25"), tmp_path, told.append)
    assert {file.stem.removeprefix("figure-") for file in files} == {"loss"}
    assert [text.split(":")[0] for text in told] == ["Figure 3 is left out", "Figure 4 is left out"]
