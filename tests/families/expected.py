"""What is expected of each model type in the tests of classifiers and of heads of their own; the rest must be right.

A type that a new version of transformers refuses, builds or breaks differently fails its test until it is stated here.
"""

from __future__ import annotations

RIGHT, REFUSED, UNBUILT, ABSENT = "right", "refused", "cannot be built", "absent"
"""`refused`: by a `FulldepthError`; `cannot be built`: transformers fails on the tiny model; `absent`: not tried, as it
needs another package or millions of parameters at any size."""

FAILURES = (AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError, AssertionError)
"""What transformers raises for a tiny model that it cannot build or run."""

EXCEPTIONS: dict[str, dict[str, str]] = {
    "text-classification": {
        REFUSED: """
        bart bigbird_pegasus canine flaubert funnel longformer mbart mt5 mvp plbart squeezebert t5gemma t5gemma2
        umt5 xlm
        """,
        UNBUILT: """
        axk1 axk2 cohere_compass_text esmc gpt_neo jamba layoutlmv3 lilt mistral4 qwen3_5 qwen3_5_text
        qwen3_next reformer t5 zamba zamba2
        """,
        ABSENT: "layoutlmv2 perceiver",
    },
    "image-classification": {
        REFUSED: """
        bit convnext convnextv2 cvt donut-swin focalnet hgnet_v2 hiera levit mobilenet_v1 mobilenet_v2 mobilevit
        mobilevitv2 poolformer pvt pvt_v2 regnet resnet segformer swiftformer swin swinv2 textnet
        """,
        UNBUILT: """
        efficientnet imagegpt pp_lcnet shieldgemma2 siglip2
        """,
        ABSENT: "dinat perceiver timm_wrapper",
    },
    "causal-lm": {
        REFUSED: """
        bert bert-generation big_bird camembert cpmant data2vec-text deepseek_v4 electra ernie megatron-bert
        minicpm3 prophetnet recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer xlm
        xlm-roberta xlm-roberta-xl xlnet xlstm xmod
        """,
        UNBUILT: """
        git
        """,
    },
    "masked-lm": {
        REFUSED: """
        flaubert funnel squeezebert
        """,
    },
}
"""Task -> verdict -> model types."""


def expected_verdict(task: str, model_type: str) -> str:
    """What is expected of a model type: `right` unless `EXCEPTIONS` names it."""
    return next((verdict for verdict, names in EXCEPTIONS[task].items() if model_type in names.split()), RIGHT)
