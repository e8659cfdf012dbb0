"""The fingerprint of an encoder: results and caches of features are known by it."""

from torch import nn

from stop_mim.data.image_source import digest
from stop_mim.models.encoder import Encoder, FrozenEncoder

# Attributes of layers that change no feature: how a layer was made, how its result is used, and how fast it is computed.
NOT_IN_FEATURES = frozenset(
    {"training", "weight_init_mode", "fix_init", "global_pool", "num_classes", "grad_checkpointing", "fused_attn"}
)


def encoder_fingerprint(encoder: FrozenEncoder) -> str:
    """Return a hash of all that features depend on: normalisation, weights, pooling, and each layer's kind and numbers."""
    weights = encoder.state_dict()
    network = encoder.vit if isinstance(encoder, Encoder) else encoder.get_submodule("model")
    layers = [(name, type(layer).__name__, _numbers(layer)) for name, layer in network.named_modules()]
    tensors = (
        part
        for name in sorted(weights)
        for part in (
            name,
            tuple(weights[name].shape),
            weights[name].detach().cpu().float().contiguous().numpy().tobytes(),
        )
    )
    return digest([type(encoder).__name__, encoder.mean, encoder.std, encoder.pool, layers, *tensors])


def _numbers(layer: nn.Module) -> list[tuple[str, object]]:
    plain = (bool, int, float, str, tuple)
    return sorted((k, v) for k, v in vars(layer).items() if isinstance(v, plain) and k not in NOT_IN_FEATURES)
