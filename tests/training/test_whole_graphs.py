"""Every objective, with every kind of noise, is one graph to the compiler: a break would split what it can fuse."""

import subprocess
import sys

# In a process of its own: the checks of shapes that the other tests run under cannot be traced.
SCRIPT = """
from dataclasses import replace
import torch
from stop_mim.masking import build_masks
from stop_mim.models.build import build_objective
from stop_mim.training.recipes import find_recipe

def small(name, **positions):
    config = find_recipe(name)
    return replace(
        config,
        encoder=replace(config.encoder, width=32, depth=2, heads=2),
        predictor=replace(config.predictor, width=32, depth=1, heads=2),
        positions=replace(config.positions, **positions),
        objective=replace(config.objective, target_layers=min(2, config.objective.target_layers)),
    )

for name in ("stop-tiny-imagenet", "ijepa-tiny-imagenet", "stop-mae-tiny-imagenet", "stop-data2vec-tiny-imagenet"):
    kinds = [{}] if name.startswith("ijepa") else [{}, {"conditioned": True}, {"kind": "jittered"}]
    for positions in kinds:
        config = small(name, **positions)
        objective = build_objective(config)
        masks = build_masks(config.masks, objective.encoder.grid).sample(2)
        torch._dynamo.reset()
        found = torch._dynamo.explain(objective)(torch.randn(2, 3, 64, 64), masks, objective.draw_noise(masks))
        reasons = [str(reason.reason) for reason in found.break_reasons]
        assert found.graph_count == 1 and not found.graph_break_count, (name, positions, reasons)
print("whole")
"""


def test_every_objective_is_one_graph():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip().endswith("whole"), done.stderr[-3000:]
