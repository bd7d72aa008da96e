from fulldepth.execution.decoding.session import Stats
from fulldepth.exit import generate_texts
from skip import word_tokenizer


def test_tokens_that_leave_after_the_last_layer_did_not_leave_early(tmp_path):
    model = word_tokenizer.checkpoint(tmp_path / "model")
    prompt = word_tokenizer.words(3, 14, 15, 9, 26)
    made = generate_texts(model, prompt, threshold=0.999999, max_new_tokens=9, chat=False)
    exits = made.results.meta["generation"]["stats"]["exits"]
    assert exits[-1] > 0
    sentence = made.results.meta["headline"]["theoretical_speedup"]["sentence"]
    assert sentence.startswith(f"{sum(exits[:-1])} of {sum(exits)} tokens left early.")


def test_speed_is_that_of_the_tokens_after_the_first():
    """Two sequences of five and seven tokens, ten of which came after the prompts, in two seconds."""
    made = Stats(num_layers=2, sequences=2, prompt_length=3, prompt_seconds=8.0, seconds=2.0)
    made.new_tokens = [5, 7]
    assert made.tokens_per_second == 5.0
