"""Encoder files of version 0.1 load and give the features that version 0.1 computed.

The files were made at commit 0359865 (torch 2.15, CPU):
stop-mim pretrain demo --data scenes:count=64,size=32 --encoder.image-size 32 32 --encoder.width 16 --encoder.depth 3
--encoder.heads 2 --predictor.width 16 --predictor.depth 1 --optim.epochs 2 --optim.warmup-epochs 1
"""

import json
from pathlib import Path

import torch

from stop_mim import load_encoder

FOLDER = Path(__file__).parent / "version-0.1"


@torch.no_grad()
def test_features_are_those_of_version_0_1():
    encoder, stored = load_encoder(FOLDER / "encoder.safetensors"), json.loads((FOLDER / "features.json").read_text())
    expected = {name: torch.tensor(values) for name, values in stored.items()}
    wide = torch.sin(torch.arange(2 * 3 * 32 * 48, dtype=torch.float32) * 0.37).reshape(2, 3, 32, 48)
    square = wide[..., :32]
    torch.testing.assert_close(encoder.embed(square, layers=3), expected["last_3_layers"], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(encoder(square)[:, ::5], expected["tokens"], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(encoder.embed(wide), expected["wide"], atol=2e-5, rtol=1e-4)
