"""Tables of positions: the values of sine and cosine, and learned ones."""

import ast
import sys
from pathlib import Path

import pytest
import torch

import stop_mim.positions
from stop_mim.errors import InputError
from stop_mim.positions import LearnedPositions, SinCosPositions

GRID, DIM = (3, 5), 8


def test_the_package_needs_torch_alone():
    package, around = Path(stop_mim.positions.__file__).parent, {"errors", "options", "constraints", "registry"}
    for path in [*package.glob("*.py"), *(package.with_name(f"{name}.py") for name in around)]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        own = {name.split(".")[1] for name in modules if name.startswith("stop_mim.")}
        assert own <= {"positions", *around}
        assert {name.split(".")[0] for name in modules} <= {"torch", "stop_mim", *sys.stdlib_module_names}


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


def test_sincos_positions_are_not_parameters():
    positions = SinCosPositions(14, 384)
    assert not list(positions.parameters())
    assert not positions.state_dict()
    with torch.device("meta"):
        assert SinCosPositions(14, 384).table().device.type == "meta"


def test_learned_positions_are_learned(indices):
    positions = LearnedPositions(GRID, DIM)
    positions(indices).sum().backward()
    touched = positions.weight.grad.abs().sum(-1) > 0
    assert touched.nonzero().flatten().tolist() == [0, 1, 4, 7, 14]


@pytest.mark.parametrize("kind", [SinCosPositions, LearnedPositions])
def test_fixed_positions_draw_no_noise(kind, indices):
    positions = kind(GRID, DIM)
    assert positions.draw_noise(indices) is None
    assert torch.equal(positions(indices, tokens="context"), positions(indices))
    assert positions.noise_power() == 0


def test_bad_grids_and_widths_are_named():
    with pytest.raises(InputError, match="dim is 6"):
        SinCosPositions(GRID, 6)
    with pytest.raises(InputError, match="grid is 0x5"):
        LearnedPositions((0, 5), 8)
