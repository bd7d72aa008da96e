"""Text, prompts with responses, labelled text and images, from files, the Hub, Python or the built-in corpus."""

from fulldepth.data.batches import Batch, Sequences
from fulldepth.data.conversations import conversations
from fulldepth.data.corpus import builtin_texts, train_tokenizer, train_wordpiece
from fulldepth.data.opening import Documents, open_documents
from fulldepth.data.order import ORDER, ShuffledSampler
from fulldepth.data.packing import Packed, Windows, flatten_windows, pack
from fulldepth.data.preparation import MASKED_SHARE, Preparation, input_texts, prepare
from fulldepth.data.records import ConversationRecord, DataRecord, ImageRecord, TextRecord
from fulldepth.data.sample_files import write_samples
from fulldepth.data.sources import Source, choose, identities, open_source
from fulldepth.data.tokens import decode_ids

__all__ = [
    "MASKED_SHARE",
    "ORDER",
    "Batch",
    "ConversationRecord",
    "DataRecord",
    "Documents",
    "ImageRecord",
    "Packed",
    "Preparation",
    "Sequences",
    "ShuffledSampler",
    "Source",
    "TextRecord",
    "Windows",
    "builtin_texts",
    "choose",
    "conversations",
    "decode_ids",
    "flatten_windows",
    "identities",
    "input_texts",
    "open_documents",
    "open_source",
    "pack",
    "prepare",
    "train_tokenizer",
    "train_wordpiece",
    "write_samples",
]
