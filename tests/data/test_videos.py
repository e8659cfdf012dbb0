"""DAVIS folders as they come and as they go wrong, every kind of mask file, and the drawn clips."""

import numpy as np
import PIL.Image
import pytest
import torch

from stop_mim.data import videos
from stop_mim.data.scenes import render_video
from stop_mim.data.videos import FolderVideo, davis_palette, open_videos, read_mask, write_mask
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
    path.write_text(text)


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
    "palette": lambda: PIL.Image.fromarray(numbers(1, 2)).convert("L"),
    "grey numbers": lambda: PIL.Image.fromarray(numbers(1, 2)),
    "colours": lambda: PIL.Image.fromarray(davis_palette()[numbers(1, 2)]),
    "colours with alpha": lambda: PIL.Image.fromarray(davis_palette()[numbers(1, 2)]).convert("RGBA"),
    "black and white": lambda: PIL.Image.fromarray(255 * numbers(1)),
    "black and white with alpha": lambda: PIL.Image.fromarray(255 * numbers(1)).convert("LA"),
    "black and white in RGB": lambda: PIL.Image.fromarray(255 * numbers(1)).convert("RGB"),
    "black and white in RGBA": lambda: PIL.Image.fromarray(255 * numbers(1)).convert("RGBA"),
    "one bit": lambda: PIL.Image.fromarray(255 * numbers(1)).convert("1"),
}


@pytest.mark.parametrize("kind", MODES)
def test_every_kind_of_mask_gives_the_same_numbers(tmp_path, kind):
    image = MODES[kind]()
    if kind == "palette":
        image.putpalette(davis_palette().tobytes())
        assert image.mode == "P"
    image.save(tmp_path / "mask.png")
    expected = numbers(1, 2) if image.mode == "P" or "numbers" in kind or "colours" in kind else numbers(1)
    assert np.array_equal(read_mask(tmp_path / "mask.png"), expected)


def test_alpha_says_nothing(tmp_path):
    image = PIL.Image.fromarray(255 * numbers(1)).convert("LA")
    image.putalpha(PIL.Image.fromarray(255 - 255 * numbers(1)))
    image.save(tmp_path / "mask.png")
    assert np.array_equal(read_mask(tmp_path / "mask.png"), numbers(1))


def test_void_is_background_in_a_video_and_kept_in_a_file(tmp_path):
    save_palette(tmp_path / "mask.png", numbers(1, void=True))
    assert read_mask(tmp_path / "mask.png").unique().tolist() == [0, 1, 255]
    root = make_davis(tmp_path / "davis", mask=numbers(1, void=True))
    assert open_videos(str(root))[0].mask(0).unique().tolist() == [0, 1]


@pytest.mark.parametrize("resolution", ["480p", "Full-Resolution", "1080p", "240p", "."])
def test_the_resolution_is_found(tmp_path, resolution):
    videos = open_videos(str(make_davis(tmp_path, resolution=resolution)))
    assert names(videos) == ["bear", "cow"]


def test_480p_comes_before_other_resolutions(tmp_path):
    make_davis(tmp_path, ("large",), resolution="Full-Resolution")
    make_davis(tmp_path, ("small",), resolution="480p")
    assert names(open_videos(str(tmp_path))) == ["small"]


def test_lists_choose_the_split(tmp_path):
    root = make_davis(tmp_path, ("ant", "bear", "cow"))
    assert names(open_videos(str(root))) == ["ant", "bear", "cow"]
    lines = [
        f"/JPEGImages/480p/{name}/{i:05d}.jpg /Annotations/480p/{name}/{i:05d}.png"
        for name in ("bear", "ant")
        for i in (0, 1)
    ]
    add_list(root, "2016/val", "\n".join(lines) + "\n")
    assert names(open_videos(str(root))) == ["bear", "ant"]
    add_list(root, "2017/val", "cow\r\n\r\nbear\r\n")
    add_list(root, "2017/train", "ant")
    assert names(open_videos(str(root))) == ["cow", "bear"]
    assert names(open_videos(str(root), "train")) == ["ant"]
    assert names(open_videos(str(root), "2016/val")) == ["bear", "ant"]


@pytest.mark.parametrize("name", ["480p/val", "val"])
def test_lists_of_older_releases(tmp_path, name):
    root = make_davis(tmp_path)
    add_list(root, name, "/JPEGImages/480p/cow/00000.jpg /Annotations/480p/cow/00000.png")
    assert names(open_videos(str(root))) == ["cow"]


def break_layout(root):
    (root / "JPEGImages").rename(root / "images")


def break_masks(root):
    (root / "Annotations").rename(root / "masks")


def list_an_absent_sequence(root):
    add_list(root, "2017/val", "bear\nyeti\n")


def list_nothing(root):
    add_list(root, "2017/val", "\n \n")


def list_another_split(root):
    add_list(root, "2017/train", "bear\n")


def list_a_way_out(root):
    add_list(root, "2017/val", "..\n")


def list_bytes(root):
    (root / "ImageSets").mkdir()
    (root / "ImageSets/val.txt").write_bytes(b"\xff\xfe\x00bear")


def remove_the_first_mask(root):
    (root / "Annotations/480p/bear/00000.png").unlink()


def empty_the_first_mask(root):
    save_palette(root / "Annotations/480p/bear/00000.png", numbers(void=True))


def resize_the_first_mask(root):
    save_palette(root / "Annotations/480p/bear/00000.png", numbers(1)[:, :-2])


def cut_the_first_mask(root):
    path = root / "Annotations/480p/bear/00000.png"
    path.write_bytes(path.read_bytes()[:-60])


def save_the_first_mask_as_jpeg(root):
    path = root / "Annotations/480p/bear/00000.png"
    PIL.Image.fromarray(255 * numbers(1)).save(path, format="JPEG")


def save_the_first_mask_in_16_bits(root):
    PIL.Image.fromarray(numbers(1).astype(np.uint16)).save(root / "Annotations/480p/bear/00000.png")


def save_the_first_mask_in_odd_colours(root):
    colours = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
    colours[5, 5] = (1, 2, 3)
    PIL.Image.fromarray(colours).save(root / "Annotations/480p/bear/00000.png")


def cut_the_first_frame(root):
    (root / "JPEGImages/480p/bear/00000.jpg").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (break_layout, "is not in DAVIS's layout: it must hold JPEGImages/480p/SEQUENCE/00000.jpg and Annotations"),
        (break_masks, "is not in DAVIS's layout"),
        (list_an_absent_sequence, "The sequence 'yeti' has no frames in .*yeti: put them there"),
        (list_nothing, "val.txt lists no sequences: write the name of one in each line"),
        (list_another_split, "has no list of the split 'val': choose among 2017/train"),
        (list_a_way_out, "val.txt has the line '..', which names no sequence"),
        (list_bytes, "val.txt cannot be read as text .*: copy it again"),
        (remove_the_first_mask, "The sequence 'bear' has no first mask: put it .*00000.png"),
        (empty_the_first_mask, "The first mask of the video 'bear' shows no object: number every object"),
        (resize_the_first_mask, "00000.png has 28x20 pixels and its frame has 30x20: give masks of the size"),
        (cut_the_first_mask, r"00000.png cannot be read as an image \(.*\): copy it again"),
        (save_the_first_mask_as_jpeg, "00000.png cannot be read as an image"),
        (save_the_first_mask_in_16_bits, "00000.png has pixels of the mode I;16: save masks as palette images"),
        (save_the_first_mask_in_odd_colours, "00000.png has the colour #010203, which is no object's"),
        (cut_the_first_frame, r"00000.jpg cannot be read as an image \(the file is empty\)"),
    ],
)
def test_a_bad_folder_is_told_in_one_sentence(tmp_path, damage, sentence):
    root = make_davis(tmp_path / "davis")
    damage(root)
    with pytest.raises(InputError, match=sentence) as raised:
        open_videos(str(root))
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")


@pytest.mark.parametrize("name", ["", "no/such/folder", "image"])
def test_what_is_no_folder_is_no_video(tmp_path, monkeypatch, name):
    monkeypatch.chdir(make_davis(tmp_path))
    (tmp_path / "image").write_bytes(b"x")
    with pytest.raises(InputError, match=f"There are no videos '{name}': give a folder with .* or scenes"):
        open_videos(name)


def test_a_bad_frame_in_the_middle_is_told_when_it_is_read(tmp_path):
    root = make_davis(tmp_path)
    (root / "JPEGImages/480p/bear/00002.jpg").write_bytes(b"not a picture")
    bear = open_videos(str(root))[0]
    assert bear.frame(1).shape == (3, HEIGHT, WIDTH)
    with pytest.raises(InputError, match=r"00002\.jpg cannot be read as an image"):
        bear.frame(2)


def test_pixels_are_bounded(tmp_path, monkeypatch):
    root = make_davis(tmp_path)
    video = FolderVideo("bear", root / "JPEGImages/480p/bear", root / "Annotations/480p/bear")
    monkeypatch.setattr(videos, "MAX_PIXELS", 599)
    for read in (video.frame, video.mask):
        with pytest.raises(InputError, match="more than 599 pixels"):
            read(0)


def test_the_fingerprint_follows_the_contents(tmp_path):
    root = make_davis(tmp_path)
    before = open_videos(str(root)).fingerprint()
    assert open_videos(str(root)).fingerprint() == before
    assert open_videos(str(root))[:1].fingerprint() != before
    save_palette(root / "Annotations/480p/cow/00003.png", numbers(1, 2))
    assert open_videos(str(root)).fingerprint() != before


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
    clip = render_video(1, 3, 32, 5)
    assert len(videos[1]) == 3
    for index in range(3):
        assert torch.equal(videos[1].frame(index), clip.frames[index])
        assert torch.equal(videos[1].mask(index), clip.masks[index])
    assert videos[1].objects == tuple(range(1, int(clip.masks[0].max()) + 1))
    assert videos.fingerprint() != open_videos("scenes:count=2,size=32,frames=3,seed=6").fingerprint()
    assert len(open_videos("scenes")) == 10


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("colour=3", "no option 'colour': choose among count, size, frames, seed"),
        ("count=0", "The option count of scenes is '0': give a whole number of at least 1"),
        ("size=16", "The option size of scenes is '16': give a whole number of at least 32"),
        ("frames=-3", "The option frames of scenes is '-3'"),
        ("seed", "The option seed of scenes is ''"),
    ],
)
def test_bad_options_of_scenes(options, sentence):
    with pytest.raises(InputError, match=sentence):
        open_videos(f"scenes:{options}")
