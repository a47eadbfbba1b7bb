"""Finds cached blocks by the tokens in them and before them."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakValueDictionary


class Content:
    """The tokens of a full block and of all blocks before it; each text has exactly one object.

    It lives while a cached block, a running request or a longer text needs it.
    """

    __slots__ = ("__weakref__", "block_id", "parent")

    def __init__(self, parent: Content | None):
        self.parent = parent
        self.block_id: int | None = None  # where it is cached


class ContentKey(NamedTuple):
    """A link of the hash chain; colliding keys are told apart by comparing their tokens."""

    parent: Content | None
    token_ids: tuple[int, ...]


class Match(NamedTuple):
    """Cached contents that a text begins with, and the next block's key (None: all were found)."""

    contents: list[Content]
    next_key: ContentKey | None


class PrefixIndex:
    """Maps cached contents to blocks; each content is found in one block.

    Attributes:
        num_ahead: tokens after a block that must match as well.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self.num_ahead = 0
        self._contents: WeakValueDictionary[ContentKey, Content] = WeakValueDictionary()
        self._content_of: dict[int, Content] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._content_of

    def find(self, token_ids: list[int], root: Content | None = None) -> Match:
        """Find the longest cached prefix of full blocks, leaving at least the last token unread.

        Texts that start from a root of their own are found only from that root.
        """
        contents: list[Content] = []
        while (key := self.next_key(contents, token_ids, root)) is not None:
            content = self._contents.get(key)
            if content is None or content.block_id is None:
                break
            contents.append(content)
        return Match(contents, key)

    def next_key(
        self, contents: list[Content], token_ids: list[int], root: Content | None = None
    ) -> ContentKey | None:
        """Return the key of the block that follows `contents`; None if it holds the last token."""
        number = len(contents)
        if number >= (len(token_ids) - 1) // self._block_size:
            return None
        return self.key(contents, token_ids, number, root)

    def key(
        self,
        contents: list[Content],
        token_ids: list[int],
        number: int,
        root: Content | None = None,
    ) -> ContentKey:
        """Return the key of block `number`, which follows `contents`."""
        start = number * self._block_size
        parent = contents[-1] if contents else root
        end = start + self._block_size + self.num_ahead
        return ContentKey(parent, tuple(token_ids[start:end]))

    def add(self, key: ContentKey, block_id: int) -> Content:
        """Record that a block has this content, unless another block already does."""
        content = self._contents.get(key)
        if content is None:
            content = self._contents[key] = Content(key.parent)
        if content.block_id is None:
            content.block_id = block_id
            self._content_of[block_id] = content
        return content

    def drop(self, block_id: int) -> None:
        """Make a block unfindable."""
        content = self._content_of.pop(block_id, None)
        if content is not None:
            content.block_id = None
