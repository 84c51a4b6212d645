"""What this package asks of a tokenizer, in one place, by duck typing.

Tokenizers and processors of transformers (fast or slow) and bare `tokenizers.Tokenizer` objects
answer all of it; anything with ``decode(ids)`` answers enough.
"""

from __future__ import annotations

import inspect
from typing import Any


class Vocabulary:
    """A tokenizer's special ids, size, spellings and decoder, read through public names only."""

    def __init__(self, tokenizer: Any) -> None:
        self._keywords: dict[str, bool] | None = None
        inner = getattr(tokenizer, "tokenizer", None)  # a processor holds its tokenizer
        self.tokenizer = tokenizer if inner is None else inner
        if isinstance(tokenizer, str) or tokenizer is None:
            raise TypeError(
                f"tokenizer is {tokenizer!r}; pass a loaded tokenizer (with a decode method)"
            )

    @property
    def size(self) -> int | None:
        """One more than the highest id, None where the tokenizer does not say how many it has.

        Added tokens may lie above a gap, so their number alone does not tell.
        """
        reader = getattr(self.tokenizer, "get_vocab_size", None)
        if hasattr(self.tokenizer, "__len__"):
            count = len(self.tokenizer)
        elif callable(reader):
            count = reader()
        else:
            return None
        return max([count, *(i + 1 for i in self.added_tokens())])

    @property
    def chat_template(self) -> str:
        """The text of every chat template that the tokenizer holds, "" for none."""
        template = getattr(self.tokenizer, "chat_template", None)
        if isinstance(template, dict):
            return "\n".join(str(part) for part in template.values())
        return template if isinstance(template, str) else ""

    @property
    def pad_id(self) -> int | None:
        """The padding id, None where there is none."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return pad if isinstance(pad, int) else None

    def added_tokens(self) -> dict[int, tuple[str, bool]]:
        """Every added token: its id, its spelling and whether it is special."""
        added = getattr(self.tokenizer, "added_tokens_decoder", None)
        if added is None:
            reader = getattr(self.tokenizer, "get_added_tokens_decoder", None)
            added = reader() if callable(reader) else {}
        return {
            int(token_id): (str(token), bool(getattr(token, "special", True)))
            for token_id, token in added.items()
        }

    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens=True`` leaves out."""
        named = getattr(self.tokenizer, "all_special_ids", None) or ()
        added = (i for i, (_, special) in self.added_tokens().items() if special)
        return frozenset(i for i in (*named, *added) if isinstance(i, int))

    def id_of(self, token: str) -> int | None:
        """The id of exactly this token, None where the vocabulary lacks it."""
        convert = getattr(self.tokenizer, "convert_tokens_to_ids", None)
        if convert is None:
            convert = getattr(self.tokenizer, "token_to_id", None)
        found = convert(token) if callable(convert) else None
        if not isinstance(found, int) or self.piece(found) != token:
            return None  # an unknown token comes back as the id of <unk>
        return found

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id (not decoded), None where it has none."""
        convert = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        if convert is None:
            convert = getattr(self.tokenizer, "id_to_token", None)
        found = convert(token_id) if callable(convert) else None
        return found if isinstance(found, str) else None

    def encode(self, text: str) -> list[int]:
        """Ids of a text without the tokens put around it; none where there is no ``encode``."""
        encode = getattr(self.tokenizer, "encode", None)
        if not callable(encode):
            return []
        encoded = encode(text, add_special_tokens=False)
        return list(getattr(encoded, "ids", encoded))

    def require_decode(self) -> None:
        """Refuse what cannot decode, before anything else fails on it.

        Raises:
            TypeError: there is no ``decode`` method.
        """
        if not callable(getattr(self.tokenizer, "decode", None)):
            raise TypeError(
                f"tokenizer is a {type(self.tokenizer).__name__} without a decode method; "
                "pass a loaded tokenizer"
            )

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens spelled, spaces left as they are.

        One row at a time: a batch call of transformers looks at each id twice before it decodes.
        """
        if self._keywords is None:
            wanted = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            known = inspect.signature(self.tokenizer.decode).parameters
            anything = any(p.kind is p.VAR_KEYWORD for p in known.values())
            self._keywords = {k: v for k, v in wanted.items() if anything or k in known}
        return self.tokenizer.decode(ids, **self._keywords)
