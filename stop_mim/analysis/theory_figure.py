"""The propositions by simulation, as a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from stop_mim.analysis import theory
from stop_mim.analysis.drawing import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    SKY,
    VERMILION,
    WIDE,
    add_letter,
)


def theory_figure(runs: Sequence[Path] = ()) -> Figure:
    """Both propositions by simulation; no run has a part in it."""
    figure = Figure(figsize=(WIDE, 5.4), layout="constrained")
    (flat, peaked), (gradients, norms) = figure.subplots(2, 2)
    _draw_smoothing(flat, theory.uniform_prior(6.0), 8.0, "positions uniform from -6 to 6")
    for border in (-6, 6):
        flat.axvline(border, color=GREY, linewidth=0.8, linestyle=":")
    _draw_smoothing(peaked, theory.normal_prior(1.0), 3.0, "positions normal, standard deviation 1")
    figure.legend(*flat.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    _draw_zero_gradients(gradients)
    _draw_toy_norms(norms)
    for axes, letter in zip((flat, peaked, gradients, norms), "abcd", strict=True):
        add_letter(axes, letter)
    return figure


def _draw_smoothing(axes: Axes, prior: theory.Prior, reach: float, title: str) -> None:
    noisy = torch.linspace(-reach, reach, 401, dtype=torch.float64)
    network, points = theory.train_predictor(theory.square_wave, prior, steps=2000), noisy[::16]
    curves: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "clean, E[Y | X = r]": (theory.square_wave(noisy), {"color": GREY, "linewidth": 1}),
        "proposition 1: clean ∗ Gaussian": (
            theory.convolution(theory.square_wave, noisy),
            {"color": ORANGE, "linestyle": "--"},
        ),
        "optimum, E[Y | R = r]": (
            theory.optimal_predictor(theory.square_wave, prior, noisy),
            {"color": BLUE, "linewidth": 2.5},
        ),
    }
    for label, (values, style) in curves.items():
        axes.plot(noisy.numpy(), values.numpy(), label=label, **style)
    dots: dict[str, Any] = {"color": BLACK, "linestyle": "none", "marker": "o", "markersize": 3}
    axes.plot(points.numpy(), network(points).numpy(), label="trained network", **dots)
    axes.set(title=title, xlabel="noisy position r = x + z, z of unit variance", ylabel="prediction")


def _draw_zero_gradients(axes: Axes) -> None:
    counts = [10**power for power in (2, 3, 4, 5)]
    kinds = {"tied": (BLUE, "-", 5.0), "untied": (VERMILION, "-", 5.0), "deterministic": (BLACK, ":", 2.5)}
    for informative, marker in ((True, "o"), (False, "^")):
        found = [theory.gradients_at_zero(theory.ToyTask(informative=informative), count) for count in counts]
        for name, (colour, dashes, size) in kinds.items():
            norms = [getattr(one, name).norm().item() for one in found]
            axes.plot(counts, norms, color=colour, linestyle=dashes, marker=marker, markersize=size)
        axes.plot([], [], color=GREY, marker=marker, linestyle="none", label=_telling(informative))
    for name, (colour, dashes, _) in kinds.items():
        axes.plot([], [], color=colour, linestyle=dashes, label=name.replace("deterministic", "without noise"))
    axes.set(xscale="log", yscale="log", xlabel="samples in the estimate", ylabel="norm of the gradient at A = 0")
    axes.set_ylim(bottom=3e-4)
    axes.legend(loc="lower left", ncols=2, columnspacing=1.0)


def _telling(informative: bool) -> str:
    return "context matters" if informative else "context irrelevant"


def _draw_toy_norms(axes: Axes, seeds: int = 3) -> None:
    cases: tuple[tuple[theory.Tying, bool, str], ...] = (
        ("tied", True, BLUE),
        ("untied", True, VERMILION),
        ("tied", False, SKY),
    )
    for tying, informative, colour in cases:
        task = theory.ToyTask(informative=informative)
        histories = [theory.train_toy(task, tying, seed=seed) for seed in range(seeds)]
        norms = torch.tensor([history.noise_norm for history in histories])
        label = f"{tying}, {_telling(informative)}"
        mean, std = norms.mean(0).numpy(), norms.std(0).numpy()
        axes.plot(histories[0].steps, mean, color=colour, label=label)
        axes.fill_between(histories[0].steps, mean - std, mean + std, color=colour, alpha=0.25, linewidth=0)
    axes.set(xlabel="training step", ylabel=r"$\|A\|$ of the noise")
    axes.set_ylim(bottom=0)
    axes.legend(title=f"mean ± s.d., {seeds} seeds", title_fontsize=8)
