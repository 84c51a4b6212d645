"""One row to one tokenised sample: its text, its trained tokens, and what was noticed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .chat import clean_messages, renderer, renderer_key
from .encoding import Encoded, Encoder, Span, common_prefix_length
from .formats import detect_format, is_message_list, maybe_convert_to_chatml
from .renderer import ChatRenderer, Rendering

T = TypeVar("T")


@dataclass
class Sample:
    """A tokenised row.

    Attributes:
        ids: token ids, ``T`` of them.
        mask: 1 on trained tokens, ``T`` of them; 0 on the first, which nothing predicts.
        prompt_mismatch: how the prompt's ids differ from the beginning of the whole, or "".
        no_end: a conversation that ends in no special token.
        unlocated: assistant's turns that were not found.
        empty_completion: the completion is an empty text.
        doubled_bos: the text spells a BOS that the tokenizer or the template adds too; one was left
            out.
    """

    ids: list[int]
    mask: list[int]
    prompt_mismatch: str = ""
    no_end: bool = False
    unlocated: int = 0
    empty_completion: bool = False
    doubled_bos: bool = False


@dataclass
class _Job:
    """A text to encode, and how its tokens become a sample."""

    text: str
    finish: Callable[[Encoded], Sample]
    plain: Sequence[Span] = field(default_factory=tuple)


class RowError(ValueError):
    """A row that cannot be prepared; says which row and why."""


class RowTokenizer:
    """Rows of any supervised format to samples.

    Args:
        tokenizer: a transformers tokenizer.
        completion_only_loss: train the completion alone; None: where a row has one.
        assistant_only_loss: train the assistant's turns alone.
        train_header: train the header of the assistant's turns too.
        dataset_text_field: column of plain texts.
        formatting_func: row to text, instead of any column.
        tools: tools for rows without their own.
        chat_template_kwargs: variables for the template.
        control_tokens: see `ChatRenderer`.
        features: the dataset's features, to tell filled nulls from meant ones.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        completion_only_loss: bool | None = None,
        assistant_only_loss: bool = False,
        train_header: bool = False,
        dataset_text_field: str = "text",
        formatting_func: Callable[[Mapping[str, Any]], str] | None = None,
        tools: list[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        control_tokens: str = "user",
        features: Any = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = Encoder.of(tokenizer)
        self.completion_only_loss = completion_only_loss
        self.assistant_only_loss = assistant_only_loss
        self.train_header = train_header
        self.dataset_text_field = dataset_text_field
        self.formatting_func = formatting_func
        self.tools = tools
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.control_tokens = control_tokens
        self.features = features or {}
        self._renderers: dict[str, ChatRenderer] = {}

    def __call__(self, rows: Sequence[Mapping[str, Any]], first_index: int = 0) -> list[Sample]:
        """Tokenise rows; ``first_index`` is the number of the first one, for messages.

        Raises:
            RowError: a row that is no row of a known format; says which, and what was wanted.
        """
        samples: list[Sample | None] = [None] * len(rows)
        jobs: list[tuple[int, _Job]] = []
        for k, row in enumerate(rows):
            made = self.guard(self._job, row, first_index + k)
            if isinstance(made, Sample):
                samples[k] = made
            else:
                jobs.append((k, made))
        for (k, job), encoded in zip(jobs, self._encode(jobs, first_index), strict=True):
            sample = job.finish(encoded)
            if sample.mask:
                sample.mask[0] = 0
            samples[k] = sample
        return [sample for sample in samples if sample is not None]

    @staticmethod
    def guard(action: Callable[[Mapping[str, Any]], T], row: Mapping[str, Any], number: int) -> T:
        """Do something with a row; an error names the row by its number."""
        try:
            return action(row)
        except RowError:
            raise
        except Exception as error:
            raise RowError(f"row {number}: {one_line(error)}") from error

    def _encode(self, jobs: list[tuple[int, _Job]], first_index: int) -> list[Encoded]:
        try:
            return self.encoder.encode_batch([j.text for _, j in jobs], [j.plain for _, j in jobs])
        except Exception:
            # Some text of the batch cannot be encoded; find which.
            encoded = []
            for k, job in jobs:
                try:
                    encoded.append(self.encoder.encode(job.text, job.plain))
                except Exception as error:
                    raise RowError(
                        f"row {first_index + k}: {encoding_fault(job.text, error)}"
                    ) from error
            return encoded

    def chat(self, row: Mapping[str, Any]) -> ChatRenderer:
        """The renderer for the row's tools and options, shared by rows that have the same."""
        key = renderer_key(row)
        if key not in self._renderers:
            if len(self._renderers) >= 256:
                self._renderers.clear()
            self._renderers[key] = renderer(
                row,
                self.tokenizer,
                self.tools,
                self.chat_template_kwargs,
                control_tokens=self.control_tokens,
                tools_feature=self._feature("tools"),
            )
        return self._renderers[key]

    def _feature(self, column: str) -> Any:
        return self.features.get(column)

    def _job(self, row: Mapping[str, Any]) -> _Job | Sample:
        if self.formatting_func is not None:
            text = self.formatting_func(row)
            if not isinstance(text, str):
                raise ValueError(
                    f"formatting_func returned {type(text).__name__}, want one text for the row"
                )
            return self._text_job(text)
        row = maybe_convert_to_chatml(row)
        kind = detect_format(row, self.dataset_text_field)
        if kind == "tokenized":
            return tokenized_sample(row)
        if kind == "language_modeling":
            return self._language_modeling_job(row)
        if kind == "prompt_completion":
            return self._prompt_completion_job(row)
        raise ValueError(
            f"a row of format {kind} cannot be used for supervised training: want text, messages "
            "or prompt + completion"
        )

    def _language_modeling_job(self, row: Mapping[str, Any]) -> _Job:
        if self.completion_only_loss:
            raise ValueError(
                "completion_only_loss=True wants rows with prompt and completion; this row has one "
                "text"
            )
        if row.get("messages") is not None:
            return self._chat_job(row, row["messages"], "messages", trained_from=0)
        text = row[self.dataset_text_field]
        if is_message_list(text):
            return self._chat_job(row, text, self.dataset_text_field, trained_from=0)
        if not isinstance(text, str):
            raise ValueError(
                f"column {self.dataset_text_field!r} is {type(text).__name__} {str(text)[:60]!r}: "
                "want a text"
            )
        return self._text_job(text)

    def _text_job(self, text: str) -> _Job:
        if self.assistant_only_loss:
            raise ValueError("assistant_only_loss=True wants conversations; this row is plain text")

        def finish(encoded: Encoded) -> Sample:
            ids = self.encoder.text_ids(encoded.ids) if encoded.ids else []
            return Sample(ids, [1] * len(ids), doubled_bos=self.encoder.spells_bos(encoded.ids))

        return _Job(text, finish)

    def _prompt_completion_job(self, row: Mapping[str, Any]) -> _Job:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._plain_completion_job(prompt, completion)
        for column in ("prompt", "completion"):
            if not is_message_list(row[column]):
                raise ValueError(
                    f"column {column!r} is {type(row[column]).__name__} {str(row[column])[:60]!r}: "
                    "want prompt and "
                    "completion to be two texts or two non-empty lists of messages"
                )
        only = self.completion_only_loss is not False
        return self._chat_job(
            row,
            [*prompt, *completion],
            "prompt + completion",
            trained_from=len(prompt) if only else 0,
            only_turns=only,
        )

    def _plain_completion_job(self, prompt: str, completion: str) -> _Job:
        if self.assistant_only_loss:
            raise ValueError("assistant_only_loss=True wants conversations; this row is plain text")
        encoder = self.encoder

        def finish(encoded: Encoded) -> Sample:
            ids = encoder.text_ids(encoded.ids)
            doubled = encoder.spells_bos(encoded.ids)
            if self.completion_only_loss is False:
                mask = [1] * len(ids)
                return Sample(ids, mask, empty_completion=not completion, doubled_bos=doubled)
            prompt_ids = encoder.prompt_ids(prompt)
            shared = min(common_prefix_length(prompt_ids, ids), len(ids))
            mismatch = (
                ""
                if shared == len(prompt_ids)
                else describe_mismatch(encoder, prompt_ids, ids, shared)
            )
            mask = [0] * shared + [1] * (len(ids) - shared)
            return Sample(
                ids,
                mask,
                prompt_mismatch=mismatch,
                empty_completion=not completion,
                doubled_bos=doubled,
            )

        return _Job(prompt + completion, finish)

    def _chat_job(
        self,
        row: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        column: str,
        *,
        trained_from: int,
        only_turns: bool = False,
    ) -> _Job:
        cleaned = clean_messages(messages, column, self._feature(column))
        flags = [m.get("train") for m in messages]
        chat = self.chat(row)
        only_turns = only_turns or self.assistant_only_loss
        rendering = chat.locate(
            cleaned, headers=self.train_header, turns=only_turns or False in flags
        )
        spans = trained_spans(
            rendering,
            cleaned,
            flags,
            trained_from,
            only_turns=only_turns,
            headers=self.train_header,
        )
        mismatch = ""
        if trained_from:
            mismatch = prompt_text_mismatch(chat, cleaned[:trained_from], rendering.text)

        def finish(encoded: Encoded) -> Sample:
            mask = self.encoder.mask(encoded, spans)
            ids = self.encoder.without_doubled_bos(encoded.ids)
            doubled = len(encoded.ids) - len(ids)
            return Sample(
                ids,
                mask[doubled:],
                prompt_mismatch=mismatch,
                no_end=not self.encoder.ends_in_special(ids),
                unlocated=len(rendering.unlocated) if only_turns else 0,
                doubled_bos=doubled > 0,
            )

        return _Job(rendering.text, finish, rendering.plain)


def trained_spans(
    rendering: Rendering,
    messages: Sequence[Mapping[str, Any]],
    flags: Sequence[bool | None],
    trained_from: int,
    *,
    only_turns: bool,
    headers: bool,
) -> list[Span]:
    """Character ranges of the rendering that are trained.

    Args:
        rendering: the located conversation.
        messages: its messages.
        flags: each message's ``train`` flag, or None.
        trained_from: messages before this one are not trained.
        only_turns: train the assistant's turns alone, not the whole text.
        headers: train the headers of these turns too.

    Raises:
        ValueError: ``"train": true`` on a message that is not the assistant's, where only the
            assistant is trained.
    """
    for index, flag in enumerate(flags):
        if flag not in (None, True, False):
            raise ValueError(f"message {index}: 'train' is {flag!r}, want true or false")
        if flag and only_turns and messages[index]["role"] != "assistant":
            raise ValueError(
                f"message {index} ({messages[index]['role']}) has 'train': true, but only the "
                "assistant's turns are trained"
            )
    turns = {
        t.message: [(t.header, t.spans[0][0]), *t.spans] if headers and t.spans else t.spans
        for t in rendering.turns
    }
    if only_turns:
        return sorted(
            span
            for i, spans in turns.items()
            if i >= trained_from and flags[i] is not False
            for span in spans
        )
    left_out = sorted(
        span
        for i, flag in enumerate(flags)
        if flag is False
        for span in turns.get(i, rendering.contents.get(i, []))
    )
    spans, position = [], 0
    for start, end in left_out:
        spans.append((position, start))
        position = max(position, end)
    return [*spans, (position, len(rendering.text))]


def tokenized_sample(row: Mapping[str, Any]) -> Sample:
    """A row that comes with ids, taken as it is; its mask is the product of those it brings."""
    ids = list(row["input_ids"])
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ValueError("column 'input_ids' holds something else than non-negative whole numbers")
    mask = [1] * len(ids)
    for name in ("loss_mask", "labels", "completion_mask", "assistant_masks"):
        values = row.get(name)
        if values is None:
            continue
        if len(values) != len(ids):
            raise ValueError(
                f"column {name!r} has {len(values)} entries for {len(ids)} input_ids: want one each"
            )
        trained = (v != -100 for v in values) if name == "labels" else values
        mask = [int(bool(m and t)) for m, t in zip(mask, trained, strict=True)]
    if mask:
        mask[0] = 0
    return Sample(ids, mask)


def prompt_text_mismatch(chat: ChatRenderer, prompt: Sequence[Mapping[str, Any]], text: str) -> str:
    """How the rendered prompt differs from the beginning of the whole conversation, or ""."""
    go_on = prompt[-1]["role"] == "assistant"
    try:
        rendered = chat.render(prompt, prompt=not go_on, go_on=go_on)
    except Exception as error:  # a template may refuse the beginning alone
        return f"the template does not render the prompt alone: {one_line(error)}"
    if text.startswith(rendered):
        return ""
    shared = common_prefix_length(rendered, text)
    encoder = chat.encoder
    near = max(0, shared - 20)
    return describe_mismatch(
        encoder,
        encoder.encode(rendered[near : shared + 20]).ids,
        encoder.encode(text[near : shared + 20]).ids,
    )


def describe_mismatch(
    encoder: Encoder, prompt_ids: Sequence[int], ids: Sequence[int], shared: int | None = None
) -> str:
    """The tokens at which a prompt and the whole part ways, in words."""
    if shared is None:
        shared = common_prefix_length(prompt_ids, ids)
    tokens = encoder.tokenizer.convert_ids_to_tokens
    here, there = (
        tokens(list(prompt_ids[shared : shared + 3])),
        tokens(list(ids[shared : shared + 3])),
    )
    return f"after {shared} shared tokens the prompt goes on {here}, prompt + completion {there}"


def encoding_fault(text: str, error: Exception) -> str:
    """Why a text cannot be encoded; names lone surrogates, the usual cause."""
    for place, character in enumerate(text):
        if "\ud800" <= character <= "\udfff":
            return (
                f"the text holds half of a surrogate pair, {character!r}, at character {place}: no "
                "UTF-8 can spell it; "
                "mend the text, e.g. with text.encode('utf-16', 'surrogatepass').decode('utf-16', "
                "'replace')"
            )
    return one_line(error)


def one_line(error: Exception) -> str:
    """An exception as one line, its type named where the message alone would not tell."""
    words = " ".join(str(error).split())
    return words if isinstance(error, ValueError) and words else f"{type(error).__name__}: {words}"
