"""flash-linear-attention's own models as oracles, on a CPU.

Importing fla takes ten seconds and registers its own `mamba2` with transformers, so that it lives in a process of its own:
`oracle()` starts one for the whole test run, and `Oracle` asks it. Only what needs a GPU is replaced there: operations by fla's
`naive` references, fused norms by its `*_ref` functions where it has them, fused activations and convolutions by torch's.
Modules, wiring, parameter names, configurations and files are fla's.
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
    """A process in which fla is imported."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fla_oracle_"))
        self._errors = self._folder / "stderr"
        with open(self._errors, "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        atexit.register(self.close)

    def make(self, folder: Path, model_type: str, tokens: Tensor, split: int | None, **options: Any) -> dict[str, Any]:
        """Save a random fla model of `model_type` with the configuration `options` into `folder`.

        Returns:
            logits (B, T, V) for `tokens` (B, T), without cache; `continued`, the same in two calls with a cache, cut after `split`
            tokens; `gradients` of the mean cross entropy of the next token, by fla's names.
        """
        return self._ask(
            {"make": model_type, "folder": str(folder), "tokens": tokens.tolist(), "split": split, "options": options}
        )

    def load(self, folder: Path, tokens: Tensor | None) -> dict[str, Any]:
        """What `AutoModelForCausalLM.from_pretrained(folder)` makes of `folder`.

        Returns:
            `tensors` by fla's names, `logits` of `tokens`, `model_type`, `problems`: missing, unexpected or mismatched keys.
        """
        return self._ask({"load": str(folder), "tokens": None if tokens is None else tokens.tolist()})

    def adapt(self, folder: Path, model_type: str, tokens: Tensor, **options: Any) -> dict[str, Any]:
        """`farstate.adapt` on a random fla model, which is trained through it with states passed and then saves itself to `folder`.

        Returns:
            `same`: whether both have the same parameters; `before` and `after` training fla's logits of `tokens` and ours.
        """
        return self._ask({"adapt": model_type, "folder": str(folder), "tokens": tokens.tolist(), "options": options})

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = self._folder / "answer.pt"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request | {"answer": str(answer)}) + "\n")
            self._process.stdin.flush()
        if self._process.stdout.readline().strip() != "done":
            raise RuntimeError(f"fla failed:\n{self._errors.read_text()[-3000:]}")
        return torch.load(answer, weights_only=True)


@functools.cache
def oracle() -> Oracle:
    """The one process of this test run."""
    return Oracle()


# --- in that process -------------------------------------------------------------------------------------


def _serve() -> None:
    # Whatever fla or transformers print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    import fla  # noqa: F401

    _replace_kernels()
    for line in sys.stdin:
        request = json.loads(line)
        result = _make(request) if "make" in request else _adapt(request) if "adapt" in request else _load(request)
        torch.save(result, request["answer"])
        print("done", file=answers, flush=True)


def _random(model_type: str, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Away from the initialisation, where norms are one and biases zero and mistakes cancel.
            parameter += 0.2 * torch.randn(parameter.shape)
    return model


def _adapt(request: dict[str, Any]) -> dict[str, Any]:
    import farstate

    theirs = _random(request["adapt"], request["options"])
    ours, tokens = farstate.adapt(theirs), torch.tensor(request["tokens"])
    result: dict[str, Any] = {"same": {id(p) for p in ours.parameters()} == {id(p) for p in theirs.parameters()}}

    def logits() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return theirs(tokens, use_cache=False).logits, ours(tokens)[0] @ ours.head_weight.T

    result["before"] = logits()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    passing = farstate.StatePassing(farstate.Run.of(ours, rows=len(tokens), context=tokens.shape[1] - 1))
    for step in range(3):
        hidden, final = ours(tokens[:, :-1], passing.initial(step))
        farstate.mean_nll(hidden, ours.head_weight, tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        passing.observe(final)
    result["after"] = logits()
    theirs.save_pretrained(request["folder"])
    return result


def _make(request: dict[str, Any]) -> dict[str, Any]:
    model = _random(request["make"], request["options"])
    model.save_pretrained(request["folder"])
    tokens, split = torch.tensor(request["tokens"]), request["split"]
    logits = model(tokens, use_cache=False).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    result = {
        "logits": logits.detach(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None},
    }
    if split is not None:
        with torch.no_grad():
            first = model(tokens[:, :split], use_cache=True)
            second = model(tokens[:, split:], past_key_values=first.past_key_values, use_cache=True)
        result["continued"] = torch.cat([first.logits, second.logits], dim=1)
    return result


def _load(request: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(request["load"], output_loading_info=True, dtype="auto")
    model.eval()
    result: dict[str, Any] = {
        "tensors": dict(model.state_dict()),
        "model_type": model.config.model_type,
        "class": type(model).__module__,
        "problems": [str(value) for kind, value in info.items() if kind != "error_msgs" and len(value)],
    }
    if request["tokens"] is not None:
        with torch.no_grad():
            result["logits"] = model(torch.tensor(request["tokens"]), use_cache=False).logits
    return result


def _replace_kernels() -> None:
    import fla.layers.gated_deltanet as gated_deltanet
    import fla.layers.gla as gla
    import fla.layers.rwkv6 as rwkv6
    import fla.models.rwkv6.modeling_rwkv6 as rwkv6_model
    from fla.modules import FusedRMSNormGated, GroupNorm, LayerNorm, RMSNorm, ShortConvolution
    from fla.modules.activations import ACT2FN
    from fla.modules.mlp import SwiGLULinear
    from fla.modules.norm import layernorm, layernorm_gated
    from fla.modules.token_shift import token_shift_ref

    ACT2FN.update(swish=F.silu, silu=F.silu, sigmoid=torch.sigmoid, sqrelu=lambda x: F.relu(x).square())

    RMSNorm.forward = lambda self, x, residual=None, prenorm=False, residual_in_fp32=False: layernorm.rms_norm_ref(
        x, self.weight, self.bias, residual, self.eps, prenorm
    )
    LayerNorm.forward = lambda self, x, residual=None, prenorm=False, residual_in_fp32=False: layernorm.layer_norm_ref(
        x, self.weight, self.bias, residual, self.eps, prenorm
    )
    GroupNorm.forward = lambda self, x: layernorm.group_norm_ref(x, self.weight, self.bias, self.num_groups, eps=self.eps)
    layernorm_gated.RMSNormGated.forward = lambda self, x, z=None: layernorm_gated.rms_norm_ref(
        x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate
    )
    # With norm_before_gate, fla's reference computes the same as its fused form: norm(x) · silu(g).
    FusedRMSNormGated.forward = lambda self, x, g: (
        layernorm_gated.rms_norm_ref(x, self.weight, self.bias, None, self.eps) * F.silu(g)
    )
    SwiGLULinear.forward = lambda self, x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias)
    ShortConvolution.forward = _short_convolution
    gated_deltanet.causal_conv1d = _causal_conv1d

    gla.fused_recurrent_gla = _gla
    rwkv6.fused_recurrent_rwkv6 = _rwkv6
    rwkv6.token_shift = rwkv6_model.token_shift = lambda x, cu_seqlens=None: token_shift_ref(x)
    gated_deltanet.chunk_gated_delta_rule = gated_deltanet.fused_recurrent_gated_delta_rule = _gated_delta


def _gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor, initial_state: Tensor | None, state_v_first: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    from fla.ops.gla.naive import naive_recurrent_gla

    assert state_v_first
    o, state = naive_recurrent_gla(q, k, v, gk, None if initial_state is None else initial_state.mT, output_final_state=True)
    return o, state.mT


def _rwkv6(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float, initial_state: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    # The reference has heads before time.
    o, state = naive_recurrent_rwkv6(*(t.transpose(1, 2) for t in (r, k, v, w)), u, scale, initial_state, output_final_state=True)
    return o.transpose(1, 2), state


def _gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    allow_neg_eigval: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    assert all(options[name] for name in ("state_v_first", "use_gate_in_kernel", "use_qk_l2norm_in_kernel"))
    assert options["use_beta_sigmoid_in_kernel"]
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    sharing = v.shape[2] // q.shape[2]
    q, k = (t.repeat_interleave(sharing, dim=2) for t in (q, k))
    beta = torch.sigmoid(beta) * (2.0 if allow_neg_eigval else 1.0)
    o, state = naive_recurrent_gated_delta_rule(
        q,
        k,
        v,
        beta,
        naive_gdn_gate(g, A_log, dt_bias),
        initial_state=None if initial_state is None else initial_state.mT,
        output_final_state=True,
    )
    return o, state.mT


def _short_convolution(
    self: Any, x: Tensor, cache: Tensor | None = None, output_final_state: bool = False, **_: Any
) -> tuple[Tensor, Tensor | None]:
    width = self.kernel_size[0]
    past = x.new_zeros(x.shape[0], x.shape[2], width) if cache is None else cache
    columns = torch.cat([past, x.transpose(1, 2)], dim=-1)
    y = F.silu(F.conv1d(columns[..., 1:], self.weight, self.bias, groups=x.shape[2])).transpose(1, 2)
    return y, columns[..., -width:] if output_final_state else None


def _causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> tuple[Tensor, None]:
    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=x.shape[2])).transpose(1, 2), None


if __name__ == "__main__":
    _serve()
