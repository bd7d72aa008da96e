"""`search`: the folder that a search leaves, whole after a restart, and never over something else."""

from __future__ import annotations

import shlex
import sys

import pytest
from pandas.testing import assert_frame_equal

from data.conftest import jsonl
from families import zoo
from fulldepth.core.progress import Watcher
from fulldepth.data.examples import read_examples
from fulldepth.execution import verify
from fulldepth.hf.model_hash import model_hash
from fulldepth.results import Results
from fulldepth.settings.loading import LoadingSettings
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.exports.export import export
from fulldepth.skip.heal import heal
from fulldepth.skip.least_squares import refit
from fulldepth.skip.plan import Plan
from fulldepth.skip.responses import Sampling, respond
from fulldepth.skip.search import search
from fulldepth.subject import Subject
from refusals import refused
from skip import plain, planned
from skip.word_tokenizer import checkpoint as saved
from skip.word_tokenizer import tokenizer, words
from tiny_models import build

SETTINGS = SearchSettings(blocks=2, epochs=2, batch_size=4)
PAIRS = [
    {"prompt": words(n, n + 1, 3 * n % 80), "response": " " + words(*((7 * n + i * i) % 80 for i in range(4 + n % 3)))}
    for n in range(20)
]


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint with its tokenizer, and pairs beside it."""
    jsonl(tmp_path / "pairs.jsonl", *PAIRS)
    return str(saved(tmp_path / "model"))


def test_a_search_leaves_its_plan_and_its_outcome_and_a_restart_makes_what_is_missing(checkpoint, tmp_path):
    data, out = str(tmp_path / "pairs.jsonl"), tmp_path / "out"
    plan = search(checkpoint, data, output=out, settings=SETTINGS)
    assert Plan.load(out) == plan
    assert plan.model.name == checkpoint
    results, again = Results.load(out), planned.analysed(checkpoint, plan, data, SETTINGS)
    assert results.meta["plan"] == plan.document()
    assert_frame_equal(results.table, again.table)
    assert results.headline == again.headline
    advised = results.meta["next"]["command"].split()
    assert advised[3:7] == [str(out), checkpoint, "--data", data]  # runs as it stands
    assert results.meta["settings"] == SETTINGS.model_dump()
    base = plain.loss(build("llama"), read_examples(data, tokenizer(), 64).heldout, (), "attention")
    first = results.table.iloc[0]
    assert (first.measure, first.state) == ("loss", "original")
    assert first.value == pytest.approx(base, rel=1e-5)
    assert not list(out.glob(".*")), "something half-written stayed"

    written = (out / "results.json").stat().st_mtime_ns
    assert search(checkpoint, data, output=out, settings=SETTINGS, resume=True) == plan
    assert (out / "results.json").stat().st_mtime_ns == written
    for name in ("results.json", "results.parquet"):
        (out / name).unlink()
    assert search(checkpoint, data, output=out, settings=SETTINGS, resume=True) == plan
    after = Results.load(out)
    assert_frame_equal(results.table, after.table)
    assert results.meta | {"created": ""} == after.meta | {"created": ""}


@pytest.mark.parametrize("options", [{"given": [2]}, {"search": "random"}, {"search": "last"}])
def test_a_choice_without_losses_leaves_an_empty_table_and_a_page(options, checkpoint, tmp_path):
    chosen = {"granularity": "attention", "fit": False, "losses": False, **options}
    plan = search(checkpoint, str(tmp_path / "pairs.jsonl"), 1, output=tmp_path / "out", **chosen)
    assert Plan.load(tmp_path / "out") == plan
    assert Results.load(tmp_path / "out").table.empty
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"The attention of layer {next(iter(plan.picks[0])).layer} (in the order" in page


def test_responses_need_the_data_that_hold_their_prompts(checkpoint, tmp_path):
    with refused("The prompts to respond to are those of --data, which is missing"):
        search(checkpoint, None, 1, heldout=str(tmp_path / "pairs.jsonl"), responses=2, output=tmp_path / "out")


def test_held_out_data_alone_choose_on_all_of_their_rows(checkpoint, tmp_path):
    chosen = str(tmp_path / "pairs.jsonl")
    with refused("Blocks are chosen on data: a seeded fifth of --data, or all rows of --heldout"):
        search(checkpoint, None, settings=SETTINGS)
    with refused("Scalars are trained on --data. Give it, or leave them out: --no-fit"):
        search(checkpoint, None, heldout=chosen, settings=SETTINGS)
    plan = search(checkpoint, None, 2, heldout=chosen, fit=False, output=tmp_path / "out")
    rows = read_examples(None, tokenizer(), 64, heldout=chosen).heldout
    assert len(rows) == len(PAIRS)
    assert plan.losses[0] == pytest.approx(plain.loss(build("llama"), rows, (), "attention"), rel=1e-5)


@pytest.mark.slow
def test_the_advice_after_held_out_data_of_ones_own_heals_on_rows_that_did_not_choose(checkpoint, tmp_path):
    chosen = jsonl(tmp_path / "chosen.jsonl", *[{**pair, "response": pair["response"] + " w3"} for pair in PAIRS])
    data, out = str(tmp_path / "pairs.jsonl"), tmp_path / "out"
    search(checkpoint, data, 1, heldout=str(chosen), fit=False, output=out)
    advised = Results.load(out).meta["next"]["command"].split()
    assert advised == ["fulldepth", "skip", "heal", str(out), checkpoint, "--data", data, "--output", "healed/"]
    heal(out, checkpoint, data, tmp_path / "healed", steps=0, progress=False)
    with refused("20 of 20 held-out rows also chose the blocks"):
        heal(out, checkpoint, data, tmp_path / "other", steps=0, heldout=str(chosen), progress=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options", "verb"),
    [
        (
            "olmo2",
            {"blocks": 1, "search": "last", "fit": True, "epochs": 1},
            "apply",
        ),  # no norm takes the scalars out of the stream
        (
            "diffllama",
            {"given": [2], "search": "given", "granularity": "layer", "fit": False},
            "apply",
        ),  # its layers' constants follow their numbers
        ("llama", {"blocks": 1, "search": "last", "granularity": "layer", "fit": False}, "heal"),
    ],
)
def test_the_command_that_a_search_advises_is_not_refused(family, options, verb, tmp_path):
    """Nor is healing refused after the model has written text."""
    folder = str(tmp_path / "model")
    zoo.build(family, "causal-lm").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    data, out = jsonl(tmp_path / "pairs.jsonl", *PAIRS), tmp_path / "out"
    search(folder, str(data), output=out, **options)
    command = shlex.split(Results.load(out).meta["next"]["command"])
    assert command[:3] == ["fulldepth", "skip", verb]
    given = dict(zip(command[5::2], command[6::2], strict=True))
    if verb == "apply":
        assert export(out, folder, given["--format"], tmp_path / "written").logit_error < 1e-3
        with refused("cannot be folded|Use --format folded"):
            refit(out, folder, str(data), first=lambda *_: pytest.fail("the work had begun"))
    else:
        heal(out, folder, given["--data"], tmp_path / "written", steps=0, progress=False)


def test_other_files_are_not_written_over(checkpoint, tmp_path):
    data, out = tmp_path / "out" / "responses.jsonl", tmp_path / "out"
    out.mkdir()
    data.write_text((tmp_path / "pairs.jsonl").read_text())
    with refused("would replace"):
        search(checkpoint, str(data), output=out, settings=SETTINGS, responses=9, max_new_tokens=2)
    for name in ("plan.json", "results.json", "settings.yaml"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("{}")
        for resume in (False, True):
            with refused():
                search(checkpoint, str(data), output=folder, settings=SETTINGS, resume=resume)
        assert {path.name: path.read_text() for path in folder.iterdir()} == {name: "{}"}
    assert [path.name for path in out.iterdir()] == ["responses.jsonl"]


def test_a_model_is_read_and_hashed_once(checkpoint, tmp_path, monkeypatch):
    """However many steps use it: counted at every place of the package that holds the function. A model that writes
    first is proven before it writes, and again on what it wrote.
    """
    calls = []

    def counted(function):
        def counting(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return counting

    package = [module for name, module in sys.modules.items() if name.split(".")[0] == "fulldepth"]
    for function in (verify, model_hash, read_examples):
        for module in package:
            for name in [name for name, value in vars(module).items() if value is function]:
                monkeypatch.setattr(module, name, counted(function))
    options = {"responses": 8, "max_new_tokens": 5}
    plan = search(checkpoint, str(tmp_path / "pairs.jsonl"), output=tmp_path / "out", settings=SETTINGS, **options)
    assert sorted(calls) == ["model_hash", "read_examples", "verify", "verify"]
    assert plan.data["responses"]["max_new_tokens"] == 5


def test_models_without_a_next_token_are_refused_before_anything_is_read(tmp_path):
    build("vit").save_pretrained(tmp_path / "model")
    with refused("is no causal language model"):
        search(tmp_path / "model", "absent.jsonl", output=tmp_path / "out", settings=SETTINGS)


def test_responses_are_found_again_and_never_written_over(tmp_path, monkeypatch):
    notes, file, model = tmp_path / "responses.json", tmp_path / "responses.jsonl", build("llama")

    def made(count=2):
        sampling = Sampling(max_new_tokens=3, batch_size=2)
        with Subject.open(model, None, LoadingSettings(), tokenizer=tokenizer()) as subject:
            return respond(subject, PAIRS, count, tmp_path, sampling, Watcher())

    first, before = made(), file.read_bytes()
    assert first["prompts"] == 2
    file.unlink()  # killed between the two files
    assert made() == first
    assert file.read_bytes() == before
    monkeypatch.setattr("fulldepth.skip.responses.generate_responses", lambda *_, **__: pytest.fail("generated again"))
    assert made() == first
    with refused("count was 2, is 3"):
        made(3)
    model.config.rms_norm_eps *= 2
    with refused("configuration was"):
        made()
    model.config.rms_norm_eps /= 2
    file.write_text("edited\n")
    with refused("has changed"):
        made()
    notes.unlink()
    with refused("holds other responses"):
        made()
    assert file.read_text() == "edited\n"
