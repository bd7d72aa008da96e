import copy

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.conftest import jsonl, talk
from fulldepth.core.progress import Watcher
from fulldepth.data import conversations, train_tokenizer
from refusals import refused

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}<|endoftext|>{% endfor %}" + (
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    *talk("One and one?", "Two.", "And one?", "Three."),
]


@pytest.fixture(scope="module")
def plain():
    return train_tokenizer(["One and one? Two. And one? Three. Be brief."] * 3, vocab_size=300)


@pytest.fixture(scope="module")
def templated(plain):
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def said(user, assistant):
    asked, answered = talk(user, assistant)
    return {"prompt": [asked], "completion": [answered]}


def test_pairs_of_every_naming(tmp_path, plain, templated):
    rows = [{"question": a, "answer": b} for a, b in (("a?", "b"), ("c:", " d"), ("e\n", "f"))]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    texts = [{"prompt": a, "completion": b} for a, b in (("a?\n", "b"), ("c:", " d"), ("e\n", "f"))]
    assert conversations(path).to_list() == conversations(path, plain).to_list() == texts
    assert conversations(path, templated).to_list() == [said("a?", "b"), said("c:", " d"), said("e\n", "f")]
    assert conversations([{"context": "a", "target": "b"}]).to_list() == [{"prompt": "a\n", "completion": "b"}]
    alpaca = [
        {"instruction": "Add.", "input": "1 1", "output": "2"},
        {"instruction": "Go.", "input": "", "output": "x"},
    ]
    pd.DataFrame(alpaca).to_parquet(tmp_path / "b.parquet")
    assert conversations(tmp_path / "b.parquet", templated).to_list() == [said("Add.\n\n1 1", "2"), said("Go.", "x")]
    assert conversations([said("a", "b")]).to_list() == [said("a", "b")]


def test_chats(tmp_path, templated):
    lines = []
    rows = [{"messages": CHAT, "id": 1}, {"messages": CHAT[:2]}, {"messages": CHAT[:3]}]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    found = conversations(path, templated, watcher=Watcher(say=lines.append))
    assert found.to_list() == [{"messages": CHAT}, {"messages": CHAT[:3]}]
    assert lines == ["1 of the rows of a.jsonl have no response and are left out."]
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    expected = [{"messages": talk("a", "b")}]
    assert conversations([shared]).to_list() == expected
    pd.DataFrame([shared]).to_parquet(tmp_path / "b.parquet")
    assert conversations(tmp_path / "b.parquet").to_list() == expected


BAD = [
    ([{"text": "a"}], "no columns of conversations. Got: 'text'. Expected: messages"),
    ([{"prompt": "a", "response": None}], "'response' is empty .null., expected text"),
    ([{"prompt": "a", "response": "b"}, {"prompt": "a"}], "row 2 has no 'response'"),
    ([], "no row with a response"),
    ([{"messages": "hello"}], "'messages' is of type str, expected a list"),
    ([{"messages": [{"role": "assitant", "content": "a"}]}], "message 1 'assitant'. Did you mean 'assistant'"),
    ([{"messages": [{"role": "user"}]}], "message 1 has no 'content'"),
    *(
        ([{"messages": [{"role": "assistant", "content": "a", key: [{"name": "f"}]}]}], f"message 1 has '{key}'")
        for key in ("tool_calls", "function_call", "reasoning_content")
    ),
    ([{"messages": CHAT, "tools": "f(x)"}], "row 1, 'tools' is no JSON: Expecting value"),
    ([{"messages": CHAT, "tools": {"name": "f"}}], "row 1, 'tools' is of type dict, expected a list of functions"),
    ([{"messages": CHAT, "tools": '["f"]'}], "row 1, 'tools', function 1 is of type str, expected a JSON object"),
    ([{"messages": CHAT, "tools": [{"name": len}]}], "row 1, 'tools' is no JSON: .* not JSON serializable"),
    ([{"messages": CHAT, "chat_template_kwargs": {"brief": True}}], "row 1 has 'chat_template_kwargs'"),
]


@pytest.mark.parametrize(("data", "message"), BAD)
def test_bad_input(data, message):
    with refused(message):
        conversations(data)


def test_a_chat_needs_a_chat_template(plain):
    with refused("tokenizer has no chat template"):
        conversations([{"messages": CHAT}], plain)
    with refused("row 2 holds a chat, but the tokenizer has no chat template"):
        conversations([{"prompt": "a", "response": "b"}, {"prompt": CHAT[:1], "response": CHAT[1:2]}], plain)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["template", "plain"])
def test_trl_counts_the_loss_on_responses_alone(tmp_path, plain, templated, kind):
    trl = pytest.importorskip("trl")
    tokenizer = plain if kind == "plain" else templated
    data = conversations([{"prompt": "One and one?", "response": "Two."}], tokenizer)
    config = LlamaConfig(
        vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, eos_token_id=0
    )
    arguments = trl.SFTConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False)
    trainer = trl.SFTTrainer(LlamaForCausalLM(config), arguments, train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    counted = [tokenizer.decode(row[row != -100]) for row in torch.as_tensor(batch["labels"])]
    assert counted == ["Two.<|endoftext|>"]
