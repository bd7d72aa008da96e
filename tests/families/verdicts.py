"""What fulldepth says of each tiny model, held against what transformers itself gives: states, logits, first layers."""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import transformers as tf

sys.path.insert(0, str(Path(__file__).parents[1]))

from families import zoo  # the tests' folder is on the path under pytest, not when this file runs as a program
from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.execution import body_inputs, capture, find_anatomy, verify
from fulldepth.hf import anatomy_candidates, truncated

PAGE = Path(__file__).parents[2] / "docs" / "families.md"

CAUSAL = """
    afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bamba bart beam bert bert-generation
    big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert codegen cohere cohere2
    cohere2_moe cohere_compass_text cpmant ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v4 diffllama doge dory dots1 dots3_note_text electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe
    falcon falcon_h1 falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4_text
    gemma4_unified gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt2 gpt_bigcode
    gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_loop_text
    inkling2_text inkling_text jais2 jamba jetmoe kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama
    llama4_text longcat_flash mamba mamba2 marian mbart megatron-bert mellum mimo_v2_flash minicpm3 minimax
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama modernbert-decoder moshi
    moss_transcribe_diarize mpt mvp nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt
    pegasus persimmon phi phi3 phi4_multimodal phimoe plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text recurrent_gemma rembert roberta roberta-prelayernorm roc_bert
    roformer rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta
    xlm-roberta-xl xlnet xlstm xmod youtu zamba zamba2 zaya
"""
MASKED = """
    albert convbert deberta deberta-v2 distilbert esm eurobert flaubert fnet funnel gte ibert layoutlm longformer
    mobilebert modernbert mpnet mra nomic_bert nystromformer squeezebert tapas yoso
"""
IMAGES_AND_TEXT = "aya_vision cohere2_vision paligemma"
NO_TINY_MODEL = {
    "text-classification": "cohere_compass_text esmc gpt_neo jamba layoutlmv2 layoutlmv3 lilt perceiver qwen3_5 "
    "qwen3_5_text qwen3_next reformer zamba zamba2",
    "image-classification": "dinat efficientnet perceiver pp_lcnet shieldgemma2 siglip2 timm_wrapper",
}
"""Classifiers that need other packages or millions of parameters, or whose stock class fails on the zoo's
configuration; every other type of transformers is a case."""
NOT_TESTED = {
    "blt": "its smallest model has 96 million parameters; it reads bytes in patches",
    "emu3": "a generator of images",
    "gemma3n": "its vision tower needs timm; the language model is `gemma3n_text`",
    "gemma4": "200 million parameters; the language model is `gemma4_text`",
    "gemma4_assistant": "drafts for another model, whose keys and values it reads",
    "gemma4_unified_assistant": "drafts for another model, whose keys and values it reads",
    "musicgen": "a decoder of sound",
    "musicgen_melody": "a decoder of sound",
    "reformer": "its blocks are reversible: two residual streams",
}
"""Text classes without a tiny model -> the reason; all other classes of transformers are cases."""
BARE = """
    aimv2 altclip audio-spectrogram-transformer blip clip_text_model clip_vision_model dinov3_vit dpr dpt hubert
    idefics3 internvl led llama4 llava m2m_100 mt5 paligemma pixtral qwen2_audio qwen3_vl siglip_vision_model
    smolvlm splinter switch_transformers visual_bert vit_mae wav2vec2 wav2vec2-bert wavlm yolos
"""
LISTS = {
    "causal-lm": [name for name in CAUSAL.split() if name in zoo.HEADS["causal-lm"]],  # versions differ
    "masked-lm": MASKED.split(),
    "image-text-to-text": IMAGES_AND_TEXT.split(),
    **{
        task: [name for name in zoo.HEADS[task] if name not in absent.split()] for task, absent in NO_TINY_MODEL.items()
    },
    "representation": BARE.split(),
}
CASES = [(task, model_type) for task, names in LISTS.items() for model_type in names]

POST_NORM = ["bart", "blenderbot-small", "git", "marian", "mvp", "openai-gpt", "plbart", "trocr"]
ADDS_THE_STREAM = ["bloom", "mpt"]
NOT_CAUSAL_BY_NAME = ["bigbird_pegasus"]
"""Its attention has `is_causal = False`, and a mask that makes it causal."""
ONLY_LAYERS = (*POST_NORM, *ADDS_THE_STREAM, *NOT_CAUSAL_BY_NAME)
"""Language models with known branches of which `fulldepth skip` removes whole layers only."""


@dataclass(frozen=True)
class Verdict:
    """One row of the table."""

    model_type: str
    class_name: str
    verdict: str
    """`right`, `right, no lens` or `refused`."""
    branches: str
    cut: str
    """Whether its first layers are a model of the same class (`fulldepth exit export`)."""
    reason: str

    @property
    def row(self):
        """As a line of the page."""
        cells = (f"`{self.model_type}`", f"`{self.class_name}`", self.verdict, self.branches, self.cut, self.reason)
        return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def stated(task, model_type):
    """The verdict of a row of the page, and whether its branches are known and its first layers can be cut out."""
    begins = f"| `{model_type}` | `{zoo.class_name(model_type, task)}` | "
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(begins))
    return row.removeprefix(begins).split(" | ")[:3]


def examine(task, model_type, model=None):
    """Build a tiny model, let fulldepth prove it on one batch, and hold its states on another against stock ones.

    Raises:
        AssertionError: if fulldepth accepts a stream that is not the stock one, logits that are not the model's, or
            first layers that give others than the whole model stopped there.
    """
    name = zoo.class_name(model_type, task)
    model = model or zoo.build(model_type, task)
    try:
        found = verify(anatomy_candidates(model), zoo.inputs(model, seed=1), optional=("head", "branches"))
    except FulldepthError as error:
        return Verdict(model_type, name, "refused", "", "", shortened(str(error)))
    batch = zoo.inputs(model, seed=2)
    with torch.no_grad(), capture(found.anatomy, ["residual"]) as activations:
        found.anatomy.body(**body_inputs(found.anatomy, batch))
        residual = activations["residual"]
    check_stream(model, batch, residual, found)
    if found.classifier is not None:
        check_lens(model, batch, residual[-1], found.classifier)
    predicts = task != "representation"
    verdict = "right" if found.classifier is not None or not predicts else "right, no lens"
    reason = found.unproven.get("head", "") if predicts else ""
    return Verdict(
        model_type, name, verdict, "yes" if found.branches else "no", first_layers(model, batch), one_line(reason, 120)
    )


@torch.no_grad()
def first_layers(model, batch):
    """`yes` if the model can be cut to two layers, which then give what it gives without its later blocks."""
    try:
        anatomy = find_anatomy(model)
        cut = truncated(anatomy, 2)
    except FulldepthError:
        return "no"
    whole = copy.deepcopy(model)
    counter = count(1)
    for block in find_anatomy(whole).block_list:
        block.forward = passing_after(2, counter, block.forward)
    got, expected = (stock_output(each, batch) for each in (cut, whole))
    for key in ("prediction_logits", "logits", "last_hidden_state", "pooler_output"):
        if key in expected:
            assert torch.allclose(got[key], expected[key], rtol=1e-4, atol=1e-4 * float(expected[key].abs().max()))
            return "yes"
    raise AssertionError("nothing to compare")


def passing_after(calls, counter, forward):
    """A block that gives the state that it is given, in its own form, after so many calls of all blocks."""

    def run(*args, **kwargs):
        state, output = args[0] if args else kwargs["hidden_states"], forward(*args, **kwargs)
        if next(counter) <= calls:
            return output
        return type(output)((state, *output[1:])) if isinstance(output, tuple | list) else state

    return run


def passing(block):
    """A block that gives what it is given: the state, and in Zaya that of the last router."""
    if type(block).__name__ == "ZayaDecoderLayer":
        return lambda state, router=None, *args, **kwargs: (state, router)
    return passing_after(0, count(1), block.forward)


def shortened(refusal):
    """The first reason of a refusal, without the size of a difference."""
    refusal = re.sub(r" \(relative difference [^)]*\)| by \S+ \(relative\)", "", refusal)
    first = refusal.partition(". Describe it")[0].partition(". A network of several")[0].partition(" | ")[0]
    return one_line(first.rpartition(" design: ")[2].rstrip(". "), 200)


@torch.no_grad()
def check_stream(model, batch, residual, found):
    """`h_0..h_L` against the hidden states that the stock model gives.

    Most models give h_0..h_(L-1) and then h_L or its norm; state-space models and RWKV give h_1..h_L and then the norm
    of h_L. ALBERT's first one stands before the projection to the width of its blocks, and a last one of another width
    behind a map that is a part of the head.
    """
    stock = stock_states(model, batch)
    start = 1 if close(stock[0], residual[1]) else 0
    normed = found.anatomy.normalise(residual[-1])
    assert normed.shape == residual[-1].shape, "the final norm gives another shape"
    ours = [*residual[start:-1], *((residual[-1],) if start else ()), normed]
    assert len(stock) == len(ours), f"{len(stock)} stock states, {len(ours)} of ours"
    for layer in range(1 if model.config.model_type == "albert" else 0, len(ours) - 1):
        assert close(stock[layer], ours[layer]), f"state {layer} of {len(stock)} differs"
    ends = [normed, residual[-1], *([found.classifier.prepare(residual[-1])] if found.classifier else [])]
    assert any(close(stock[-1], end) for end in ends), "the last state differs"


def stock_states(model, batch):
    """Hidden states by transformers alone, `[B, T, D]` each."""
    states = list(stock_output(model, batch, output_hidden_states=True).hidden_states)
    sequence_first = states[0].shape[:2] == (zoo.LENGTH, 2)
    return [state.transpose(0, 1) for state in states] if sequence_first else states


def stock_output(model, batch, **options):
    """What the stock model gives; without a cache where it may have one, as some caches know no attention."""
    try:
        return model(**batch, **options, use_cache=False)
    except TypeError:
        return model(**batch, **options)


def close(one, other):
    """Whether two states are the same but for rounding."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


@torch.no_grad()
def check_lens(model, batch, last, classifier):
    """The lens of the last layer against the logits of a batch that nothing was proven on."""
    output = stock_output(model, batch)
    expected = output["prediction_logits"] if "prediction_logits" in output else output["logits"]
    if expected.ndim == 3:
        got = classifier.tokens(last.flatten(0, 1)).view_as(expected)
    else:
        got = classifier.sequences(last, torch.ones(last.shape[:2]))
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def _named(model_types):
    return ", ".join(f"`{name}`" for name in model_types)


HEADER = f"""# Model types

Tiny random models of {len(CASES)} classes of transformers {{version}}, built from their configurations. *Right*: every
state of the residual stream equals the hidden states that transformers gives, on a batch that the proof at load has not
seen, and the lens of the last layer gives the model's own logits. *Right, no lens*: the stream is right, and the lens
measures are left out, because part of the head is not a module or its task is unknown. *Refused*: nothing is measured;
the reason is the one that `fulldepth measure` prints. The column *branches* says whether attention and MLP are measured
one by one, the column *cut* whether the first layers are a model of the same class (`fulldepth exit export`). *Not
tested*: no tiny model can be built; such a model is tried when it is loaded, as every other.

Attention and MLP are the two modules whose outputs a block adds to its input, whatever their names: a state-space model
or a convolution in the place of attention counts as attention. Where a block adds anything else (a bias, a third
module, a scaled stream), they are not known, and layers are measured, and removed by `fulldepth skip`, as wholes.

`fulldepth skip` removes attention and MLP one by one from every language model that is *right* with *branches* `yes`,
with these exceptions, of which it removes whole layers only. A norm follows the residual sums:
{_named(POST_NORM)}.
The modules add the stream to their outputs themselves: {_named(ADDS_THE_STREAM)}. The attention is not marked as
causal: {_named(NOT_CAUSAL_BY_NAME)}.

BigBird reads texts of more than `(5 + 2 num_random_blocks) block_size` tokens (704) with sparse attention, and no
longer does so once it has read a shorter one: longer texts are refused, unless its configuration says
`"attention_type": "original_full"`. Longformer pads to whole windows, and is measured on texts of whole windows alone.

The models have two to four layers. RWKV halves its stream after every `rescale_every` (six) layers: loaded from a
folder it is measured and cut at any depth, with `rescale_every=0` and the same logits; in memory it is refused unless
it was loaded so.

{{counts}}

Made by `python tests/families/verdicts.py`; a test holds every row.

| model type | class | verdict | branches | cut | reason |
|---|---|---|---|---|---|
"""


def page(verdicts):
    """The page of the documentation."""
    kinds = ("right", "right, no lens", "refused")
    counts = ", ".join(f"{sum(v.verdict == kind for v in verdicts)} {kind}" for kind in kinds)
    header = HEADER.format(
        version=tf.__version__, counts=f"{counts}; none wrong.".replace("right, no", "right with no")
    )
    names = {name: zoo.class_name(name, "causal-lm") for name in NOT_TESTED}
    others = [Verdict(name, names[name], "not tested", "", "", reason) for name, reason in NOT_TESTED.items()]
    return header + "".join(f"{verdict.row}\n" for verdict in [*verdicts, *others])


def rows():
    """Every verdict, told as it is made."""
    for number, (task, model_type) in enumerate(CASES, start=1):
        verdict = examine(task, model_type)
        print(f"{number} of {len(CASES)}: {verdict.row}", file=sys.stderr)
        yield verdict


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page(list(rows())))
