"""How linear probes are trained and tested on each data set: the numbers of the paper's evaluations, as data."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from stop_mim.data.image_source import ImageSource
from stop_mim.data.loader import common_size
from stop_mim.data.sources.folder import FileSource as ListedSource
from stop_mim.errors import InputError


@dataclass(frozen=True)
class LinearProtocol:
    """SGD on frozen features: either steps of a tenth at milestones or a cosine down to a final learning rate."""

    name: str
    """What it is called on the command line."""
    label: Literal["class", "count", "distance"]
    """Which of a source's labels is predicted; count and distance are made classes by evaluation/clevr.py."""
    classes: int | None
    """How many classes there are; None: as many as the data have."""
    epochs: int
    """Passes over the training images."""
    lr_milestones: tuple[int, ...] = ()
    """Epochs, counted from 0, from which on the learning rate is a tenth of what it was."""
    cosine_final_lr: float | None = None
    """The learning rate that a cosine ends at, for the same batch size as lrs, and if there are several for the first."""
    lrs: tuple[float, ...] = (0.01,)
    """Learning rates at the start for a batch of lr_batch_size, tried at once; they grow in proportion to the batch."""
    lr_batch_size: int = 256
    """The batch size that lrs are for."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = True
    """Whether the momentum is Nesterov's."""
    weight_decay: float = 5e-4
    """Weight decay of SGD, on all parameters."""
    preconditioned: bool = False
    """Whether steps are stretched along the principal components of the features, in parts of a step of Newton's."""
    train_view: Literal["random_resized_crop", "resize_flip"] = "random_resized_crop"
    """What is seen of a training image; both are also flipped, half of the time."""
    test_view: Literal["resize_crop", "resize"] = "resize_crop"
    """What is seen of a test image: the centre, or all of it with both sides resized."""
    metric: Literal["top1"] = "top1"
    """Which score is reported: the part of the test images whose class scores highest, in percent."""

    def __post_init__(self) -> None:
        if bool(self.lr_milestones) == (self.cosine_final_lr is not None):
            raise InputError(f"The protocol {self.name} needs either lr_milestones or cosine_final_lr: give one.")
        if self.epochs < 1:
            raise InputError(f"The epochs of the protocol {self.name} are {self.epochs}: give at least 1.")

    @property
    def lr(self) -> float:
        """The first of the learning rates, which is the only one in all published protocols."""
        return self.lrs[0]


_PROTOCOLS = (
    LinearProtocol("imagenet", "class", 1000, 28, (8, 16, 24)),
    LinearProtocol("places205", "class", 205, 14, (4, 8, 12)),
    # Not among the paper's: as Places205.
    LinearProtocol("places365", "class", 365, 14, (4, 8, 12)),
    LinearProtocol("inat18", "class", 8142, 84, (24, 48, 72)),
    LinearProtocol("cifar100", "class", 100, 28, (8, 16, 24), train_view="resize_flip", test_view="resize"),
    LinearProtocol("clevr-count", "count", 8, 50, cosine_final_lr=1e-4, train_view="resize_flip", test_view="resize"),
    LinearProtocol(
        "clevr-dist", "distance", 6, 100, cosine_final_lr=1e-4, train_view="resize_flip", test_view="resize"
    ),
    # Any other labelled data: as ImageNet, but with steps that also few images lead to the optimum with.
    LinearProtocol(
        "generic",
        "class",
        None,
        28,
        cosine_final_lr=0.0,
        lrs=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03),
        weight_decay=1e-7,
        preconditioned=True,
    ),
)

PROTOCOLS = {protocol.name: protocol for protocol in _PROTOCOLS}

# How the names of data sets tell which they are; the number of classes must agree as well.
_NAME_PATTERNS = {
    "imagenet": r"imagenet|ilsvrc",
    "places205": r"places[-_]?205",
    "places365": r"places[-_]?365",
    "inat18": r"inat",
    "cifar100": r"cifar[-_]?100",
}


def fitted(protocol: LinearProtocol, source: ImageSource, size: tuple[int, int]) -> LinearProtocol:
    """The protocol for these images: those that have the encoder's size already are seen as they are."""
    return replace(protocol, test_view="resize") if common_size(source) == size else protocol


def find_protocol(name: str) -> LinearProtocol:
    """The protocol of this name."""
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    raise InputError(f"There is no protocol '{name}': choose one of {', '.join(PROTOCOLS)}.")


def guess_protocol(source: ImageSource) -> LinearProtocol:
    """The protocol of the data set that the source's name or layout and number of classes tell, or the generic one.

    Of the two protocols for counts and distances it is the one for counts.
    """
    if "count" in source.labels:
        return PROTOCOLS["clevr-count"]
    classes = number_of_classes(source)
    layout = source.layout if isinstance(source, ListedSource) else ""
    for name, pattern in _NAME_PATTERNS.items():
        told = layout == name or re.search(pattern, source.name, re.IGNORECASE)
        if told and classes == PROTOCOLS[name].classes:
            return PROTOCOLS[name]
    return PROTOCOLS["generic"]


def number_of_classes(source: ImageSource) -> int:
    """As many as have names, or else as the labels need; InputError for data without classes."""
    labels = source.labels.get("class")
    if labels is None:
        raise InputError(f"{source.name} has no classes: give data with a class for each image.")
    return len(source.class_names) or int(labels.max()) + 1
