"""Text, prompts with responses, labelled text and images, from files, the Hub, Python or the built-in corpus."""

from fulldepth.data.arrays import prepare_arrays
from fulldepth.data.conversations import conversations
from fulldepth.data.corpus import builtin_texts, train_tokenizer, train_wordpiece
from fulldepth.data.documents import Documents, open_documents
from fulldepth.data.encoding import MASKED_SHARE
from fulldepth.data.images import image_content, image_name
from fulldepth.data.labelled import balanced_sample
from fulldepth.data.order import ORDER, ShuffledSampler
from fulldepth.data.packing import Packed, Windows, flatten_windows, pack
from fulldepth.data.preparation import prepare
from fulldepth.data.sequences import Batch, Sequences
from fulldepth.data.sources import Record, Source, choose, content_hash, identities, open_source
from fulldepth.data.tokens import decode_ids
from fulldepth.data.translation import input_texts, prepare_translation

__all__ = [
    "MASKED_SHARE",
    "ORDER",
    "Batch",
    "Documents",
    "Packed",
    "Record",
    "Sequences",
    "ShuffledSampler",
    "Source",
    "Windows",
    "balanced_sample",
    "builtin_texts",
    "choose",
    "content_hash",
    "conversations",
    "decode_ids",
    "flatten_windows",
    "identities",
    "image_content",
    "image_name",
    "input_texts",
    "open_documents",
    "open_source",
    "pack",
    "prepare",
    "prepare_arrays",
    "prepare_translation",
    "train_tokenizer",
    "train_wordpiece",
]
