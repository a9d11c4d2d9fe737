"""mamba-ssm's own `MambaLMHeadModel` as an oracle, on a CPU.

It is imported with stubs that transformers must not see, so that it lives in a process of its own: `oracle()` starts one for
the test run. Only what needs a GPU is replaced there, by mamba-ssm's own references: the scans by `selective_scan_ref`, the norms
by `rms_norm_ref`. Modules, wiring, names, configurations, `save_pretrained` and `from_pretrained` are mamba-ssm's.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Oracle:
    """A process in which mamba-ssm is imported."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mamba_ssm_oracle_"))
        self._errors = self._folder / "stderr"
        with open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        atexit.register(self._process.kill)

    def make(self, folder: Path, tokens: Tensor, **options: Any) -> dict[str, Any]:
        """Save a random model with the `MambaConfig` of `options` into `folder`; its logits of `tokens` and its gradients."""
        return self._ask({"folder": str(folder), "tokens": tokens.tolist(), "options": options})

    def load(self, folder: Path, tokens: Tensor) -> dict[str, Any]:
        """The same of what `from_pretrained(folder)` loads, and its `tensors`."""
        return self._ask({"folder": str(folder), "tokens": tokens.tolist()})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = self._folder / "answer.pt"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request | {"answer": str(answer)}) + "\n")
            self._process.stdin.flush()
        if self._process.stdout.readline().strip() != "done":
            raise RuntimeError(f"mamba-ssm failed:\n{self._errors.read_text()[-3000:]}")
        return torch.load(answer, weights_only=True)


@functools.cache
def oracle() -> Oracle:
    """The one process of this test run."""
    return Oracle()


# --- in that process -------------------------------------------------------------------------------------


def _serve() -> None:
    # Whatever the library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    MambaConfig, MambaLMHeadModel = _import_with_references()
    for line in sys.stdin:
        request = json.loads(line)
        if "options" in request:
            torch.manual_seed(0)
            model = MambaLMHeadModel(MambaConfig(**request["options"]))
            with torch.no_grad():
                for parameter in model.parameters():
                    # Away from the initialisation, where norms are one and biases zero and mistakes cancel.
                    parameter += 0.2 * torch.randn(parameter.shape)
            model.save_pretrained(request["folder"])
        else:
            model = MambaLMHeadModel.from_pretrained(request["folder"])
        tokens = torch.tensor(request["tokens"])
        logits = model(tokens).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        result = {
            "tensors": dict(model.state_dict()),
            "logits": logits.detach(),
            "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        }
        torch.save(result, request["answer"])
        print("done", file=answers, flush=True)


def _import_with_references() -> tuple[Any, Any]:
    import types

    import transformers.models.mamba2.modeling_mamba2  # noqa: F401 (chooses its kernels before the stub is there)

    sys.modules["selective_scan_cuda"] = types.ModuleType("selective_scan_cuda")
    import mamba_ssm.modules.mamba2 as mamba2
    import mamba_ssm.modules.mamba_simple as mamba1
    import mamba_ssm.ops.selective_scan_interface as scans
    import mamba_ssm.ops.triton.layer_norm as norms
    import mamba_ssm.ops.triton.layernorm_gated as gated
    import mamba_ssm.ops.triton.ssd_combined as ssd
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    scans.selective_scan_fn = mamba1.selective_scan_fn = scans.selective_scan_ref

    def scan(x: Tensor, dt: Tensor, *rest: Any, chunk_size: int, **options: Any) -> Tensor:
        assert not any(
            options.pop(name, None) for name in ("seq_idx", "cu_seqlens", "return_final_states", "return_varlen_states")
        )
        options["dt_limit"] = tuple(options.get("dt_limit", (0.0, float("inf"))))
        return ssd.ssd_selective_scan(x, dt, *rest, **options)

    mamba2.mamba_chunk_scan_combined = scan
    norms.RMSNorm.forward = lambda self, x: norms.rms_norm_ref(x, self.weight, self.bias, eps=self.eps)
    gated.RMSNorm.forward = lambda self, x, z=None: gated.rms_norm_ref(
        x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate
    )

    # The fused paths are kernels; `from_pretrained` has no word for the other ones.
    def unfused(mixer: type, name: str) -> None:
        forward = mixer.forward

        def plain(self: Any, *arguments: Any, **options: Any) -> Any:
            setattr(self, name, False)
            return forward(self, *arguments, **options)

        mixer.forward = plain  # type: ignore[attr-defined]

    unfused(mamba2.Mamba2, "use_mem_eff_path")
    unfused(mamba1.Mamba, "use_fast_path")

    def backbone(self: Any, input_ids: Tensor, inference_params: None = None) -> Tensor:
        hidden, residual = self.embedding(input_ids), None
        for layer in self.layers:
            layer.fused_add_norm = False
            hidden, residual = layer(hidden, residual)
        return self.norm_f((hidden + residual).to(self.norm_f.weight.dtype))

    from mamba_ssm.models.mixer_seq_simple import MixerModel

    MixerModel.forward = backbone
    return MambaConfig, MambaLMHeadModel


if __name__ == "__main__":
    _serve()
