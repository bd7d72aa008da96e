"""Early exit, against loops over whole sequences without a cache that use nothing but the model's blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor

import tiny_models as tm
from execution import decoders
from fulldepth.execution.decoding import RULES, Decoder, certainty

NEW = 14
ENDS = {"gpt2": ("transformer.h", "transformer.ln_f"), "gpt_neox": ("gpt_neox.layers", "gpt_neox.final_layer_norm")}
FAMILIES = ["llama", "gemma3", "gpt2", "mistral-window", "gpt_neox"]


@pytest.fixture(autouse=True)
def more_models(monkeypatch):
    for name, build in decoders.MODELS.items():
        monkeypatch.setitem(tm.UNLISTED, name, build)


class Reference:
    """One sequence, token by token, without a cache: every block runs on the whole sequence in every step."""

    def __init__(self, model: tf.PreTrainedModel, name: str, rule: str, threshold: float, policy: str) -> None:
        blocks, norm = ENDS.get(name, ("model.layers", "model.norm"))
        self.model, self.blocks, self.norm = model, model.get_submodule(blocks), model.get_submodule(norm)
        self.rule, self.threshold, self.policy = rule, threshold, policy

    def arguments(self, ids: Tensor) -> list[dict]:
        """What the model itself passes to each block besides the state."""
        seen: list[dict] = []
        hooks = [
            block.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args[1:], kwargs)), with_kwargs=True)
            for block in self.blocks
        ]
        self.model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        for hook in hooks:
            hook.remove()
        return seen

    def embedded(self, ids: Tensor) -> Tensor:
        first: list[Tensor] = []
        hook = self.blocks[0].register_forward_pre_hook(
            lambda _, args, kwargs: first.append((args or (kwargs["hidden_states"],))[0]), with_kwargs=True
        )
        self.model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        hook.remove()
        return first[0]

    def predict(self, state: Tensor) -> np.ndarray:
        return self.model.get_output_embeddings()(self.norm(state))[0, -1].double().numpy()

    def typical(self, ids: Tensor) -> float:
        """Threshold that about half of the predictions of layer 1 exceed."""
        if self.rule == "patience":
            return 0.5
        states = []
        hook = self.blocks[0].register_forward_hook(
            lambda _, args, output: states.append(output[0] if isinstance(output, tuple) else output)
        )
        self.model(ids, use_cache=False)
        hook.remove()
        return float(np.median([self.value([self.predict(states[0][:1, : at + 1])]) for at in range(ids.shape[1])]))

    def leaves(self, history: list[np.ndarray]) -> bool:
        return self.value(history) > self.threshold

    def value(self, history: list[np.ndarray]) -> float:
        """The rule's value, from the predictions of layers 1, 2, ... so far."""
        p = np.exp(history[-1] - history[-1].max())
        p /= p.sum()
        if self.rule == "confidence":
            return p.max()
        if self.rule == "margin":
            return np.sort(p)[-1] - np.sort(p)[-2]
        if self.rule == "entropy":
            return 1 + (p * np.log(p)).sum() / np.log(len(p))
        tops = [logits.argmax() for logits in history]
        same = next((n for n, top in enumerate(reversed(tops)) if top != tops[-1]), len(tops))
        return same / len(self.blocks)

    def run(self, ids: Tensor, new: int) -> tuple[list[int], list[int]]:
        """New tokens and their exit layers."""
        prompt, exits, inputs = ids.shape[1], [], None
        depth = len(self.blocks)
        for _ in range(new):
            arguments, first = self.arguments(ids), self.embedded(ids)
            # inputs[l]: [1, T, D] what block l read at every position
            inputs = [first, *[None] * depth] if self.policy == "recompute" or inputs is None else inputs
            if self.policy == "propagate" and ids.shape[1] > prompt:
                inputs[0] = torch.cat([inputs[0], first[:, -1:]], dim=1)
            history, exit_layer, chosen = [], None, None
            for layer in range(1, depth + 1):
                args, kwargs = arguments[layer - 1]
                state = {"hidden_states": inputs[layer - 1]} if "hidden_states" in kwargs else {}
                kwargs = {key: value for key, value in kwargs.items() if key != "hidden_states"}
                output = self.blocks[layer - 1](*([] if state else [inputs[layer - 1]]), *args, **state, **kwargs)
                output = output[0] if isinstance(output, tuple) else output
                history.append(self.predict(output[:, -1:]))
                if exit_layer is None and (layer == depth or self.leaves(history)):
                    exit_layer, chosen = layer, int(history[-1].argmax())
                    left = output[:, -1:]
                if self.policy == "recompute" or ids.shape[1] == prompt:
                    inputs[layer] = output
                else:  # the newest position keeps the state at its exit; earlier ones keep theirs
                    newest = output[:, -1:] if exit_layer is None or exit_layer == layer else left
                    inputs[layer] = torch.cat([inputs[layer], newest], dim=1)
            exits.append(exit_layer)
            ids = torch.cat([ids, torch.tensor([[chosen]])], dim=1)
        return ids[0, prompt:].tolist(), exits


@torch.no_grad()
@pytest.mark.parametrize("policy", ["recompute", "propagate"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_policy_gives_what_a_loop_without_a_cache_gives(name, policy):
    """A batch of three lengths, padded on the left, against each sequence alone in a plain float64 loop."""
    model = decoders.build(name, late=0.4)
    model.generation_config.eos_token_id = None
    prompts, decoder, exits = decoders.prompts(3), Decoder(model), set()
    for rule in RULES if name == "llama" else ("confidence",):
        threshold = Reference(model, name, rule, 0.0, policy).typical(prompts["input_ids"])
        found = decoder.generate(**prompts, max_new_tokens=NEW, threshold=threshold, rule=rule, policy=policy)
        for row, mask in enumerate(prompts["attention_mask"]):
            ids = prompts["input_ids"][row : row + 1, int((1 - mask).sum()) :]
            tokens, layers = Reference(model, name, rule, threshold, policy).run(ids, NEW)
            assert found.sequences[row, 9:].tolist() == tokens
            assert found.stats.exit_layers[row] == layers
            exits |= {*layers}
            alone = decoder.generate(ids, max_new_tokens=NEW, threshold=threshold, rule=rule, policy=policy)
            assert alone.sequences[0, ids.shape[1] :].tolist() == tokens
            assert alone.stats.exits == [layers.count(layer) for layer in (1, 2, 3)]
    assert len(exits) > 1  # tokens left at different layers


@pytest.mark.parametrize("policy", ["recompute", "propagate"])
def test_a_threshold_of_one_is_the_full_model(policy):
    model = decoders.build("llama", late=0.4)
    prompts = decoders.prompts(3)
    expected = model.generate(**prompts, max_new_tokens=NEW, do_sample=False)
    for rule in RULES:
        found = Decoder(model).generate(**prompts, max_new_tokens=NEW, threshold=1.0, rule=rule, policy=policy)
        assert torch.equal(found.sequences, expected)
        assert found.stats.theoretical_speedup == 1.0


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_one_exit_layer_is_the_model_cut_off_there(name):
    """The model with its first layers, loaded by transformers from a configuration of fewer layers."""
    model, new = decoders.build(name, late=0.4), 8
    for layer in (1, 2):
        config = type(model.config)(**model.config.to_dict())
        config.num_hidden_layers = layer
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layer]
        short = type(model)(config).to(torch.float64).eval()
        short.load_state_dict(model.state_dict(), strict=False)
        prompts = decoders.prompts(2)
        expected = short.generate(**prompts, max_new_tokens=new, do_sample=False)
        found = Decoder(model).generate(**prompts, max_new_tokens=new, exit_layer=layer)
        assert torch.equal(found.sequences, expected)
        assert found.stats.layer_positions[layer:] == [0] * (3 - layer)


def test_certainty_against_numpy_and_its_range():
    logits = torch.randn(50, 7, dtype=torch.float64) * 3
    p = np.exp(logits.numpy())
    p /= p.sum(1, keepdims=True)
    ordered = np.sort(p, axis=1)
    np.testing.assert_allclose(certainty(logits, "confidence"), ordered[:, -1])
    np.testing.assert_allclose(certainty(logits, "margin"), ordered[:, -1] - ordered[:, -2])
    np.testing.assert_allclose(certainty(logits, "entropy"), 1 + (p * np.log(p)).sum(1) / np.log(7))
    sure = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert all(float(certainty(sure, rule)) == 1.0 for rule in ("confidence", "margin", "entropy"))
