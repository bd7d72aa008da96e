"""Classifiers of every type against stock transformers: the last layer is the model, in each command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fulldepth
from families import zoo
from families.own_heads import check_own_heads, loss_of
from families.stock import Stock, stock
from fulldepth import exit
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.exit.readings import Exit
from fulldepth.exit.served import EarlyExit
from fulldepth.exit.subject import open_checkpoint, prepare_subject
from fulldepth.settings.exit import ExitSettings

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS, IMAGES = "text-classification", "image-classification"
HARD = [
    (TEXTS, "distilbert"),  # a function between two modules of the head
    (TEXTS, "eurobert"),  # the mean of the logits
    (TEXTS, "xlnet"),  # the head reads the last position, padding or not; states are [T, B, D]
    (TEXTS, "gemma2"),  # the language model's soft cap
    (TEXTS, "bloom"),  # arguments with an entry for each head of each sequence
    (TEXTS, "deberta-v2"),  # modules that read a parameter
    (IMAGES, "beit"),  # a pooler that averages patches
    (IMAGES, "dinov2_with_registers"),  # [CLS] beside the mean of the patches
]
READ = {"xlnet": "last", "eurobert": "mean", "beit": "mean-patches", "distilbert": "cls", "bloom": "last"}
"""Model type -> what its head reads."""
NO_TINY_MODEL = {
    TEXTS: "cohere_compass_text esmc gpt_neo jamba layoutlmv2 layoutlmv3 lilt perceiver qwen3_5 "
    "qwen3_5_text qwen3_next reformer t5 zamba zamba2",
    IMAGES: "dinat efficientnet imagegpt perceiver pp_lcnet shieldgemma2 siglip2 timm_wrapper",
}
"""Types that need other packages or millions of parameters, or whose stock class fails on the zoo's configuration."""
REFUSED = {
    TEXTS: "bart bigbird_pegasus canine flaubert funnel longformer mbart mt5 mvp plbart squeezebert t5gemma t5gemma2 "
    "umt5 xlm",
    IMAGES: "bit convnext convnextv2 cvt donut-swin focalnet hgnet_v2 hiera levit mobilenet_v1 mobilenet_v2 mobilevit "
    "mobilevitv2 poolformer pvt pvt_v2 regnet resnet segformer swiftformer swin swinv2 textnet",
}
"""Types whose layers are no layers of one classifier; every other type of transformers is right."""
EVERY = [
    (task, name)
    for task, names in NO_TINY_MODEL.items()
    for name in zoo.HEADS[task]
    if name not in names.split() and (task, name) not in HARD
]


def check(subject: Stock) -> None:
    """Measure, early exit and the aligned loss against the stock answers."""
    lens = fulldepth.measure(subject.folder, subject.data, measures=["lens_accuracy", "lens_loss"], batch_size=4)
    swept = exit.sweep(subject.folder, subject.data, thresholds=[0.34, 0.37, 0.4, 0.5, 1.0], batch_size=4, rounds=1)
    for results in (lens, swept):
        assert results.values("lens_accuracy", "mean").iloc[-1] == pytest.approx(subject.accuracy, abs=1e-12)
        assert results.values("lens_loss", "mean").iloc[-1] == pytest.approx(subject.loss, rel=1e-4)
    settings = ExitSettings(batch_size=4)
    early = EarlyExit(prepare_subject(open_checkpoint(subject.folder, settings), subject.data, settings))
    given = early.subject.sequences
    for batch in given.batches(4):
        inputs = early.subject.inputs(batch.inputs)
        logits, _ = early.run(inputs, Exit("confidence", 1.0, 1, early.subject.anatomy.num_layers))
        expected = subject.logits[batch.sequence]
        assert torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    model, batch = subject.model, subject.batch()
    last = [0.0] * (find_anatomy(model).num_layers - 1) + [1.0]
    stock_loss = float(model(**batch).loss.detach())
    assert float(loss_of(model, batch, aligned=last).detach()) == pytest.approx(stock_loss, rel=1e-5)
    check_own_heads(model, batch, subject.folder / "heads")


@pytest.mark.parametrize(("task", "model_type"), HARD)
def test_the_last_layer_is_the_stock_model(task: str, model_type: str, tmp_path: Path) -> None:
    check(stock(task, model_type, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "model_type"), EVERY)
def test_every_classifier_is_right_or_refused_as_stated(task: str, model_type: str, tmp_path: Path) -> None:
    subject = stock(task, model_type, tmp_path)
    if model_type not in REFUSED[task].split():
        check(subject)
        return
    for run in (fulldepth.measure, exit.sweep):
        with pytest.raises(FulldepthError, match=r"is refused|encoder-decoder"):
            run(subject.folder, subject.data)


@pytest.mark.parametrize(("model_type", "policy"), READ.items())
def test_what_counts_is_what_the_head_reads(model_type: str, policy: str, tmp_path: Path) -> None:
    subject = stock(dict((name, task) for task, name in HARD)[model_type], model_type, tmp_path)
    results = fulldepth.measure(subject.folder, subject.data, measures=["nc1"])
    assert results.meta["token_policy"]["name"] == policy


@pytest.mark.parametrize("pad", ["[PAD]", None])
def test_a_classifier_is_padded_with_its_own_token(pad: str | None, tmp_path: Path) -> None:
    """GPT-2 finds the last token by the padding id of its configuration, here the end of a text."""
    subject = stock(TEXTS, "gpt2", tmp_path, pad=pad, pad_token_id=2)
    losses = [
        fulldepth.measure(subject.folder, subject.data, measures=["lens_loss"], batch_size=size).values(
            "lens_loss", "mean"
        )
        for size in (1, 3, 6)
    ]
    for values in losses:
        assert values.tolist() == pytest.approx(losses[0].tolist(), rel=1e-5)
        assert values.iloc[-1] == pytest.approx(subject.loss, rel=1e-5)


@pytest.mark.parametrize(
    "fields", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}, {"problem_type": "regression"}]
)
def test_models_without_one_class_have_no_accuracy(fields: dict[str, object], tmp_path: Path) -> None:
    subject = stock(TEXTS, "bert", tmp_path, **fields)
    results = fulldepth.measure(subject.folder, subject.data)
    assert not {"lens_accuracy", "lens_loss", "saturation"} & set(results.table.measure)
    with pytest.raises(FulldepthError, match="does not predict one class out of several"):
        fulldepth.measure(subject.folder, subject.data, measures=["lens_accuracy"])
    with pytest.raises(FulldepthError, match="does not predict one class out of several"):
        exit.sweep(subject.folder, subject.data)


class SwinHead(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.norm, self.classifier = model.swin.layernorm, model.classifier

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.norm(states).mean(1))


def test_the_refusal_of_a_network_of_stages_names_a_way_that_works(tmp_path: Path) -> None:
    subject = stock(IMAGES, "swin", tmp_path)
    with pytest.raises(FulldepthError, match=r"fulldepth.measure\(model, \(images, labels\), stages="):
        fulldepth.measure(subject.folder, subject.data)
    images = torch.cat([inputs["pixel_values"] for inputs in subject.inputs])
    model = subject.model
    results = fulldepth.measure(
        model, (images, subject.labels), stages=[*model.swin.encoder.layers], head=SwinHead(model)
    )
    assert results.values("lens_accuracy", "mean").iloc[-1] == pytest.approx(subject.accuracy)
    assert results.values("lens_loss", "mean").iloc[-1] == pytest.approx(subject.loss, rel=1e-5)


@pytest.mark.parametrize("model_type", ["bloom", "xlnet"])
def test_a_type_without_fused_attention_is_trained(model_type: str, tmp_path: Path) -> None:
    """BLOOM has eager attention only; XLNet has no limit of positions (-1)."""
    subject = stock(TEXTS, model_type, tmp_path)
    rows = "".join(f'{{"text": "{row["text"]}", "label": {row["label"]}}}\n' for row in subject.data * 2)
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    data = {"name": str(tmp_path / "rows.jsonl"), "validation": str(tmp_path / "rows.jsonl")}
    settings = {
        "task": TEXTS,
        "method": "aligned",
        "model": {"checkpoint": str(subject.folder)},
        "tokenizer": str(subject.folder),
        "data": data,
        "steps": 1,
        "global_batch_size": 4,
        "sequence_length": 16,
        "eval_every": 1,
        "save_every": 1,
    }
    results = fulldepth.train(settings, tmp_path / "run", progress=False)
    assert "lens_accuracy" in set(results.table.measure)
