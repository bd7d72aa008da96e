"""Runs a generation in the mode that the options ask for."""

from __future__ import annotations

from statistics import median

from fulldepth.execution.decoding.choosing import (
    LEAST_TOKENS,
    LENGTHS,
    LOSS,
    STEPS,
    Chosen,
    Probe,
    candidates,
    choose,
)
from fulldepth.execution.decoding.control import Control, Trial
from fulldepth.execution.decoding.early_exit import exiting_step
from fulldepth.execution.decoding.options import AUTO, DraftPlan, Options
from fulldepth.execution.decoding.session import Session
from fulldepth.execution.decoding.speculation import Skipper, speculate
from fulldepth.hf import Switches

DRAFTS = 4
"""Drafts in a round of a plan's model if no number is given."""


def decode(session: Session, options: Options) -> None:
    """Decode until every sequence has ended."""
    stats = session.stats
    stats.mode = options.mode
    step, probe = session.step, None
    if options.mode == "early-exit":
        step = exiting_step(session, options)
        stats.exits, stats.exit_layers = [0] * stats.num_layers, [[] for _ in session.sequences.lengths]
        stats.reason = _reason(options)
    elif options.measures and session.sequences.room < LEAST_TOKENS:
        stats.mode, stats.chosen_by = "plain", "measured"
        stats.reason = f"Plain decoding: measuring drafts is not repaid by fewer than {LEAST_TOKENS} new tokens."
    elif options.mode == "speculative" and options.measures and options.plan is None:
        given = options.speculate_from
        layers = [given] if isinstance(given, int) else candidates(stats.num_layers)
        probe = Probe(session, layers)
    begun = session.clock()
    step() if probe is None else probe.prompt()
    stats.prompt_positions = stats.layer_positions
    stats.layer_calls, stats.layer_positions = [0] * stats.num_layers, [0] * stats.num_layers
    stats.prompt_seconds = session.clock() - begun
    begun = session.clock()
    if probe is not None:
        _speculate_if_it_pays(session, options, probe)
    elif stats.mode == "speculative" and session.sequences.active:
        _speculate(session, options)
    while session.sequences.active:
        step()
    stats.seconds = session.clock() - begun
    stats.new_tokens = [length - session.sequences.prompt_length for length in session.sequences.lengths]
    stats.tokens = sum(stats.new_tokens)


def _speculate(session: Session, options: Options) -> None:
    """Draft and confirm until every sequence has ended."""
    stats = session.stats
    length = DRAFTS if options.draft_length == AUTO else int(options.draft_length)
    if options.plan is not None:
        _speculate_with_plan(session, options.plan, length, options)
        return
    early = options.speculate_from
    assert isinstance(early, int)
    stats.speculate_from, stats.draft_length = early, length
    stats.reason = f"Layers 1 to {early} draft up to {length} tokens a round, as asked."
    while session.sequences.active:
        speculate(session, early, length, options.draft_threshold)


def _speculate_with_plan(session: Session, plan: DraftPlan, length: int, options: Options) -> None:
    """Draft with the model without the plan's parts; the layers before the first of them run once for each draft."""
    stats, active = session.stats, session.sequences
    early, count = min(plan.layers, default=stats.num_layers) - 1, len(set(plan.layers))
    drafter = f"the model without {count} {plan.granularity} blocks"
    stats.speculate_from, stats.draft_length = max(1, early), length
    stats.reason = f"{drafter[0].upper()}{drafter[1:]} drafts up to {length} tokens a round, as asked."
    trial = _plain_trial(session, drafter) if options.measures else None
    with Switches(session.runner.anatomy, plan.granularity) as switches:
        while active.active and (trial is None or trial.pays):
            begun = session.clock()
            skipper = Skipper(switches, plan.layers, plan.scalars)
            done = speculate(session, early, length, options.draft_threshold, skipper)
            if trial is not None:
                trial.note(done, session.clock() - begun)
    if trial is not None and not stats.rounds:
        stats.mode, stats.reason = "plain", "The sequences ended before speculation was measured."
    elif trial is not None:
        stats.paid, stats.reason = _paid(trial), trial.reason
        stats.mode = "speculative" if trial.pays else "plain"


def _paid(trial: Trial) -> bool | None:
    """False if rounds were given up, True if they were measurably faster, None if times cannot tell."""
    return False if not trial.pays else True if trial.measured else None


def _plain_trial(session: Session, drafter: str) -> Trial:
    """Decode a few tokens plainly for their time, with which rounds are compared."""
    room = session.sequences.room
    seconds: list[float] = []
    while session.sequences.active and len(seconds) < STEPS // 2:
        begun = session.clock()
        session.step()
        seconds.append(session.clock() - begun)
    plain = median(seconds)
    return Trial(plain, drafter, LOSS * plain * room)


def _speculate_if_it_pays(session: Session, options: Options, probe: Probe) -> None:
    """Measure, then draft and confirm as long as that is faster than plain decoding."""
    stats, sequences = session.stats, session.sequences
    stats.chosen_by, room = "measured", sequences.room if sequences.active else 0
    probe.steps()
    if not sequences.active:
        stats.mode, stats.reason = "plain", "The sequences ended before speculation was measured."
        return
    lengths = LENGTHS if options.draft_length == AUTO else (int(options.draft_length),)
    allowance = LOSS * probe.times.plain * room
    chosen = choose(probe, probe.layers, lengths, allowance)
    best, stats.candidates = chosen.best, chosen.measured
    control = Control(probe.times, stats.num_layers, best, lengths, allowance - probe.spent)
    if not control.hopeful or chosen.why != "measured":
        stats.mode, stats.paid, stats.reason = "plain", False, _why_plain(chosen, control, room)
        return
    stats.speculate_from = best.layer
    while sequences.active and control.pays:
        stats.draft_length = control.length
        begun = session.clock()
        done = speculate(session, best.layer, control.length, options.draft_threshold)
        control.note(done, session.clock() - begun)
    stats.paid, stats.reason = _paid(control), control.reason
    if not control.pays:
        stats.mode = "plain"


def _why_plain(chosen: Chosen, control: Control, room: int) -> str:
    """Why no round was tried, in one sentence."""
    if chosen.why == "measured":
        return control.reason
    if chosen.why == "dear":
        return f"Plain decoding: for {room} tokens, measuring the drafts would take more than {LOSS:.0%} of the time."
    ratio = 1 / chosen.best.predicted_speedup
    return (
        f"Plain decoding: if all drafts of layer {chosen.best.layer} were accepted, speculation would take "
        f"{ratio:.2f} times as long."
    )


def _reason(options: Options) -> str:
    if options.exit_layer is not None:
        return f"Every token leaves at layer {options.exit_layer}; later layers do not run."
    how = "exact: skipped layers run when a later token needs them"
    if options.policy == "propagate":
        how = "approximate: skipped layers compute keys and values from the state at the exit"
    return f"A token leaves where its {options.rule} exceeds {options.threshold} ({options.policy}, {how})."
