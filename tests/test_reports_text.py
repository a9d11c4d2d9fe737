"""The sentences of a figure, case by case: each says what its verdicts say, and nothing more."""

from __future__ import annotations

import math
from typing import Any

import pytest

from farstate.reports import text
from test_reports_synthetic import HALF, INTERVAL, verdict

NAMES = {
    "base": "base",
    "control": "zero-init control",
    "fitted_noise": "fitted noise",
    "state_passing": "state passing",
    "tbtt": "TBTT",
}
NO_INTERVAL = {
    f"{name}_{end}": None
    for name in (
        *("gap", "gap_beyond", "excess_nll", "excess_nll_base", "removed_base", "removed_base_vs_control"),
        *("short_context_cost", "short_context_cost_vs_control", "beats_reset", "beats_base_reset"),
    )
    for end in ("low", "high")
}


def said(rows: list[dict[str, Any]]) -> str:
    found = text.findings("M", 32, 4096, rows, NAMES)
    return " ".join(
        [text.headline("M", rows, NAMES), *(f"[{finding.topic}] {finding.text}" for finding in found), text.certainty(rows)]
    )


def _nothing(*names: str) -> dict[str, None]:
    return {f"{name}{end}": None for name in names for end in ("", "_low", "_high")}


_VS_WORSE_CONTROL = {
    "removed_base_vs_control": 0.35,
    "removed_base_vs_control_low": 0.32,
    "removed_base_vs_control_high": 0.38,
}
_GAP_BEYOND = {"gap_beyond": 0.4, "gap_beyond_low": 0.35, "gap_beyond_high": 0.45}
FAIL, PASS, UNDECIDED = {"verdict": "FAIL"}, {"verdict": "PASS"}, {"verdict": "UNDECIDED"}
BASE = verdict(arm="base", **FAIL)
CONTROL = verdict(arm="control", excess=0.73, **FAIL)
_BROKEN = verdict(arm="base", broken_at=600, **FAIL) | _nothing("gap", "gap_beyond", "excess_nll", "excess_nll_base")

CASES: dict[str, tuple[list[dict[str, Any]], list[str], list[str]]] = {
    "one arm repairs, the control does not": (
        [BASE, CONTROL, verdict(arm="state_passing", excess=0.0, **PASS)],
        [
            "M fails beyond its training length: state passing repairs it; the same steps from the zero state do not repair it.",
            "rises to 0.670 nats (0.650 to 0.690) above its own best there, worst near position 2,048",
            "From position 1,024 on, carrying the state costs 0.670 (0.640 to 0.700) nats",
            "100 further steps from the zero state, still fails: the steps alone make it worse",
            "Repaired (PASS): state passing 99 % (96 % to 102 %) of the control's, 99 % (96 % to 102 %) of the base's.",
            "the base model, its state reset every 32 tokens",
            "carrying beats it for state passing −0.032 (−0.052 to −0.012). Against resetting the arm itself: state passing −0.040",
            "Against the base model: zero-init control −0.012 (−0.018 to −0.006) and state passing +0.008 (0.002 to 0.014).",
            "Only the cost against the control belongs to the initial state; not free: state passing +0.020 (0.014 to 0.026).",
            "means over 3 post-training seeds",
        ],
        ["no initial state", "UNDECIDED", "no interval"],
    ),
    "several repair": (
        [BASE, CONTROL, verdict(arm="state_passing", excess=0.0, **PASS), verdict(arm="tbtt", excess=0.0, **PASS)],
        [
            "state passing and TBTT repair it",
            "TBTT differs from the control in the order of the data too.",
            "not free: state passing +0.020 (0.014 to 0.026) and TBTT +0.016",
        ],
        [],
    ),
    "reduced only": (
        [BASE, CONTROL, verdict(arm="fitted_noise", excess=0.47, **FAIL)],
        [
            "nothing repairs it in full; fitted noise reduces the failure",
            "no initial state repairs it at this budget",
            "Reduced, not repaired (FAIL): fitted noise",
            "it would still be better than fitted noise +0.475",
        ],
        ["Repaired (PASS)"],
    ),
    "no effect established": (
        [
            BASE,
            CONTROL,
            verdict(
                arm="tbtt",
                removed_base_vs_control=0.01,
                removed_base_vs_control_low=-0.02,
                removed_base_vs_control_high=0.04,
                **FAIL,
            ),
        ],
        [
            "nothing repairs it in full",
            "No effect of the initial state established (FAIL): TBTT 1 % (−2 % to 4 %) of the control's",
        ],
        ["reduces the failure"],
    ),
    "an arm makes it worse": (
        [
            BASE,
            CONTROL,
            verdict(
                arm="tbtt",
                removed_base_vs_control=-0.2,
                removed_base_vs_control_low=-0.3,
                removed_base_vs_control_high=-0.1,
                **FAIL,
            ),
        ],
        ["Worse than the control (FAIL): TBTT −20 % (−30 % to −10 %) of the control's", "below zero it grew"],
        [],
    ),
    "an arm is undecided": (
        [BASE, CONTROL, verdict(arm="tbtt", excess=0.02, **UNDECIDED)],
        [
            "nothing is shown to repair it in full; TBTT is UNDECIDED",
            "[What repairs it] By the verdict of Def. 3.2 no initial state is shown to repair it",
        ],
        ["Repaired (PASS)", "no initial state repairs it"],
    ),
    "the control passes too": (
        [BASE, verdict(arm="control", excess=0.0, **PASS), verdict(arm="state_passing", excess=0.0, **PASS)],
        ["the same steps from the zero state repair it too", "no special initial state is needed"],
        [],
    ),
    "the control is undecided": (
        [BASE, verdict(arm="control", **UNDECIDED)],
        ["the same steps from the zero state are UNDECIDED", "is not settled", "No other initial state was tried."],
        [],
    ),
    "no control": (
        [BASE, verdict(arm="state_passing", excess=0.0, **PASS)],
        [
            "without a zero-init control none of it can be credited",
            "The zero-init control is missing",
            "Repaired (PASS): state passing 99 % (96 % to 102 %) of the base's.",
            "how much of it is due to the steps alone is unknown",
        ],
        ["the control's", "belongs to the initial state;"],
    ),
    "no control, an arm reduces": (
        [BASE, verdict(arm="fitted_noise", excess=0.47, **FAIL), verdict(arm="tbtt", excess=0.9, **FAIL)],
        [
            "fitted noise reduces the failure; without a zero-init control",
            "Reduced, not repaired (FAIL): fitted noise 23 % (20 % to 26 %) of the base's.",
            "Worse than the base model (FAIL): TBTT −35 %",
        ],
        ["the control's"],
    ),
    "nothing fails": (
        [
            verdict(arm="base", excess=0.004, **PASS),
            verdict(arm="control", excess=0.0, **PASS),
            verdict(arm="tbtt", excess=0.0, **PASS),
        ],
        [
            "M does not fail here, so there is nothing to repair",
            "none of these is a repair: TBTT PASS",
            "stays within 0.02 nats",
            "passes.",
        ],
        ["Repaired (PASS)", "TBTT repairs"],
    ),
    "the failure is undecided": (
        [verdict(arm="base", excess=0.03, **UNDECIDED), CONTROL, verdict(arm="tbtt", excess=0.0, **PASS)],
        ["whether it fails is UNDECIDED, so no repair can be claimed", "cannot tell that from the tolerance of 0.02 nats"],
        ["Repaired (PASS)", "TBTT repairs"],
    ),
    "no base": (
        [CONTROL, verdict(arm="tbtt", excess=0.0, **PASS)],
        ["no verdict on the base model", "nothing here can be called a repair"],
        ["Repaired (PASS)"],
    ),
    "base only": ([BASE], ["No other initial state was tried.", "The zero-init control is missing"], ["post-training seed"]),
    "the base breaks": (
        [_BROKEN, CONTROL],
        ["its loss is not a number any more from position 600 on"],
        ["None", "nan"],
    ),
    "the base breaks, arms do not": (
        [
            _BROKEN,
            CONTROL | _nothing("removed_base"),
            verdict(arm="tbtt", excess=0.0, **PASS) | _nothing("removed_base"),
            verdict(arm="fitted_noise", excess=0.47, **FAIL) | _nothing("removed_base"),
        ],
        [
            "M fails beyond its training length: TBTT repairs it; fitted noise is better than the control, not shown to be better",
            "still fails: what share of the base model's far excess the steps alone remove is not defined, because the base model's "
            "loss is not a number from position 600 on.",
            "Repaired (PASS): TBTT 99 % (96 % to 102 %) of the control's.",
            "Better than the control, not shown to be better than the base model (FAIL): fitted noise",
            "Shares of the base model's far excess are not defined: the base model's loss is not a number from position 600 on.",
        ],
        ["reduces the failure", "change nothing"],
    ),
    "the control breaks": (
        [
            BASE,
            verdict(arm="control", broken_at=700, **FAIL)
            | _nothing("gap", "gap_beyond", "excess_nll", "excess_nll_base", "removed_base", "beats_reset", "beats_base_reset"),
            verdict(arm="fitted_noise", excess=0.47, **FAIL) | _nothing("removed_base_vs_control"),
        ],
        [
            "the same steps from the zero state break.",
            "broke: its loss is not a number from position 700 on",
            "No effect of the initial state established (FAIL): fitted noise 23 % (20 % to 26 %) of the base's.",
            "Shares of the control's far excess are not defined: the control's loss is not a number from position 700 on.",
        ],
        ["reduces the failure"],
    ),
    "the control is worse than the base, an arm is between": (
        [BASE, verdict(arm="control", excess=1.4, **FAIL), verdict(arm="tbtt", excess=0.9, **FAIL) | _VS_WORSE_CONTROL],
        [
            "the steps alone make it worse",
            "nothing repairs it in full; TBTT is better than the control, not shown to be better than the base model;",
            "Better than the control, not shown to be better than the base model (FAIL): TBTT",
            "of the control's, −35 % (−38 % to −32 %) of the base's.",
        ],
        ["reduces the failure", "Reduced"],
    ),
    "the failure is both inside and beyond": (
        [
            verdict(arm="base", worst_position=31, gap=0.9, fails_beyond=True, worst_beyond=2048, **_GAP_BEYOND, **FAIL),
            CONTROL,
            verdict(arm="tbtt", worst_position=31, fails_beyond=True, worst_beyond=2048, excess=0.3, **FAIL),
        ],
        [
            "M fails beyond its training length: nothing repairs it in full; TBTT reduces the failure",
            "rises to 0.400 nats (0.350 to 0.450) above its own best there, worst near position 2,048",
            "It misses Def. 3.2 inside that length too, by 0.900 nats",
        ],
        ["not shown", "none of these is a repair"],
    ),
    "an arm and the control fail inside only": (
        [
            BASE,
            verdict(arm="control", excess=0.03, fails_beyond=None, worst_position=31, **FAIL),
            verdict(arm="tbtt", excess=0.01, fails_beyond=False, worst_position=31, **FAIL),
        ],
        [
            "nothing is shown to repair it in full; TBTT fails inside the training length, beyond it not shown to; "
            "the same steps from the zero state fail inside the training length, beyond it not shown to.",
            "a failure beyond it is not shown, so the steps alone may be enough",
            "no initial state is shown to repair it",
            "FAIL inside the training length, a failure beyond it is not shown: TBTT",
        ],
        ["still fails", "do not repair it", "Reduced"],
    ),
    "the control's excess may be nothing": (
        [
            BASE,
            verdict(arm="control", excess=0.02, **UNDECIDED),
            verdict(arm="tbtt", excess=0.1, **FAIL) | _nothing("removed_base_vs_control"),
        ],
        [
            "Shares of the control's far excess are not defined: the control's far excess, +0.008 (−0.022 to 0.038) nats, "
            "is not clearly above zero.",
        ],
        ["reduces the failure"],
    ),
    "an arm breaks": (
        [
            BASE,
            CONTROL,
            verdict(arm="tbtt", broken_at=900, **FAIL)
            | _nothing("gap", "gap_beyond", "excess_nll", "removed_base", "removed_base_vs_control")
            | _nothing("beats_reset", "beats_base_reset", "short_context_cost", "short_context_cost_vs_control"),
        ],
        [
            "Broken, the loss is not a number (FAIL): TBTT, from position 900",
            "was not measured",
            "Not defined: the loss of TBTT is not a number far out.",
        ],
        ["None", "ends too early", "Shares of"],
    ),
    "nothing beyond t*": (
        [verdict(arm="base", gap=None, worst_position=None, excess_nll=None, far_from=None, far_to=None, **UNDECIDED)],
        ["UNDECIDED, the evaluation holds no position beyond its best one"],
        ["None"],
    ),
    "the definition is missed inside the training length": (
        [verdict(arm="base", t_star=1, worst_position=2, fails_beyond=False, **FAIL), CONTROL, verdict(arm="tbtt", **FAIL)],
        [
            "misses Def. 3.2 inside its training length; a failure beyond it is not shown.",
            "one to carry a state, is not shown, where the widest gap is",
            "none of these is a repair: TBTT FAIL",
        ],
        ["M fails beyond", "Reduced"],
    ),
    "shares are not defined": (
        [
            BASE | {"excess_nll_base_low": -0.1},
            CONTROL | {"excess_nll_base_low": -0.1},
            verdict(arm="tbtt", **FAIL) | _nothing("removed_base", "removed_base_vs_control"),
        ],
        [
            "No effect of the initial state established (FAIL): TBTT (no share).",
            "Shares of the control's far excess are not defined: the control's far excess, +0.718 (−0.100 to 0.748) nats, is not",
            "Shares of the base model's far excess are not defined: the base model's far excess, +0.670 (−0.100 to 0.700) nats, is not",
        ],
        ["The percentages"],
    ),
    "one seed": (
        [BASE, CONTROL | {"n_seeds": 1}, verdict(arm="tbtt", excess=0.0, n_seeds=1, **PASS)],
        ["One post-training seed: how much another training run would differ is not in them.", f"{HALF}; {INTERVAL}"],
        ["means over"],
    ),
    "no intervals": (
        [row | NO_INTERVAL for row in (BASE, CONTROL, verdict(arm="tbtt", excess=0.1, **FAIL))],
        [
            "0.670 nats (no interval)",
            "the steps alone remove -7 % (no interval)".replace("-", "−"),
            "carrying the state costs 0.670 nats a token (no interval)",
            "No effect of the initial state established (FAIL): TBTT 85 % (no interval) of the control's",
            "the two cannot be told apart for TBTT +0.064 (no interval)",
            "no cost established: TBTT +0.016 (no interval)",
        ],
        ["reduces the failure", "( to"],
    ),
    "short contexts improve": (
        [
            BASE,
            CONTROL,
            verdict(
                arm="tbtt",
                excess=0.0,
                short_context_cost_vs_control=-0.02,
                short_context_cost_vs_control_low=-0.03,
                short_context_cost_vs_control_high=-0.01,
                **PASS,
            ),
        ],
        ["better than the control: TBTT −0.020 (−0.030 to −0.010)"],
        ["not free"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_findings(name: str) -> None:
    rows, present, absent = CASES[name]
    sentences = said(rows)
    for part in present:
        assert part in sentences, f"{part!r} is not in: {sentences}"
    for part in [*absent, "None", "nan"]:
        assert part not in sentences, f"{part!r} is in: {sentences}"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "about 150 documents would show FAIL, these are 12"),
        ({"documents_to_decide": 1130.0, "would_be": "PASS"}, "about 1,100 documents would show PASS, these are 12"),
        ({"documents_to_decide": 1201.0}, "more than 100 times these 12 documents would decide it"),
        ({"documents_to_decide": math.inf}, "more than 100 times these 12 documents would decide it"),
        ({"documents_to_decide": None}, ""),
        ({"verdict": "PASS"}, ""),
    ],
)
def test_power_note(changes: dict[str, Any], expected: str) -> None:
    assert text.to_decide(verdict(arm="tbtt", excess=0.02, **UNDECIDED) | changes) == expected


def test_comparisons_are_counted() -> None:
    rows = [verdict(model=model, arm=arm, excess=0.3) for model in ("a", "b") for arm in ("base", "control", "tbtt")]
    said = text.comparisons(rows)
    assert "corrected for the 6 verdicts on this page (2 models, 3 arms): at 95 % each, up to 0.3 of" in said
    assert text.comparisons([row | NO_INTERVAL for row in rows]) == ""


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (text.nats(-0.0034), "−0.003"),
        (text.nats(-0.0001), "0.000"),
        (text.nats(0.04, signed=True), "+0.040"),
        (text.nats(float("nan")), "–"),
        (text.share(0.8649), "86 %"),
        (text.share(-0.001), "0 %"),
        (text.share(None), "–"),
        (text.perplexity(71.4), "71.40"),
        (text.perplexity(1234.5), "1,234"),
        (text.perplexity(7.79), "7.790"),
        (text.magnitude(197_888), "198 K"),
        (text.magnitude(25e9), "25 B"),
        (text.scientific(5e-4), "5e−4"),
        (text.count(32768), "32,768"),
        (text.listing(["a", "b", "c"]), "a, b and c"),
        (text.listing([]), ""),
    ],
)
def test_numbers_as_text(written: str, expected: str) -> None:
    assert written == expected


def test_what_of_a_state_suffices_is_said_where_arms_take_it_apart() -> None:
    def removed(arm: str, value: float) -> dict[str, Any]:
        return verdict(arm=arm, excess=0.1) | {
            "removed_base": value,
            "removed_base_low": value - 0.02,
            "removed_base_high": value + 0.02,
        }

    names = NAMES | {"permuted": "permuted states", "gaussian_joint": "Gaussian, joint"}
    rows = [BASE, CONTROL, removed("fitted_noise", 0.7), removed("permuted", 0.9), removed("state_passing", 0.91)]

    def structure(rows: list[dict[str, Any]]) -> str:
        return " ".join(f.text for f in text.findings("M", 32, 4096, rows, names) if f.topic == "Which structure of a state")

    said = structure([*rows, removed("gaussian_joint", 0.99)])
    assert "state passing, which keeps all of a real state, removes 91 % (89 % to 93 %)." in said
    assert "less: fitted noise (one mean and one variance a head) 70 % (68 % to 72 %)" in said
    assert "no difference shown: permuted states (each element's own distribution, no correlation) 90 %" in said
    assert "more: Gaussian, joint (means and all covariances) 99 %" in said
    assert structure([row for row in rows if row["arm"] != "permuted"]) == "", "the paper's arms alone take nothing apart"
    assert structure([row for row in rows if row["arm"] != "state_passing"]) == ""
