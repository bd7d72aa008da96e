"""The rows of data that are measured: a text or a pair of texts, a conversation, or an image."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from PIL import ImageOps

from fulldepth.core.targets import IGNORE
from fulldepth.core.uncertainty import identity
from fulldepth.data.coco import Objects
from fulldepth.data.images import StoredImage


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecord:
    """A row of data: what every kind of row has."""

    label: int | None = None
    """Class index, None where unknown."""
    where: str = ""
    """Location in the data, for messages."""
    identity: int | None = None
    """See `fulldepth.core.uncertainty.identity`; None = that of its content, see `identities`."""
    digest: bytes = b""
    """SHA-256 of its content without the label; empty before `number_labels`."""

    @property
    @abstractmethod
    def content(self) -> int:
        """Identity of the text, or of the name or place of the image: equal for equal texts, whatever their label."""

    @property
    def class_index(self) -> int:
        """Its label, -100 if unknown."""
        return IGNORE if self.label is None else self.label


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRecord(DataRecord):
    """A text, or a pair of texts such as premise and hypothesis."""

    text: str
    second: str | None = None
    """The second text of a pair."""

    @property
    def content(self) -> int:
        """Identity of the texts."""
        return identity(self.text, self.second or "", "", "")

    @property
    def texts(self) -> list[str]:
        """Its texts that are not empty."""
        return [text for text in (self.text, self.second) if text]

    @property
    def is_blank(self) -> bool:
        """True if the first text is blank."""
        return not self.text.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRecord(DataRecord):
    """A prompt with its response, or a chat."""

    conversation: Mapping[str, Any]
    """Its columns in the data, for `fulldepth.data.conversations`."""
    prompt: str | None = None
    """The prompt, if it and the response are texts and not lists of messages."""
    response: str | None = None
    """The response, if it and the prompt are texts."""

    @property
    def content(self) -> int:
        """Identity of prompt and response, or of the messages."""
        return identity("", "", self.prompt or "", self.response or "", *filter(None, [self.messages]))

    @property
    def messages(self) -> str | None:
        """The conversation as JSON, if it is not a prompt and a response that are texts."""
        return None if self.prompt is not None else json.dumps(self.conversation, sort_keys=True, default=str)

    @property
    def is_blank(self) -> bool:
        """True if prompt or response is a blank text; messages are checked when they are encoded."""
        return self.prompt is not None and not (self.prompt.strip() and (self.response or "").strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRecord(DataRecord):
    """An image, with a caption or with boxes of objects if it has them."""

    image: StoredImage
    """Decodes the image to RGB when called."""
    caption: str | None = None
    objects: Objects | None = None
    """Classes and boxes of the objects in the image; None for data without boxes."""

    @property
    def content(self) -> int:
        """Identity of the image's name, or of its place."""
        return identity(self.image.name or self.where)

    def mirrored(self) -> ImageRecord:
        """The image and its boxes, with left and right exchanged."""
        objects = None if self.objects is None else self.objects.mirrored()
        return replace(self, image=self.image.changed(ImageOps.mirror), objects=objects)
