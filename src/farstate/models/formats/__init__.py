"""Formats of checkpoints by name, in the order in which they are asked whether a folder is theirs.

| format       | folder holds                                                                                              |
|--------------|-----------------------------------------------------------------------------------------------------------|
| farstate     | `config.json` (a `Config`), `model.safetensors` whose header repeats it and says where the weights come from |
| fla          | `config.json` (`model_type`: gla, rwkv6, mamba2, gated_deltanet), weights as transformers'                |
| transformers | `config.json` (`model_type`: mamba, mamba2), safetensors or `pytorch_model.bin`, whole or with an index     |
| mamba-ssm    | `config.json` (`d_model`, `n_layer`, `ssm_cfg`, …), `pytorch_model.bin`                                   |
| blinkdl      | one official RWKV-6 `.pth`, no configuration; the file itself will do                                     |

A new one is a module with the names of `Format`, and a line in `FORMATS`.
"""

from __future__ import annotations

from farstate.models.formats import blinkdl, farstate, fla, mamba_ssm, transformers
from farstate.models.formats.checkpoint import Checkpoint, Format, Origin

__all__ = ["FORMATS", "Checkpoint", "Format", "Origin"]

FORMATS: dict[str, Format] = {
    "farstate": farstate,
    "fla": fla,
    "transformers": transformers,
    "mamba-ssm": mamba_ssm,
    "blinkdl": blinkdl,
}
