"""How many runs fit side by side, and on which device each of them runs."""

import math
import os
from collections.abc import Mapping

import torch

from stop_mim.models.encoder import Encoder
from stop_mim.training.build import build_objective
from stop_mim.training.config import TrainConfig
from stop_mim.training.distributed import choose_device

MOST_SIDE_BY_SIDE = 4
# Larger encoders fill a GPU on their own: side by side, each would only be slower.
LARGEST_SMALL_ENCODER = 50e6
# Weights, gradients and AdamW's two averages, in full precision; a target encoder has weights alone.
BYTES_A_PARAMETER = 16
# What a transformer layer keeps of a feature for its gradient, in half precision: a rule of thumb, on the safe side.
BYTES_AN_ACTIVATION = 34
BYTES_OF_A_PROCESS = 1.5 * 2**30
USABLE_MEMORY = 0.9


def memory_of_run(config: TrainConfig, image_bytes: int = 0) -> float:
    """About how many bytes a run takes on a GPU, with so many bytes of images resident."""
    with torch.device("meta"):
        objective = build_objective(config)
    parameters = sum(parameter.numel() for parameter in objective.parameters())
    encoder, predictor, masks = objective.encoder, config.predictor, config.masks
    features = encoder.depth * encoder.dim + masks.n_blocks * predictor.depth * predictor.width
    batch = config.speed.batch_size_per_device or config.optim.batch_size
    activations = batch * math.prod(encoder.grid) * features * BYTES_AN_ACTIVATION
    if config.speed.precision == "fp32":
        activations *= 2
    return parameters * BYTES_A_PARAMETER + activations + image_bytes + BYTES_OF_A_PROCESS


def fitting(run_bytes: float, free_bytes: float, encoder_parameters: float) -> int:
    """How many such runs share a GPU."""
    if encoder_parameters > LARGEST_SMALL_ENCODER:
        return 1
    return max(1, min(MOST_SIDE_BY_SIDE, int(USABLE_MEMORY * free_bytes / run_bytes)))


def choose_side_by_side(asked: int | None, config: TrainConfig, image_bytes: int = 0) -> int:
    """Runs at the same time on a device: as asked, else one on the CPU and as many small ones as fit on a GPU."""
    device = choose_device(config.speed.device)
    if asked is not None or device.type == "cpu":
        return asked or 1
    free, _ = torch.cuda.mem_get_info(device)
    with torch.device("meta"):
        encoder: Encoder = build_objective(config).encoder
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    return fitting(memory_of_run(config, image_bytes), free, parameters)


def slot_environments(side_by_side: int, device: str, given: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """What each process finds in its environment: its own share of the cores, and one of the GPUs where there are several."""
    visible = [""]
    if choose_device(device).type == "cuda" and ":" not in device and torch.cuda.device_count() > 1:
        visible = given.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if visible == [""]:
            visible = [str(number) for number in range(torch.cuda.device_count())]
    places = [{"CUDA_VISIBLE_DEVICES": name} if name else {} for _ in range(side_by_side) for name in visible]
    if len(places) > 1 and "OMP_NUM_THREADS" not in given:
        threads = str(max(1, (os.cpu_count() or 1) // len(places)))
        places = [{**place, "OMP_NUM_THREADS": threads} for place in places]
    return places
