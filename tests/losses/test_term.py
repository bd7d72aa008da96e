"""What a contributor adds for a new penalty: one class and one entry of the registry, good for loops and recipes."""

from __future__ import annotations

import json

import pytest
import yaml
from torch import Tensor

from fulldepth.cli import main
from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.errors import FulldepthError
from fulldepth.losses import TERMS, Context, Term
from fulldepth.results import Results
from fulldepth.settings import assignments, layer
from fulldepth.training import TrainSettings
from fulldepth.training.trainer import make_objective, resolved


class Loudness(Term):
    """Mean power of the last state's channels."""

    name = "loudness"
    sites = ("residual",)
    exponent: float = 2.0

    def value(self, context: Context) -> Tensor:
        last = context.states["residual"][-1]
        return last.abs().pow(self.exponent).mean(-1)[context.task.counted(context.batch, last)].mean()


@pytest.fixture
def loudness(monkeypatch):
    monkeypatch.setitem(TERMS, "loudness", Loudness)


@pytest.mark.usefixtures("loudness")
def test_a_new_penalty_in_a_recipe(tmp_path, monkeypatch, capsys):
    texts = [" ".join(p.split()) for p in builtin_texts("heldout")[0][:30_000].split("\n\n") if len(p) > 100]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    train_tokenizer(texts, vocab_size=300).save_pretrained(tmp_path / "tokenizer")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    recipe = {
        "model": sizes,
        "data": {"name": str(tmp_path / "text.jsonl"), "validation_share": 0.2, "validation_sequences": 4},
        "tokenizer": str(tmp_path / "tokenizer"),
        "objective": {"loudness": 0.1},
        **{"steps": 2, "global_batch_size": 2, "sequence_length": 16, "eval_every": 2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")

    def run(*options: str) -> str:
        monkeypatch.setattr("sys.argv", ["fulldepth", "train", str(tmp_path / "recipe.yaml"), *options])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        return capsys.readouterr().out

    run("--output", str(tmp_path / "run"))
    results = Results.load(tmp_path / "run")
    rows = results.table[(results.table.measure == "penalty") & (results.table.site == "loudness")]
    assert rows.value.tolist()[0] > 0
    assert results.meta["settings"]["objective"] == {"energy_warmup": 800, "loudness": 0.1}
    assert "loudness (weight 0.1)" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8").lower()


def settings(*arguments: str) -> TrainSettings:
    return layer(TrainSettings, assignments(arguments))


@pytest.mark.parametrize(
    ("argument", "word"),
    {
        "objective.jmup=1.0": "objective.jump",
        "objective.jmup=null": "objective.jump",
        "objective.jump.alhpa=1": "alpha",
        "method=jrge": "jreg",
        "objective.jump=true": "objective.jump",
        "objective.jump.alpha=x": "jump.alpha",
        "objective.coherence.layers=all": "coherence.layers",
        "objective.orthogonality.layers=3": "orthogonality.layers",
        "objective.coherence.target=-1": "coherence.target",
    }.items(),
)
def test_terms_in_settings_are_checked_when_they_are_read(argument, word):
    with pytest.raises(FulldepthError, match=word):
        resolved(settings(argument))


def test_nothing_switches_off_what_the_method_has():
    chosen = settings("method=cr", "objective.orthogonality=null", "objective.coherence.target=0.5")
    assert resolved(chosen).objective.terms == {"coherence": {"target": 0.5}}
    assert list(make_objective(resolved(chosen)).terms) == ["coherence"]
    assert resolved(resolved(chosen).model_copy(update={"method": "standard"})).objective == resolved(chosen).objective
