"""Protocols of the paper's evaluations: SGD of linear heads, and views of training and test images, for each dataset."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from stop_mim.data.augment import STORED_TO_USED, Interpolation, RandomCrop, TestView, WholeImage
from stop_mim.data.image_source import ImageSource, common_size
from stop_mim.errors import InputError
from stop_mim.models.encoder import FrozenEncoder
from stop_mim.options import AugmentConfig


@dataclass(frozen=True)
class Protocol:
    """The schedule of SGD on frozen features, and the views of images for all tasks."""

    name: str
    """Its name on the command line."""
    epochs: int
    """Passes over the training images."""
    milestones: tuple[int, ...] = ()
    """Epochs, counted from 0, at whose start the learning rate falls to a tenth."""
    final_factor: float | None = None
    """The learning rate follows a cosine down to this fraction; None: it falls at the milestones."""
    by_epoch: bool = True
    """A cosine changes the learning rate at the start of each epoch, and not with every step."""
    lrs: tuple[float, ...] = (0.01,)
    """Learning rates for a batch of 256 images, tried at once; they are scaled linearly with the batch size."""
    weight_decay: float = 5e-4
    """Weight decay of weights and biases."""
    preconditioned: bool = False
    """Steps are preconditioned by the features' curvature; learning rates are then fractions of a Newton step."""
    train_view: Literal["random_resized_crop", "resize_flip"] = "random_resized_crop"
    """The view of a training image; both kinds flip half of the images."""
    test_view: Literal["resize_crop", "short_side", "resize"] = "resize_crop"
    """resize_crop: the short side to 8/7 of the size, then the centre; short_side: the short side to the size, then the
    centre; resize: the whole image, both sides resized."""
    interpolation: Interpolation = "bicubic"
    """How training and test images are resized."""
    label: str = "class"
    """The label that it is for."""
    classes: int | None = None
    """Number of classes of the dataset; None: any."""

    def shortened(self, epochs: int) -> "Protocol":
        """Return the protocol with another number of epochs and its milestones in proportion."""
        scaled = {max(1, round(milestone * epochs / self.epochs)) for milestone in self.milestones}
        return replace(self, epochs=epochs, milestones=tuple(sorted(one for one in scaled if one < epochs)))

    def training_view(self, encoder: FrozenEncoder, augment: AugmentConfig) -> RandomCrop:
        kind = RandomCrop if self.train_view == "random_resized_crop" else WholeImage
        return kind(augment, encoder.image_size, encoder.mean, encoder.std, self.interpolation)

    def test_view_of(self, encoder: FrozenEncoder) -> TestView:
        size = max(encoder.image_size)
        resize_to = {"resize_crop": round(STORED_TO_USED * size), "short_side": size, "resize": None}[self.test_view]
        return TestView(encoder.image_size, resize_to, encoder.mean, encoder.std, self.interpolation)

    def with_few_labels(self) -> "Protocol":
        """Return the protocol of the low-shot probe: for ImageNet, resize the short side bilinearly to the size of the crop."""
        if self.name != "imagenet" or self.test_view != "resize_crop":
            return self
        return replace(self, test_view="short_side", interpolation="bilinear")


# VISSL's configurations of datasets resize bilinearly; those of ViTs, which replace the views of all but CLEVR, bicubically.
_WHOLE = Protocol("", 28, train_view="resize_flip", test_view="resize", interpolation="bilinear")
_PROTOCOLS = (
    Protocol("imagenet", 28, (8, 16, 24), classes=1000),
    Protocol("places205", 14, (4, 8, 12), classes=205),
    # Not in the paper: as Places205.
    Protocol("places365", 14, (4, 8, 12), classes=365),
    Protocol("inat18", 84, (24, 48, 72), classes=8142),
    # The dataset's configuration, and the one with the views of a ViT's.
    replace(_WHOLE, name="cifar100", milestones=(8, 16, 24), classes=100),
    Protocol("cifar100-crops", 28, (8, 16, 24), classes=100),
    replace(_WHOLE, name="clevr-count", epochs=50, final_factor=0.01, label="count", classes=8),
    replace(_WHOLE, name="clevr-dist", epochs=100, final_factor=0.01, label="distance", classes=6),
    # Any other labelled data: as ImageNet, with steps that reach the optimum on small datasets too.
    Protocol(
        "generic",
        28,
        final_factor=0.0,
        by_epoch=False,
        lrs=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03),
        weight_decay=1e-7,
        preconditioned=True,
    ),
)

PROTOCOLS = {protocol.name: protocol for protocol in _PROTOCOLS}

# The names of datasets; the number of classes must agree as well.
_NAME_PATTERNS = {
    "imagenet": r"imagenet|ilsvrc",
    "places205": r"places[-_]?205",
    "places365": r"places[-_]?365",
    "inat18": r"inat",
    "cifar100": r"cifar[-_]?100",
}


def choose_protocol(name: str, source: ImageSource, label: str, size: tuple[int, int]) -> Protocol:
    """Return the protocol of that name, or with "auto" that of the data; images of the encoder's size are not cropped."""
    if name == "auto":
        protocol = guess_protocol(source, label)
    elif name in PROTOCOLS:
        protocol = PROTOCOLS[name]
    else:
        raise InputError(f"There is no protocol '{name}': choose one of {', '.join(PROTOCOLS)}.")
    return replace(protocol, test_view="resize") if common_size(source) == size else protocol


def guess_protocol(source: ImageSource, label: str = "class") -> Protocol:
    """Return the protocol that the label, or the source's name or layout and number of classes, stand for."""
    if label != "class":
        return next((one for one in _PROTOCOLS if one.label == label), PROTOCOLS["generic"])
    classes = len(source.class_names) or int(source.labels["class"].max()) + 1
    for name, pattern in _NAME_PATTERNS.items():
        is_named = source.layout == name or re.search(pattern, source.name, re.IGNORECASE)
        if is_named and classes == PROTOCOLS[name].classes:
            return PROTOCOLS[name]
    return PROTOCOLS["generic"]
