"""`fulldepth generate`: text on stdout, statistics on stderr, results, and mistakes that end with 2."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fulldepth import exit
from fulldepth.results import Results
from pages import DOCS
from refusals import refused
from skip import word_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return word_tokenizer.checkpoint(tmp_path_factory.mktemp("generate") / "model")


@pytest.fixture
def run(main):
    """The program: its output, after a check of the exit code."""

    def call(*arguments, code=0):
        found, stdout, stderr = main(*arguments)
        assert found == code, stderr
        return SimpleNamespace(stdout=stdout, stderr=stderr)

    return call


PROMPT = word_tokenizer.words(3, 14, 15, 9, 26)


def text_of(folder, new):
    """The continuation by transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    given = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
    return tokenizer.decode(given[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(
    "options", [(), ("--speculate-from", "2", "--set", "draft_length=3"), ("--speculate-from", "auto")]
)
def test_text_is_that_of_transformers(run, checkpoint, options):
    result = run("generate", checkpoint, "--prompt", PROMPT, "--no-chat", "--max-new-tokens", "9", *options)
    assert result.stdout.strip() == text_of(checkpoint, 9).strip()
    assert "9 tokens in" in result.stderr


def test_prompts_are_padded_although_the_padding_token_has_no_embedding(checkpoint):
    """Padding is masked, so the text is that of each prompt alone, and that of a tokenizer with a known padding."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    model.resize_token_embeddings(len(tokenizer))
    prompts = [PROMPT, " ".join(PROMPT.split()[:1])]
    options = {"tokenizer": tokenizer, "max_new_tokens": 9}
    expected = exit.generate(model, prompts, **options).texts
    assert expected == [exit.generate(model, prompt, **options).texts[0] for prompt in prompts]
    tokenizer.add_special_tokens({"pad_token": "[NEW]"})
    assert exit.generate(model, prompts, **options).texts == expected


def test_python_continues_texts_too(checkpoint):
    tokenizer, model = (
        AutoTokenizer.from_pretrained(checkpoint),
        AutoModelForCausalLM.from_pretrained(checkpoint).eval(),
    )
    made = exit.generate(model, [PROMPT, PROMPT], tokenizer=tokenizer, max_new_tokens=9)
    assert made.texts == [text_of(checkpoint, 9)] * 2
    assert repr(made).startswith("Generation(2 sequences; new tokens: 9, 9; ")
    with refused("tokenizer"):
        exit.generate(model, PROMPT, max_new_tokens=9)
    with refused("no prompt"):
        exit.generate(model, [], tokenizer=tokenizer, max_new_tokens=9)


def test_results_hold_text_and_statistics(run, checkpoint, tmp_path):
    output = tmp_path / "out"
    result = run(
        *("generate", checkpoint, "--prompt", PROMPT, "--no-chat", "--max-new-tokens", "9", "--speculate-from", "2"),
        *("--set", "draft_length=3", "--output", output, "--json"),
    )
    printed = json.loads(result.stdout)
    assert printed["texts"] == [text_of(checkpoint, 9)]
    meta = Results.load(output).meta
    assert meta["kind"] == "generation"
    assert meta["generation"]["prompts"] == [PROMPT]
    assert meta["generation"]["texts"] == [text_of(checkpoint, 9)]
    assert meta["generation"]["stats"]["speculate_from"] == 2
    assert printed == {"texts": printed["texts"], "stats": meta["generation"]["stats"]}
    assert meta["headline"]["acceptance"]["value"] == meta["generation"]["stats"]["acceptance"]
    assert run("generate", checkpoint, "--prompt", PROMPT, "--output", output, code=2).stderr.count("already holds")


def test_help_and_documentation_say_what_json_is(run, checkpoint):
    """`lens` prints its table: the last layer's tokens at the end of the prompt are those of a stock forward pass."""
    printed = json.loads(run("lens", checkpoint, PROMPT, "--top-k", "2", "--json").stdout)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer(PROMPT)["input_ids"]])).logits[0, -1]
    place = max((row["layer"], row["position"]) for row in printed)
    tops = [row["top_token"].strip() for row in printed if (row["layer"], row["position"]) == place]
    assert tops == [tokenizer.decode([token]).strip() for token in logits.topk(2).indices.tolist()]
    documented = " ".join((DOCS / "inputs.md").read_text().split())
    for verb, content in (("lens", "the table of tokens"), ("generate", "texts and statistics")):
        shown = " ".join(run(verb, "--help").stdout.replace("│", " ").split())
        assert f"Print {content} as JSON on stdout" in shown
        assert f"`{verb}`: {content}" in documented
    assert "Print the headline as JSON on stdout" in " ".join(run("exit", "--help").stdout.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--threshold", "0"], "threshold"),
        (["--chat"], "--chat"),
        (["--set", "chat=true"], "--chat"),
        (["--rule", "confidance"], "confidence"),
        (["--rule", "margin"], "--rule has no effect without --threshold."),
        (["--set", "draft_length=3"], "--set draft_length has no effect without --speculate-from."),
        (["--prompt", " "], "prompt is empty"),
        (["--no-chat", "--prompt", word_tokenizer.words(*range(80))], "80 tokens"),
    ],
)
def test_mistakes_end_with_two(run, checkpoint, options, name):
    prompt = () if "--prompt" in options else ("--prompt", PROMPT)
    assert name in " ".join(run("generate", checkpoint, *prompt, *options, code=2).stderr.split())


def test_layers_that_do_not_exist_are_refused_before_weights_are_read(run, checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, value, *more in (("min_layer", "4", "--threshold", "0.5"), ("speculate_from", "7")):
        result = run("generate", tmp_path, "--prompt", PROMPT, "--set", f"{name}={value}", *more, code=2)
        assert f"{name} is {value}" in result.stderr
    sweep = ("exit", tmp_path, "--data", "corpus:builtin", "--set", "min_layer=4", "--output", tmp_path / "out")
    assert "min_layer is 4" in run(*sweep, code=2).stderr
