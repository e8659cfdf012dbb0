"""Video object segmentation: DAVIS's J and F of propagated labels, or of masks of another method."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from stop_mim.constraints import ABOVE_ZERO, AT_LEAST_ZERO, SIDE, Checked
from stop_mim.evaluation.config import EvaluateConfig
from stop_mim.evaluation.task import TASKS, Task, options_of
from stop_mim.results import Score

if TYPE_CHECKING:
    from stop_mim.data.videos import Video
    from stop_mim.evaluation.segmentation import Mask

# As in the paper's table.
HEADLINES = ("J&F", "J_mean", "F_mean")


@dataclass(frozen=True)
class PropagationConfig(Checked, group="video.propagation"):
    """Label propagation from frame to frame; the defaults are those of the paper, which follows DINO."""

    short_side: Annotated[int, SIDE] = 480
    """Frames are resized to this shorter side in pixels, as nearly as whole patches allow."""
    context_frames: Annotated[int, AT_LEAST_ZERO] = 7
    """Number of previous frames to take labels from, besides the first frame."""
    temperature: Annotated[float, ABOVE_ZERO] = 0.1
    """A patch has the weight exp(cosine / temperature)."""
    window: Annotated[int, AT_LEAST_ZERO] = 12
    """A patch takes labels from patches up to this many rows and columns away."""
    neighbours: Annotated[int, ABOVE_ZERO] = 5
    """Number of nearest patches, in the window of all context frames, to take labels from."""


@dataclass(frozen=True)
class VideoOptions(Checked, group="video"):
    """Video object segmentation."""

    split: str = "val"
    """The list in DAVIS's folder ImageSets that names the sequences, such as val or 2016/val; without lists: all."""
    masks: Path | None = None
    """Folder for the predicted masks, in DAVIS's format; each encoder has its own folder in it, if there are several."""
    overlays: bool = False
    """Also write a contact sheet of each sequence: some frames with their masks."""
    foreground: Annotated[bool, tyro.conf.arg(aliases=["--foreground"])] = False
    """Score all objects of a video as one, as DAVIS 2016 does."""
    propagation: PropagationConfig = field(default_factory=PropagationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("overlays", self.masks is not None or not self.overlays, "give a folder with --video.masks")


@TASKS.register("video")
class VideoSegmentation(Task):
    """The masks of all videos; one process does the work."""

    help = "video object segmentation by label propagation, on DAVIS or scenes"
    Options = VideoOptions
    needs = "videos"
    options: VideoOptions

    @classmethod
    def video_split(cls, config: EvaluateConfig) -> str:
        return options_of(config, "video").split

    def settings(self) -> dict[str, Any]:
        propagation = {} if self.subject.encoder is None else asdict(self.options.propagation)
        return {"name": "davis", "foreground": self.options.foreground, **propagation}

    def run(self) -> Iterator[Score]:
        """Yield means over all objects; the details have every sequence."""
        self.details.update(self._scores() if self.subject.ranks.is_main else {})
        for metric, value in self.details.items():
            if metric != "sequences":
                yield Score(metric, 100 * value, headline=metric in HEADLINES)

    def _scores(self) -> dict[str, Any]:
        from stop_mim.evaluation.segmentation import score_masks, score_videos

        videos, foreground = self.data.videos, self.options.foreground
        if self.subject.encoder is None:
            return score_masks(videos, self.subject.folder, foreground, self.progress)
        # Objects are propagated one by one, also if they are scored as one: saved masks then score the same.
        return score_videos(videos, self._segment, foreground, self.progress)

    def _segment(self, video: "Video") -> Iterator["Mask"]:
        """Yield the masks of a video, and write those that the options ask for."""
        from stop_mim.data.videos import write_mask
        from stop_mim.evaluation.propagation import propagate, write_contact_sheet

        subject, options, device = self.subject, self.options, self.subject.ranks.device
        out = options.masks if options.masks is None or subject.place is None else options.masks / subject.place
        masks = []
        for index, mask in enumerate(propagate(subject.encoder.to(device), video, options.propagation, device)):
            if out is not None:
                write_mask(out / video.name / f"{video.frame_name(index)}.png", mask)
            if options.overlays:
                masks.append(mask)
            yield mask
        if out is not None and options.overlays:
            write_contact_sheet(video, masks, out / "overlays" / f"{video.name}.png")
