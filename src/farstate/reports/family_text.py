"""What a family of curves says, as sentences: from verdicts and intervals that the comparison computed.

"Beyond the tolerance" means that the whole interval of the far excess (own windows) lies above it, "within" that the whole
interval lies below. Two runs are told apart only where their intervals do not meet, which is stricter than a test of the
difference, since the intervals of two models over the same texts move together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from farstate.reports.text import NO_INTERVAL, Finding, Row, between, count, estimate, finite, listing, nats

BROKEN, BEYOND, WITHIN, OPEN, UNMEASURED = "broken", "beyond", "within", "open", "unmeasured"


@dataclass(frozen=True)
class Item:
    """One run of a family.

    Attributes:
        label: the value in words.
        value: of what is varied.
        arm: in the tables.
        of: the arm that is varied.
        row: the verdict over all seeds.
        seeds: the verdicts of single seeds.
        short: `short_loss` with its interval: the loss in the last bin inside the shortest training length.
        onset: first position beyond the training length where the pointwise interval of the excess lies above the tolerance.
        tokens: of the training, as `tokens`; multiples of Chinchilla with and without embeddings as `chinchilla`, `chinchilla_bare`.
    """

    label: str
    value: float
    arm: str
    of: str
    row: Row
    seeds: Sequence[Row] = ()
    short: Row = field(default_factory=dict)
    onset: int | None = None
    tokens: Row = field(default_factory=dict)


def status(row: Row, name: str = "excess_nll") -> str:
    """Where the far excess lies: beyond or within the tolerance, open, broken (not a number), or not measured."""
    if finite(row.get("broken_at")):
        return BROKEN
    if not finite(row.get(name)):
        return UNMEASURED
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is None or high is None or not (finite(low) and finite(high)):
        return OPEN
    return BEYOND if low > row["tolerance"] else WITHIN if high <= row["tolerance"] else OPEN


def far(row: Row, name: str = "excess_nll") -> str:
    """The far excess with its interval, or why there is none."""
    if finite(row.get("broken_at")):
        return f"not a number from position {count(row['broken_at'])} on"
    if not finite(row.get(name)):
        return "not measured"
    return f"{nats(row[name], signed=True)} nats ({between(row, name) or NO_INTERVAL})"


def apart(one: Row, other: Row, name: str) -> int | None:
    """+1 or −1 when the interval of `name` in `other` lies wholly above or below that in `one`, 0 when they meet, None without both."""
    low, high, other_low, other_high = (row.get(f"{name}{end}") for row in (one, other) for end in ("_low", "_high"))
    if low is None or high is None or other_low is None or other_high is None:
        return None
    return 1 if other_low > high else -1 if other_high < low else 0


def contexts(panel: str, items: Sequence[Item]) -> tuple[str, list[Finding]]:
    """Training contexts at equal tokens: does a longer one prevent the failure or move it?"""
    if len(items) == 1:
        return f"{panel}: one training context only ({items[0].label}), so there is none to compare it with.", _contexts_numbers(
            items
        )
    kinds = [status(item.row) for item in items]
    failing = [item for item, kind in zip(items, kinds, strict=True) if kind in (BEYOND, BROKEN)]
    rest = [item for item, kind in zip(items, kinds, strict=True) if kind not in (BEYOND, BROKEN)]
    if not failing:
        if all(kind == WITHIN for kind in kinds):
            lead = f"{panel} fails at none of these training contexts here: there is no failure for a longer context to prevent."
        else:
            lead = f"{panel}: a failure is established at none of these training contexts, nor is its absence at all of them."
        return lead, _contexts_numbers(items)
    ordered = all(item.value < min(other.value for other in rest) for item in failing) if rest else True
    if not rest:
        lead = f"{panel} fails at every training context tried: a longer one does not prevent the failure here"
        lead += f", it only moves it ({_onsets(failing)})." if _moves(failing) else f" ({_onsets(failing)})."
        return lead, _contexts_numbers(items)
    first = min(rest, key=lambda item: item.value)
    if not ordered:
        lead = (
            f"{panel} fails at {listing([item.label for item in failing])} and is not shown to fail at {listing([item.label for item in rest])}: "
            "in these runs the failure does not simply end from some training context on."
        )
        return lead, _contexts_numbers(items)
    verb = "stops failing" if status(first.row) == WITHIN else "is no longer shown to fail"
    lead = f"{panel} {verb} from {first.label} on, as far as position {count(first.row['far_to'])} shows; shorter ones fail."
    reach = _reach(first)
    onsets = [item.onset / item.row["train_length"] for item in failing if item.onset is not None]
    if reach is not None and onsets:
        latest = max(onsets)
        if reach > latest:
            lead += (
                f" The failing ones had begun to fail by {latest:.2g} times their training length, and this one was read to {reach:.3g} times "
                "its own: the failure is not merely moved along with the length."
            )
        else:
            lead += (
                f" It was read to {reach:.3g} times its training length only, and the failing ones begin as late as {latest:.2g} times theirs: "
                "whether the longer context prevents the failure or moves it beyond the texts cannot be told."
            )
    return lead, _contexts_numbers(items)


def _contexts_numbers(items: Sequence[Item]) -> list[Finding]:
    tokens = sorted({int(item.tokens["tokens"]) for item in items if item.tokens.get("tokens")})
    equal = (
        "Their numbers of training tokens are not known."
        if not tokens
        else f"All were trained on the same {count(tokens[0])} tokens."
        if len(tokens) == 1
        else f"Trained on {count(tokens[0])} to {count(tokens[-1])} tokens: whole batches, and so not quite equal."
        if tokens[-1] < 1.01 * tokens[0]
        else f"Not at equal tokens: {count(tokens[0])} to {count(tokens[-1])}."
    )
    short = listing([f"{nats(item.short.get('short_loss'))} at {item.label}" for item in items])
    where = next((item.short["position"] for item in items if item.short.get("position")), None)
    price = (
        f" Near position {count(where)}, inside every training length, the loss is {short} (nats)." if where is not None else ""
    )
    return [
        Finding("Equal tokens", equal + price),
        Finding("Far excess", "; ".join(f"{item.label}: {far(item.row)}, {_far_range(item.row)}" for item in items) + "."),
        Finding("Where it begins", f"{_onsets(items)[:1].upper()}{_onsets(items)[1:]}."),
    ]


def _far_range(row: Row) -> str:
    if not finite(row.get("far_from")):
        return "no position beyond"
    return f"positions {count(row['far_from'])} to {count(row['far_to'])}"


def _reach(item: Item) -> float | None:
    return item.row["far_to"] / item.row["train_length"] if finite(item.row.get("far_to")) else None


def _onsets(items: Sequence[Item]) -> str:
    words = []
    for item in items:
        if item.onset is None:
            words.append(f"{item.label}: nowhere")
        else:
            words.append(f"{item.label}: near {count(item.onset)}, {item.onset / item.row['train_length']:.2g} × T_train")
    return f"the excess is first above the tolerance, its interval with it, at {'; at '.join(words)}"


def _moves(items: Sequence[Item]) -> bool:
    known = [item for item in items if item.onset is not None]
    return len(known) > 1 and all(later.onset > earlier.onset for earlier, later in pairwise(known))  # type: ignore[operator]


def snapshots(panel: str, items: Sequence[Item]) -> tuple[str, list[Finding]]:
    """Snapshots along one training: when does the excess first exceed the tolerance, and is it monotone?"""
    kinds = [status(item.row) for item in items]
    first = next((item for item, kind in zip(items, kinds, strict=True) if kind in (BEYOND, BROKEN)), None)
    if first is None:
        strongest = max(
            (item for item in items if finite(item.row.get("excess_nll"))), key=lambda i: i.row["excess_nll"], default=None
        )
        most = f" (largest: {strongest.label}, {far(strongest.row)})" if strongest is not None else ""
        end = items[-1]
        lead = f"{panel} does not begin to fail within {_tokens(end)}: no snapshot's far excess is clearly above the tolerance{most}."
    elif first is items[0]:
        lead = f"{panel} fails already at the earliest snapshot, {_tokens(first)}: far excess {far(first.row)}."
    else:
        before = items[items.index(first) - 1]
        lead = (
            f"{panel}: the far excess first clearly exceeds the tolerance at {_tokens(first)}, {far(first.row)}; "
            f"at the snapshot before, {count(before.tokens.get('tokens'))} tokens, it is {far(before.row)}."
        )
    found = [Finding("Is it monotone?", _monotone(items, _grows))]
    end = items[-1]
    found.append(
        Finding(
            "At the end",
            f"After {_tokens(end)}: {far(end.row)}; loss near the training length {estimate(end.short, 'short_loss')} nats.",
        )
    )
    return lead, found


def _tokens(item: Item) -> str:
    words = f"{count(item.tokens.get('tokens'))} tokens"
    if finite(item.tokens.get("chinchilla")):
        words += f" ({item.tokens['chinchilla']:.3g} × Chinchilla, {item.tokens['chinchilla_bare']:.3g} × without embeddings)"
    return words


def _grows(item: Item) -> str:
    return f"{count(item.tokens.get('tokens'))} tokens"


def _monotone(items: Sequence[Item], name: Callable[[Item], str]) -> str:
    known = [item for item in items if finite(item.row.get("excess_nll"))]
    if len(known) < 2:
        return "Fewer than two snapshots have a far excess."
    falls = [(a, b) for a, b in pairwise(known) if b.row["excess_nll"] < a.row["excess_nll"]]
    clear = [(a, b) for a, b in falls if apart(a.row, b.row, "excess_nll") == -1]
    rises = [(a, b) for a, b in pairwise(known) if apart(a.row, b.row, "excess_nll") == 1]
    if not falls:
        established = f"{len(rises)} of the {len(known) - 1} steps with intervals that do not meet"
        return f"In these runs yes: the far excess is larger at each snapshot than at the one before ({established})."
    steps = listing(
        [f"from {name(a)} to {name(b)} ({nats(a.row['excess_nll'])} to {nats(b.row['excess_nll'])} nats)" for a, b in falls]
    )
    how = (
        f"{len(clear)} of these {len(falls)} falls with intervals that do not meet"
        if clear
        else "the intervals meet in every fall"
    )
    answer = "No" if clear else "Not shown"
    return f"{answer}: the far excess falls {steps}; {how}. It rises clearly in {len(rises)} of {len(known) - 1} steps."


def warmups(panel: str, items: Sequence[Item], differences: Mapping[int | None, Row]) -> tuple[str, list[Finding]]:
    """Warm-ups: is the longest worse beyond the training length than the shortest, over pre-training seeds?

    Args:
        panel: the model.
        items: by warm-up.
        differences: by pre-training seed (None: their mean) the far excess of the longest minus the shortest, `difference` with
            an interval over documents, and the mean's `difference_seeds` with one over seeds.
    """
    short, long = items[0], items[-1]
    mean = differences.get(None)
    if mean is None:
        return f"{panel}: the two warm-ups have no seed in common whose far excess is known, so nothing can be compared.", []
    seeds = [seed for seed in differences if seed is not None]
    each = listing([f"seed {seed}: {nats(differences[seed]['difference'], signed=True)}" for seed in seeds])
    what = (
        f"the far excess with {long.label} minus that with {short.label} is {nats(mean['difference'], signed=True)} nats "
        f"({between(mean, 'difference') or NO_INTERVAL} over texts, these models held fixed)"
    )
    number = mean["n_seeds"]
    if over := between(mean, "difference_seeds"):
        pair = f"{long.label} is {{}} beyond the training length than {short.label}"
        low, high = mean["difference_seeds_low"], mean["difference_seeds_high"]
        outcome = (
            pair.format("worse")
            if low > 0
            else f"{pair.format('better')}, unlike in the paper"
            if high < 0
            else (f"that {long.label} is worse beyond the training length than {short.label} is not shown at this scale")
        )
        lead = f"{panel}: {outcome}: {what}; over {count(number)} pre-training seeds {over} (Student's t)."
    else:
        lead = (
            f"{panel}: with {count(number)} pre-training seed{'s' if number > 1 else ''} there is no interval over trainings, and that one warm-up "
            f"is worse than the other is not established: {what}."
        )
    found = [
        Finding("Seed by seed", f"Difference of the far excess, nats, {each}."),
        Finding(
            "Far excess",
            "; ".join(f"{item.label}: {far(item.row)}{_over_seeds(item.row)}" for item in items)
            + ". The first interval is over texts, the models held fixed.",
        ),
        Finding(
            "Inside the training length",
            f"Loss near position {count(items[0].short.get('position'))}: "
            + "; ".join(f"{item.label}: {estimate(item.short, 'short_loss')}" for item in items)
            + " nats.",
        ),
    ]
    return lead, found


def _over_seeds(row: Row) -> str:
    over = between(row, "excess_nll_seeds")
    return f", over seeds {over}" if over else ""


def sigmas(panel: str, items: Sequence[Item], base: Row | None, control: Row | None) -> tuple[str, list[Finding]]:
    """Widths of noise: the best, and what is wrong with the ends."""
    known = [item for item in items if finite(item.row.get("excess_nll_base")) and not finite(item.row.get("broken_at"))]
    if not known:
        return f"{panel}: no far excess was measured for any σ.", []
    best = min(known, key=lambda item: item.row["excess_nll_base"])
    against = ""
    if base is not None and finite(base.get("excess_nll_base")):
        against = f", against {far(base, 'excess_nll_base')} for the base model"
        if control is not None and finite(control.get("excess_nll_base")):
            against += f" and {far(control, 'excess_nll_base')} for the same steps from the zero state"
    repaired = {
        WITHIN: "Against its own short windows it repairs: ",
        BEYOND: "It does not repair in full even against its own short windows: ",
    }.get(status(best.row), "Whether it repairs against its own short windows is not decided: ")
    lead = (
        f"{panel}: the best is {best.label}, with a far excess over the base model's windows of {far(best.row, 'excess_nll_base')}{against}. "
        f"{repaired}{far(best.row)}."
    )
    if base is not None and status(base) == WITHIN:
        lead = (
            f"{panel}: the base model does not fail here ({far(base)}), so no noise can repair it. "
            + lead.removeprefix(f"{panel}: ").capitalize()
        )
    low, high = known[0], known[-1]
    found = []
    own = min(
        (item for item in known if finite(item.row.get("excess_nll"))), key=lambda item: item.row["excess_nll"], default=best
    )
    if own is not best:
        found.append(
            Finding(
                "By own windows",
                f"The least far excess over a model's own windows has {own.label}, {far(own.row)}, at a short-context cost of {_cost(own.row)}: "
                "that reference has lost too.",
            )
        )
    found += [
        Finding("Too small", _end(low, best, "excess_nll", "leaves a far excess (own windows) of", base)),
        Finding("Too large", _end(high, best, "short_context_cost", "costs inside the training length", None)),
        Finding(
            "σ by σ",
            "; ".join(f"{item.label}: {far(item.row, 'excess_nll_base')}" for item in items)
            + " (far excess over the base model's windows).",
        ),
    ]
    return lead, found


def _end(end: Item, best: Item, name: str, words: str, base: Row | None) -> str:
    own = f"{end.label} {words} {estimate(end.row, name)} nats"
    if end is best:
        return f"The best σ is at this end of those tried, so how far it goes on is not known: {own}."
    other = f"{estimate(best.row, name)} at {best.label}"
    if base is not None and finite(base.get(name)):
        own += f" (base model: {estimate(base, name)})"
    side = apart(best.row, end.row, name)
    if side is None:
        return f"{own}, {other}; {NO_INTERVAL}."
    return {1: f"Yes: {own}, against {other}; the intervals do not meet.", -1: f"No: {own}, less than {other}."}.get(
        side, f"Not shown: {own}, against {other}; the intervals meet."
    )


def cost(panel: str, items: Sequence[Item], base: Row | None, margin: float) -> tuple[str, list[Finding]]:
    """Which settings repair, what they cost, and whether one is free.

    Args:
        panel: the model.
        items: settings of the arms that start from other states than zero, each once.
        base: verdict of the base model.
        margin: nats up to which a cost counts as none.
    """
    if base is not None and status(base) == WITHIN:
        return (
            f"{panel}: the base model does not fail here ({far(base)}), so there is nothing to repair and no price to ask for.",
            [],
        )
    repairing = [item for item in items if status(item.row) == WITHIN]
    unsure = [item for item in items if status(item.row) == OPEN]
    free = [item for item in repairing if _free(item.row, "short_context_cost", margin)]
    free_control = [item for item in repairing if _free(item.row, "short_context_cost_vs_control", margin)]
    total = f"{count(len(items))} settings"
    if not repairing:
        nearest = min(
            (item for item in items if finite(item.row.get("excess_nll"))), key=lambda i: i.row["excess_nll"], default=None
        )
        words = (
            f"; the least is left by {nearest.label}: {far(nearest.row)}, at a cost of {_cost(nearest.row)}" if nearest else ""
        )
        lead = f"{panel}: of {total} none is shown to repair in full (far excess within the tolerance){words}."
    else:
        cheapest = min(
            (item for item in repairing if finite(item.row.get("short_context_cost"))),
            key=lambda i: i.row["short_context_cost"],
            default=None,
        )
        what = f"{panel}: {count(len(repairing))} of {total} repair" if len(repairing) > 1 else f"{panel}: 1 of {total} repairs"
        if free:
            lead = (
                f"{what}, and free of cost on short contexts (below {margin:g} nats) is {listing([item.label for item in free])}."
            )
        elif cheapest is not None:
            priced = all((item.row.get("short_context_cost_low") or 0.0) > 0.0 for item in repairing)
            none = "none of them free" if priced else f"none of them shown to be free (below {margin:g} nats)"
            lead = f"{what}, {none}: the cheapest, {cheapest.label}, costs {_cost(cheapest.row)} on short contexts against the base model."
        else:
            lead = f"{what}; what they cost was not measured."
    found = []
    if repairing:
        found.append(
            Finding(
                "What repairs, and its price",
                "; ".join(f"{item.label}: {_cost(item.row)}" for item in repairing) + " (against the base model).",
            )
        )
        known = [item for item in repairing if finite(item.row.get("short_context_cost_vs_control"))]
        if known:
            words = "; ".join(f"{item.label}: {_cost(item.row, 'short_context_cost_vs_control')}" for item in known)
            verdict = (
                f"Free of cost that belongs to the initial state: {listing([item.label for item in free_control])}."
                if free_control
                else "For none of them is that shown to be below the margin."
            )
            found.append(Finding("Against the same steps from the zero state", f"{words}. {verdict}"))
        else:
            found.append(
                Finding(
                    "Against the same steps from the zero state", "Not measured: no control of the same budget is in the tables."
                )
            )
    if unsure:
        found.append(Finding("Undecided", "; ".join(f"{item.label}: {far(item.row)}" for item in unsure) + "."))
    cheap = [
        item for item in items if item not in repairing and item not in unsure and _free(item.row, "short_context_cost", margin)
    ]
    if cheap:
        found.append(Finding("Free, but no repair", "; ".join(f"{item.label}: {far(item.row)}" for item in cheap) + "."))
    return lead, found


def _free(row: Row, name: str, margin: float) -> bool:
    high = row.get(f"{name}_high")
    return high is not None and finite(high) and float(high) < margin


def _cost(row: Row, name: str = "short_context_cost") -> str:
    if not finite(row.get(name)):
        return "not measured"
    return f"{nats(row[name], signed=True)} nats ({between(row, name) or NO_INTERVAL})"
