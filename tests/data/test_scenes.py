"""Drawn scenes: the same whatever the batch, labels that agree with the masks, clips that move smoothly."""

import threading
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from stop_mim.data.scenes import Scenes, render_scenes, render_video
from stop_mim.data.sources import scenes as scenes_module
from stop_mim.data.sources.scenes import load_scenes

DISTANCE_BINS = [8.0, 8.5, 9.0, 9.5, 10.0]


@pytest.fixture(scope="module")
def many() -> Scenes:
    return render_scenes(320)


def assert_same(a: Scenes, b: Scenes) -> None:
    for field in fields(Scenes):
        assert torch.equal(getattr(a, field.name), getattr(b, field.name)), field.name


def part(scenes: Scenes, low: int, high: int) -> Scenes:
    return Scenes(**{field.name: getattr(scenes, field.name)[low:high] for field in fields(Scenes)})


def visible_ids(masks: torch.Tensor) -> list[set[int]]:
    return [set(mask.unique().tolist()) - {0} for mask in masks]


def assert_ids_are_counted(scenes: Scenes) -> None:
    assert visible_ids(scenes.masks) == [set(range(1, count + 1)) for count in scenes.counts.tolist()]


def test_a_scene_depends_neither_on_its_batch_nor_on_the_threads(many: Scenes) -> None:
    assert_same(render_scenes(8, first=4), part(render_scenes(12), 4, 12))
    assert_same(render_scenes(20, first=295), part(many, 295, 315))
    assert not torch.equal(render_scenes(4, seed=3).images, many.images[:4])


def test_labels_do_not_depend_on_the_size(many: Scenes) -> None:
    small, large = part(many, 0, 3), render_scenes(3, size=224)
    assert large.images.shape == (3, 3, 224, 224)
    assert torch.equal(small.counts, large.counts)
    assert torch.equal(small.nearest_distances, large.nearest_distances)
    assert_ids_are_counted(large)
    shrunk = torch.nn.functional.interpolate(large.images.float(), (64, 64), mode="area")
    assert (shrunk - small.images.float()).abs().mean() < 8


def test_counts_are_uniform_and_agree_with_the_masks(many: Scenes) -> None:
    assert_ids_are_counted(many)
    shares = torch.bincount(many.counts, minlength=11)[3:] / len(many.counts)
    assert len(shares) == 8
    assert shares.min() > 0.08
    assert_ids_are_counted(render_scenes(32, size=32))


def test_every_bin_of_the_nearest_distance_is_occupied_whatever_the_count(many: Scenes) -> None:
    distances = many.nearest_distances.numpy()
    assert np.bincount(np.digitize(distances, DISTANCE_BINS), minlength=6).min() > 0.08 * len(distances)
    assert abs(np.corrcoef(distances, many.counts.numpy())[0, 1]) < 0.1


def test_the_cache_gives_back_what_was_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOP_MIM_CACHE", str(tmp_path))
    first = load_scenes(20, size=32)
    assert_same(first, render_scenes(20, size=32))
    monkeypatch.setattr(scenes_module, "render_scenes", None)
    assert_same(load_scenes(20, size=32), first)


def test_rendering_leaves_the_number_of_threads_as_it_was() -> None:
    before, seen = torch.get_num_threads(), []
    render_scenes(1, size=32)
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *seen] == [before, before]


def test_a_video_begins_with_all_objects_and_keeps_their_numbers() -> None:
    for index in range(6):
        _, masks = render_video(index, frames=8, size=64)
        first, *later = visible_ids(masks)
        assert first == set(range(1, len(first) + 1))
        assert 2 <= len(first) <= 4
        assert all(ids <= first for ids in later)


def test_objects_move_smoothly() -> None:
    _, masks = render_video(1, frames=12, size=64)
    changed = (masks[1:] != masks[:-1]).float().mean((1, 2))
    assert changed.min() > 0
    assert changed.max() < 0.15
    assert (masks[0] != masks[-1]).float().mean() > changed.mean()


def test_a_longer_video_begins_like_a_shorter_one() -> None:
    short, long = (render_video(2, frames, size=32, seed=5) for frames in (3, 60))
    assert all(torch.equal(one, other[:3]) for one, other in zip(short, long, strict=True))
