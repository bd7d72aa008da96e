"""What a measurement says beside its numbers: the policy that fits the model, BOS tokens, gaps, and when it refuses."""

from __future__ import annotations

import pytest
import transformers as tf
from tokenizers.processors import TemplateProcessing

import tiny_models
from data.conftest import jsonl
from fulldepth.data import train_tokenizer
from fulldepth.measurement import measure
from fulldepth.measurement.caveats import gaps, spans
from fulldepth.results import tabulate
from refusals import refused

FEW = {"max_sequences": 6, "sequence_length": 12}
NAN = float("nan")


@pytest.mark.parametrize(("bos", "count"), [("auto", 12), ("never", 0)])
def test_how_many_sequences_begin_with_bos(corpus, bos, count):
    """Every window does where the tokenizer puts it before a text, unless it is asked not to."""
    tokenizer = train_tokenizer([corpus], vocab_size=320)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    model = tiny_models.build("llama")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    options = {"max_sequences": 12, "sequence_length": 16, "measures": ["displacement"]}
    found = measure(model, [corpus[:800]], tokenizer=tokenizer, bos=bos, **options)
    assert found.meta["data"]["sequences"] == 12
    assert found.meta["token_policy"]["begin_with_bos"] == count
    assert not any("BOS token" in line for line in found.meta["warnings"])


def test_a_class_token_counts_where_there_is_one(checkpoint, picture_folder, ragged_tsv, tmp_path):
    settings = {name: value for name, value in tiny_models.VISION.items() if name != "num_labels"}
    tf.SiglipVisionModel(tf.SiglipVisionConfig(**settings)).save_pretrained(tmp_path)  # 16 patches, 16 positions
    tf.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    for model, data, policy, expected, words in (
        (checkpoint("vit"), picture_folder, "auto", ("cls", 12), "first token ([CLS]) of each image"),
        (checkpoint("bert-classifier"), ragged_tsv, "auto", ("cls", 12), "first token ([CLS]) of each sequence"),
        (checkpoint("llama"), ragged_tsv, "cls", ("cls", 12), "first token of each sequence"),
        (tmp_path, picture_folder, "auto", ("all", 12 * 16), "Every token"),
        (tmp_path, picture_folder, "cls", ("cls", 12), "no [CLS]"),
    ):
        found = measure(model, data, token_policy=policy, measures=["displacement"])
        stated = found.meta["token_policy"]
        rows = found.table.query("statistic == 'mean' and site == 'residual'")
        assert (stated["name"], max(rows["count"])) == expected  # none has a direction at a layer that is all zeros
        assert words in stated["sentence"]


@pytest.mark.parametrize(
    ("options", "weighs"),
    [
        ({"measures": ["displacement"]}, "equal"),
        ({"measures": ["lens_loss"]}, "responses"),
        ({"measures": ["displacement", "lens_loss"]}, "responses"),
        ({"measures": ["lens_loss"], "score": "all"}, "equal"),
        ({"measures": ["displacement"], "token_policy": "last"}, "equal"),
    ],
)
def test_errors_rest_on_the_tokens_that_count(checkpoint, tokenizer, corpus, tmp_path, options, weighs):
    """Ten pairs of equal length, three with long responses; their effective number (Kish) by hand."""
    ids = tokenizer(corpus)["input_ids"]
    texts = [(tokenizer.decode(ids[n : n + 30]), tokenizer.decode(ids[n + 30 : n + 60])) for n in (0, 100, 200)]
    texts += [(tokenizer.decode(ids[n : n + 59]), "x") for n in range(300, 1000, 100)]
    jsonl(tmp_path / "pairs.jsonl", *({"prompt": prompt, "response": text} for prompt, text in texts))
    responses = [len(tokenizer(text)["input_ids"]) for _, text in texts]
    lengths = [len(tokenizer(prompt)["input_ids"]) + n for (prompt, _), n in zip(texts, responses, strict=True)]
    assert max(lengths) < 1.2 * min(lengths)
    found = measure(checkpoint("llama"), str(tmp_path / "pairs.jsonl"), chat=False, sequence_length=80, **options)
    worth = sum(responses) ** 2 / sum(n * n for n in responses)
    assert 2 < worth < 6
    expected = 10 if weighs == "equal" else worth
    assert found.meta["data"]["independent"] == pytest.approx(expected, abs=1e-4)
    said = " ".join(found.meta["warnings"])
    assert (f"on 10 rows, worth {worth:.1f} of equal weight" in said) == (weighs == "responses")


@pytest.mark.parametrize(("scored", "share"), [("responses", 86), ("tokens", 78)])
def test_no_error_where_one_row_holds_most_of_what_counts(checkpoint, corpus, tmp_path, scored, share):
    """A classifier reads one token of a row, so the rows count alike, however long one is."""
    if scored == "responses":
        pairs = [{"prompt": "ab " * 27 + letter, "response": "x"} for letter in "abcdefghi"]
        jsonl(tmp_path / "data.jsonl", *pairs, {"prompt": "q", "response": corpus[:78]})
        found = measure(checkpoint("llama"), str(tmp_path / "data.jsonl"), chat=False, measures=["lens_loss"])
        assert found.meta["data"]["no_error"] == f"one row of 10 holds {share} % of the predicted tokens"
        assert "standard_error" not in set(found.table.statistic)
    else:
        jsonl(
            tmp_path / "data.jsonl",
            *({"text": letter, "label": index % 3} for index, letter in enumerate("abcde")),
            {"text": corpus[:70], "label": 0},
        )
        model = checkpoint("bert-classifier")
        options = {"measures": ["lens_loss", "displacement"]}
        found = measure(model, str(tmp_path / "data.jsonl"), **options)
        assert (found.meta["data"]["no_error"], found.meta["data"]["independent"]) == (None, 6)
        assert found.values("lens_loss", "standard_error").notna().all()
        found = measure(model, str(tmp_path / "data.jsonl"), token_policy="all", **options)
        assert found.meta["data"]["no_error"] == f"one row of 6 holds {share} % of the tokens"


def test_weights_that_are_all_zero_are_named_with_what_they_undo(tokenizer, text_file):
    model = tiny_models.build("llama")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for parameter in model.parameters():
        parameter.data.zero_()
    found = measure(model, str(text_file), tokenizer=tokenizer, **FEW)
    lines = "\n".join(found.meta["warnings"])
    for part in (
        "23 of 23 weight matrices",
        "model.embed_tokens.weight",
        "displacement is not a number at layers 1-3",
        "cosine is not a number at layers 0-3",
    ):
        assert part in lines
    assert "coherence" in {entry["measure"] for entry in found.meta["left_out"]}
    assert not {"mean_coherence", "last_layer_displacement"} & set(found.headline)
    with refused("only zeros"):
        measure(model, str(text_file), tokenizer=tokenizer, measures=["displacement", "jump_rate"], **FEW)


def test_gaps_are_named_by_layer_and_statistic():
    rows = [("nc1", "residual", n, None, "value", NAN if n in (0, 1, 3) else 1.0, 4, "1") for n in range(5)]
    rows += [
        ("cka", "residual", a, b, "debiased", NAN if 2 in (a, b) else 1.0, 4, "1") for a in range(4) for b in range(4)
    ]
    rows += [("separability", "value", 1, None, s, NAN if s == "std" else 0.5, 4, "1") for s in ("mean", "std")]
    rows += [("displacement", "residual", n, None, "mean", 0.1, 4, "1") for n in (1, 2)]
    rows += [("coherence", "residual", n, None, "mean", 0.1, 4, "1") for n in (1, 3, 4)]
    assert [line.partition(":")[0] for line in gaps(tabulate(rows), 4)] == [
        "nc1 is not a number at layers 0-1, 3",
        "cka is not a number at layer 2",
        "separability (std) is not a number at layer 1",
        "coherence has no number at layer 2",
    ]
    assert spans([0, 1, 2, 5, 7, 8]) == "layers 0-2, 5, 7-8"
