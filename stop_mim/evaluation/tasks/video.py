"""Video object segmentation: DAVIS's J and F of propagated labels, or of masks that somebody else made."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from stop_mim.constraints import ABOVE_ZERO, AT_LEAST_ZERO, Checked
from stop_mim.evaluation.task import TASKS, Task
from stop_mim.results import Score

# As in the paper's table.
HEADLINES = ("J&F", "J_mean", "F_mean")

Variant = Literal["dino", "soft"]


@dataclass(frozen=True)
class PropagationConfig(Checked, group="video.propagation"):
    """How labels go from frame to frame; the defaults are those of the paper, which follows DINO."""

    variant: Variant = "dino"
    """dino: seeds of one object per patch, and each object's map stretched to 0..1 before the largest is taken; soft: seeds
    are fractions of patches, and maps are compared as they are."""
    short_side: Annotated[int, ABOVE_ZERO] = 480
    """Frames are resized to this shorter side in pixels, as nearly as whole patches allow."""
    context_frames: Annotated[int, AT_LEAST_ZERO] = 7
    """How many of the frames just before give labels, besides the first."""
    temperature: Annotated[float, ABOVE_ZERO] = 0.1
    """A patch has the weight exp(cosine / temperature)."""
    window: Annotated[int, AT_LEAST_ZERO] = 12
    """A patch looks at patches up to this many rows and columns away."""
    neighbours: Annotated[int, ABOVE_ZERO] = 5
    """How many patches, of all in the window in all context frames, give their labels."""


@dataclass(frozen=True)
class VideoOptions(Checked, group="video"):
    """Video object segmentation."""

    split: str = "val"
    """The list in DAVIS's folder ImageSets that names the sequences, such as val or 2016/val; without lists: all."""
    masks: Path | None = None
    """Folder for the predicted masks, in DAVIS's format; each encoder has its own folder in it, if there are several."""
    overlays: bool = False
    """Draw the masks over some frames too, as a contact sheet for each sequence."""
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

    def settings(self) -> dict[str, Any]:
        propagation = {} if self.subject.encoder is None else asdict(self.options.propagation)
        return {"name": "davis", "foreground": self.config.foreground, **propagation}

    def run(self) -> Iterator[Score]:
        """Yield means over all objects; the details have every sequence."""
        self.details.update(self._scores() if self.subject.ranks.is_main else {})
        for metric, value in self.details.items():
            if metric != "sequences":
                yield Score(metric, 100 * value, headline=metric in HEADLINES)

    def _scores(self) -> dict[str, Any]:
        from stop_mim.evaluation.propagation import segment_videos
        from stop_mim.evaluation.segmentation import score_masks

        videos, subject, foreground = self.data.videos, self.subject, self.config.foreground
        if subject.encoder is None:
            return score_masks(videos, subject.folder, foreground, self.progress)
        device, options = subject.ranks.device, self.options
        out = options.masks if options.masks is None or subject.place is None else options.masks / subject.place
        encoder = subject.encoder.to(device)
        return segment_videos(
            encoder, videos, options.propagation, device, out, options.overlays, foreground, self.progress
        )
