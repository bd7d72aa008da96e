from types import SimpleNamespace

import numpy as np
import pytest

from fulldepth.execution.heldout import HeldoutLosses
from fulldepth.settings.heal import ResolvedHealSettings
from fulldepth.skip.heal import _training
from fulldepth.skip.healed import healing_headline
from metrics.oracle import of_ratio
from tiny_models import build


def test_findings_of_a_healing_are_differences_from_the_model_that_they_name():
    tokens, documents, rng = np.full(12, 10.0), np.arange(12), np.random.default_rng(0)
    levels = {"original": 2.0, "removed": 3.0, "refitted": 2.5, "trained": 2.2, "control": 1.9}
    sums = {label: 10 * (level + rng.normal(0, 0.01, 12)) for label, level in levels.items()}
    losses = HeldoutLosses(sums, tokens, documents)
    healing = SimpleNamespace(
        readings=dict.fromkeys(("loss", "kl", "greedy_agreement"), losses),
        examples=SimpleNamespace(meta={"name": "texts", "kind": "text"}),
    )
    found = dict(healing_headline(healing))
    pairs = {f"loss_added {label}": (label, "original") for label in levels if label != "original"}
    pairs |= {"net_cost": ("trained", "control"), "healing": ("trained", "removed")}
    assert found.keys() == pairs.keys()
    for name, (first, second) in pairs.items():
        gap = sums[first] - sums[second]
        assert found[name].value == pytest.approx(gap.sum() / 120)
        assert found[name].standard_error == pytest.approx(of_ratio(documents.tolist(), gap, tokens))
        assert f"{found[name].value:+.4f} against" in found[name].sentence


def test_the_training_has_the_settings_of_the_healing_and_adapts_the_weights_that_were_refitted(tmp_path):
    original, healed = build("llama"), build("llama")
    healed.model.layers[1].mlp.down_proj.weight.data += 1
    given = {"steps": 12, "global_batch_size": 3, "learning_rate": 2e-4, "precision": "float32", "seed": 7}
    settings = ResolvedHealSettings(**given, rank=5, sequence_length=24)
    healing = SimpleNamespace(settings=settings, original=original, model=healed, examples=SimpleNamespace(meta={}))
    run = _training(healing, "start", "teacher", tmp_path)
    assert {name: getattr(run, name) for name in given} == given
    assert (run.sequence_length, run.save_every, run.eval_every, run.keep_checkpoints) == (24, 3, 12, 1)
    assert (run.lora.rank, run.lora.target_modules) == (5, ["down_proj"])
    assert run.objective.terms == {"distillation": {"teacher": "teacher"}}
    assert (run.model.checkpoint, run.tokenizer) == ("start", str(tmp_path / "start"))
    tokens, validation = (str(tmp_path / name) for name in ("train-tokens", "validation-tokens"))
    assert (run.data.tokens, run.data.validation, run.data.end_of_text) == (tokens, validation, False)
