"""Where each turn of a conversation stands in its rendering, for any chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .encoding import Encoder, Span, common_prefix_length
from .marks import (
    MOST_MESSAGES,
    Level,
    Mark,
    Marked,
    has_marks,
    mark_message,
    read_marks,
    texts_of,
    with_printed_generation_tags,
)

Messages = Sequence[Mapping[str, Any]]
CACHE_SIZE = 4096


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


class Rendering(NamedTuple):
    """A rendered conversation and what stands where in it.

    Attributes:
        text: the rendering.
        turns: the assistant's turns that were found.
        contents: for each message, the ranges of its own texts.
        plain: ranges in which a message spells a control token that is ordinary text.
        unlocated: assistant messages that could not be found in the text.
        tail_start: where the text after the last message's own text begins.
    """

    text: str
    turns: list[Turn]
    contents: dict[int, list[Span]]
    plain: list[Span]
    unlocated: list[int]
    tail_start: int


class ChatRenderer:
    """Renders conversations with one tokenizer, one set of tools and one set of template options.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        tools: tools offered to the model, as the template takes them.
        options: further variables of the template.
        control_tokens: "user" keeps control tokens spelled in messages as text, except in the assistant's;
            "all" in the assistant's too; "encode" lets the tokenizer take them for the real ones.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        control_tokens: str = "user",
    ) -> None:
        if control_tokens not in ("user", "all", "encode"):
            raise ValueError(f"control_tokens={control_tokens!r}: want 'user', 'all' or 'encode'")
        self.tokenizer = tokenizer
        self.tools = list(tools) if tools else None
        self.options = dict(options or {})
        self.control_tokens = control_tokens
        self.encoder = Encoder.of(tokenizer)
        template = self.options.get("chat_template")
        self.template: str = tokenizer.get_chat_template(template, self.tools)
        self.options.pop("chat_template", None)
        self.tagged_template = with_printed_generation_tags(self.template)
        spelled = sorted(self.encoder.control_tokens, key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        self._offsets: dict[tuple[Any, ...], int] = {}

    def render(
        self, messages: Messages, *, prompt: bool = False, go_on: bool = False, tagged: bool = False
    ) -> str:
        """The plain rendering; ``prompt`` adds the generation prompt, ``go_on`` leaves the last turn open."""
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=self.tools,
            tokenize=False,
            add_generation_prompt=prompt,
            continue_final_message=go_on,
            chat_template=self.tagged_template if tagged else self.template,
            **self.options,
        )

    def locate(self, messages: Messages, *, headers: bool = False) -> Rendering:
        """Render a whole conversation and find the assistant's turns in it."""
        plain = self.render(messages)
        marked_messages, marked = self._mark(messages, plain)
        contents = _content_spans(marked.marks)
        plain_spans = self._spelled_controls(messages, marked.text, contents)
        turns, unlocated = [], []
        finder = _TurnFinder(self, messages, marked_messages, marked, headers)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            turn = finder.find(index)
            if turn is None:
                unlocated.append(index)
            else:
                turns.append(turn)
        tail = marked.marks[-1].position if marked.marks else 0
        return Rendering(marked.text, turns, contents, plain_spans, unlocated, tail)

    def locate_prompt(self, messages: Messages) -> Rendering:
        """Render a prompt with its generation prompt, or left open if the assistant speaks last."""
        go_on = messages[-1]["role"] == "assistant"
        plain = self.render(messages, prompt=not go_on, go_on=go_on)
        _, marked = self._mark(messages, plain, prompt=not go_on, go_on=go_on)
        contents = _content_spans(marked.marks)
        tail = marked.marks[-1].position if marked.marks else 0
        spelled = self._spelled_controls(messages, marked.text, contents)
        return Rendering(marked.text, [], contents, spelled, [], tail)

    def _mark(
        self, messages: Messages, plain: str, **how: bool
    ) -> tuple[list[dict[str, Any]], Marked]:
        """The most telling marks that leave the rendering as it is."""
        count = len(messages)
        if count > MOST_MESSAGES or has_marks(plain):
            return [dict(m) for m in messages], Marked(plain, [], [])
        attempts: list[Callable[[], list[Level]]] = [
            lambda: ["both"] * count,
            lambda: ["end" if m["role"] == "assistant" else "both" for m in messages],
            lambda: self._levels_one_by_one(messages, plain, **how),
            lambda: ["none"] * count,
        ]
        for levels in attempts:
            marked_messages = [
                mark_message(m, i, level)
                for i, (m, level) in enumerate(zip(messages, levels(), strict=True))
            ]
            marked = self._try(marked_messages, plain, **how)
            if marked is not None:
                return marked_messages, marked
        return [dict(m) for m in messages], Marked(plain, [], [])

    def _levels_one_by_one(self, messages: Messages, plain: str, **how: bool) -> list[Level]:
        chosen: list[Level] = []
        for index, message in enumerate(messages):
            levels: tuple[Level, ...] = ("both", "end", "none")
            for level in levels:
                trial = [
                    *messages[:index],
                    mark_message(message, index, level),
                    *messages[index + 1 :],
                ]
                if level == "none" or self._try(trial, plain, **how) is not None:
                    chosen.append(level)
                    break
        return chosen

    def _try(self, messages: Messages, plain: str, **how: bool) -> Marked | None:
        try:
            rendered = self.render(
                messages, tagged=self.tagged_template is not None and not how, **how
            )
        except (
            Exception
        ):  # a template may raise anything on a marked value; the plain one did render
            return None
        marked = read_marks(rendered)
        return marked if marked.text == plain else None

    def _spelled_controls(
        self, messages: Messages, text: str, contents: Mapping[int, list[Span]]
    ) -> list[Span]:
        if self.control_tokens == "encode" or not self.control.search(texts_of(messages)):
            return []
        spans: list[Span] = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and self.control_tokens != "all":
                continue
            written = self.control.search(
                texts_of([{k: v for k, v in message.items() if k != "role"}])
            )
            if written is None:
                continue
            found = [
                (start + m.start(), start + m.end())
                for start, end in contents.get(index, [])
                for m in self.control.finditer(text[start:end])
            ]
            if not contents.get(index) and written.group() in text:
                raise ValueError(
                    f"message {index} ({message['role']}) spells the control token {written.group()!r} and this "
                    "template rewrites the message, so it cannot be kept apart from a real one; remove it "
                    "from the text or pass control_tokens='encode'"
                )
            spans += found
        return sorted(set(spans))

    def remember(self, key: tuple[Any, ...], compute: Callable[[], int | None]) -> int | None:
        """An offset within fixed text of the template, computed once for each such text."""
        known = self._offsets.get(key)
        if known is None:
            known = compute()
            if known is not None:
                if len(self._offsets) >= CACHE_SIZE:
                    self._offsets.clear()
                self._offsets[key] = known
        return known


def _content_spans(marks: Sequence[Mark]) -> dict[int, list[Span]]:
    opened: dict[int, int] = {}
    spans: dict[int, list[Span]] = {}
    for mark in marks:
        if mark.opens:
            opened[mark.message] = mark.position
        elif mark.message in opened:
            spans.setdefault(mark.message, []).append((opened.pop(mark.message), mark.position))
    return spans


class _TurnFinder:
    """Finds the turns of one rendered conversation from its marks and from renderings of its beginnings."""

    def __init__(
        self,
        chat: ChatRenderer,
        messages: Messages,
        marked_messages: Messages,
        marked: Marked,
        headers: bool,
    ) -> None:
        self.chat = chat
        self.messages = messages
        self.marked_messages = marked_messages
        self.marked = marked
        self.text = marked.text
        self.headers = headers
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for place, mark in enumerate(marked.marks):
            self.first.setdefault(mark.message, place)
            self.last[mark.message] = place

    def find(self, index: int) -> Turn | None:
        """The turn of message ``index``, or None if it cannot be found."""
        located = self._from_marks(index) if self._is_contiguous(index) else None
        if located is None:
            located = self._from_prefixes(index)
        tagged = self._tagged_spans(index)
        if tagged is None:
            if located is None:
                return None
            header, start, end = located
            return Turn(index, [(start, end)], header if self.headers else start)
        header = (
            located[0] if located is not None and self.headers else tagged[0][0] if tagged else 0
        )
        return Turn(index, tagged, header)

    def _is_contiguous(self, index: int) -> bool:
        if index not in self.first:
            return False
        marks = self.marked.marks[self.first[index] : self.last[index] + 1]
        return all(mark.message == index for mark in marks)

    def _tagged_spans(self, index: int) -> list[Span] | None:
        """The template's own generation blocks of a message; None where the template has no such tags."""
        if self.chat.tagged_template is None or not self.marked.generations:
            return None
        return [span for span in self.marked.generations if self._owner(span) == index]

    def _owner(self, span: Span) -> int:
        before = -1
        for mark in self.marked.marks:
            if mark.position > span[1]:
                break
            if span[0] <= mark.position and self.messages[mark.message]["role"] == "assistant":
                return mark.message
            before = max(before, mark.message)
        following = range(before + 1, len(self.messages))
        return next((i for i in following if self.messages[i]["role"] == "assistant"), -1)

    # -- from marks -------------------------------------------------------------------------------------

    def _from_marks(self, index: int) -> tuple[int, int, int] | None:
        """Header, start and end from the fixed text on both sides of the message's own texts."""
        place = self.first[index]
        marks = self.marked.marks
        before = marks[place - 1] if place else None
        left = before.position if before else 0
        bounded = marks[place].opens
        fixed = self.text[left : marks[place].position]
        start = self._start_offset(index, before, fixed, bounded)
        if start is None:
            return None
        end = self._end_offset(index)
        if end is None:
            return None
        header = self._header_offset(index, before, fixed) if self.headers else start
        return left + min(header, start), left + start, marks[self.last[index]].position + end

    def _start_offset(
        self, index: int, before: Mark | None, fixed: str, bounded: bool
    ) -> int | None:
        def compute() -> int | None:
            tail = self._tail(index, before, prompt=True)
            if tail is None:
                return self._start_from_dummy(fixed) if bounded else None
            return self._agreement(fixed, tail, bounded)

        if not bounded:
            return compute()
        return self.chat.remember(("start", fixed, *self._context(index, before)), compute)

    def _header_offset(self, index: int, before: Mark | None, fixed: str) -> int:
        def compute() -> int:
            tail = self._tail(index, before, prompt=False)
            if tail is None:
                prompt = self._dummy_prompt()
                return fixed.rfind(prompt) if prompt and prompt in fixed else len(fixed)
            return common_prefix_length(tail, fixed)

        return self.chat.remember(("header", fixed, *self._context(index, before)), compute) or 0

    def _context(self, index: int, before: Mark | None) -> tuple[Any, ...]:
        role = self.messages[before.message]["role"] if before else None
        return (
            role,
            before.opens if before else None,
            before.message == index - 1 if before else None,
        )

    def _tail(self, index: int, before: Mark | None, *, prompt: bool) -> str | None:
        """What a rendering of the messages before ``index`` holds after the mark ``before``."""
        if index == 0:
            return None
        try:
            prefix = read_marks(self.chat.render(self.marked_messages[:index], prompt=prompt))
        except (
            Exception
        ):  # templates may refuse a beginning, e.g. one that does not end in a user's message
            return None
        if before is None:
            return prefix.text if not prefix.marks else None
        if not prefix.marks or prefix.marks[-1][1:] != before[1:]:
            return None
        return prefix.text[prefix.marks[-1].position :]

    def _agreement(self, fixed: str, tail: str, bounded: bool) -> int:
        shared = common_prefix_length(fixed, tail)
        if bounded or shared == len(tail):
            return shared
        # The message's own text may begin like the rest of the generation prompt: stop at a whole token.
        encoded = self.chat.encoder.encode(tail)
        return max((end for end in encoded.ends if end <= shared), default=0)

    def _dummy_prompt(self) -> str:
        """The generation prompt, taken from a conversation of one user message."""
        dummy = [mark_message({"role": "user", "content": "x"}, 0, "both")]
        try:
            with_prompt = read_marks(self.chat.render(dummy, prompt=True))
            without = read_marks(self.chat.render(dummy))
        except Exception:  # a template that refuses this conversation says nothing about its prompt
            return ""
        return with_prompt.text[common_prefix_length(with_prompt.text, without.text) :]

    def _start_from_dummy(self, fixed: str) -> int:
        prompt = self._dummy_prompt()
        for length in range(len(prompt), 0, -1):
            place = fixed.rfind(prompt[:length])
            if place >= 0:
                return place + length
        return len(fixed)

    def _end_offset(self, index: int) -> int | None:
        place = self.last[index]
        marks = self.marked.marks
        mark = marks[place]
        after = marks[place + 1] if place + 1 < len(marks) else None
        fixed = self.text[mark.position : after.position if after else len(self.text)]

        def compute() -> int | None:
            if index == len(self.messages) - 1:
                return end_of_turn(fixed, fixed, self._is_added, "")
            try:
                alone = read_marks(self.chat.render(self.marked_messages[: index + 1]))
            except Exception:  # as in _tail
                return None
            if not alone.marks or alone.marks[-1][1:] != mark[1:]:
                return None
            tail = alone.text[alone.marks[-1].position :]
            return end_of_turn(fixed, tail, self._is_added, self._fixed_before(after))

        is_last = index == len(self.messages) - 1
        role = self.messages[after.message]["role"] if after else None
        return self.chat.remember(("end", fixed, is_last, role), compute)

    def _fixed_before(self, mark: Mark | None) -> str:
        """Fixed text before another message of the same role as the one that ``mark`` opens."""
        if mark is None:
            return ""
        role = self.messages[mark.message]["role"]
        for place, other in enumerate(self.marked.marks):
            if (
                other.opens
                and other.message != mark.message
                and self.messages[other.message]["role"] == role
            ):
                left = self.marked.marks[place - 1].position if place else 0
                return self.text[left : other.position]
        return ""

    def _is_added(self, text: str) -> str | None:
        """The added token that a text begins with."""
        found = self.chat.control.match(text)
        return found.group() if found else None

    # -- from prefixes ----------------------------------------------------------------------------------

    def _from_prefixes(self, index: int) -> tuple[int, int, int] | None:
        """Header, start and end from renderings of the conversation's beginnings alone."""
        if index == 0:
            return None
        try:
            before = read_marks(self.chat.render(self.marked_messages[:index])).text
            prompt = read_marks(self.chat.render(self.marked_messages[:index], prompt=True)).text
            through = read_marks(self.chat.render(self.marked_messages[: index + 1])).text
        except Exception:  # as in _tail
            return None
        start = common_prefix_length(self.text, prompt)
        whole = start == len(prompt)
        if not whole or through[:start] != prompt[:start]:
            return None
        fixed, tail = self.text[start:], through[start:]
        return (
            common_prefix_length(self.text, before),
            start,
            start + end_of_turn(fixed, tail, self._is_added, ""),
        )


def end_of_turn(
    fixed: str, tail: str, starting_token: Callable[[str], str | None], next_header: str
) -> int:
    """How much of the text after a message still belongs to its turn.

    Args:
        fixed: the text that follows in the whole conversation.
        tail: the text that follows where the conversation ends here.
        starting_token: names the added token that a text begins with, if any.
        next_header: text that stands before another message of the next one's role, or "".

    Returns:
        Characters up to the end of turn, without white space that follows it. Where the last turn of a
        conversation ends in another token than earlier ones do, that other token counts as the end of turn.
    """
    shared = common_prefix_length(fixed, tail)
    if shared < len(tail):
        for k in range(shared, -1, -1):
            here, there = starting_token(fixed[k:]), starting_token(tail[k:])
            if here and there and here != there and k + len(here) > shared:
                common_end = _common_suffix_length(fixed, next_header)
                if not next_header or k < len(fixed) - common_end:
                    shared = k + len(here)
                else:
                    shared = k
                break
            if here and here == there:
                break
    kept = fixed[:shared].rstrip()
    return len(kept) or shared


def _common_suffix_length(left: str, right: str) -> int:
    return common_prefix_length(left[::-1], right[::-1])
