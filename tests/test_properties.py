"""Properties over many configurations, grids, sizes and dtypes; hypothesis draws the examples, the same ones every time."""

import json
import math

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.extra import numpy as arrays

from stop_mim.data.decode import cut
from stop_mim.errors import InputError
from stop_mim.masking import BlockwiseMasks, MultiBlockMasks, RandomMasks
from stop_mim.models.build import build_encoder
from stop_mim.models.config import EncoderConfig
from stop_mim.positions import SinCosPositions
from stop_mim.records import from_plain
from stop_mim.training.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from stop_mim.training.config import CheckpointConfig, LogConfig, OptimConfig, TrainConfig, to_json
from stop_mim.training.schedules import values_at

SHORT = settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
sides = st.integers(1, 10)
# Not all of Unicode, whose tables take hypothesis seconds to build.
texts = st.text('aψ😀."\\\n\x1b ', max_size=9)
fractions = st.floats(0, 1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


@SHORT
@given(
    seed=st.integers(-(2**63) + 1, 2**63 - 1),
    epochs=st.integers(1, 10**9),
    lr=st.floats(1e-12, 1e3),
    ema=fractions,
    every=st.integers(1, 10**9),
    data=texts,
)
def test_a_configuration_comes_back_from_its_file(seed, epochs, lr, ema, every, data):
    optim = OptimConfig(epochs=epochs, lr=lr, ema_start=ema, warmup_epochs=0.0)
    config = TrainConfig(
        data=data, seed=seed, optim=optim, log=LogConfig(every_steps=every), checkpoint=CheckpointConfig(keep=every)
    )
    assert from_plain(TrainConfig, json.loads(to_json(config))) == config


@SHORT
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | texts,
        lambda x: (
            st.lists(x)
            | st.dictionaries(st.sampled_from(["optim", "seed", "lr", "betas", "data", "encoder", "image_size"]), x)
        ),
    )
)
def test_any_json_is_a_configuration_or_refused(plain):
    try:
        config = from_plain(TrainConfig, json.loads(json.dumps(plain)))
    except InputError:
        return
    assert isinstance(config, TrainConfig)


@SHORT
@given(sides, sides, st.integers(1, 5), st.integers(0, 2**31))
def test_masks_are_patches_of_the_grid_and_targets_are_no_context(height, width, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    for kind in (MultiBlockMasks, RandomMasks, BlockwiseMasks):
        try:
            sampler = kind((height, width))
        except InputError:
            continue
        masks = sampler.sample(batch, generator=generator)
        blocks = 4 if kind is MultiBlockMasks else 1
        assert masks.context.shape == (batch, sampler.context_tokens)
        assert masks.targets.shape == (batch, blocks, sampler.target_tokens)
        assert all((indices.diff(dim=-1) > 0).all() for indices in (masks.context, masks.targets))
        if kind is not MultiBlockMasks:
            assert sampler.context_tokens + sampler.target_tokens == height * width
        for context, targets in zip(masks.context, masks.targets.flatten(1), strict=True):
            assert set(context.tolist() + targets.tolist()) <= set(range(height * width))
            assert not set(context.tolist()) & set(targets.tolist())


@SHORT
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_encoders_give_a_token_for_each_patch_of_any_size_and_dtype(rows, columns, batch, dtype):
    encoder = build_encoder(EncoderConfig("tiny", image_size=(8, 8), patch_size=4, width=16, depth=1, heads=2)).to(
        dtype
    )
    tokens = encoder(torch.zeros(batch, 3, 4 * rows, 4 * columns, dtype=dtype))
    assert tokens.shape == (batch, rows * columns, 16)
    assert tokens.dtype == dtype
    assert torch.isfinite(tokens).all()


@SHORT
@given(st.integers(1, 30), st.integers(1, 30))
def test_positions_differ_between_all_patches_of_a_grid(height, width):
    table = SinCosPositions((height, width), 16).table()
    assert table.shape == (height * width, 16)
    assert len(table.unique(dim=0)) == height * width


@SHORT
@given(st.data(), st.integers(1, 64), st.integers(1, 64), sides, sides)
def test_a_box_inside_an_image_is_cut_to_any_size(data, height, width, tall, wide):
    box_height, box_width = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    box = (
        data.draw(st.integers(0, height - box_height)),
        data.draw(st.integers(0, width - box_width)),
        box_height,
        box_width,
    )
    pixels = torch.from_numpy(data.draw(arrays.arrays("uint8", (height, width, 3))))
    found = cut(pixels, box, (tall, wide))
    assert found.shape == (tall, wide, 3)
    inside = pixels[box[0] : box[0] + box_height, box[1] : box[1] + box_width]
    # Interpolation stays between the darkest and the brightest pixel.
    assert inside.min() <= found.min() <= found.max() <= inside.max()


@SHORT
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3), texts, st.integers(0, 10**12))
def test_checkpoints_hold_tensors_of_any_dtype_and_shape(tmp_path, dtype, shape, name, step):
    values = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    save_checkpoint(Checkpoint(step, {f"model.{name}": values}, {"x": name}), tmp_path / "a.safetensors")
    found = read_checkpoint(tmp_path / "a.safetensors")
    assert (found.step, found.state) == (step, {"x": name})
    assert torch.equal(found.tensors[f"model.{name}"], values)
    assert found.tensors[f"model.{name}"].dtype == dtype


@SHORT
@given(st.integers(1, 500), st.integers(1, 50), fractions, st.data())
def test_schedules_stay_between_their_ends(epochs, steps_per_epoch, warmup, data):
    optim = OptimConfig(epochs=epochs, warmup_epochs=warmup * epochs, lr=1.0, start_lr=0.2, final_lr=0.1, ema_start=0.9)
    values = values_at(data.draw(st.integers(0, epochs * steps_per_epoch - 1)), steps_per_epoch, optim)
    assert 0.1 - 1e-9 <= values.lr <= 1 + 1e-9
    assert optim.weight_decay - 1e-9 <= values.weight_decay <= optim.final_weight_decay + 1e-9
    assert 0.9 - 1e-9 <= values.ema_momentum <= optim.ema_final + 1e-9
