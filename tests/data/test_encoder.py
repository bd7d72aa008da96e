"""Text to ids: what the tokenizer itself gives, end-of-text behind it."""

import pickle

from fulldepth.data.cache.encoder import Encoder


def test_ids_are_those_that_the_tokenizer_gives(bert_tokenizer):
    tokenizer = pickle.loads(pickle.dumps(bert_tokenizer))
    tokenizer.eos_token = "[SEP]"
    written = ["w0 [SEP] w1", "", "w2 w3", "[MASK]"]
    for raw in (False, True):
        tokenizer.split_special_tokens = raw
        batch = Encoder(tokenizer)(written)
        plain = tokenizer(written, add_special_tokens=False)["input_ids"]
        expected = [[2, *ids, 3] if ids else [] for ids in plain]
        assert batch.ids.tolist() == [i for ids in expected for i in ids]
        assert batch.lengths.tolist() == list(map(len, expected))
