"""Which rows come out, for every kind of model, against the table in the documentation written out by hand."""

from __future__ import annotations

import pytest

from fulldepth.comparison import compare
from fulldepth.measurement import MeasureSettings, measure, measure_into
from fulldepth.uncertainty import error_of
from measurement import contract

GENERAL = {"displacement", "jump_rate", "cosine", "cka", "norm_ratio", "renyi_entropy", "spectral_norm"}
L = 3
LLAMA = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
BERT = [
    *(f"attention.self.{name}" for name in ("query", "key", "value")),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
]
PROJECTIONS = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": LLAMA,
    "gemma3": LLAMA,
    "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
    "gpt_neox": ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
}


def left_out(results):
    return {entry["measure"] for entry in results.meta["left_out"]}


@pytest.mark.parametrize("family", PROJECTIONS)
def test_a_language_model_misses_nothing(checkpoint, documents_file, family):
    results = measure(checkpoint(family), documents_file, max_sequences=5, sequence_length=12, words=["the", "and"])
    promised = GENERAL | contract.LM | {"coherence"}
    if "separability" not in left_out(results):
        promised |= {"separability"}
    # NeoX adds both branches at once: no module sees x' = x + Attn(Norm(x)), but it exists all the same
    contract.check(results.table, contract.rows(L, promised, projections=PROJECTIONS[family]))
    assert left_out(results) - {"separability"} == {"nc1", "mmd"}
    undefined = results.table[results.table["value"].isna()]  # relative to an accuracy of 0 there is no depth
    assert all(undefined.statistic.str.startswith("relative_eps"))
    assert results.meta["token_policy"]["name"] == "all"
    assert all(entry["reason"] for entry in results.meta["left_out"])


def test_influences_give_the_errors_of_the_table_and_are_small(checkpoint, documents_file, tmp_path):
    """Two models on the same text are paired; another text has other groups."""
    first, second, other = (
        measure(checkpoint("llama", seed), documents_file, max_sequences=n, sequence_length=12)
        for seed, n in ((0, 16), (1, 16), (0, 12))
    )
    assert first.meta["groups"] == second.meta["groups"] != other.meta["groups"]
    rows = first.table.set_index(["measure", "site", "layer", "statistic"])["value"]
    values = first.influences
    assert set(values.measure) >= {"displacement", "jump_rate", "lens_accuracy", "lens_loss", "coherence", "saturation"}
    groups = [name for name in values.columns if name.startswith("group_")]
    assert len(groups) == first.meta["groups"]["count"]
    for measure_, statistic in (("displacement", "mean"), ("lens_loss", "mean"), ("jump_rate", "value")):
        some = values[(values.measure == measure_) & (values.statistic == statistic)]
        for row, influence in zip(some.itertuples(), some[groups].to_numpy(), strict=True):
            error = rows.get((measure_, row.site, row.layer, "standard_error"))
            if error is not None:
                assert error_of(influence) == pytest.approx(error, rel=1e-5, abs=1e-9)
    assert (first.save(tmp_path, page=False) / "groups.parquet").stat().st_size < 50_000
    assert compare([first, second]).meta["models"][1]["paired"] is True
    assert compare([first, other]).meta["models"][1]["paired"] is False


def test_words_and_a_reference_add_their_measures(checkpoint, corpus):
    texts = [{"text": f"{corpus[n : n + 20]} the {corpus[n + 20 : n + 40]} and", "label": n % 2} for n in range(12)]
    results = measure(
        checkpoint("llama"), texts, words=["the", "and"], reference=str(checkpoint("llama", 1)), sequence_length=64
    )
    promised = GENERAL | contract.LM | {"separability", "mmd", "nc1"}  # ragged, so no coherence
    contract.check(results.table, contract.rows(L, promised, projections=LLAMA))
    assert [e for e in results.meta["left_out"] if e["measure"].startswith("coherence")]


def test_a_masked_language_model(checkpoint, documents_file):
    results = measure(checkpoint("bert"), documents_file, max_sequences=5, sequence_length=12)
    promised = GENERAL | contract.LM | {"coherence"}
    contract.check(results.table, contract.rows(L, promised, projections=BERT, normed=False))
    assert results.meta["model"]["task"] == "masked-lm"
    assert results.meta["token_policy"]["name"] == "all"


@pytest.mark.parametrize("family", ["bert-classifier", "gpt2-classifier", "llama-classifier"])
def test_a_text_classifier_reads_one_token(checkpoint, ragged_tsv, family):
    results = measure(checkpoint(family), ragged_tsv, sequence_length=32, batch_size=4)
    projections = BERT if family.startswith("bert") else PROJECTIONS[family.removesuffix("-classifier")]
    promised = GENERAL | contract.LM | {"nc1"}
    contract.check(
        results.table,
        contract.rows(L, promised, projections=projections, first=False, normed=not family.startswith("bert")),
    )
    assert results.meta["token_policy"]["name"] == ("cls" if family.startswith("bert") else "last")
    assert results.meta["data"]["num_classes"] == 3
    assert results.meta["sampling"]["counted_tokens"] == 12


def test_an_image_classifier(checkpoint, picture_folder):
    results = measure(checkpoint("vit"), picture_folder)
    vit = ["attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2"]
    promised = GENERAL | contract.LM | {"nc1", "coherence"}
    contract.check(results.table, contract.rows(L, promised, projections=vit, first=False))
    assert results.meta["token_policy"]["name"] == "cls"
    assert results.meta["data"] | {"hash": None} == {
        "name": picture_folder.name,
        "kind": "images",
        "text_hash": None,
        "hash": None,
        "sequences": 12,
        "tokens": 12 * 17,
        "sequence_length": 17,
        "num_classes": 3,
        "masked_share": None,
        "clusters": 12,
        "unit": "image",
        "no_error": None,
    }
    assert results.meta["lens_grid"]["of"] == "samples"


@pytest.mark.parametrize("tower", ["text", "vision"])
def test_each_tower_of_clip(checkpoint, tokenizer, picture_folder, tower):
    folder = checkpoint("clip")
    data = picture_folder if tower == "vision" else [f"a picture{tokenizer.eos_token}" for _ in range(4)]
    results = measure(folder, data, tower=tower, sequence_length=8)
    assert {"displacement", "jump_rate", "cosine", "cka", "norm_ratio", "spectral_norm"} <= set(results.table.measure)
    assert set(results.table[results.table.measure == "displacement"].layer.dropna()) == {1, 2, 3}
    assert left_out(results) >= contract.LM
    assert results.meta["token_policy"]["name"] == ("cls" if tower == "vision" else "eos")


def test_detr_is_measured_in_its_decoder(checkpoint, picture_folder):
    results = measure(checkpoint("detr"), picture_folder, max_sequences=3)
    assert {"displacement", "jump_rate", "cosine", "cka", "norm_ratio", "spectral_norm"} <= set(results.table.measure)
    assert left_out(results) >= contract.LM
    assert set(results.table[results.table.measure == "norm_ratio"].layer) == {1, 2, 3}


@pytest.mark.parametrize("family", ["bert-bare", "bert-pretraining"])
def test_other_heads(checkpoint, documents_file, family):
    results = measure(checkpoint(family), documents_file, max_sequences=4, sequence_length=12)
    measured = set(results.table.measure)
    assert measured >= GENERAL | {"coherence"}
    without = [entry for entry in results.meta["left_out"] if entry["measure"] in contract.LM]
    if family == "bert-bare":
        assert len(without) == 4
        assert all("head" in entry["reason"] for entry in without)
    else:
        assert not without


def test_unlabelled_text_leaves_the_classifier_what_needs_no_labels(checkpoint, ragged_texts):
    results = measure(checkpoint("bert-classifier"), [text for text, _ in ragged_texts], sequence_length=32)
    assert contract.LM | {"nc1"} <= left_out(results)
    assert set(results.table.measure) >= GENERAL


@pytest.mark.parametrize("family", ["olmo2", "opt", "phi3", "falcon", "granite"])
def test_a_family_that_is_only_found(checkpoint, documents_file, family):
    results = measure(checkpoint(family), documents_file, max_sequences=4, sequence_length=12)
    assert set(results.table.measure) >= GENERAL | contract.LM


def test_asking_for_some_gives_only_those(checkpoint, documents_file):
    results = measure(checkpoint("llama"), documents_file, measures=["cka", "displacement"], max_sequences=4)
    contract.check(results.table, contract.rows(L, {"cka", "displacement"}))
    assert results.meta["left_out"] == []
    assert set(results.headline) == {"last_layer_displacement"}


def test_a_single_layer_has_no_jump(tmp_path, tokenizer, documents_file):
    import transformers as tf

    import tiny_models

    config = tf.LlamaConfig(**{**tiny_models.DECODER, "num_hidden_layers": 1, "vocab_size": len(tokenizer)})
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path / "one")
    tokenizer.save_pretrained(tmp_path / "one")
    results = measure(tmp_path / "one", documents_file, max_sequences=4, sequence_length=12)
    promised = (GENERAL | contract.LM | {"coherence"}) - {"jump_rate"}
    contract.check(results.table, contract.rows(1, promised, projections=LLAMA))
    assert "zeta_L" not in results.headline


def test_the_document_says_everything_that_is_needed_to_repeat_the_run(checkpoint, documents_file, tmp_path):
    settings = MeasureSettings(max_sequences=4, sequence_length=12)
    results = measure_into(checkpoint("llama"), str(documents_file), tmp_path / "out", settings)
    meta = results.meta
    assert meta["kind"] == "measure"
    assert meta["complete"] is True
    assert meta["settings"] == settings.model_dump()
    assert (
        meta["model"].items()
        >= {
            "name": str(checkpoint("llama")),
            "class": "LlamaForCausalLM",
            "family": "llama",
            "task": "causal-lm",
            "num_layers": 3,
            "width": 32,
            "dtype": "float32",
            "revision": None,
        }.items()
    )
    assert meta["model"]["config_hash"].startswith("sha256:")
    assert meta["data"]["hash"].startswith("sha256:")
    assert (meta["data"]["sequences"], meta["data"]["tokens"]) == (4, 48)
    assert set(meta["versions"]) == {"fulldepth", "torch", "transformers", "python"}
    assert set(meta["timings"]) == {"load", "forward", "measures", "total"}
    assert meta["timings"]["total"] >= meta["timings"]["forward"] > 0
    assert meta["sampling"]["reservoir_tokens"] == meta["sampling"]["counted_tokens"] == 48
    assert meta["sampling"]["lens_targets"] == 4 * 11
    assert meta["memory"]["reservoirs"] >= 48 * 4 * 32 * 4
