"""Masks that somebody else made, scored by the command's way: kinds of files, void, what is said of them."""

import shutil
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
from quick_evaluation import QUICK, complaint, silent

from stop_mim.errors import InputError
from stop_mim.evaluation.evaluate import evaluate

SIZE = (24, 32)


def block(*places, shape=SIZE):
    """Objects as (number, top, left), eight pixels high and wide."""
    mask = np.zeros(shape, dtype=np.uint8)
    for number, top, left in places:
        mask[top : top + 8, left : left + 8] = number
    return mask


def save(path, mask, palette=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = PIL.Image.fromarray(mask)
    if palette:
        image.putpalette([*range(256)] * 3)
    image.save(path)


def davis(root, masks, palette=False):
    for index, mask in enumerate(masks):
        save(root / f"Annotations/480p/bear/{index:05d}.png", mask, palette)
        save(root / f"JPEGImages/480p/bear/{index:05d}.jpg", np.zeros((*mask.shape, 3), dtype=np.uint8))
    return root


def scores(truth, predicted, **options):
    (found,) = evaluate([f"masks:{predicted}"], replace(QUICK, task=("video",), data=str(truth), **options), silent())
    return found.details["sequences"]["bear"]


@pytest.mark.parametrize("palette", [False, True], ids=["grey", "palette"])
def test_a_mask_of_void_alone_shows_no_object_where_objects_have_numbers(tmp_path, palette):
    numbered, void, empty = block((1, 2, 2), (255, 12, 20)), block((255, 12, 20)), block()
    truth = davis(tmp_path / "davis", [numbered, void, void, numbered, numbered], palette)
    for index, mask in enumerate([empty, empty, block((1, 2, 2)), empty, empty]):
        save(tmp_path / f"masks/bear/{index:05d}.png", mask)
    assert scores(truth, tmp_path / "masks")["J_mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("foreground", [False, True])
def test_white_is_an_object_where_the_first_mask_is_black_and_white(tmp_path, foreground):
    white = [block((255, 2, left)) for left in (2, 3, 4, 5)]
    truth = davis(tmp_path / "davis", white)
    for index, mask in enumerate(white):
        save(tmp_path / f"masks/bear/{index:05d}.png", mask)
    found = scores(truth, tmp_path / "masks", foreground=foreground)
    assert found["J_mean"] == found["F_mean"] == 1
    assert found["n"] == 2


def test_a_mask_without_its_frame_is_not_left_out_silently(tmp_path, capsys):
    truth = davis(tmp_path / "davis", [block((1, 2, 2))] * 4)
    frame = truth / "JPEGImages/480p/bear/00001.jpg"
    frame.unlink()
    said = complaint(capsys, f"masks:{tmp_path}", "--task", "video", "--data", truth)
    assert f"00001.png has no frame in {frame.parent}" in said


def test_a_list_may_begin_with_a_byte_order_mark(tmp_path):
    masks = [block((1, 2, 2))] * 3
    truth = davis(tmp_path / "davis", masks)
    (truth / "ImageSets").mkdir()
    (truth / "ImageSets" / "val.txt").write_text("bear\n", "utf-8-sig")
    assert scores(truth, truth / "Annotations")["J_mean"] == 1


def test_image_tasks_do_not_take_the_folders_of_videos_for_classes(tmp_path, capsys, run):
    truth = davis(tmp_path / "davis", [block((1, 2, 2))] * 3)
    for tasks in (["linear"], ["knn", "video"]):
        assert "its task is video" in complaint(capsys, run, "--task", *tasks, "--data", truth)


def test_masks_are_scored_without_the_frames(tmp_path):
    truth = davis(tmp_path / "davis", [block((1, 2, left), (2, 12, 20)) for left in range(2, 7)], palette=True)
    for index in range(5):
        save(tmp_path / f"masks/bear/{index:05d}.png", block((1, 2, 4), (2, 12, 20)))
    with_frames = scores(truth, tmp_path / "masks")
    shutil.rmtree(truth / "JPEGImages")
    assert scores(truth, tmp_path / "masks") == with_frames
    assert 0.5 < with_frames["J_mean"] < 1
    config = replace(QUICK, task=("video",), data=str(truth))
    with pytest.raises(InputError, match="is not in DAVIS's layout: it must hold JPEGImages"):
        evaluate([f"masks:{tmp_path / 'masks'}", "timm:vit_tiny_patch16_224"], config, silent())
