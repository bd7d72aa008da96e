"""Early exit, against loops over whole sequences without a cache by the stock model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from execution import decoders
from exit import plain
from fulldepth.execution.decoding import RULES, Decoder, certainty

NEW = 14
ENDS = {"gpt2": ("transformer.h", "transformer.ln_f"), "gpt_neox": ("gpt_neox.layers", "gpt_neox.final_layer_norm")}
FAMILIES = ["llama", "gemma3", "gpt2", "mistral-window", "gpt_neox", "llama-fast"]


class Stock:
    """One sequence without a cache: the stock model's own pass, through all layers."""

    def __init__(self, model, name):
        blocks, norm = ENDS.get(name, ("model.layers", "model.norm"))
        self.model, self.norm = model, model.get_submodule(norm)
        self.states = []
        self.hooks = [block.register_forward_hook(self.keep) for block in model.get_submodule(blocks)]

    def keep(self, _, args, output):
        self.states.append(output[0] if isinstance(output, tuple) else output)

    def layers(self, ids):
        """[L][T][V] logits."""
        self.states = []
        self.model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return [self.model.get_output_embeddings()(self.norm(state))[0].tolist() for state in self.states]

    def run(self, ids, rule, threshold):
        """New tokens and their exit layers."""
        prompt, exits = ids.shape[1], []
        for _ in range(NEW):
            logits = [layer[-1] for layer in self.layers(ids)]
            exits.append(plain.leave(logits, rule, threshold, 1))
            ids = torch.cat([ids, torch.tensor([[int(np.argmax(logits[exits[-1] - 1]))]])], dim=1)
        return ids[0, prompt:].tolist(), exits


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_early_exit_gives_what_a_loop_without_a_cache_gives(name):
    """A batch of three lengths, padded on the left, against each sequence alone in a loop over whole sequences."""
    model = decoders.build(name, late=0.4)
    prompts, decoder, exits = decoders.prompts(3), Decoder(model), set()
    for rule in RULES if name == "llama" else ("confidence",):
        stock = Stock(model, name)
        first = stock.layers(prompts["input_ids"][:1])[0]
        threshold = 0.5 if rule == "patience" else float(np.median([plain.certainty(logits, rule) for logits in first]))
        rows = [ids[None, mask == 1] for ids, mask in zip(*prompts.values(), strict=True)]
        expected = [stock.run(ids, rule, threshold) for ids in rows]
        for hook in stock.hooks:
            hook.remove()
        options = {"max_new_tokens": NEW, "threshold": threshold, "rule": rule}
        found = decoder.generate(**prompts, **options)
        for row, (ids, (tokens, layers)) in enumerate(zip(rows, expected, strict=True)):
            assert found.sequences[row, 9:].tolist() == tokens
            assert found.stats.exit_layers[row] == layers
            exits |= {*layers}
            alone = decoder.generate(ids, **options)
            assert alone.sequences[0, ids.shape[1] :].tolist() == tokens
            assert alone.stats.exits == [layers.count(layer) for layer in (1, 2, 3)]
    assert len(exits) > 1  # tokens left at different layers


def test_a_threshold_of_one_is_the_full_model():
    model = decoders.build("llama", late=0.4)
    prompts = decoders.prompts(3)
    expected = model.generate(**prompts, max_new_tokens=NEW, do_sample=False)
    for rule in RULES:
        found = Decoder(model).generate(**prompts, max_new_tokens=NEW, threshold=1.0, rule=rule)
        assert torch.equal(found.sequences, expected)
        assert found.stats.theoretical_speedup == 1.0


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
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
        short.generation_config.eos_token_id = None
        prompts = decoders.prompts(2)
        expected = short.generate(**prompts, max_new_tokens=new, do_sample=False)
        found = Decoder(model).generate(**prompts, max_new_tokens=new, threshold=1e-9, min_layer=layer)
        assert torch.equal(found.sequences, expected)
        assert found.stats.layer_positions[layer:] == [0] * (3 - layer)


def test_a_class_that_is_certain_is_a_one_also_beside_others_that_cannot_be():
    sure = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert all(float(certainty(sure, rule)) == 1.0 for rule in ("confidence", "margin", "entropy"))
