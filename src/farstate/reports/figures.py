"""What each of the paper's figures asks and what it printed; one entry a page. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """A figure that shows perplexity by position.

    Attributes:
        title: of the page and of the static figure.
        question: one sentence under the title.
        points: the figure's name in the digitised values, or None where there are none.
        methods: by the digitised values' method, the arm it is.
        source: where the digitised values were read, for readers.
        steps: post-training steps in the paper by architecture; under "" for any other, None where they are given in tokens.
        architectures: those the paper's figure shows.
        remark: what the page says of the paper's own finding where no values are digitised.
    """

    title: str
    question: str
    points: str | None
    methods: Mapping[str, str]
    source: str
    steps: Mapping[str, int | None]
    architectures: tuple[str, ...]
    remark: str = ""


FIGURES: dict[str, About] = {
    "fig1": About(
        title="Do recurrent models keep working far beyond their training length?",
        question=(
            "Recurrent language models trained from a zero state on short contexts are run far beyond them, before and after a few "
            "hundred steps that start from passed states: does perplexity hold, and for which architectures?"
        ),
        points="fig1b_ppl",
        methods={"base": "base", "SP500": "state_passing"},
        source="Fig. 1 (top, Mamba-2 panels)",
        steps={"mamba1": 1000, "": 500},
        architectures=("mamba1", "mamba2", "gla"),
        remark=(
            "In the paper Mamba-1, Mamba-2 and GLA all lose their perplexity beyond the training length, and state passing keeps it "
            "flat to 131,072 positions; only the Mamba-2 panels were digitised."
        ),
    ),
    "fig5": About(
        title="Which initial state repairs length generalisation?",
        question=(
            "A recurrent language model is trained from a zero state on short contexts and then run far beyond them: from which initial "
            "state must a few further steps start so that its predictions hold?"
        ),
        points="fig5_ppl",
        methods={
            "base": "base",
            "random": "random_noise",
            "fitted": "fitted_noise",
            "SP100": "state_passing",
            "TBTT100": "tbtt",
        },
        source="Fig. 5, 100-step panels",
        steps={"": 100},
        architectures=("mamba2",),
    ),
    "fig10": About(
        title="Does state passing repair RWKV-6?",
        question=(
            "RWKV-6 is trained from a zero state on short contexts and then run far beyond them, before and after further training that "
            "starts from passed states: does perplexity hold?"
        ),
        points=None,
        methods={},
        source="Fig. 10",
        steps={"": None},
        architectures=("rwkv6",),
        remark=(
            "The paper's Fig. 10 shows a 70M RWKV-v6 trained on 256 tokens at a time that fails beyond them, and holds after 250M tokens "
            "of state passing; its values were not digitised."
        ),
    ),
}
