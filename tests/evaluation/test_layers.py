"""Scores at every exit layer against lm-eval's own evaluation of the model, and of its first layers alone."""

from __future__ import annotations

import json
import string
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import tiny_models
from data.conftest import jsonl
from evaluation import small_world
from evaluation.small_world import LAYERS
from fulldepth.evaluation import evaluate
from fulldepth.evaluation.harness import Answers, LayerReader, layered_model, seeded
from fulldepth.evaluation.local_tasks import local_task
from fulldepth.execution.verify import prove
from fulldepth.hf.truncation import truncated
from json_files import write_json
from marks import thorough
from refusals import refused
from skip import word_tokenizer

lm_eval = pytest.importorskip("lm_eval")
SCORED = ["arc_easy_local", "lambada_local", "hellaswag_local", "piqa_local", "arc_challenge_local"]
LIMIT = 5
RESAMPLES = {"bootstrap_iters": 1000}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_world.write_data(tmp_path_factory.mktemp("tasks"))


def stock(model, task, data, replies=None, limit=LIMIT, batch_size=4, tokenizer=None, **options):
    """lm-eval's own scores of a model: metric -> (value, standard error); its texts are added to `replies`."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    output = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer or small_world.tokenizer(), batch_size=batch_size),
        tasks=[local_task(task, [data]) if isinstance(task, str) else task],
        task_manager=TaskManager(include_defaults=False),
        limit=limit,
        log_samples=replies is not None,
        **options,
    )
    (results,) = output["results"].values()
    for name, samples in (output.get("samples") or {}).items():
        replies.setdefault(name, []).extend(sample["resps"][0][0] for sample in samples)
    scores = {}
    for key, value in results.items():
        metric, comma, how = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            name = metric if how == "none" else f"{metric}:{how}"
            scores[name] = value, results[f"{metric}_stderr,{how}"]
    return scores


def ours(results, task, layer):
    """Metric -> (value, standard error) at an exit layer."""
    rows = results.table.query("site == @task and layer == @layer and measure == 'task_score'")
    values = dict(zip(rows.statistic, rows.value, strict=True))
    return {name: (value, values[f"{name}_stderr"]) for name, value in values.items() if not name.endswith("_stderr")}


def scored(model, tasks, data, tokenizer=None, **options):
    """Results of this package on the local files."""
    given = {"tokenizer": tokenizer or small_world.tokenizer(), "task_data": [str(data)], "limit": LIMIT}
    return evaluate(model, tasks, **{**given, "batch_size": 4, **options})


def near(got, expected, rel=1e-5):
    assert got.keys() == expected.keys()
    for metric, pair in expected.items():
        assert got[metric] == pytest.approx(pair, rel=rel), metric


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_layer_has_the_scores_of_lm_eval_and_an_exit_layer_those_of_the_first_layers(data, dtype):
    model, differing = small_world.model(dtype=dtype), set()
    tasks = SCORED if dtype == torch.float32 else SCORED[:1]
    results = scored(model, tasks, data, **RESAMPLES)
    for task in tasks:
        whole = stock(model, task, data, **RESAMPLES)
        assert ours(results, task, LAYERS) == whole
        for layer in range(1, LAYERS):
            expected = stock(small_world.first_layers(model, layer), task, data, **RESAMPLES)
            got = ours(results, task, layer)
            near(got, expected)
            differing.add(tuple(got.items()) != tuple(whole.items()))
    assert True in differing
    assert set(results.table.layer.unique()) == set(range(1, LAYERS + 1))


def test_one_pass_answers_all_layers(data):
    model, passes = small_world.model(), []
    model.register_forward_hook(lambda *_: passes.append(layers))
    for layers in ("full", "all"):
        scored(model, ["arc_easy_local"], data, exit_layers=layers)
    assert passes.count("full") == passes.count("all") > 0


CHAT = (
    "{% for turn in messages %}<s>{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def test_chat_templates_and_arguments_of_generation_are_those_of_lm_eval(data, tmp_path):
    """Scores and logs of examples against a stock run with the same options."""
    model, tokenizer, out = small_world.model(), small_world.tokenizer(), tmp_path / "out"
    tokenizer.chat_template = CHAT
    prompting = {"apply_chat_template": True, "system_instruction": "Be brief.", "gen_kwargs": "max_gen_toks=7"}
    options = {"num_fewshot": 2, **RESAMPLES}
    tasks, given = ["lambada_local", "arc_easy_local", "gsm8k_local"], {**options, "exit_layers": "2"}
    logging = {"output": out, "log_samples": True}
    results = scored(model, tasks, data, tokenizer, **prompting, **logging, **given)
    plain = scored(model, tasks, data, tokenizer, **given)
    assert not results.table.value.equals(plain.table.value)
    assert not any("'<think>'" in line for line in results.meta["warnings"])
    tokenizer.chat_template = CHAT.replace("assistant: ", "assistant: <think>\n")
    thinking = scored(model, tasks, data, tokenizer, apply_chat_template=True, exit_layers="full").meta["warnings"]
    (noted, also) = (line for line in thinking if "begins each answer with '<think>'" in line)
    assert "lambada_local scores answers in place of the reasoning" in noted
    assert "arc_easy_local scores" in also
    tokenizer.chat_template = CHAT
    for task in tasks:
        logs = [json.loads(line) for line in (out / f"samples_{task}.jsonl").read_text().splitlines()]
        for layer in (LAYERS, 2):
            replies = {}
            first = small_world.first_layers(model, layer)
            reading = {"replies": replies, "tokenizer": tokenizer, "fewshot_as_multiturn": True}
            whole = stock(first, task, data, **prompting, **options, **reading)
            near(ours(results, task, layer), whole, 0 if layer == LAYERS else 1e-5)
            logged = [entry["resps"][0][0] for entry in logs if entry["exit_layer"] == layer]
            assert len(logged) == len(replies[task]) >= LIMIT
            if task == "gsm8k_local":
                assert logged == replies[task]
        prompts = [entry["arguments"]["gen_args_0"]["arg_0"] for entry in logs]
        assert all(prompt.startswith("<s>system: Be brief.\n<s>user: ") for prompt in prompts)
        assert {prompt.count("<s>user: ") for prompt in prompts} == {3}


def test_a_continuation_longer_than_the_positions_is_refused(data):
    """lm-eval refuses it too; read at wrapped positions it would have the likelihood of something else."""
    model = small_world.model()
    model.config.max_position_embeddings = 6
    with pytest.raises(AssertionError):
        stock(model, "arc_easy_local", data)
    with refused(r"continuation of \d+ tokens is longer than the model's 6 positions"):
        scored(model, ["arc_easy_local"], data)


def test_perplexities_of_whole_texts(data, tmp_path):
    """Tasks of rolling log-likelihoods, with texts longer than the model's positions."""
    model = small_world.model()
    model.config.max_position_embeddings = 16
    task = {
        "task": "texts",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data / "gsm8k/test.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{answer}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    }
    write_json(tmp_path / "texts.yaml", task)
    results = scored(model, ["texts"], data, include_path=str(tmp_path))
    rows = results.table.set_index(["layer", "statistic"]).value
    for layer in (2, LAYERS):
        expected = stock(small_world.first_layers(model, layer), task, data)
        for metric in ("word_perplexity", "bits_per_byte"):
            assert rows[layer, metric] == pytest.approx(expected[metric][0], rel=1e-5)
    assert rows[LAYERS, "bits_per_byte"] == stock(model, task, data)["bits_per_byte"][0]


def test_requests_that_split_the_same_tokens_differently_are_read_at_their_own_positions():
    model, tokens = small_world.model(), [50, 51, 52, 53, 54]
    anatomy, classifier = prove(model, {"input_ids": torch.tensor([tokens])})
    reader = LayerReader(anatomy, classifier, [2, LAYERS])
    lm = layered_model(reader, small_world.tokenizer(), Answers(None, {}, 2), batch_size=4)
    with torch.no_grad():
        first = small_world.first_layers(model, 2)
        pairs = ((2, first), (LAYERS, model))
        said = {layer: one(torch.tensor([tokens[:3]])).logits[0].log_softmax(-1) for layer, one in pairs}
    for layer in (2, LAYERS):
        lm.layer = layer
        long, short = lm._loglikelihood_tokens([(None, tokens[:2], tokens[2:4]), (None, tokens[:3], tokens[4:])])
        assert long[0] == pytest.approx(float(said[layer][1, 52] + said[layer][2, 53]), rel=1e-5)
        assert short[0] == pytest.approx(float(said[layer][2, 54]), rel=1e-5)


BOS, EOS = 1, 2
FRAMES = {"no frame": "$A", "BOS": "<s> $A", "BOS and EOS": "<s> $A </s>", "EOS": "$A </s>"}


def framed(frame):
    """The tokenizer of bytes, which writes BOS, EOS or both around each text."""
    reading = small_world.tokenizer()
    marks = [("<s>", BOS), ("</s>", EOS)]
    reading.backend_tokenizer.post_processor = TemplateProcessing(single=FRAMES[frame], special_tokens=marks)
    assert reading("a")["input_ids"].count(BOS) == ("<s>" in FRAMES[frame])
    return reading


@pytest.mark.parametrize("frame", FRAMES)
def test_each_text_has_one_bos_for_all_types_of_requests(frame):
    """Oracle: a plain loop over tokens that are put together by hand; texts may begin with the mark themselves."""
    from lm_eval.api.instance import Instance

    model, letters = small_world.model(), small_world.tokenizer()
    anatomy, classifier = prove(model, {"input_ids": torch.arange(3, 9)[None]})
    lm = layered_model(LayerReader(anatomy, classifier, [LAYERS]), framed(frame), Answers(None, {}, 1), batch_size=2)
    adds = frame.startswith("BOS")

    def plain(context, continuation):
        """The log-likelihood of tokens, and whether each is the most likely one."""
        said = model(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(continuation)
        return float(said.gather(1, wanted[:, None]).sum()), bool((said.argmax(-1) == wanted).all())

    def ask(kind, *requests):
        instances = [Instance(kind, {}, arguments, 0) for arguments in requests]
        return getattr(lm, kind)(instances)

    texts = {text: letters.encode(text, add_special_tokens=False) for text in ("the sun", " and", "a leaf fell")}
    with torch.no_grad():
        for (text, ids), mark in product(texts.items(), ("", "<s>")):
            expected = plain([BOS], ids)
            assert ask("loglikelihood_rolling", (mark + text,)) == [pytest.approx(expected[0], rel=1e-5)]
            ((value, greedy),) = ask("loglikelihood", ("", mark + text))
            assert (value, greedy) == (pytest.approx(expected[0], rel=1e-5), expected[1])
            ((value, greedy),) = ask("loglikelihood", (mark + text, " is"))
            expected = plain([BOS] * (adds or bool(mark)) + ids, letters.encode(" is", add_special_tokens=False))
            assert (value, greedy) == (pytest.approx(expected[0], rel=1e-5), expected[1])
        asked = [(mark + text, {"until": ["zzz"], "max_gen_toks": 4}) for text in texts for mark in ("", "<s>")]
        for (text, _), reply in zip(asked, ask("generate_until", *asked), strict=True):
            bare = text.removeprefix("<s>")
            ids = [BOS] * (adds or bare != text) + texts[bare]
            for _ in range(4):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            assert reply == letters.decode(ids[-4:], skip_special_tokens=True), text


PROMPT = "{} of them drank from the"


def test_a_task_of_which_no_answer_is_right_is_said_with_what_to_look_at(tmp_path):
    """Answers without the space before them; answers with it; and what the model itself says, for one row of three."""
    model, reading = small_world.model(), small_world.tokenizer()
    with torch.no_grad():
        said = {
            c: model(torch.tensor([reading(c)["input_ids"]])).logits[0, -1].argmax()
            for c in map(PROMPT.format, range(60))
        }
    own, answer = next(
        (c, word) for c, token in said.items() if (word := reading.decode([token])) in string.ascii_letters
    )
    contexts = [own, PROMPT.format("One"), PROMPT.format("Two")]

    def warned(*targets):
        (tmp_path / "lm-eval").mkdir(exist_ok=True)
        rows = [{"context": c, "target": t} for c, t in zip(contexts, targets, strict=True)]
        jsonl(tmp_path / "lm-eval" / "lambada_test.jsonl", *rows)
        results = scored(model, ["lambada_local"], tmp_path, exit_layers="full")
        return [line for line in results.meta["warnings"] if "is right" in line]

    first = "None of the 3 answers of lambada_local is right with the whole model."
    (joined,) = warned("cup", "cup", "cup")
    hint = "Its answers follow the prompts without a space (' them drank from thecup'); give them one (' cup')."
    assert joined == f"{first} {hint}"
    assert warned(" cup", " cup", " cup") == [f"{first} Look at the prompts and answers (--set log_samples=true)."]
    assert warned(answer, " cup", " cup") == []


FAMILIES = ["gemma2", "cohere", "depth_llama-hyper"]
FURTHER = ["gpt2", "gemma3", "gpt_neox", "granite", "depth_llama-dynamic"]


@pytest.mark.parametrize("name", [*FAMILIES, *(thorough(name) for name in FURTHER)])
def test_families(name, tmp_path):
    """Soft caps, scaled logits, parallel blocks, sliding windows, learned positions, several streams."""
    words = word_tokenizer.words
    rows = [
        {"question": words(i, i + 3), "choices": [words(2, i), words(5), words(4)], "gold": i % 3} for i in range(4)
    ]
    jsonl(tmp_path / "arc_easy_test.jsonl", *rows)
    model, tokenizer, task = tiny_models.build(name), word_tokenizer.tokenizer(), "arc_easy_local"
    results = scored(model, [task], tmp_path, tokenizer)
    for layer, first in ((3, model), (2, truncated(model, 2))):
        assert ours(results, task, layer) == stock(first, task, tmp_path, tokenizer=tokenizer)


def test_the_generator_of_the_models_device_is_seeded_and_restored(monkeypatch):
    """On a GPU, sampled texts are drawn by its own generator. The fake one holds a seed as its state."""
    states = {"cuda:0": 5, "cuda:1": 6}
    current = ["cuda:0"]

    @contextmanager
    def on(device):
        before, current[0] = current[0], str(device)
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: states.update({current[0]: seed}))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({str(device): state}))
    cpu = torch.get_rng_state()
    with seeded(7, torch.device("cuda:1")):
        assert states == {"cuda:0": 5, "cuda:1": 7}
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert states == {"cuda:0": 5, "cuda:1": 6}
    assert torch.equal(torch.get_rng_state(), cpu)
