"""The sentences of a figure, case by case: each says what its verdicts say, and nothing more."""

from __future__ import annotations

from typing import Any

import pytest
from tests.test_reports_synthetic import HALF, INTERVAL, verdict

from farstate.reports import text

NAMES = {
    "base": "base",
    "control": "zero-init control",
    "fitted_noise": "fitted noise",
    "state_passing": "state passing",
    "tbtt": "TBTT",
}
NO_INTERVAL = {
    f"{name}_{end}": None
    for name in ("gap", "excess_nll", "removed_base", "removed_base_vs_control", "short_context_cost", "beats_reset")
    for end in ("low", "high")
}


def said(rows: list[dict[str, Any]]) -> str:
    found = text.findings("M", 32, 4096, rows, NAMES)
    return " ".join(
        [text.headline("M", rows, NAMES), *(f"[{finding.topic}] {finding.text}" for finding in found), text.certainty(rows)]
    )


_NO_SHARE = {f"removed_base_vs_control{end}": None for end in ("", "_low", "_high")}
FAIL, PASS, UNDECIDED = {"verdict": "FAIL"}, {"verdict": "PASS"}, {"verdict": "UNDECIDED"}
BASE = verdict(arm="base", **FAIL)
CONTROL = verdict(arm="control", excess=0.73, **FAIL)

CASES: dict[str, tuple[list[dict[str, Any]], list[str], list[str]]] = {
    "one arm repairs, the control does not": (
        [BASE, CONTROL, verdict(arm="state_passing", excess=0.0, **PASS)],
        [
            "M fails beyond its training length: state passing repairs it; the same steps from the zero state do not repair it.",
            "rises to 0.670 nats (0.650 to 0.690) above its own best, worst near position 2,048",
            "From position 1,024 on, carrying the state costs 0.670 (0.640 to 0.700) nats",
            "100 further steps from the zero state, still fails: the steps alone make it worse",
            "Repaired (PASS): state passing 99 % (96 % to 102 %)",
            "carrying beats resetting for state passing −0.040",
            "not free: state passing +0.008 (0.002 to 0.014)",
            "means over 3 post-training seeds",
        ],
        ["No initial state repairs", "UNDECIDED"],
    ),
    "several repair": (
        [BASE, CONTROL, verdict(arm="state_passing", excess=0.0, **PASS), verdict(arm="tbtt", excess=0.0, **PASS)],
        ["state passing and TBTT repair it", "no cost established: TBTT +0.004 (−0.002 to 0.010)"],
        [],
    ),
    "reduced only": (
        [BASE, CONTROL, verdict(arm="fitted_noise", excess=0.47, **FAIL)],
        [
            "nothing repairs it in full; fitted noise reduces the failure",
            "no initial state repairs it at this budget",
            "Reduced, not repaired (FAIL): fitted noise",
            "resetting would still be better for fitted noise +0.430",
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
        ["nothing repairs it in full", "No effect established (FAIL): TBTT 1 % (−2 % to 4 %)"],
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
        ["Made worse, by (FAIL): TBTT 20 % (10 % to 30 %)"],
        [],
    ),
    "an arm is undecided": (
        [BASE, CONTROL, verdict(arm="tbtt", excess=0.02, **UNDECIDED)],
        [
            "nothing is shown to repair it in full; TBTT is UNDECIDED",
            "[What repairs it] By the verdict of Def. 3.2 no initial state repairs it",
        ],
        ["Repaired (PASS)"],
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
            "share of the base model's far excess",
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
        [verdict(arm="base", broken_at=600, gap=None, excess_nll=None, **FAIL), CONTROL],
        ["its loss is not a number any more from position 600 on"],
        ["None", "nan"],
    ),
    "an arm breaks": (
        [
            BASE,
            CONTROL,
            verdict(
                arm="tbtt",
                broken_at=900,
                gap=None,
                excess_nll=None,
                removed_base_vs_control=None,
                beats_reset=None,
                short_context_cost=None,
                **FAIL,
            ),
        ],
        ["Broken, the loss is not a number (FAIL): TBTT, from position 900", "was not measured", "the evaluation ends too early"],
        ["None"],
    ),
    "nothing beyond t*": (
        [verdict(arm="base", gap=None, worst_position=None, excess_nll=None, far_from=None, far_to=None, **UNDECIDED)],
        ["UNDECIDED, the evaluation holds no position beyond its best one"],
        ["None"],
    ),
    "the definition is missed inside the training length": (
        [verdict(arm="base", t_star=1, worst_position=2, **FAIL), CONTROL, verdict(arm="tbtt", **FAIL)],
        [
            "misses Def. 3.2 already inside its training length",
            "That is no failure to carry a state.",
            "none of these is a repair: TBTT FAIL",
        ],
        ["fails beyond", "Reduced"],
    ),
    "shares are not defined": (
        [BASE, CONTROL, verdict(arm="tbtt", **_NO_SHARE, **FAIL)],
        [
            "No effect established (FAIL): TBTT (no share).",
            "Shares are not given: the control's own far excess is not clearly above zero.",
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
            "without an interval",
            "No effect established (FAIL): TBTT 85 %",
            "the two cannot be told apart for TBTT +0.060",
            "no cost established: TBTT +0.004",
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
                short_context_cost=-0.02,
                short_context_cost_low=-0.03,
                short_context_cost_high=-0.01,
                **PASS,
            ),
        ],
        ["even better than before: TBTT −0.020 (−0.030 to −0.010)"],
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
