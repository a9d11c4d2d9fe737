"""What does it cost to answer a prompt from the carried state?

    python benchmarks/generation.py [--prompt 512] [--new 32] [--rows 8] [--repeats 5]

The same Mamba-2 weights, float32, greedy, prompts of equal length, one thread, the candidates in turns, processor seconds, which
other jobs on the machine disturb least; medians of ratios within a round:

1. Farstate, against transformers' `generate` (torch path, with its cache, at its fastest prefill chunk of 16, 32 and 64, and at its default
   chunk of 256), and against reading everything again for each token.
2. Farstate's prefill of prompts of different lengths against as many tokens in prompts of one length: lengths that occur several
   times, which sorting brings together, and lengths that are all different, which it cannot.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 2048
CHUNKS = (16, 32, 64)
DEFAULT_CHUNK = 256
Call = Callable[[], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate (default %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="prompts side by side (default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the model (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="(default %(default)s)")
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        against_others(arguments, Path(folder))
    many_lengths(arguments)
    return 0


def against_others(arguments: argparse.Namespace, folder: Path) -> None:
    import numpy as np
    import torch
    from transformers import Mamba2ForCausalLM

    from farstate.evaluation.generation import greedy
    from farstate.models.checkpoints import load_model

    rivals = {DEFAULT_CHUNK: rival(arguments, DEFAULT_CHUNK)}
    rivals[DEFAULT_CHUNK].save_pretrained(folder)
    for chunk in CHUNKS:
        rivals[chunk] = Mamba2ForCausalLM.from_pretrained(folder, chunk_size=chunk).eval()
    model = load_model(folder)
    prompts = list(np.random.default_rng(0).integers(VOCABULARY, size=(arguments.rows, arguments.prompt)))
    ids = torch.from_numpy(np.stack(prompts))

    def ours() -> Any:
        options = {"segment_tokens": 1024, "rows": arguments.rows, "device": torch.device("cpu"), "stop": frozenset()}
        return np.stack(greedy(model, prompts, max_new_tokens=arguments.new, vocabulary_size=VOCABULARY, **options))

    def theirs(chunk: int) -> Call:
        options = {"max_new_tokens": arguments.new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

        def call() -> Any:
            with torch.inference_mode():
                return rivals[chunk].generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :].numpy()

        return call

    def again() -> Any:
        text = ids
        with torch.inference_mode():
            for _ in range(arguments.new):
                hidden, _ = model(text)
                text = torch.cat([text, (hidden[:, -1] @ model.head_weight[:VOCABULARY].t()).argmax(1, keepdim=True)], dim=1)
        return text[:, ids.shape[1] :].numpy()

    best = min(CHUNKS, key=lambda chunk: min(timed(theirs(chunk)) for _ in range(2)))
    calls = {
        "Farstate": ours,
        f"transformers, chunk {best}": theirs(best),
        f"transformers, chunk {DEFAULT_CHUNK} (default)": theirs(DEFAULT_CHUNK),
        "reading again": again,
    }
    expected = ours()
    for name, call in calls.items():
        print(f"{name}: {(call() == expected).mean():.3f} of the tokens are Farstate's")
    report(calls, arguments.repeats, arguments.rows * (arguments.prompt + arguments.new))


def rival(arguments: argparse.Namespace, chunk: int) -> Any:
    import torch
    from transformers import Mamba2Config, Mamba2ForCausalLM

    model = Mamba2ForCausalLM(
        Mamba2Config(
            num_heads=2 * arguments.width // 16,
            head_dim=16,
            vocab_size=VOCABULARY,
            hidden_size=arguments.width,
            state_size=64,
            num_hidden_layers=arguments.layers,
            n_groups=1,
            tie_word_embeddings=True,
            chunk_size=chunk,
        )
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            # Away from the initialisation, at which all rows say the same.
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def many_lengths(arguments: argparse.Namespace) -> None:
    import numpy as np
    import torch

    from farstate.evaluation.generation import batches, prefill
    from farstate.models.language_model import LanguageModel
    from farstate.models.mamba2.shape import Mamba2Config

    config = Mamba2Config(vocabulary_size=VOCABULARY, width=arguments.width, layers=arguments.layers, state_size=64, head_size=16)
    model, generator = LanguageModel(config).eval(), np.random.default_rng(1)
    # Eight batches, so that sorting by length has something to sort.
    count = 8 * arguments.rows

    def prompts(lengths: Any) -> list[Any]:
        return [generator.integers(VOCABULARY, size=int(length)) for length in lengths]

    def read(given: list[Any], *, grouped: bool) -> Call:
        order = batches([len(prompt) for prompt in given], arguments.rows)
        if not grouped:
            order = [list(range(start, start + arguments.rows)) for start in range(0, count, arguments.rows)]

        def call() -> None:
            for batch in order:
                prefill(model, [given[index] for index in batch], segment_tokens=1024, device=torch.device("cpu"))

        return call

    alike = prompts([arguments.prompt] * count)
    repeated = prompts(arguments.prompt - arguments.rows + generator.integers(2 * arguments.rows, size=count))
    different = prompts(
        generator.permutation(np.linspace(arguments.prompt // 4, 2 * arguments.prompt - arguments.prompt // 4, count))
    )
    calls = {
        "one length": read(alike, grouped=True),
        f"{2 * arguments.rows} lengths, sorted": read(repeated, grouped=True),
        f"{2 * arguments.rows} lengths, as they come": read(repeated, grouped=False),
        f"{count} lengths, sorted": read(different, grouped=True),
        f"{count} lengths, as they come": read(different, grouped=False),
    }
    print(f"prefill of {count} prompts of {arguments.prompt} tokens on average, {arguments.rows} side by side:")
    for call in calls.values():
        call()
    report(calls, arguments.repeats, count * arguments.prompt)


def report(calls: dict[str, Call], repeats: int, tokens: int) -> None:
    """Medians of the candidates' time relative to the first one's of the same round."""
    rounds = [{name: timed(call) for name, call in calls.items()} for _ in range(repeats)]
    first = next(iter(calls))
    for name in calls:
        seconds = statistics.median(each[name] for each in rounds)
        ratio = statistics.median(each[name] / each[first] for each in rounds)
        print(f"{name:<36} {seconds:8.3f} s  {tokens / seconds:8.0f} tokens/s  × {ratio:.2f} of the time of '{first}'")


def timed(call: Call) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    raise SystemExit(main())
