"""State passing in a training loop of one's own, beside the control that it must beat: `python examples/state_passing.py`.

A Mamba-2 of 18,000 parameters learns words in 32 tokens from random weights, then goes on from the zero state (the control) and
from passed states on the same batches. Printed is the perplexity within the training length and far beyond it. Seconds on a CPU; the
size of an effect in such a toy says nothing about a language model.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

import farstate
from farstate.models.mamba2.shape import Mamba2Config

CONTEXT, ROWS = 32, 16


def main() -> None:
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(64, (50, 6), generator=draw)
    text = words[torch.randint(50, (20_000,), generator=draw)].flatten()
    held_out = words[torch.randint(50, (4, 400), generator=draw)].flatten(1)

    # Decays so slow that nothing in 32 tokens tells how large the state becomes later.
    slow = {"dt_min": 5e-4, "dt_max": 3e-3, "A_init_range": (1.0, 1.0)}
    config = Mamba2Config(width=32, layers=2, state_size=16, head_size=16, vocabulary_size=64, **slow)
    base = farstate.LanguageModel(config)
    zero = farstate.ZeroInit(farstate.Run.of(base, ROWS, CONTEXT))
    train(base, zero, text, steps=300, rate=5e-3)

    control, passed = copy.deepcopy(base), copy.deepcopy(base)
    run = farstate.Run.of(base, ROWS, CONTEXT, seed=1)
    train(control, farstate.ZeroInit(run), text, steps=60, rate=2e-3)
    train(passed, farstate.StatePassing(run, reset_probability=0.1), text, steps=60, rate=2e-3)

    print(f"{'perplexity at':>16}{CONTEXT:>8}{512:>8}{2048:>8} tokens")
    for name, model in {"base": base, "control": control, "state passing": passed}.items():
        curve = farstate.perplexity_by_position(model, held_out)
        # Words differ in how hard they are to guess at their beginning: whole words of six tokens are averaged.
        print(f"{name:>16}" + "".join(f"{curve[t - 24 : t].mean():8.2f}" for t in (CONTEXT, 512, 2048)))


def train(model: farstate.LanguageModel, intervention: farstate.Intervention, text: Tensor, steps: int, rate: float) -> None:
    """`steps` of AdamW on windows of `text` in a fixed random order, each from the state that `intervention` gives."""
    windows = text.unfold(0, CONTEXT + 1, CONTEXT + 1)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate)
    for step in range(steps):
        chosen = torch.randint(len(windows), (ROWS,), generator=torch.Generator().manual_seed(step))
        tokens = windows[chosen]
        hidden, final = model(tokens[:, :-1], intervention.initial(step))
        farstate.mean_nll(hidden, model.head_weight, tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        intervention.observe(final)


if __name__ == "__main__":
    main()
