"""Renders conversations and says where in the text messages, turns and control tokens stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from .encoding import Encoder, Span, common_prefix_length
from .marks import (
    Alphabet,
    Level,
    Marked,
    Marker,
    alphabet_for,
    has_generation_tags,
)
from .turns import Marking, Turn, TurnFinder

Messages = Sequence[Mapping[str, Any]]
CACHE_SIZE = 4096
T = TypeVar("T")


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
        control_tokens: "user" keeps control tokens spelled in messages as text, except in the
            assistant's; "all" in the assistant's too; "encode" lets the tokenizer take them for the
            real ones.
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
        self.has_tags = has_generation_tags(self.template)
        self.control = self.encoder.control
        self._tagged: dict[Alphabet, str] = {}
        self._found: dict[tuple[Any, ...], Any] = {}

    def render(
        self,
        messages: Messages,
        *,
        prompt: bool = False,
        go_on: bool = False,
        template: str | None = None,
    ) -> str:
        """The text; ``prompt`` adds the generation prompt, ``go_on`` leaves the last turn open."""
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=self.tools,
            tokenize=False,
            add_generation_prompt=prompt,
            continue_final_message=go_on,
            chat_template=template or self.template,
            **self.options,
        )

    def locate(self, messages: Messages, *, headers: bool = False, turns: bool = True) -> Rendering:
        """Render a whole conversation and find the assistant's turns in it.

        Args:
            messages: the conversation.
            headers: find the headers of the turns, too.
            turns: find the turns; without, only spelled control tokens are looked for.
        """
        plain = self.render(messages)
        if not turns and not self._spells_controls(messages):
            return Rendering(plain, [], {}, [], [], 0)
        marking = self._mark(messages, plain)
        contents = _content_spans(marking)
        spelled = self._spelled_controls(messages, plain, contents)
        finder = TurnFinder(self, messages, marking, headers=headers)
        places = [k for k, m in enumerate(messages) if turns and m["role"] == "assistant"]
        found = {k: finder.find(k) for k in places}
        return Rendering(
            plain,
            [turn for turn in found.values() if turn is not None],
            contents,
            spelled,
            [k for k, turn in found.items() if turn is None],
            _tail_start(marking.found),
        )

    def locate_prompt(self, messages: Messages) -> Rendering:
        """Render a prompt with its generation prompt, or left open if the assistant speaks last."""
        go_on = messages[-1]["role"] == "assistant"
        plain = self.render(messages, prompt=not go_on, go_on=go_on)
        marking = self._mark(messages, plain, prompt=not go_on, go_on=go_on)
        contents = _content_spans(marking)
        spelled = self._spelled_controls(messages, plain, contents, prompt=not go_on, go_on=go_on)
        return Rendering(plain, [], contents, spelled, [], _tail_start(marking.found))

    def _mark(self, messages: Messages, plain: str, **how: bool) -> Marking:
        """The most telling marks that leave the rendering as it is."""
        count = len(messages)
        attempts: list[Callable[[], list[Level]]] = [
            lambda: ["both"] * count,
            lambda: ["end" if m["role"] == "assistant" else "both" for m in messages],
            lambda: self._levels_one_by_one(messages, plain, **how),
            lambda: ["none"] * count,
        ]
        alphabet = alphabet_for(plain, messages)
        for levels in attempts if alphabet else []:
            marking = self._try(messages, levels(), plain, **how)
            if marking is not None:
                return marking
        return Marking([dict(m) for m in messages], [], Marked(plain, [], []), None)

    def _levels_one_by_one(self, messages: Messages, plain: str, **how: bool) -> list[Level]:
        chosen: list[Level] = ["none"] * len(messages)
        for index in range(len(messages)):
            levels: tuple[Level, ...] = ("both", "end")
            for level in levels:
                trial = [*chosen[:index], level, *chosen[index + 1 :]]
                if self._try(messages, trial, plain, **how) is not None:
                    chosen = trial
                    break
        return chosen

    def _try(
        self, messages: Messages, levels: Sequence[Level], plain: str, **how: bool
    ) -> Marking | None:
        alphabet = alphabet_for(plain, messages)
        if alphabet is None:
            return None
        marker = Marker(alphabet)
        marked = [
            marker.message(m, i, level)
            for i, (m, level) in enumerate(zip(messages, levels, strict=True))
        ]
        template = self._printing(alphabet) if self.has_tags and not how else None
        try:
            rendered = self.render(marked, template=template, **how)
        except Exception:  # a template may raise anything on a value that is marked
            return None
        found = alphabet.read(rendered)
        return Marking(marked, marker.owners, found, alphabet) if found.text == plain else None

    def _printing(self, alphabet: Alphabet) -> str:
        """The template with generation tags that print marks."""
        if alphabet not in self._tagged:
            self._tagged[alphabet] = alphabet.with_printed_generation_tags(self.template)
        return self._tagged[alphabet]

    def _spells_controls(self, messages: Messages) -> bool:
        return self.control_tokens != "encode" and self.control.search(str(messages)) is not None

    def _spelled_controls(
        self, messages: Messages, text: str, contents: Mapping[int, list[Span]], **how: Any
    ) -> list[Span]:
        """Where messages spell control tokens that are to be ordinary text."""
        if not self._spells_controls(messages):
            return []
        guarded = [
            k
            for k, message in enumerate(messages)
            if self.control_tokens == "all" or message["role"] != "assistant"
        ]
        spans = {
            (start + spelled.start(), start + spelled.end())
            for k in guarded
            for start, end in contents.get(k, [])
            for spelled in self.control.finditer(text[start:end])
        }
        without = [self._without_controls(m) if k in guarded else m for k, m in enumerate(messages)]
        real = len(self.control.findall(self.render(without, **how)))
        if len(self.control.findall(text)) - len(spans) != real:
            token = self.control.search(str([messages[k] for k in guarded]))
            raise ValueError(
                f"a message spells the control token {token.group() if token else ''!r} where this "
                "template "
                "rewrites it, so that it cannot be kept apart from a real one; remove it from the "
                "text or "
                "pass control_tokens='encode'"
            )
        return sorted(spans)

    def _without_controls(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.control.sub("x", value)
        if isinstance(value, Mapping):
            return {k: v if k == "role" else self._without_controls(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._without_controls(v) for v in value]
        return value

    def starting_token(self, text: str) -> str | None:
        """The control token that a text begins with."""
        found = self.control.match(text)
        return found.group() if found else None

    @cached_property
    def generation_prompt(self) -> str:
        """What the template adds for generation, seen on a conversation of one user message."""
        dummy = {"role": "user", "content": "x"}
        try:
            with_prompt = self.render([dummy], prompt=True)
            without = self.render([dummy])
        except Exception:  # a template that refuses this conversation says nothing about its prompt
            return ""
        return with_prompt[common_prefix_length(with_prompt, without) :]

    @cached_property
    def ends_turns(self) -> bool:
        """Whether the template writes anything after the assistant's text when it speaks last."""
        dummy = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        try:
            rendered = self.render(dummy)
        except Exception:  # as above
            return True
        return not rendered.endswith("y")

    @cached_property
    def end_tokens(self) -> frozenset[str]:
        """Control tokens that follow the assistant's text, within a conversation and at its end."""
        user = {"role": "user", "content": "x"}
        said = ("qzx", "qzy")
        first, last = ({"role": "assistant", "content": word} for word in said)
        try:
            rendered = self.render([user, first, user, last])
        except Exception:  # as above
            return frozenset()
        places = [rendered.rfind(word) + len(word) for word in said if word in rendered]
        found = (self.control.search(rendered, place) for place in places)
        return frozenset(token.group() for token in found if token)

    def remember(self, key: tuple[Any, ...], compute: Callable[[], T | None]) -> T | None:
        """What was found out about a piece of the template's fixed text, computed once for each."""
        known: T | None = self._found.get(key)
        if known is None:
            known = compute()
            if known is not None:
                if len(self._found) >= CACHE_SIZE:
                    self._found.clear()
                self._found[key] = known
        return known


def _content_spans(marking: Marking) -> dict[int, list[Span]]:
    opened: dict[int, int] = {}
    spans: dict[int, list[Span]] = {}
    for mark in marking.found.marks:
        if mark.opens:
            opened[mark.text] = mark.position
        elif mark.text in opened:
            span = (opened.pop(mark.text), mark.position)
            spans.setdefault(marking.owners[mark.text], []).append(span)
    return spans


def _tail_start(found: Marked) -> int:
    return found.marks[-1].position if found.marks else 0
