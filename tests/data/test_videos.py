"""DAVIS folders as they come and as they go wrong, every kind of mask file, and the drawn clips."""

import numpy as np
import PIL.Image
import pytest
import torch
from written_images import one_sentence

from stop_mim.data.scenes import render_video
from stop_mim.data.videos import davis_palette, open_videos, read_mask, write_mask
from stop_mim.errors import InputError

HEIGHT, WIDTH = 20, 30


def numbers(*objects, void=False):
    """Each object a square of its own."""
    mask = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    for number in objects:
        mask[4:10, 6 * number : 6 * number + 5] = number
    if void:
        mask[15:] = 255
    return mask


def save_palette(path, mask):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = PIL.Image.fromarray(mask)
    image.putpalette(davis_palette().tobytes())
    image.save(path)


def save_frame(path, shade=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.new("RGB", (WIDTH, HEIGHT), (shade, 50, 200)).save(path)


def make_davis(root, sequences=("bear", "cow"), resolution="480p", frames=4, mask=None):
    for sequence in sequences:
        for index in range(frames):
            save_frame(root / "JPEGImages" / resolution / sequence / f"{index:05d}.jpg", 10 * index)
            save_palette(
                root / "Annotations" / resolution / sequence / f"{index:05d}.png", numbers(1) if mask is None else mask
            )
    return root


def add_list(root, name, text):
    path = root / "ImageSets" / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def names(videos):
    return [video.name for video in videos]


def test_frames_masks_and_objects(tmp_path):
    root = make_davis(tmp_path, mask=numbers(1, 3, void=True))
    videos = open_videos(str(root))
    bear = videos[0]
    assert names(videos) == ["bear", "cow"]
    assert len(bear) == 4
    assert bear.frame_name(3) == "00003"
    assert bear.frame(2).shape == (3, HEIGHT, WIDTH)
    assert abs(int(bear.frame(2)[0, 0, 0]) - 20) < 3
    assert np.array_equal(bear.mask(1), numbers(1, 3))
    assert bear.objects == (1, 2, 3)


def test_a_video_may_lack_masks_but_the_first(tmp_path):
    root = make_davis(tmp_path, ("bear",))
    (root / "Annotations/480p/bear/00002.png").unlink()
    bear = open_videos(str(root))[0]
    assert bear.mask(2) is None
    assert [bear.has_mask(index) for index in range(4)] == [True, True, False, True]


MODES = {
    "grey numbers": lambda: PIL.Image.fromarray(numbers(1, 2)),
    "black and white": lambda: PIL.Image.fromarray(255 * numbers(1)),
    # The alpha channel says nothing.
    "black and white with alpha": lambda: PIL.Image.merge(
        "LA", [PIL.Image.fromarray(255 * numbers(1)), PIL.Image.fromarray(255 - 255 * numbers(1))]
    ),
    "black and white in RGB": lambda: PIL.Image.fromarray(255 * numbers(1)).convert("RGB"),
    "black and white in RGBA": lambda: PIL.Image.fromarray(255 * numbers(1)).convert("RGBA"),
    "one bit": lambda: PIL.Image.fromarray(255 * numbers(1)).convert("1"),
}


@pytest.mark.parametrize("kind", MODES)
def test_every_kind_of_mask_gives_the_same_numbers(tmp_path, kind):
    MODES[kind]().save(tmp_path / "mask.png")
    expected = numbers(1, 2) if kind == "grey numbers" else numbers(1)
    assert np.array_equal(read_mask(tmp_path / "mask.png"), expected)


def test_void_is_background_in_a_video_and_kept_in_a_file(tmp_path):
    save_palette(tmp_path / "mask.png", numbers(1, void=True))
    assert read_mask(tmp_path / "mask.png").unique().tolist() == [0, 1, 255]
    root = make_davis(tmp_path / "davis", mask=numbers(1, void=True))
    assert open_videos(str(root))[0].mask(0).unique().tolist() == [0, 1]


@pytest.mark.parametrize("resolution", ["Full-Resolution", "240p", "."])
def test_the_resolution_is_found_and_480p_comes_first(tmp_path, resolution):
    assert names(open_videos(str(make_davis(tmp_path, resolution=resolution)))) == ["bear", "cow"]
    if resolution != ".":
        assert names(open_videos(str(make_davis(tmp_path, ("small",), resolution="480p")))) == ["small"]


def test_lists_choose_the_split(tmp_path):
    root = make_davis(tmp_path, ("ant", "bear", "cow"))
    assert names(open_videos(str(root))) == ["ant", "bear", "cow"]
    lines = [
        f"/JPEGImages/480p/{name}/{i:05d}.jpg /Annotations/480p/{name}/{i:05d}.png"
        for name in ("bear", "ant")
        for i in (0, 1)
    ]
    for release in ("val", "480p/val", "2016/val"):
        add_list(root, release, "\n".join(lines) + "\n")
        assert names(open_videos(str(root))) == ["bear", "ant"]
    add_list(root, "2017/val", "cow\r\n\r\nbear\r\n")
    add_list(root, "2017/train", "ant")
    assert names(open_videos(str(root))) == ["cow", "bear"]
    assert names(open_videos(str(root), "train")) == ["ant"]
    assert names(open_videos(str(root), "2016/val")) == ["bear", "ant"]


FIRST_MASK = "Annotations/480p/bear/00000.png"


DAMAGES = {
    "no frames": (lambda root: (root / "JPEGImages").rename(root / "images"), "JPEGImages/480p/SEQUENCE/00000.jpg"),
    "no masks": (lambda root: (root / "Annotations").rename(root / "masks"), "Annotations/480p/SEQUENCE/00000.png"),
    "an absent sequence": (lambda root: add_list(root, "2017/val", "bear\nyeti\n"), "'yeti' has no frames in .*yeti"),
    "an empty list": (lambda root: add_list(root, "2017/val", "\n \n"), "val.txt lists no sequences"),
    "another split": (lambda root: add_list(root, "2017/train", "bear\n"), "'val': choose among 2017/train"),
    "a way out": (lambda root: add_list(root, "2017/val", "..\n"), "val.txt has the line '..'"),
    "no text": (lambda root: add_list(root, "val", b"\xff\xfe\x00bear"), "val.txt cannot be read as text"),
    "no first mask": (lambda root: (root / FIRST_MASK).unlink(), "'bear' has no first mask: .*00000.png"),
    "an empty mask": (lambda root: save_palette(root / FIRST_MASK, numbers(void=True)), "'bear' shows no object"),
    "a small mask": (lambda root: save_palette(root / FIRST_MASK, numbers(1)[:, :-2]), "00000.png has 28x20 .* 30x20"),
    "a mask that is cut off": (
        lambda root: (root / FIRST_MASK).write_bytes((root / FIRST_MASK).read_bytes()[:-60]),
        r"00000.png cannot be read as an image \(.*\)",
    ),
    "a mask as JPEG": (
        lambda root: PIL.Image.fromarray(255 * numbers(1)).save(root / FIRST_MASK, format="JPEG"),
        "00000.png cannot be read as an image",
    ),
    "a mask of 16 bits": (
        lambda root: PIL.Image.fromarray(numbers(1).astype(np.uint16)).save(root / FIRST_MASK),
        "00000.png has .*I;16",
    ),
    "colours": (
        lambda root: PIL.Image.fromarray(davis_palette()[numbers(1, 2)]).save(root / FIRST_MASK),
        "00000.png has colours",
    ),
    "an empty frame": (
        lambda root: (root / "JPEGImages/480p/bear/00000.jpg").write_bytes(b""),
        r"00000.jpg cannot be read as an image \(the file is empty\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_folder_is_told_in_one_sentence(tmp_path, damage):
    root = make_davis(tmp_path / "davis")
    break_it, message = DAMAGES[damage]
    break_it(root)
    with pytest.raises(InputError, match=message) as error:
        open_videos(str(root))
    one_sentence(error)


@pytest.mark.parametrize("name", ["", "no/such/folder", "image"])
def test_what_is_no_folder_is_no_video(tmp_path, monkeypatch, name):
    monkeypatch.chdir(make_davis(tmp_path))
    (tmp_path / "image").write_bytes(b"x")
    with pytest.raises(InputError, match=f"'{name}'"):
        open_videos(name)


def test_the_fingerprint_follows_the_contents(tmp_path):
    root = make_davis(tmp_path)
    before = open_videos(str(root))[1].fingerprint()
    assert open_videos(str(root))[1].fingerprint() == before
    save_palette(root / "Annotations/480p/cow/00003.png", numbers(1, 2))
    assert open_videos(str(root))[1].fingerprint() != before


def test_masks_are_written_as_davis_writes_them(tmp_path):
    mask = torch.from_numpy(numbers(1, 2, 3))
    write_mask(tmp_path / "new" / "00000.png", mask)
    assert torch.equal(read_mask(tmp_path / "new" / "00000.png"), mask)
    with PIL.Image.open(tmp_path / "new" / "00000.png") as image:
        assert image.mode == "P"
        assert image.getpalette()[:15] == [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0, 0, 0, 128]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["00000.png"]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        write_mask(tmp_path / "file" / "00000.png", mask)


def test_the_palette_is_that_of_published_masks(real_data):
    with PIL.Image.open(real_data("davis-sample") / "results/osvos/dog/00001.png") as image:
        assert image.getpalette() == davis_palette().flatten().tolist()


def test_the_real_sample_opens(real_data):
    videos = open_videos(str(real_data("davis-sample")))
    assert [(video.name, len(video), video.objects) for video in videos] == [
        ("blackswan", 50, (1,)),
        ("dog", 60, (1,)),
        ("libby", 49, (1,)),
    ]
    assert videos[1].frame(7).shape == (3, 480, 854)
    assert videos[1].mask(59).unique().tolist() == [0, 1]


def test_scenes_are_the_drawn_clips():
    videos = open_videos("scenes:count=2,size=32,frames=3,seed=5")
    assert names(videos) == ["scene-000", "scene-001"]
    frames, masks = render_video(1, 3, 32, 5)
    assert len(videos[1]) == 3
    for index in range(3):
        assert torch.equal(videos[1].frame(index), frames[index])
        assert torch.equal(videos[1].mask(index), masks[index])
    assert videos[1].objects == tuple(range(1, int(masks[0].max()) + 1))
    assert videos[0].fingerprint() != open_videos("scenes:count=2,size=32,frames=3,seed=6")[0].fingerprint()
    assert len(open_videos("scenes")) == 10
