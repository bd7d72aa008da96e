"""Model types against stock transformers: every row of docs/families.md, heads of single layers, classifiers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.testing import assert_close

import fulldepth
from families import verdicts, zoo
from families.stock import stock, word_tokenizer
from fulldepth import exit
from fulldepth.execution import find_anatomy
from fulldepth.exit.readings import Exit
from fulldepth.exit.served import EarlyExit
from fulldepth.hf import copy_to_exit_heads, exit_weights, open_model, save_exit_heads, truncated
from fulldepth.hf.exit_heads import output_layer
from fulldepth.losses import Objective, add_exit_heads, has_next_token_loss, use_next_token_loss
from fulldepth.settings.exit import ExitSettings
from fulldepth.subject import Subject
from marks import thorough
from refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = verdicts.PAGE.read_text()
TEXTS, IMAGES = "text-classification", "image-classification"
DESIGNS = [
    ("causal-lm", "gemma2"),  # norms around the branches, soft cap
    ("causal-lm", "gpt2"),  # tied embeddings, fused projections
    ("causal-lm", "gpt_neox"),  # parallel branches
    ("causal-lm", "opt"),  # the MLP is no module
    ("causal-lm", "cohere"),  # one norm for both branches, scaled logits
    ("causal-lm", "mistral"),  # sliding window
    ("causal-lm", "qwen3_moe"),  # mixture of experts
    ("causal-lm", "deepseek_v3"),  # latent attention
    ("causal-lm", "jamba"),  # attention in some layers, state-space models in the others
    ("causal-lm", "xlm"),  # refused: its list of attentions is not its blocks
    ("masked-lm", "modernbert"),  # encoder before norms
    ("masked-lm", "albert"),  # one block for all layers
    ("masked-lm", "convbert"),  # no lens
    (TEXTS, "distilbert"),  # a function between two modules of the head
    (TEXTS, "xlnet"),  # the head reads the last position, padding or not; states are [T, B, D]
    (TEXTS, "bloom"),  # arguments with an entry for each head of each sequence
    (IMAGES, "beit"),  # a pooler that averages patches
    (IMAGES, "clip"),  # one tower of two
    (IMAGES, "swin"),  # refused: several stages
    ("representation", "mt5"),  # refused: two stacks
]
"""One type for each design, tested on every push; the others by `make test-all`."""
NO_DATA = ("imagegpt", "t5")
"""Refused types whose stock class does not run on images or texts alone."""
CLOSE = 1e-6
"""Largest relative difference of two losses."""


def loss_of(model, batch, **weights):
    """The loss of all layers with some weights, by the shared head (aligned) or by heads of their own (multi_exit)."""
    terms = {term: {"schedule": "always", "weights": each} for term, each in weights.items()}
    objective = Objective(**terms).attach(model)
    loss, _ = objective(model(**batch), batch)
    objective.detach()
    return loss


def check_own_heads(model, batch, folder, *, cut):
    """Heads that are copies of the model's own, without its bias, give the loss of the shared head and are all trained.
    Random ones are saved, loaded beside the stock model, and become the head of its first layers.
    """
    anatomy = find_anatomy(model)
    _, _, own = output_layer(anatomy)
    if own.bias is not None:
        nn.init.zeros_(own.bias)
    shared = float(loss_of(model, batch, aligned="uniform").detach())
    add_exit_heads(model)
    copy_to_exit_heads(anatomy)
    loss = loss_of(model, batch, multi_exit="uniform")
    assert abs(loss.item() - shared) <= CLOSE * abs(shared)
    loss.backward()
    assert all(bool(weight.grad is not None and weight.grad.any()) for weight in exit_weights(model))
    with torch.no_grad():
        for weight in exit_weights(model):
            weight.normal_(std=0.5)
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        expected = model(**inputs).logits
        model.save_pretrained(folder)
        save_exit_heads(model, folder)
        again = open_model(folder, exit_heads=True).model
        for one, other in zip(exit_weights(model), exit_weights(again), strict=True):
            assert torch.equal(one, other)
        assert_close(again(**inputs).logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    if cut:
        truncated(find_anatomy(again), 2)  # compares its logits with those of the second head


def check_next_token_loss(model, batch):
    """The loss of training is the cross-entropy of the next token, whatever the class computes."""
    if not has_next_token_loss(model):
        use_next_token_loss(model)
    with torch.no_grad():
        output = model(**batch)
    expected = F.cross_entropy(output.logits[:, :-1].double().flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert float(output.loss) == pytest.approx(float(expected), rel=1e-5)


def check_commands(subject):
    """Measure, early exit and the aligned loss against the stock answers."""
    lens = fulldepth.measure(subject.folder, subject.data, measures=["lens_accuracy", "lens_loss"], batch_size=4)
    swept = exit.sweep(subject.folder, subject.data, threshold=[0.34, 0.37, 0.4, 0.5, 1.0], batch_size=4, repeats=1)
    for results in (lens, swept):
        assert results.values("lens_accuracy", "mean").iloc[-1] == pytest.approx(subject.accuracy, abs=1e-12)
        assert results.values("lens_loss", "mean").iloc[-1] == pytest.approx(subject.loss, rel=1e-4)
    with Subject.open(subject.folder, subject.data, ExitSettings(), needs={"head", "targets"}) as opened:
        early = EarlyExit(opened)
        for batch in opened.sequences.batches(4):
            logits, _ = early.run(opened.inputs(batch.inputs), Exit("confidence", 1.0, 1, opened.anatomy.num_layers))
            expected = subject.logits[batch.sequence]
            assert torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    model, batch = subject.model, subject.batch()
    last = [0.0] * (find_anatomy(model).num_layers - 1) + [1.0]
    stock_loss = float(model(**batch).loss.detach())
    assert float(loss_of(model, batch, aligned=last).detach()) == pytest.approx(stock_loss, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "model_type"),
    [pytest.param(*case, marks=() if case in DESIGNS else pytest.mark.thorough) for case in verdicts.CASES],
)
def test_a_model_type_is_what_the_page_says(task, model_type, tmp_path):
    """One tiny model for all questions; what is refused, left out or not cut where the page says otherwise fails."""
    subject = None
    if task in (TEXTS, IMAGES) and model_type not in NO_DATA:
        subject = stock(task, model_type, tmp_path)
    model = zoo.build(model_type, task) if subject is None else subject.model
    verdict = verdicts.examine(task, model_type, model)
    assert verdict.row in PAGE, "python tests/families/verdicts.py makes the page anew"
    if subject is not None and verdict.verdict != "right":
        for run in (fulldepth.measure, exit.sweep):
            with refused(most=1200):  # three reasons and what to do
                run(subject.folder, subject.data)
        return
    if subject is not None:
        check_commands(subject)
        batch = subject.batch()
    elif task in ("causal-lm", "masked-lm"):
        batch = zoo.inputs(model, seed=3)
        batch = {**batch, "labels": batch["input_ids"].clone()}
        if task == "causal-lm":
            batch["use_cache"] = False
            check_next_token_loss(model, batch)
    else:
        return
    if verdict.verdict == "right":
        check_own_heads(model, batch, tmp_path / "heads", cut=verdict.cut == "yes")
    else:
        with refused(most=1200):  # three reasons and what to do
            loss_of(model, batch, aligned="uniform")


def test_the_page_has_a_row_for_every_case_and_one_case_for_every_design():
    assert PAGE.count("\n| `") == len(verdicts.CASES) + len(verdicts.NOT_TESTED)
    assert set(DESIGNS) <= set(verdicts.CASES)


@torch.no_grad()
@pytest.mark.parametrize("before", [True, False])
def test_a_map_to_another_width_behind_the_last_block_is_no_norm(before):
    """OPT-350m: its decoder ends in `project_out`, to the width of its embeddings; without norms before the sums."""
    model = zoo.build("opt", "causal-lm", do_layer_norm_before=before)
    tokenizer, text = word_tokenizer(), "w7 w1 w30 w4 w4 w80 w2 w11"
    results = fulldepth.measure(model, [text], tokenizer=tokenizer, measures=["displacement", "lens_loss"])
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    last = model.model.decoder.layers[-1]
    stream = []
    hook = last.register_forward_hook(lambda _, inputs, output: stream.extend((inputs[0], output)))
    logits = model(input_ids=ids).logits
    hook.remove()
    ends = {"residual": stream[1]}
    if before:
        ends["final_normed"] = model.model.decoder.final_layer_norm(stream[1])
    assert set(results.table.site[results.table.measure == "displacement"]) == set(ends)
    for site, end in ends.items():
        expected = (1 - torch.cosine_similarity(stream[0].double(), end.double(), dim=-1)) / 2
        assert results.values("displacement", "mean", site).iloc[-1] == pytest.approx(float(expected.mean()), rel=1e-5)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert results.values("lens_loss", "mean").iloc[-1] == pytest.approx(float(loss), rel=1e-5)


@torch.no_grad()
def test_siglip_without_a_processor_is_measured_at_its_own_size(tmp_path):
    """Its head reads the mean of the patches, so that counts; against stock states of pictures scaled by hand."""
    pictures = []
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number}.png")
        pictures.append(torch.tensor(pixels).permute(2, 0, 1) / 127.5 - 1)
    model = zoo.build("siglip", IMAGES)
    model.save_pretrained(tmp_path / "model")
    results = fulldepth.measure(tmp_path / "model", tmp_path / "pictures", measures=["displacement"])
    hidden = model.vision_model(torch.stack(pictures), output_hidden_states=True).hidden_states
    states = torch.stack(hidden).double().mean(2)
    cosines = F.cosine_similarity(states[:-1], states[1:], dim=-1)
    expected = ((1 - cosines) / 2).mean(1)
    assert results.values("displacement", "mean", "residual")[[1, 2]].tolist() == pytest.approx(
        expected[:2].tolist(), rel=1e-5
    )
    assert results.meta["token_policy"]["name"] == "mean"


@pytest.mark.parametrize(
    ("task", "model_type", "policy"),
    [(TEXTS, "xlnet", "last"), (TEXTS, "eurobert", "mean"), (TEXTS, "bert", "cls"), (IMAGES, "siglip", "mean")],
)
def test_what_counts_is_what_the_head_reads(task, model_type, policy, tmp_path):
    subject = stock(task, model_type, tmp_path)
    results = fulldepth.measure(subject.folder, subject.data, measures=["nc1"])
    assert results.meta["token_policy"]["name"] == policy


@pytest.mark.parametrize("pad", ["[PAD]", None])
def test_a_classifier_is_padded_with_its_own_token(pad, tmp_path):
    """GPT-2 finds the last token by the padding id of its configuration, here the end of a text."""
    subject = stock(TEXTS, "gpt2", tmp_path, pad=pad, pad_token_id=2)
    losses = [
        fulldepth.measure(subject.folder, subject.data, measures=["lens_loss"], batch_size=size).values(
            "lens_loss", "mean"
        )
        for size in (1, 3)
    ]
    assert losses[1].tolist() == pytest.approx(losses[0].tolist(), rel=1e-5)
    assert losses[0].iloc[-1] == pytest.approx(subject.loss, rel=1e-5)


@pytest.mark.parametrize("fields", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}])
def test_models_without_one_class_have_no_accuracy(fields, tmp_path):
    subject = stock(TEXTS, "bert", tmp_path, **fields)
    results = fulldepth.measure(subject.folder, subject.data)
    assert not {"lens_accuracy", "lens_loss", "saturation"} & set(results.table.measure)
    with refused("does not predict one class out of several"):
        exit.sweep(subject.folder, subject.data)


def test_the_refusal_of_a_network_of_stages_says_why(tmp_path):
    subject = stock(IMAGES, "swin", tmp_path)
    with refused("several stages has no single residual stream"):
        fulldepth.measure(subject.folder, subject.data)


@pytest.mark.parametrize("model_type", [thorough("bloom"), "xlnet"])
def test_a_type_without_fused_attention_is_trained(model_type, tmp_path):
    """BLOOM has eager attention only; XLNet has no limit of positions (-1)."""
    subject = stock(TEXTS, model_type, tmp_path)
    rows = "".join(f'{{"text": "{row["text"]}", "label": {row["label"]}}}\n' for row in subject.data * 2)
    (tmp_path / "rows.jsonl").write_text(rows)
    settings = {
        "task": TEXTS,
        "method": "aligned",
        "model": {"checkpoint": str(subject.folder)},
        "tokenizer": str(subject.folder),
        "data": {"name": str(tmp_path / "rows.jsonl"), "validation": str(tmp_path / "rows.jsonl")},
        "steps": 1,
        "global_batch_size": 4,
        "sequence_length": 16,
        "eval_every": 1,
        "save_every": 1,
    }
    results = fulldepth.train(settings, tmp_path / "run", progress=False)
    assert "lens_accuracy" in set(results.table.measure)


def test_positions_that_a_quantised_table_leaves_unused_are_not_offered(tmp_path):
    """I-BERT's positions begin behind the padding token, as RoBERTa's do, in a table of a class of its own."""
    model = zoo.build("ibert", "masked-lm")
    rows = len(model.ibert.embeddings.position_embeddings.weight)
    usable = find_anatomy(model).max_positions
    assert usable == rows - 1 - model.config.pad_token_id
    with torch.no_grad():
        model(input_ids=torch.full((1, usable), 7))
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, usable + 1), 7))
