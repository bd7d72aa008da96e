"""Runs a generation in the mode that the options ask for."""

from __future__ import annotations

from fulldepth.execution.decoding.choosing import LENGTHS, Probe, candidates, choose
from fulldepth.execution.decoding.control import Control
from fulldepth.execution.decoding.early_exit import exiting_step
from fulldepth.execution.decoding.options import AUTO, Options
from fulldepth.execution.decoding.session import Session
from fulldepth.execution.decoding.speculation import speculate


def decode(session: Session, options: Options) -> None:
    """Decode until every sequence has ended."""
    stats = session.stats
    stats.mode = options.mode
    step, probe = session.step, None
    if options.mode == "early-exit":
        step = exiting_step(session, options)
        stats.exits, stats.exit_layers = [0] * stats.num_layers, [[] for _ in session.sequences.lengths]
        stats.reason = _reason(options)
    elif options.mode == "speculative" and options.measures:
        given = options.speculate_from
        layers = [given] if isinstance(given, int) else candidates(stats.num_layers)
        probe = Probe(session, layers)
    begun = session.clock()
    step() if probe is None else probe.prompt()
    stats.layer_calls, stats.layer_positions = [0] * stats.num_layers, [0] * stats.num_layers
    stats.prompt_seconds = session.clock() - begun
    begun = session.clock()
    if probe is not None:
        _speculate_if_it_pays(session, options, probe)
    elif options.mode == "speculative":
        _speculate(session, options)
    while session.sequences.active:
        step()
    stats.seconds = session.clock() - begun
    stats.tokens = sum(session.sequences.lengths) - session.sequences.prompt_length * len(session.sequences.lengths)


def _speculate(session: Session, options: Options) -> None:
    """Draft and confirm until every sequence has ended."""
    early, length, stats = options.speculate_from, options.draft_length, session.stats
    assert isinstance(early, int)
    assert isinstance(length, int)
    stats.speculate_from, stats.draft_length = early, length
    stats.reason = f"Layers 1 to {early} draft up to {length} tokens a round, as asked."
    while session.sequences.active:
        speculate(session, early, length, options.threshold)


def _speculate_if_it_pays(session: Session, options: Options, probe: Probe) -> None:
    """Measure, then draft and confirm as long as that is faster than plain decoding."""
    stats, sequences = session.stats, session.sequences
    stats.chosen_by = "measured"
    probe.steps()
    if not sequences.active:
        stats.mode, stats.reason = "plain", "The sequences ended before speculation was measured."
        return
    lengths = LENGTHS if options.draft_length == AUTO else (int(options.draft_length),)
    best, stats.candidates = choose(probe, probe.layers, lengths)
    control = Control(probe.times, stats.num_layers, best, lengths)
    if not control.hopeful:
        stats.mode, stats.paid, stats.reason = "plain", False, control.reason
        return
    stats.speculate_from = best.layer
    while sequences.active and control.pays:
        stats.draft_length = control.length
        begun = session.clock()
        done = speculate(session, best.layer, control.length, options.threshold)
        control.note(done, session.clock() - begun)
    stats.paid, stats.reason = control.pays, control.reason
    if not control.pays:
        stats.mode = "plain"


def _reason(options: Options) -> str:
    if options.exit_layer is not None:
        return f"Every token leaves at layer {options.exit_layer}; later layers do not run."
    how = "exact: skipped layers run when a later token needs them"
    if options.policy == "propagate":
        how = "approximate: skipped layers compute keys and values from the state at the exit"
    return f"A token leaves where its {options.rule} exceeds {options.threshold} ({options.policy}, {how})."
