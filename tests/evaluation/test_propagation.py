"""Label propagation on videos whose answer is known; exchange/test_release_scores.py has the masks of its definition."""

import math
from types import SimpleNamespace

import PIL.Image
import pytest
import torch
from small_trainings import ALONE, CPU, MemoryVideo

from stop_mim.data.videos import read_mask
from stop_mim.errors import InputError
from stop_mim.evaluation import propagation
from stop_mim.evaluation.config import evaluate_config
from stop_mim.evaluation.data import VideoData
from stop_mim.evaluation.propagation import image_size, mask_of, propagate, propagate_labels, seeds
from stop_mim.evaluation.segmentation import score_masks
from stop_mim.evaluation.tasks.video import PropagationConfig, VideoOptions, VideoSegmentation
from stop_mim.models.encoder import Dimensions, create_encoder
from stop_mim.models.hub_encoder import HubEncoder


class MeanColour(HubEncoder):
    """An encoder whose tokens are the patches' mean colours."""

    mean, std, patch_size = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (4, 4)

    def __init__(self):
        torch.nn.Module.__init__(self)

    def forward(self, images):
        return torch.nn.functional.avg_pool2d(images, self.patch_size).flatten(2).mT


class DrawnVideo(MemoryVideo):
    """Two coloured squares on blue, which pass each other by a step a frame."""

    COLOURS = ((0, 0, 255), (255, 0, 0), (0, 255, 0))

    def __init__(self, frames=10, step=4):
        super().__init__("drawn", [])
        for moved in range(0, frames * step, step):
            mask = torch.zeros(64, 128, dtype=torch.uint8)
            for number, (y, x) in enumerate(((8 + moved, 4 + moved), (40 - moved, 44 - moved)), start=1):
                mask[y : y + 16, x : x + 16] = number
            self.masks.append(mask)

    def frame(self, index):
        return torch.tensor(self.COLOURS, dtype=torch.uint8)[self.masks[index].long()].permute(2, 0, 1)


def config(**changes):
    return PropagationConfig(**{"short_side": 64, **changes})


def propagated(encoder, video, **changes):
    return list(propagate(encoder, video, config(**changes), CPU))


def segmented(video, out, foreground=False, overlays=False, progress=lambda done, total: None):
    """The scores of the task, which writes the masks."""
    options = VideoOptions(masks=out, overlays=overlays, foreground=foreground, propagation=config())
    settings = evaluate_config()(video=options)
    subject = SimpleNamespace(encoder=MeanColour(), ranks=ALONE, place=None)
    task = VideoSegmentation("video", settings, subject, VideoData([video], "drawn"), progress)
    assert {score.metric: score.value for score in task.run()}["J&F"] == 100 * task.details["J&F"]
    return task.details


@pytest.mark.parametrize(
    ("frame", "patch", "short_side", "expected"),
    [
        # Frames of DAVIS: 854 pixels are floored to 13 * 64, and then to whole patches.
        ((480, 854), (16, 16), 480, (480, 832)),
        ((1152, 480), (8, 8), 480, (1152, 480)),
        ((480, 910), (14, 14), 480, (476, 896)),
        ((10, 15), (4, 4), 32, (32, 48)),
    ],
)
def test_frames_are_resized_to_whole_patches(frame, patch, short_side, expected):
    assert image_size(frame, patch, short_side) == expected


def random_frames(count, grid=(6, 9), dim=8, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    patches = grid[0] * grid[1]
    return [
        (
            torch.nn.functional.normalize(torch.randn(patches, dim, generator=generator), dim=1),
            torch.rand(patches, classes, generator=generator).softmax(1),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("cosines_at_a_time", [1, 2 * 3 * 6 * 81])
@pytest.mark.parametrize("settings", [config(window=1), config(neighbours=1000)], ids=["few candidates", "all of them"])
def test_chunks_do_not_change_results(settings, cosines_at_a_time, monkeypatch):
    (features, _), *context = random_frames(4)
    whole = propagate_labels(features, context, (6, 9), settings)
    monkeypatch.setattr(propagation, "COSINES_AT_A_TIME", cosines_at_a_time)
    torch.testing.assert_close(propagate_labels(features, context, (6, 9), settings), whole, atol=1e-6, rtol=1e-5)


def test_an_object_without_a_patch_is_in_no_mask():
    mask = torch.zeros(8, 12, dtype=torch.uint8)
    mask[:4, :4] = 1
    mask[7, 11] = 2
    labels = seeds(mask, 3, (2, 3))
    assert not labels[:, 2].any(), "its pixel is no patch's centre"
    assert mask_of(labels.T.unflatten(1, (2, 3)), (4, 4), (8, 12)).unique().tolist() == [0, 1]


def test_masks_are_saved_and_score_the_same(tmp_path):
    video = DrawnVideo()
    steps, out = [], tmp_path / "masks"
    for foreground in (False, True):
        scores = segmented(video, out, foreground, progress=lambda *step: steps.append(step))
        assert scores == score_masks([video], out, foreground)
        objects = scores["sequences"]["drawn"]["objects"]
        assert len(objects) == (1 if foreground else 2)
        assert min(one["J_mean"] for one in objects.values()) > 0.93, "objects that pass each other keep their numbers"
    assert steps == [(done, 10) for done in range(1, 11)] * 2
    assert sorted(path.name for path in (out / "drawn").iterdir()) == [f"{index:05d}.png" for index in range(10)]
    assert torch.equal(read_mask(out / "drawn" / "00000.png"), video.mask(0)), "the given mask comes first"
    assert [path.name for path in out.iterdir()] == ["drawn"]


def test_overlays_are_drawn(tmp_path):
    video = DrawnVideo(frames=14, step=2)
    segmented(video, tmp_path, overlays=True)
    with PIL.Image.open(tmp_path / "overlays" / "drawn.png") as sheet:
        assert sheet.size == (4 * 324 + 4, 3 * 164 + 4)
        # A pixel of the first object, red, under DAVIS's darker red.
        assert 128 < sheet.getpixel((4 + 30, 4 + 40))[0] < 255
    with pytest.raises(InputError, match=r"video\.overlays is True"):
        VideoOptions(overlays=True)


def test_tokens_that_are_no_patches_or_not_finite_are_refused():
    class WithClassToken(MeanColour):
        def forward(self, images):
            return super().forward(images)[:, [0, *range(512)]]

    with pytest.raises(InputError, match="513 tokens for 512 patches"):
        propagated(WithClassToken(), DrawnVideo())
    broken = MeanColour()
    broken.mean = (math.nan,) * 3
    with pytest.raises(InputError, match="not finite"):
        propagated(broken, DrawnVideo())


@pytest.mark.gpu
def test_the_gpu_agrees_with_the_cpu():
    torch.manual_seed(0)
    encoder = create_encoder(Dimensions(48, 2, 3), image_size=64, patch_size=8).eval()
    video, cuda = DrawnVideo(), torch.device("cuda")
    on_cpu = torch.stack(propagated(encoder, video))
    on_gpu = torch.stack(list(propagate(encoder.to(cuda), video, config(), cuda)))
    assert on_gpu.device.type == "cpu"
    assert (on_gpu == on_cpu).float().mean() > 0.999
