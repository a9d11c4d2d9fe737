"""What each of the paper's figures asks and what it printed; one entry a page. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class About:
    """A figure: what it asks, which module draws it, and what the paper has to it.

    Attributes:
        title: of the page and of the static figure.
        question: one sentence under the title.
        points: the figure's name in the digitised values, or None where there are none.
        methods: by the digitised values' method, the arm it is.
        source: where the digitised values were read, for readers.
        steps: post-training steps in the paper by architecture; under "" for any other, None where they are given in tokens
            or the paper gives none.
        architectures: those the paper's figure shows; empty where it makes no difference.
        remark: what the page says of the paper's own finding where no values are digitised.
        draws: the module of `farstate.reports` whose `draw` makes the page.
        roles: what the page's inputs must hold.
        family: what is varied on a page that `families` draws; what one of `states` shows, the `whole` model or its `heads`;
            on a page of a long-context task its name in the parameters.
    """

    title: str
    question: str
    points: str | None = None
    methods: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    steps: Mapping[str, int | None] = field(default_factory=lambda: {"": None})
    architectures: tuple[str, ...] = ()
    remark: str = ""
    draws: str = "curves"
    roles: tuple[str, ...] = ("comparison",)
    family: str = ""


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
    "fig2": About(
        title="Does a longer training context prevent the failure, or only move it?",
        question=(
            "Models of one size are trained from scratch on the same number of tokens, cut into sequences of different lengths, and all "
            "are run to the same position: from which training context on do they stop failing?"
        ),
        draws="families",
        family="contexts",
        source="Fig. 2",
        architectures=("mamba2", "gla"),
        remark=(
            "In the paper a Mamba-2 125M fails when it is trained on 1,024 tokens at a time, rises late with 2,048 and is steadier with "
            "4,096; its values were not digitised."
        ),
    ),
    "fig3": About(
        title="When in training does the failure begin?",
        question=(
            "One model is trained on a short context for longer and longer, and every snapshot is run far beyond that context: after how "
            "much training does it stop generalising to longer texts?"
        ),
        draws="families",
        family="snapshots",
        source="Fig. 3",
        architectures=("mamba2",),
        remark=(
            "In the paper a Mamba-2 85M trained on 1,024 tokens at a time breaks near 7.5 times the Chinchilla budget, between 4.25 and "
            "34 billion tokens; its values were not digitised."
        ),
    ),
    "fig4": About(
        title="Do the states drift?",
        question=(
            "Mean and standard deviation of all entries of the recurrent state, by position, before and after further training: does the "
            "state leave the range it had inside the training length?"
        ),
        draws="states",
        roles=("states",),
        family="whole",
        points="fig4_state_std",
        methods={"base": "base", "SP": "state_passing"},
        source="Fig. 4",
        architectures=("mamba2",),
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
        remark=(
            "In the paper (Mamba-2 370M, 780M and 1.3B) state passing and TBTT keep perplexity flat to 32,768 positions, fitted noise does "
            "so for the two smaller models and fails at 1.3B, and random noise costs perplexity from the training length on."
        ),
    ),
    "fig6": About(
        title="Does the state carry facts across long texts?",
        question=(
            "BABILong: the facts of a short story are hidden in background text, far beyond the training length, and a question about them "
            "stands at the end: does the model answer it, few-shot and after training on the task?"
        ),
        draws="babilong",
        roles=("task",),
        family="babilong",
        source="Fig. 6",
        architectures=("mamba2",),
    ),
    "fig7": About(
        title="Passkey: is a number found again, however far back it stands?",
        question=(
            "A number is hidden at some depth of a text and asked for at its end: how long may the text be, without training on the "
            "task, after it, and when that training starts from other states than zero?"
        ),
        draws="passkey",
        roles=("task",),
        family="passkey",
        source="Fig. 7",
        architectures=("mamba2",),
    ),
    "fig9": About(
        title="Which heads drift?",
        question=(
            "The standard deviation of the state of every head, by position: which heads leave the range they had inside the training "
            "length, and does further training hold them?"
        ),
        draws="states",
        roles=("states",),
        family="heads",
        source="Fig. 9",
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
    "fig11": About(
        title="Does a longer warm-up make the failure worse?",
        question=(
            "The same model is trained from scratch with different shares of its steps spent on warming up the learning rate: how far "
            "beyond its training length does each one hold?"
        ),
        draws="families",
        family="warmups",
        source="Fig. 11",
        architectures=("mamba2",),
        remark=(
            "In the paper a Mamba-2 45M trained with a warm-up of 25 % of the steps is worse beyond its training length than one with "
            "10 %; its values were not digitised, and it shows one run each."
        ),
    ),
    "fig12": About(
        title="How much random noise repairs?",
        question=(
            "Further training starts from states of independent normal noise, one standard deviation σ for all layers and heads: which "
            "σ repairs, and what do too small and too large ones cost?"
        ),
        draws="families",
        family="sigmas",
        source="Fig. 12",
        steps={"": 100},
        architectures=("mamba2",),
        remark=(
            "In the paper a Mamba-2 125M is not repaired where σ is too small, and loses perplexity where it is too large; its values "
            "were not digitised and its σ are not in the text."
        ),
    ),
    "fig13": About(
        title="What does the model remember, by three distances?",
        question=(
            "Effective Remembrance: how far the prediction at the end of a text moves when its first t tokens are dropped, measured by "
            "total variation, Jensen–Shannon and cosine distance: do they tell the same?"
        ),
        draws="remembrance",
        roles=("remembrance",),
        source="Fig. 13",
        architectures=("mamba2",),
        remark=(
            "The paper's Fig. 13 shows effective remembrance of Mamba-2 at T = 8,192 by total variation, Jensen–Shannon and cosine "
            "distance; its values were not digitised. In its Fig. 1, in total variation, state passing lowers what far text still changes."
        ),
    ),
    "table1": About(
        title="Copying: are strings longer than any in training copied?",
        question=(
            "A model is trained from random weights to write a string of letters once more, from zero states or from passed ones: how much "
            "of a string longer than all that it was trained on does it get right?"
        ),
        draws="copying",
        roles=("task",),
        family="copying",
        source="Table 1",
        architectures=("mamba2",),
        remark=(
            "In the paper a Mamba-2 45M, trained on strings of 50 to 100 letters, copies 0.27 ± 0.03 of the letters of strings of 300 when it "
            "is trained from zero states, and 0.47 ± 0.11 when it is trained from passed ones."
        ),
    ),
    "shift": About(
        title="Are the states far out ones that training never met?",
        question=(
            "States at positions far beyond the training length against those that each arm's own training met, by layer and head: do "
            "their distributions differ, are they new, and does it explain the excess?"
        ),
        draws="shift",
        roles=("shift",),
    ),
    "cost": About(
        title="Is the repair free?",
        question=(
            "What further training from passed states costs on short contexts, against the base model and against the same steps from the "
            "zero state, by steps, reset probability and learning rate: is there a setting that repairs and costs nothing?"
        ),
        draws="families",
        family="cost",
    ),
    "diagnosis": About(
        title="Does this model work beyond its training length?",
        question=(
            "Read far beyond the length it was trained on: does the model keep predicting, to where, which of its heads leave their range, "
            "and what does it still use of what it has read?"
        ),
        roles=("comparison", "reach"),
    ),
    "repair": About(
        title="Is this model repaired?",
        question=(
            "The model before and after further training from other initial states, and after the same steps from the zero state: does it "
            "work beyond its training length now, and what did that cost within it?"
        ),
        roles=("comparison", "reach"),
    ),
}
