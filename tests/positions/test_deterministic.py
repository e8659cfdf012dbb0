"""Tables of positions: what sine and cosine say, what is learned, and other grids."""

import ast
from pathlib import Path

import pytest
import torch

import stop_mim.positions
from stop_mim.positions import JitteredPositions, LearnedPositions, SinCosPositions, sincos_positions

GRID, DIM = (3, 5), 8


@pytest.mark.parametrize(
    "path", sorted(Path(stop_mim.positions.__file__).parent.glob("*.py")), ids=lambda path: path.name
)
def test_imports_torch_alone(path):
    tree = ast.parse(path.read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    outside = {name.split(".")[0] for name in modules if not name.startswith("stop_mim.positions.")}
    assert outside <= {"torch", "abc", "math", "collections", "typing"}


def test_sincos_is_row_major_and_separable():
    table = SinCosPositions(GRID, DIM)(torch.arange(15)[None])[0].unflatten(0, GRID)
    assert table.shape == (3, 5, DIM)
    columns, rows = table[..., : DIM // 2], table[..., DIM // 2 :]
    assert torch.equal(columns[0], columns[2])
    assert torch.equal(rows[:, 0], rows[:, 4])
    # Worked out by hand for dim 8: frequencies 1 and 0.01, column 4, row 2.
    expected = torch.tensor([4.0, 0.04]), torch.tensor([2.0, 0.02])
    torch.testing.assert_close(columns[2, 4], torch.cat([expected[0].sin(), expected[0].cos()]))
    torch.testing.assert_close(rows[2, 4], torch.cat([expected[1].sin(), expected[1].cos()]))


def test_the_table_is_the_continuous_function_at_whole_coordinates():
    rows, columns = (torch.arange(size, dtype=torch.float32) for size in GRID)
    continuous = sincos_positions(rows[:, None].expand(GRID), columns.expand(GRID), DIM)
    assert torch.equal(continuous.flatten(0, 1), SinCosPositions(GRID, DIM).table())
    # Computed where the coordinates are.
    assert sincos_positions(rows.to("meta"), rows.to("meta"), DIM).device.type == "meta"


def test_sincos_positions_are_distinct_and_not_parameters():
    positions = SinCosPositions(14, 384)
    assert not list(positions.parameters())
    assert not positions.state_dict()
    distances = torch.cdist(positions.table(), positions.table()) + torch.eye(196) * 100
    assert distances.min() > 0.1


def test_learned_positions_are_learned(indices):
    positions = LearnedPositions(GRID, DIM)
    positions(indices).sum().backward()
    touched = positions.weight.grad.abs().sum(-1) > 0
    assert touched.nonzero().flatten().tolist() == [0, 1, 4, 7, 14]


@pytest.mark.parametrize("kind", [SinCosPositions, LearnedPositions])
def test_resizing_keeps_the_grid_it_has_and_follows_the_image(kind):
    positions = kind((4, 6), DIM)
    torch.testing.assert_close(positions.resized((4, 6)).table(), positions.table(), atol=1e-6, rtol=0)
    fine = positions.resized((12, 18))
    assert fine.grid == (12, 18)
    # The centre patch of each 3x3 group has the coarse patch's own centre.
    centres = fine.table().unflatten(0, (12, 18))[1::3, 1::3].flatten(0, 1)
    if kind is SinCosPositions:
        torch.testing.assert_close(centres, positions.table(), atol=1e-5, rtol=0)
    assert fine.table().shape == (12 * 18, DIM)


@pytest.mark.parametrize("kind", [SinCosPositions, JitteredPositions])
def test_resizing_there_and_back_is_no_resizing(kind):
    positions = kind((4, 6), DIM)
    torch.testing.assert_close(positions.resized((9, 7)).resized((4, 6)).table(), positions.table(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", [SinCosPositions, LearnedPositions])
def test_positions_without_noise_ignore_what_noise_needs(kind, indices):
    positions = kind(GRID, DIM)
    told = positions(indices, tokens="context", context=torch.randn(2, 4, 12), generator=torch.Generator())
    assert torch.equal(told, positions(indices))
    assert positions.noise_power() == 0


def test_bad_grids_and_widths_are_named():
    with pytest.raises(ValueError, match="dim is 6"):
        SinCosPositions(GRID, 6)
    with pytest.raises(ValueError, match="grid is 0x5"):
        LearnedPositions((0, 5), 8)
