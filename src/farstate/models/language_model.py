"""The language model: embedding, residual blocks, final norm. Logits only through `farstate.models.head`."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from farstate.models.config import Config
from farstate.models.parts import LayerNorm, RMSNorm, draw_normal, draw_uniform, embedding, linear
from farstate.models.registry import Block, build_block
from farstate.state import LayerState, State


class Backbone(nn.Module):
    """The parameters before the head, under mamba-ssm's names."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = embedding(config.padded_vocabulary, config.width)
        self.layers = nn.ModuleList(build_block(config, layer) for layer in range(config.layers))
        norm = LayerNorm if config.final_norm == "layer" else RMSNorm
        self.norm_f = norm(config.width, config.norm_epsilon)


class LanguageModel(nn.Module):
    """A recurrent language model that continues exactly from the state it returned.

    Any split of a sequence into segments of any length ≥ 1 gives the same outputs and the same final state.

    Args:
        config: architecture and sizes.
        generator: a CPU generator for the initial parameters; None takes one with seed 0. The global one is never used.
        device, dtype: of the parameters.

    Attributes:
        recomputes: keep for the backward pass only what enters each block, and compute the rest again (activation checkpointing);
            the numbers are the same.
        origin: where the weights came from, as a format says it (`farstate.models.formats.Origin`); empty for a model made here.
    """

    def __init__(
        self,
        config: Config,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.recomputes = False
        self.origin: dict[str, Any] = {}
        self.backbone = Backbone(config)
        self.lm_head = linear(config.width, config.padded_vocabulary)
        self._tie()
        self._initialize(torch.Generator().manual_seed(0) if generator is None else generator)
        self.to(device=device, dtype=dtype)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Read a segment.

        Args:
            tokens: (B, T), int64, T ≥ 1.
            state: what an earlier call returned, or None for the zero state.

        Returns:
            hidden: (B, T, D) after the final norm; `hidden[:, t]` predicts token t + 1.
            state: after the segment, float32 (float64 in a float64 model). It carries gradients: detach it to cut them.

        Raises:
            ValueError: tokens of the wrong shape, or a state of another batch size or depth.
        """
        if tokens.dim() != 2 or tokens.shape[1] < 1:
            raise ValueError(f"tokens must be (B, T) with T ≥ 1, found {tuple(tokens.shape)}")
        blocks = self._blocks()
        if state is not None and (len(state) != len(blocks) or state.batch_size != tokens.shape[0]):
            raise ValueError(
                f"a state of {len(state)} layers and batch size {state.batch_size} for a model of {len(blocks)} layers and {tokens.shape[0]} sequences"
            )
        residual = F.embedding(tokens, self.backbone.embedding.weight)
        layers = []
        for number, block in enumerate(blocks):
            residual, layer_state = self._through(block, residual, None if state is None else state.layers[number])
            layers.append(layer_state)
        return self.backbone.norm_f(residual), State(tuple(layers))

    def zero_state(self, batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> State:
        """The state before the first token, on the model's device; float32, or float64 in a float64 model, unless given."""
        weight = self.head_weight
        where = weight.device if device is None else torch.device(device)
        kind = (torch.float64 if weight.dtype == torch.float64 else torch.float32) if dtype is None else dtype
        return State(tuple(block.zero_state(batch_size, where, kind) for block in self._blocks()))

    @property
    def head_weight(self) -> Tensor:
        """(padded V, D); the embedding itself when tied."""
        return self.lm_head.weight

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Two groups for an optimizer: decayed, and not (a block's `undecayed`, norms, biases; mamba-ssm does the same).

        Decay on the dynamics pushes the model towards fast forgetting, and length generalisation appears by accident.
        """
        decayed: list[nn.Parameter] = []
        kept: list[nn.Parameter] = []
        undecayed = {name for block in self._blocks() for name in block.undecayed}
        for name, parameter in self.named_parameters():
            dynamics = name.rpartition(".")[2] in undecayed
            (kept if dynamics or parameter.dim() < 2 else decayed).append(parameter)
        return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]

    def _through(self, block: Block, residual: Tensor, state: LayerState | None) -> tuple[Tensor, LayerState]:
        if not (self.recomputes and torch.is_grad_enabled()):
            return block(residual, state)
        # On a GPU the backward pass runs in a thread of its own, which would not know the selected backend.
        run = copy_context().run
        result: tuple[Tensor, LayerState] = checkpoint(run, block, residual, state, use_reentrant=False, preserve_rng_state=False)
        return result

    def _blocks(self) -> list[Block]:
        return cast("list[Block]", list(self.backbone.layers))

    def _tie(self) -> None:
        if self.config.tied_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        draw_normal(self.backbone.embedding.weight, self.config.initializer_range, generator)
        for block in self._blocks():
            block.initialize(generator)
        norm = self.backbone.norm_f
        norm.weight.fill_(1.0)
        if isinstance(norm, LayerNorm):
            norm.bias.zero_()
        if not self.config.tied_embeddings:
            if self.config.initial_head == "normal":
                draw_normal(self.lm_head.weight, self.config.initializer_range, generator)
            else:
                bound = self.config.width**-0.5
                draw_uniform(self.lm_head.weight, -bound, bound, generator)
