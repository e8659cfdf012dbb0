"""Files with the key layout of the releases, and a Vision Transformer in plain operations to hold them against."""

import math

import torch
import torch.nn.functional as F

HEADS = {192: 3, 768: 12, 1024: 16, 1280: 16}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def block_state(prefix, width, draw):
    shapes = {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "attn.qkv.weight": (3 * width, width),
        "attn.qkv.bias": (3 * width,),
        "attn.proj.weight": (width, width),
        "attn.proj.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "mlp.fc1.weight": (4 * width, width),
        "mlp.fc1.bias": (4 * width,),
        "mlp.fc2.weight": (width, 4 * width),
        "mlp.fc2.bias": (width,),
    }
    return {f"{prefix}{name}": draw(*shape) for name, shape in shapes.items()}


def drawer(seed):
    random = generator(seed)
    return lambda *shape: torch.randn(*shape, generator=random) / math.sqrt(shape[-1] if len(shape) > 1 else 4)


def encoder_state(width, patch, grid, depth, seed):
    draw = drawer(seed)
    state = {
        "pos_embed": sincos_by_definition(width, grid)[None],
        "patch_embed.proj.weight": draw(width, 3, patch, patch) / patch,
        "patch_embed.proj.bias": draw(width),
    }
    for number in range(depth):
        state |= block_state(f"blocks.{number}.", width, draw)
    return state | {"norm.weight": draw(width), "norm.bias": draw(width)}


def predictor_state(width, encoder_width, grid, depth, seed):
    draw = drawer(seed)
    state = {
        "mask_token": draw(1, 1, width),
        "predictor_pos_embed": sincos_by_definition(width, grid)[None],
        "predictor_embed.weight": draw(width, encoder_width),
        "predictor_embed.bias": draw(width),
    }
    for number in range(depth):
        state |= block_state(f"predictor_blocks.{number}.", width, draw)
    return state | {
        "predictor_norm.weight": draw(width),
        "predictor_norm.bias": draw(width),
        "predictor_proj.weight": draw(encoder_width, width),
        "predictor_proj.bias": draw(encoder_width),
    }


def release(width=192, patch=16, grid=4, depth=2, prefix="module.", predictor_width=48, predictor_depth=2):
    """What the releases' training scripts hand to torch.save."""
    parts = {
        "encoder": encoder_state(width, patch, grid, depth, seed=1),
        "predictor": predictor_state(predictor_width, width, grid, predictor_depth, seed=2),
        "target_encoder": encoder_state(width, patch, grid, depth, seed=3),
    }
    parts = {part: {f"{prefix}{name}": t for name, t in state.items()} for part, state in parts.items()}
    optimiser = {"state": {0: {"step": 1, "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    rest = {"opt": optimiser, "scaler": None, "epoch": 300, "loss": 0.1, "batch_size": 64, "world_size": 32, "lr": 1e-3}
    return {**parts, **rest}


def sincos_by_definition(width, grid):
    """Half of the features for the column, half for the row; of each, sines then cosines of a quarter of the frequencies."""
    quarter = width // 4
    frequencies = [1 / 10000 ** (index / quarter) for index in range(quarter)]
    waves = [
        [math.sin(place * frequency) for frequency in frequencies]
        + [math.cos(place * frequency) for frequency in frequencies]
        for place in range(grid)
    ]
    return torch.tensor([waves[column] + waves[row] for row in range(grid) for column in range(grid)])


def norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias


def transformer(x, state, prefix, depth, heads):
    batch, count, width = x.shape
    for number in range(depth):
        w = {
            name.removeprefix(f"{prefix}{number}."): t
            for name, t in state.items()
            if name.startswith(f"{prefix}{number}.")
        }
        y = norm(x, w["norm1.weight"], w["norm1.bias"]) @ w["attn.qkv.weight"].T + w["attn.qkv.bias"]
        query, key, value = y.view(batch, count, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        mixed = ((query @ key.transpose(-1, -2)) / math.sqrt(width // heads)).softmax(-1) @ value
        x = x + mixed.transpose(1, 2).reshape(batch, count, width) @ w["attn.proj.weight"].T + w["attn.proj.bias"]
        hidden = norm(x, w["norm2.weight"], w["norm2.bias"]) @ w["mlp.fc1.weight"].T + w["mlp.fc1.bias"]
        gelu = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + gelu @ w["mlp.fc2.weight"].T + w["mlp.fc2.bias"]
    return x


def tokens_by_definition(state, images, heads, indices=None):
    """Normed patch tokens of an encoder's state without prefix."""
    weight = state["patch_embed.proj.weight"]
    patches = F.unfold(images, weight.shape[-2:], stride=weight.shape[-2:]).transpose(1, 2)
    x = patches @ weight.flatten(1).T + state["patch_embed.proj.bias"] + state["pos_embed"]
    if indices is not None:
        x = torch.stack([tokens[chosen] for tokens, chosen in zip(x, indices, strict=True)])
    depth = sum(name.endswith("norm1.weight") for name in state)
    return norm(transformer(x, state, "blocks.", depth, heads), state["norm.weight"], state["norm.bias"])


def prediction_by_definition(state, context, context_indices, target_indices, heads, masked):
    """Predicted features of one target block; `masked` is what is added to the masked tokens' positions."""
    table = state["predictor_pos_embed"][0]
    seen = context @ state["predictor_embed.weight"].T + state["predictor_embed.bias"] + table[context_indices]
    x = torch.cat([seen, table[target_indices] + masked], dim=1)
    depth = sum(name.endswith("norm1.weight") for name in state)
    x = norm(
        transformer(x, state, "predictor_blocks.", depth, heads),
        state["predictor_norm.weight"],
        state["predictor_norm.bias"],
    )
    return x[:, -target_indices.shape[1] :] @ state["predictor_proj.weight"].T + state["predictor_proj.bias"]


def without_prefix(state):
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}
