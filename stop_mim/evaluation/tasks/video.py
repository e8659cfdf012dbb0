"""Video object segmentation: DAVIS's J and F of propagated labels, or of masks that somebody else made."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stop_mim.constraints import Checked
from stop_mim.evaluation.data import VideoData
from stop_mim.evaluation.propagation import PropagationConfig, segment_videos
from stop_mim.evaluation.segmentation import VideoScores, score_masks
from stop_mim.evaluation.subject import GivenMasks
from stop_mim.evaluation.task import TASKS, Task
from stop_mim.results import Score

# As in the paper's table.
HEADLINES = ("J&F", "J_mean", "F_mean")


@dataclass(frozen=True)
class VideoOptions(Checked, group="video"):
    """Video object segmentation."""

    split: str = "val"
    """The list in DAVIS's folder ImageSets that names the sequences, such as val or 2016/val; without lists: all."""
    masks: Path | None = None
    """Folder for the predicted masks, in DAVIS's format; each encoder has its own folder in it, if there are several."""
    overlays: bool = False
    """Draw the masks over the frames too, as contact sheets and animations."""
    propagation: PropagationConfig = field(default_factory=PropagationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("overlays", self.masks is not None or not self.overlays, "name a folder with --video.masks")


@TASKS.register("video")
class VideoSegmentation(Task):
    """The masks of all videos; one process does the work."""

    help = "video object segmentation by label propagation, on DAVIS or scenes"
    Options = VideoOptions
    needs = "videos"
    options: VideoOptions
    data: VideoData

    def settings(self) -> dict[str, Any]:
        given = isinstance(self.subject, GivenMasks)
        propagation = {} if given else asdict(self.options.propagation)
        return {"name": "davis", "foreground": self.config.foreground, **propagation}

    def run(self) -> Iterator[Score]:
        """Yield means over all objects; the details have every sequence."""
        if self.subject.ranks.is_main:
            scores = self._scores()
            self.details.update(scores)
            for metric, value in scores.items():
                if metric != "sequences":
                    yield Score(metric, 100 * value, headline=metric in HEADLINES)

    def _scores(self) -> VideoScores:
        videos, subject, foreground = self.data.videos, self.subject, self.config.foreground
        if isinstance(subject, GivenMasks):
            return score_masks(videos, subject.folder, foreground, self.progress)
        device, options = subject.ranks.device, self.options
        out = options.masks if options.masks is None or subject.place is None else options.masks / subject.place
        encoder = subject.encoder.to(device)
        return segment_videos(
            encoder, videos, options.propagation, device, out, options.overlays, foreground, self.progress
        )
