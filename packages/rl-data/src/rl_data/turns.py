"""Where the assistant's turns stand in a rendered conversation, whatever its template.

The start of a turn is where the generation prompt ends: the text that follows the previous message
in a rendering of the messages before the turn, as far as the whole conversation agrees with it. The
end is found in the same way from a rendering that stops after the turn. Both compare only the
template's own text between two messages, so that a template may rewrite its history (drop earlier
reasoning, move the tools) and the turn is found all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .encoding import Span, common_prefix_length
from .marks import Alphabet, Mark, Marked

if TYPE_CHECKING:
    from .renderer import ChatRenderer

Messages = Sequence[Mapping[str, Any]]
# Where a partial agreement may stop: after white space or a closed tag, not within a word or a tag.
_BOUNDARY = re.compile(r"(?s).*[\s>\]]")


class Turn(NamedTuple):
    """An assistant's turn in the rendered text.

    Attributes:
        message: index of the message.
        spans: character ranges that the model generates, end of turn included.
        header: where the turn's header begins; it ends where the first span starts.
    """

    message: int
    spans: list[Span]
    header: int


class Marking(NamedTuple):
    """A conversation with marks, and where they came out.

    Attributes:
        messages: the marked messages.
        owners: the message of each marked text.
        found: the rendering without the marks, and their places.
        alphabet: the marks' characters; None where there are no marks.
    """

    messages: Sequence[Mapping[str, Any]]
    owners: Sequence[int]
    found: Marked
    alphabet: Alphabet | None


class Located(NamedTuple):
    """Places of a turn in the text: its header, what the model generates, and the end of that."""

    header: int
    start: int
    end: int


class TurnFinder:
    """Finds the turns of one rendered conversation.

    Args:
        chat: what rendered it.
        messages: the conversation.
        marking: its marks.
        headers: find the headers of the turns, too.
    """

    def __init__(
        self, chat: ChatRenderer, messages: Messages, marking: Marking, *, headers: bool
    ) -> None:
        self.chat = chat
        self.messages = messages
        self.marking = marking
        self.marks = marking.found.marks
        self.text = marking.found.text
        self.headers = headers
        self.beginnings: dict[tuple[int, bool], Marked | None] = {}
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for place, mark in enumerate(self.marks):
            self.first.setdefault(self._message(mark), place)
            self.last[self._message(mark)] = place

    def _message(self, mark: Mark) -> int:
        return self.marking.owners[mark.text]

    def find(self, index: int) -> Turn | None:
        """The turn of message ``index``, or None if it cannot be found."""
        tagged = self._tagged_spans(index)
        if tagged is not None and not self.headers:
            return Turn(index, tagged, tagged[0][0] if tagged else 0)
        located = self._from_marks(index) or self._from_prefixes(index)
        if located is None:
            return None if tagged is None else Turn(index, tagged, tagged[0][0] if tagged else 0)
        return Turn(index, [located[1:]] if tagged is None else tagged, located.header)

    # The template's own markers

    def _tagged_spans(self, index: int) -> list[Span] | None:
        """The template's generation blocks of a message; None for a template without any."""
        blocks = self.marking.found.generations
        if not blocks:
            return None
        speaking = [k for k in range(len(self.messages)) if self._role(k) == "assistant"]
        if len(blocks) == len(speaking):
            return [blocks[speaking.index(index)]]
        return [block for block in blocks if self._owner(block) == index]

    def _owner(self, span: Span) -> int:
        before = -1
        for mark in self.marks:
            if mark.position > span[1]:
                break
            message = self._message(mark)
            if span[0] <= mark.position and self._role(message) == "assistant":
                return message
            before = max(before, message)
        # No text of the message is in the block: it belongs to the next assistant's message, or the
        # one just before.
        following = [
            i for i in range(before + 1, len(self.messages)) if self._role(i) == "assistant"
        ]
        return following[0] if following else before

    def _role(self, index: int) -> str:
        return self.messages[index]["role"]

    # From the marks around a message

    def _from_marks(self, index: int) -> Located | None:
        if index not in self.first:
            return None
        first, last = self.first[index], self._last_own(index)
        if last is None or any(self._message(m) != index for m in self.marks[first : last + 1]):
            return None
        before = self.marks[first - 1] if first else None
        left = before.position if before else 0
        fixed = self.text[left : self.marks[first].position]
        start = self._start(index, before, fixed, bounded=self.marks[first].opens)
        end = self._end(index, last)
        if start is None or end is None or left + start >= self.marks[last].position + end:
            return None
        header = min(start, self._header(index, before, fixed)) if self.headers else start
        return Located(left + header, left + start, self.marks[last].position + end)

    def _last_own(self, index: int) -> int | None:
        """The message's last mark in its own turn; a later one may repeat the name of its tool."""
        last = self.last[index]
        own = self.marks[self.first[index] : last + 1]
        if len({mark[1:] for mark in own}) == len(own):  # nothing is repeated
            return last
        alone = self._beginning(index + 1)
        if alone is None or not alone.marks:
            return last
        ending = alone.marks[-1][1:]
        count = sum(mark[1:] == ending for mark in alone.marks)
        places = [k for k in range(self.first[index], last + 1) if self.marks[k][1:] == ending]
        return places[count - 1] if len(places) >= count else None

    def _beginning(self, count: int, *, prompt: bool = False) -> Marked | None:
        """The rendering of the first ``count`` messages, if the template accepts them alone."""
        if count == 0:
            return None
        key = (count, prompt)
        if key not in self.beginnings:
            self.beginnings[key] = self._render_beginning(count, prompt=prompt)
        return self.beginnings[key]

    def _render_beginning(self, count: int, *, prompt: bool) -> Marked | None:
        try:
            rendered = self.chat.render(self.marking.messages[:count], prompt=prompt)
        except Exception:  # a template may raise anything, e.g. that the user has to speak last
            return None
        alphabet = self.marking.alphabet
        return alphabet.read(rendered) if alphabet else Marked(rendered, [], [])

    def _tail(self, count: int, before: Mark | None, *, prompt: bool = False) -> str | None:
        """What the rendering of the first ``count`` messages holds after the mark ``before``."""
        beginning = self._beginning(count, prompt=prompt)
        if beginning is None:
            return None
        if before is None:
            return None if beginning.marks else beginning.text
        if not beginning.marks or beginning.marks[-1][1:] != before[1:]:
            return None
        return beginning.text[beginning.marks[-1].position :]

    def _context(self, index: int, before: Mark | None) -> tuple[Any, ...]:
        if before is None:
            return (index == 0,)
        message = self._message(before)
        return (self._role(message), before.opens, message == index - 1)

    def _start(self, index: int, before: Mark | None, fixed: str, *, bounded: bool) -> int | None:
        def compute() -> tuple[int, str] | None:
            tail = self._tail(index, before, prompt=True)
            if tail is None:
                return (self._end_of_prompt_in(fixed), "") if bounded else None
            agreed = agreement(fixed, tail, bounded=bounded)
            header = self.chat.generation_prompt
            if bounded and agreed == len(tail) and header and fixed.startswith(header, agreed):
                # After a tool's answer some templates leave the header out of their prompt.
                return agreed + len(header), ""
            if bounded and agreed < len(tail) and not header:
                # A template without a generation prompt, whose text depends on who comes next.
                return len(fixed), ""
            return agreed, tail[agreed:] if agreed == len(fixed) else ""

        if not bounded:  # then ``fixed`` holds text of the message, and cannot be met again
            found = compute()
        else:
            found = self.chat.remember(("start", fixed, *self._context(index, before)), compute)
        if found is None:
            return None
        offset, rest = found
        # The message's own text may spell what is left of the generation prompt, such as an opened
        # reasoning block.
        left = before.position if before else 0
        return offset + len(rest) if self.text.startswith(rest, left + offset) else offset

    def _end_of_prompt_in(self, fixed: str) -> int:
        """Where the generation prompt, or as much of it as there is, ends in a text."""
        prompt = self.chat.generation_prompt
        for length in range(len(prompt), 0, -1):
            place = fixed.rfind(prompt[:length])
            if place >= 0:
                return place + length
        return len(fixed)

    def _header(self, index: int, before: Mark | None, fixed: str) -> int:
        def compute() -> int:
            tail = self._tail(index, before)
            if tail is not None:
                return agreement(fixed, tail, bounded=True)
            prompt = self.chat.generation_prompt
            return fixed.rfind(prompt) if prompt and prompt in fixed else len(fixed)

        return self.chat.remember(("header", fixed, *self._context(index, before)), compute) or 0

    def _end(self, index: int, last: int) -> int | None:
        after = self.marks[last + 1] if last + 1 < len(self.marks) else None
        fixed = self.text[self.marks[last].position : after.position if after else len(self.text)]
        is_last = index == len(self.messages) - 1

        def compute() -> int | None:
            tail = fixed if is_last else self._tail(index + 1, self.marks[last])
            return None if tail is None else self._end_of_turn(fixed, tail)

        following = self._role(self._message(after)) if after else None
        return self.chat.remember(("end", fixed, is_last, following), compute)

    # From renderings of beginnings alone

    def _from_prefixes(self, index: int) -> Located | None:
        """For a message that prints nothing of its own, such as an empty one."""
        before = self._beginning(index)
        prompt = self._beginning(index, prompt=True)
        through = self._beginning(index + 1)
        if before is None or prompt is None or through is None:
            return None
        shared = common_prefix_length(before.text, prompt.text)
        if self.text[:shared] != prompt.text[:shared]:
            return None
        start = shared + agreement(self.text[shared:], prompt.text[shared:], bounded=False)
        if through.text[:start] != self.text[:start]:
            return None
        own = [m.position for m in through.marks if self._message(m) == index]
        behind = max([start, *own])
        tail = through.text[behind:]
        if behind > start:
            # The whole drops what the turn says when it is the last; find what is written after it.
            following = (m.position for m in self.marks if m.position > start)
            until = next(following, len(self.text))
            behind = self.text.find(tail.rstrip(), start, until) if tail.strip() else -1
        elif not self._part_at_an_end(self.text[behind:], tail):
            behind = -1
        if behind < 0:
            return None
        end = behind + self._end_of_turn(self.text[behind:], tail)
        return Located(shared, start, end) if end > start else None

    def _part_at_an_end(self, fixed: str, tail: str) -> bool:
        """Whether both go on alike until the tail ends or writes another control token."""
        parted = parting(fixed, tail, self.chat)
        return parted == len(tail) or self.chat.starting_token(tail[parted:]) is not None

    def _end_of_turn(self, fixed: str, tail: str) -> int:
        return end_of_turn(fixed, tail, self.chat)


def agreement(fixed: str, tail: str, *, bounded: bool) -> int:
    """How far a text agrees with what a shorter rendering has in its place.

    Args:
        fixed: text of the whole conversation.
        tail: text of the shorter rendering.
        bounded: ``fixed`` ends where the message's own text begins, so that it can be used up.

    Returns:
        Characters; where both go on differently, without a word or a tag that they have begun in
        the same way.
    """
    shared = common_prefix_length(fixed, tail)
    if shared == len(tail) or (bounded and shared == len(fixed)):
        return shared
    return whole_words(fixed[:shared])


def end_of_turn(fixed: str, tail: str, chat: ChatRenderer) -> int:
    """How much of the text after a message still belongs to its turn.

    Args:
        fixed: the text that follows in the whole conversation.
        tail: the text that follows where the conversation ends here.
        chat: knows the control tokens, and whether the template ends turns at all.

    Returns:
        Characters up to the end of turn, without white space after it. Where a conversation's last
        turn ends in another control token than its earlier ones, or where a template writes no end
        at all, the control token that follows counts as the end: it is what the model has to say
        there.
    """
    shared = parting(fixed, tail, chat)
    follows = chat.starting_token(fixed[shared:])
    written = chat.control.findall(fixed[:shared])
    ended = bool(written) and (written[-1] in chat.end_tokens or not chat.end_tokens)
    other_end = not ended and chat.starting_token(tail[shared:]) is not None
    if follows and (other_end or (not chat.ends_turns and shared == len(tail))):
        shared += len(follows)
    elif shared < len(tail) and not follows:
        shared = whole_words(fixed[:shared])
    return len(fixed[:shared].rstrip()) or shared


def parting(fixed: str, tail: str, chat: ChatRenderer) -> int:
    """Where two texts part ways, not within a control token."""
    shared = common_prefix_length(fixed, tail)
    for token in chat.control.finditer(fixed):
        if token.start() < shared < token.end():
            return token.start()
    return shared


def whole_words(text: str) -> int:
    """How much of a text ends in white space or a closed tag."""
    found = _BOUNDARY.match(text)
    return found.end() if found else 0
