"""Official RWKV-6 "Finch" checkpoints: one `.pth` of tensors without a configuration, as BlinkDL's RWKV-LM trains them
(`RWKV-v5/src/model.py`, version x060).

With x the input of a step, x⁻ that of the token before and xx = x⁻ − x, the official time mix is

    m                = tanh((x + xx · time_maa_x) time_maa_w1), in five equal parts, part i times time_maa_w2[i]: m_w, m_k, m_v, m_r, m_g
    x_c              = x + xx · (time_maa_c + m_c)
    decay            = exp(−exp(time_decay + tanh(x_w time_decay_w1) time_decay_w2))
    r, k, v, g       = receptance(x_r), key(x_k), value(x_v), silu(gate(x_g))
    out              = output(ln_x(wkv(r, k, v, decay, time_faaaa)) · g)

Our block computes the same with the matrices transposed and the five parts in the order r, w, k, v, g. Sizes follow from the
shapes; two numbers are in the official program and not in the file: ε = 1e-5 of the LayerNorms and 64e-5 of ln_x. Files that were
prepared for one way of inference (rescaled, quantised or transposed layers) are not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from farstate.errors import FarstateError
from farstate.models.config import Config
from farstate.models.formats.checkpoint import Checkpoint, Origin
from farstate.models.formats.checks import EMBEDDING, HEAD, check_names_and_shapes, expressible, validated
from farstate.models.formats.files import CONFIG, dtypes_of, read_file
from farstate.models.rwkv6.shape import RWKV6Config

name = "blinkdl"
architectures = ("rwkv6",)

_FILE = "rwkv6.pth"
_FIXED = {"norm_epsilon": 1e-5, "group_norm_epsilon": 64e-5, "norm_first": True, "tied_embeddings": False}
# The parts of the token-shift mix: in the file, and the file's places in the order of our rows (r, w, k, v, g).
_PARTS = ("w", "k", "v", "r", "g")
_OURS = (3, 0, 1, 2, 4)
_THEIRS = (1, 2, 3, 0, 4)

# Tensors that are stored as we hold them.
_OUTSIDE = {
    "emb.weight": EMBEDDING,
    "ln_out.weight": "backbone.norm_f.weight",
    "ln_out.bias": "backbone.norm_f.bias",
    "head.weight": HEAD,
}
_SAME = {
    "ln1.weight": "attn_norm.weight",
    "ln1.bias": "attn_norm.bias",
    "ln2.weight": "ffn_norm.weight",
    "ln2.bias": "ffn_norm.bias",
    "att.time_faaaa": "attn.bonus",
    "att.receptance.weight": "attn.r_proj.linear.weight",
    "att.key.weight": "attn.k_proj.linear.weight",
    "att.value.weight": "attn.v_proj.linear.weight",
    "att.gate.weight": "attn.g_proj.linear.weight",
    "att.output.weight": "attn.o_proj.weight",
    "att.ln_x.weight": "attn.g_norm.weight",
    "att.ln_x.bias": "attn.g_norm.bias",
    "ffn.key.weight": "ffn.key.linear.weight",
    "ffn.value.weight": "ffn.value.weight",
    "ffn.receptance.weight": "ffn.receptance.linear.weight",
}
_FIRST = {"ln0.weight": "pre_norm.weight", "ln0.bias": "pre_norm.bias"}
# Vectors, stored as (1, 1, channels).
_VECTORS = {
    "att.time_maa_x": "attn.x_proj.0.mu",
    "att.time_decay": "attn.w_proj.linear.lora.2.bias",
    "ffn.time_maa_k": "ffn.key.mu",
    "ffn.time_maa_r": "ffn.receptance.mu",
}
# Matrices, stored transposed.
_TRANSPOSED = {
    "att.time_decay_w1": "attn.w_proj.linear.lora.0.weight",
    "att.time_decay_w2": "attn.w_proj.linear.lora.2.weight",
}
_X_BIAS, _DOWN, _UP = "attn.x_bias", "attn.x_proj.0.linear.weight", "attn.x_proj.2.weight"


def detects(path: Path) -> bool:
    """A `.pth` file, or a folder with one of them and no `config.json`."""
    if path.is_dir():
        return not (path / CONFIG).exists() and len(list(path.glob("*.pth"))) == 1
    return path.suffix == ".pth"


def read(path: Path) -> Checkpoint:
    """The file `path`, or the only `.pth` in the folder `path`."""
    source = next(path.glob("*.pth")) if path.is_dir() else path
    stored = read_file(source)
    config = _sizes(stored, source)
    check_names_and_shapes(stored, _expected(config), source)
    tensors = {ours: stored[theirs] for theirs, ours in _OUTSIDE.items()}
    for layer in range(config.layers):
        theirs = f"blocks.{layer}."
        block = {key.removeprefix(theirs): tensor for key, tensor in stored.items() if key.startswith(theirs)}
        tensors |= {f"backbone.layers.{layer}.{key}": tensor for key, tensor in _block(block, config).items()}
    origin = {"format": name, "file": source.name, "storage": dtypes_of(tensors)}
    return Checkpoint(config, tensors, origin, source)


def write(config: Config, tensors: Mapping[str, Tensor], folder: Path, origin: Origin) -> None:
    """One `.pth` under the name it came with, its tensors in the official order within a block and shapes."""
    if not isinstance(config, RWKV6Config):
        raise FarstateError(f"{name}: has no architecture '{config.architecture}', only rwkv6")
    expressible(config, name, {**_FIXED, "expand_v": config.expand_k})
    stored = {"emb.weight": tensors[EMBEDDING]}
    for layer in range(config.layers):
        ours = f"backbone.layers.{layer}."
        block = {key.removeprefix(ours): tensor for key, tensor in tensors.items() if key.startswith(ours)}
        official = _official(block, config)
        stored |= {f"blocks.{layer}.{key}": official[key] for key in _shapes(config, layer)}
    stored |= {theirs: tensors[ours] for theirs, ours in _OUTSIDE.items() if theirs != "emb.weight"}
    with open(folder / Path(origin.get("file", _FILE)).name, "wb") as file:
        torch.save({key: tensor.contiguous() for key, tensor in stored.items()}, file)
        file.flush()
        os.fsync(file.fileno())


def _sizes(stored: Mapping[str, Tensor], source: Path) -> RWKV6Config:
    """The configuration, from the shapes.

    Raises:
        FarstateError: not an RWKV-6, or a tensor that tells a size is absent or of another rank.
    """
    blocks = {found[1] for key in stored if (found := re.match(r"blocks\.(\d+)\.", key))}
    if "blocks.0.att.time_maa_w1" not in stored:
        kinds = {"blocks.0.att.x_r": "RWKV-7", "blocks.0.att.time_mix_g": "RWKV-5", "blocks.0.att.time_mix_k": "RWKV-4"}
        other = next((f" (it looks like {kind})" for key, kind in kinds.items() if key in stored), "")
        raise FarstateError(f"{source}: not an RWKV-6 model, the only one that is read: no blocks.0.att.time_maa_w1 in it{other}")
    ranks = {"emb.weight": 2, "blocks.0.ffn.key.weight": 2}
    ranks |= {f"blocks.0.att.{key}": 2 for key in ("time_faaaa", "time_maa_w1", "time_decay_w1", "receptance.weight")}
    for key, rank in ranks.items():
        if key not in stored:
            raise FarstateError(f"{source}: missing {key}")
        if stored[key].dim() != rank or 0 in stored[key].shape:
            raise FarstateError(f"{source}: wrong shape: {key} is {tuple(stored[key].shape)}, expected {rank} dimensions")
    vocabulary, width = stored["emb.weight"].shape
    expand = stored["blocks.0.att.receptance.weight"].shape[0] / width
    config = validated(
        {
            "architecture": "rwkv6",
            "vocabulary_size": vocabulary,
            "vocabulary_multiple": 1,
            "width": width,
            "layers": len(blocks),
            "heads": stored["blocks.0.att.time_faaaa"].shape[0],
            "expand_k": expand,
            "expand_v": expand,
            "mix_rank": max(stored["blocks.0.att.time_maa_w1"].shape[1] // len(_PARTS), 1),
            "decay_rank": stored["blocks.0.att.time_decay_w1"].shape[1],
            "ffn_width": stored["blocks.0.ffn.key.weight"].shape[0],
            "residual_in_fp32": False,
            **_FIXED,
        },
        source,
    )
    assert isinstance(config, RWKV6Config)
    return config


def _expected(config: RWKV6Config) -> dict[str, Tensor]:
    """Names and shapes of the file; the tensors have no memory."""
    vocabulary, width = config.padded_vocabulary, config.width
    shapes: dict[str, tuple[int, ...]] = {"emb.weight": (vocabulary, width)}
    for layer in range(config.layers):
        shapes |= {f"blocks.{layer}.{key}": shape for key, shape in _shapes(config, layer).items()}
    shapes |= {"ln_out.weight": (width,), "ln_out.bias": (width,), "head.weight": (vocabulary, width)}
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


def _shapes(config: RWKV6Config, layer: int) -> dict[str, tuple[int, ...]]:
    """The official shapes of a block's tensors, in the official order."""
    width, inner, ffn = config.width, config.heads * config.key_size, config.inner_ffn_width
    norms = ["ln1", "ln2", "ln0"] if layer == 0 else ["ln1", "ln2"]
    return {
        **{f"{norm}.{part}": (width,) for norm in norms for part in ("weight", "bias")},
        **{f"att.time_maa_{part}": (1, 1, width) for part in ("x", *_PARTS)},
        "att.time_maa_w1": (width, len(_PARTS) * config.mix_rank),
        "att.time_maa_w2": (len(_PARTS), config.mix_rank, width),
        "att.time_decay": (1, 1, inner),
        "att.time_decay_w1": (width, config.decay_rank),
        "att.time_decay_w2": (config.decay_rank, inner),
        "att.time_faaaa": (config.heads, config.key_size),
        **{f"att.{matrix}.weight": (inner, width) for matrix in ("receptance", "key", "value")},
        "att.output.weight": (width, inner),
        "att.gate.weight": (inner, width),
        "att.ln_x.weight": (inner,),
        "att.ln_x.bias": (inner,),
        "ffn.time_maa_k": (1, 1, width),
        "ffn.time_maa_r": (1, 1, width),
        "ffn.key.weight": (ffn, width),
        "ffn.receptance.weight": (width, width),
        "ffn.value.weight": (width, ffn),
    }


def _block(stored: Mapping[str, Tensor], config: RWKV6Config) -> dict[str, Tensor]:
    """The tensors of a block under our names, from the official ones."""
    block = {ours: stored[theirs] for theirs, ours in (_SAME | _FIRST).items() if theirs in stored}
    block |= {ours: stored[theirs].flatten() for theirs, ours in _VECTORS.items()}
    block |= {ours: stored[theirs].t() for theirs, ours in _TRANSPOSED.items()}
    block[_X_BIAS] = torch.stack([stored[f"att.time_maa_{part}"].flatten() for part in _PARTS])[list(_OURS)]
    # (D, 5 · rank) → (5 · rank, D), and (5, rank, D) → (D, 5 · rank).
    down = stored["att.time_maa_w1"].t().unflatten(0, (len(_PARTS), -1))
    block[_DOWN] = down[list(_OURS)].flatten(0, 1)
    block[_UP] = stored["att.time_maa_w2"][list(_OURS)].permute(2, 0, 1).flatten(1)
    return block


def _official(block: Mapping[str, Tensor], config: RWKV6Config) -> dict[str, Tensor]:
    """The inverse of `_block`."""
    stored = {theirs: block[ours] for theirs, ours in (_SAME | _FIRST).items() if ours in block}
    stored |= {theirs: block[ours].view(1, 1, -1) for theirs, ours in _VECTORS.items()}
    stored |= {theirs: block[ours].t() for theirs, ours in _TRANSPOSED.items()}
    mixes = block[_X_BIAS][list(_THEIRS)]
    stored |= {f"att.time_maa_{part}": row.view(1, 1, -1).clone() for part, row in zip(_PARTS, mixes, strict=True)}
    down = block[_DOWN].unflatten(0, (len(_PARTS), -1))[list(_THEIRS)]
    stored["att.time_maa_w1"] = down.flatten(0, 1).t()
    stored["att.time_maa_w2"] = block[_UP].unflatten(1, (len(_PARTS), -1)).permute(1, 2, 0)[list(_THEIRS)]
    return stored
