"""The task on videos: masks that labels of an encoder's patches are propagated to, or that somebody else made."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from stop_mim.evaluation.plan import GivenMasks, Plan
from stop_mim.evaluation.results import Evaluation
from stop_mim.evaluation.segmentation import VideoScores, score_masks
from stop_mim.evaluation.session import EncoderSession, Session
from stop_mim.evaluation.video import segment_videos
from stop_mim.training.distributed import wait_for_all


def video_task(session: Session, plan: Plan, subject: EncoderSession | GivenMasks) -> Evaluation:
    """Score the masks of all videos; one process does it."""
    config, videos = session.config, plan.videos
    assert videos is not None
    protocol: dict[str, Any] = {"name": "davis", "foreground": config.foreground}
    facts: dict[str, Any] = {"data_fingerprint": videos.fingerprint(), "sequences": len(videos)}
    if isinstance(subject, EncoderSession):
        protocol |= asdict(config.video.propagation)
        facts = {"encoder_fingerprint": subject.fingerprint, **facts}
    scores = _scores(session, plan, subject) if session.ranks.is_main else None
    wait_for_all(session.ranks)
    metrics = dict(scores.named_values()) if scores is not None else {}
    details = scores.as_json() if scores is not None else {}
    return session.record(subject.name, "video", "objects", config.data, protocol, metrics, facts, details)


def _scores(session: Session, plan: Plan, subject: EncoderSession | GivenMasks) -> VideoScores:
    config, videos = session.config, plan.videos
    assert videos is not None
    bar = session.bar(f"{subject.name} video", unit="frames")
    if isinstance(subject, GivenMasks):
        return score_masks(videos, subject.folder, config.foreground, bar)
    out = config.video.masks
    if out is not None and len(plan.encoders) > 1:
        place = [named.name for named in plan.encoders].index(subject.name)
        out = out / f"{place}-{Path(subject.name).name.replace(':', '-')}"
    settings, overlays = config.video.propagation, config.video.overlays
    return segment_videos(
        subject.encoder, videos, out, settings, config.foreground, overlays, bar, session.ranks.device
    )
