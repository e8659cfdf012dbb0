"""Options of the model: objective, encoder, predictor, positions and masks. All of them change results.

The docstring of a field is its help on the command line. The options of masks are in `stop_mim/options.py`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable

from stop_mim.constraints import ABOVE_ZERO, AT_LEAST_ZERO, DEPTH, SIDE, WIDTH, Checked, Each, NotWith, OnlyWith
from stop_mim.options import ApplyTo, Convention, MaskConfig

EncoderSize = Literal["tiny", "small", "base", "large", "huge", "giant"]
TargetResolution = Literal["full", "bilinear", "max"]
PositionsKind = Literal["stochastic", "sincos", "learned"]
Initialisation = Literal["scaled", "release"]

IJEPA_ONLY = OnlyWith("objective.kind", ("ijepa",))
DATA2VEC_ONLY = OnlyWith("objective.kind", ("data2vec",))
STOCHASTIC_ONLY = OnlyWith("positions.kind", ("stochastic",))


@dataclass(frozen=True)
class ObjectiveConfig(Checked, group="objective"):
    """What is predicted for the masked patches."""

    kind: str = "ijepa"
    """ijepa: features, by a predictor; mae: pixels, by a decoder (the predictor group); data2vec: features, by the encoder."""
    target_layers: Annotated[int, ABOVE_ZERO, DATA2VEC_ONLY] = 1
    """Number of last layers of the target encoder whose features are averaged (data2vec)."""
    beta: Annotated[float, ABOVE_ZERO, NotWith("objective.kind", ("mae",))] = 1.0
    """Error above which smooth-L1 is linear (ijepa, data2vec)."""
    norm_pixels: Annotated[bool, NotWith("objective.kind", ("ijepa", "data2vec"))] = True
    """Normalise the pixels of each patch by their mean and variance (mae)."""
    target_resolution: Annotated[TargetResolution, IJEPA_ONLY] = "full"
    """full: targets at the patches' resolution; bilinear, max: also at half of it, by resizing or max pooling (ijepa)."""
    l1_strength: Annotated[float, AT_LEAST_ZERO, IJEPA_ONLY] = 0.0
    """Weight of the mean absolute entry of A in the loss (ijepa)."""


@dataclass(frozen=True)
class EncoderConfig(Checked, group="encoder"):
    """The Vision Transformer that is trained."""

    size: EncoderSize = "base"
    """Width and depth by name: tiny 192x12, small 384x12, base 768x12, large 1024x24, huge 1280x32, giant 1408x40."""
    image_size: Annotated[tuple[int, int], Each(SIDE)] = (224, 224)
    """Height and width of the training images in pixels."""
    patch_size: Annotated[int, SIDE] = 16
    """Side of a patch in pixels."""
    width: Annotated[int | None, WIDTH] = None
    """Width instead of the size's."""
    depth: Annotated[int | None, DEPTH] = None
    """Number of layers instead of the size's."""
    heads: Annotated[int | None, DEPTH] = None
    """Number of attention heads instead of the size's."""
    initialisation: Initialisation = "scaled"
    """Initial weights, also of the predictor. scaled: by fan-in for patches, by depth for layers; release: std 0.02 for all."""


@dataclass(frozen=True)
class PredictorConfig(Checked, group="predictor"):
    """The narrow transformer that predicts the targets: MAE's decoder; data2vec has none."""

    width: Annotated[int, WIDTH] = 384
    """Width of its tokens."""
    depth: Annotated[int, DEPTH] = 6
    """Number of layers."""
    heads: Annotated[int | None, DEPTH] = None
    """Number of attention heads; by default the encoder's."""


@dataclass(frozen=True)
class PositionsConfig(Checked, group="positions"):
    """Positions in the predictor: fixed for I-JEPA, stochastic for StoP."""

    kind: PositionsKind = "stochastic"
    """stochastic (StoP, around sine-cosine positions), sincos (I-JEPA) or learned."""
    sigma: Annotated[float, AT_LEAST_ZERO] = 0.25
    """Strength of the noise in Σ = σ A Aᵀ: a variance or a standard deviation, as the convention says."""
    apply_to: Annotated[ApplyTo, STOCHASTIC_ONLY] = "masked"
    """Which tokens get noisy positions."""
    covariance: Annotated[str, STOCHASTIC_ONLY] = "tied"
    """Σ: tied, identity, diagonal, untied or low_rank(r)."""
    convention: Convention = "paper"
    """paper: sigma is a variance; std: a standard deviation; release: that, and the projection's bias instead of m̃."""


@runtime_checkable
class ModelConfig(Protocol):
    """A config with the groups of the model; `TrainConfig` is one."""

    @property
    def objective(self) -> ObjectiveConfig: ...
    @property
    def encoder(self) -> EncoderConfig: ...
    @property
    def predictor(self) -> PredictorConfig: ...
    @property
    def positions(self) -> PositionsConfig: ...
    @property
    def masks(self) -> MaskConfig: ...
