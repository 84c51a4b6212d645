"""One row to one tokenised sample: its text, its trained tokens, and what was noticed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .chat import clean_messages, renderer, renderer_key
from .encoding import Encoded, Encoder, Span, common_prefix_length
from .faults import RowError, encoding_fault, one_line
from .formats import detect_format, is_message_list, maybe_convert_to_chatml
from .renderer import ChatRenderer
from .trained import describe_mismatch, prompt_text_mismatch, trained_spans

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
        positions: position ids that the row brought, if any.
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
    positions: list[int] = field(default_factory=list)


@dataclass
class _Job:
    """A text to encode, and how its tokens become a sample."""

    text: str
    finish: Callable[[Encoded], Sample]
    plain: Sequence[Span] = field(default_factory=tuple)
    offsets: bool = False


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
        return self.some(rows, range(first_index, first_index + len(rows)))

    def some(self, rows: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> list[Sample]:
        """Tokenise rows that have these numbers."""
        samples: dict[int, Sample] = {}
        jobs: list[tuple[int, _Job]] = []
        for number, row in zip(numbers, rows, strict=True):
            made = self.guard(self._job, row, number)
            if isinstance(made, Sample):
                samples[number] = made
            else:
                jobs.append((number, made))
        for (number, job), encoded in zip(jobs, self._encode(jobs), strict=True):
            sample = job.finish(encoded)
            if sample.mask:
                sample.mask[0] = 0
            samples[number] = sample
        return [samples[number] for number in numbers]

    @staticmethod
    def guard(action: Callable[[Mapping[str, Any]], T], row: Mapping[str, Any], number: int) -> T:
        """Do something with a row; an error names the row by its number."""
        try:
            return action(row)
        except RowError:
            raise
        except Exception as error:
            raise RowError(f"row {number}: {one_line(error)}") from error

    def _encode(self, jobs: list[tuple[int, _Job]]) -> list[Encoded]:
        encoded: dict[int, Encoded] = {}
        try:
            for offsets in {job.offsets for _, job in jobs}:
                group = [k for k, (_, job) in enumerate(jobs) if job.offsets == offsets]
                texts, plains = [jobs[k][1].text for k in group], [jobs[k][1].plain for k in group]
                made = self.encoder.encode_batch(texts, plains, offsets=offsets)
                encoded.update(zip(group, made, strict=True))
        except Exception as fault:  # some text cannot be encoded; find which
            for number, job in jobs:
                try:
                    self.encoder.encode(job.text, job.plain)
                except Exception as error:
                    said = encoding_fault(job.text, error)
                    raise RowError(f"row {number}: {said}") from error
            raise fault
        return [encoded[k] for k in range(len(jobs))]

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
            return tokenized_sample(row, len(self.tokenizer))
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

    def _refuse_chat_options(self) -> None:
        """Options that could do nothing for a plain text."""
        for name in ("assistant_only_loss", "train_header", "tools", "chat_template_kwargs"):
            value = getattr(self, name)
            if value:
                shown = "=True" if value is True else ""
                raise ValueError(f"{name}{shown} wants conversations; this row is plain text")

    def _text_job(self, text: str) -> _Job:
        self._refuse_chat_options()

        def finish(encoded: Encoded) -> Sample:
            ids = self.encoder.text_ids(encoded.ids) if encoded.ids else []
            return Sample(ids, [1] * len(ids), doubled_bos=self.encoder.spells_bos(encoded.ids))

        return _Job(text, finish)

    def _prompt_completion_job(self, row: Mapping[str, Any]) -> _Job:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._plain_completion_job(prompt, completion)
        for column in ("prompt", "completion"):
            value = row[column]
            if not isinstance(value, str) and not is_message_list(value):
                raise ValueError(
                    f"column {column!r} is {type(value).__name__} {str(value)[:60]!r}: want a text "
                    "or "
                    "a non-empty list of messages"
                )
        if isinstance(prompt, str) or isinstance(completion, str):
            raise ValueError(
                f"prompt is {type(prompt).__name__} and completion {type(completion).__name__}: "
                "want "
                "two texts or two lists of messages"
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
        self._refuse_chat_options()
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
        if self.train_header and not only_turns:
            raise ValueError(
                "train_header=True does nothing where every token is trained; "
                "assistant_only_loss=True trains the turns alone"
            )
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
            mask = [1] * len(encoded.ids) if whole else self.encoder.mask(encoded, spans)
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

        whole = spans == [(0, len(rendering.text))]
        return _Job(rendering.text, finish, rendering.plain, offsets=not whole)


def tokenized_sample(row: Mapping[str, Any], vocabulary: int) -> Sample:
    """A row that comes with ids, taken as it is; its mask is the product of those it brings."""
    ids = list(row["input_ids"])
    wrong = next((i for i in ids if not isinstance(i, int) or not 0 <= i < vocabulary), 0)
    if wrong != 0:
        raise ValueError(
            f"column 'input_ids' holds {wrong!r}, want whole numbers from 0 to {vocabulary - 1}, "
            "the tokenizer's last id"
        )
    mask = [1] * len(ids)
    for name in ("loss_mask", "labels", "completion_mask", "assistant_masks"):
        values = row.get(name)
        if values is None:
            continue
        _want_one_each(name, values, ids)
        trained = (v != -100 for v in values) if name == "labels" else values
        mask = [int(bool(m and t)) for m, t in zip(mask, trained, strict=True)]
    positions = row.get("position_ids")
    if positions is None:
        return Sample(ids, [0, *mask[1:]] if mask else [])
    _want_one_each("position_ids", positions, ids)
    mask = [m if p else 0 for m, p in zip(mask, positions, strict=True)]
    return Sample(ids, mask, positions=list(positions))


def _want_one_each(name: str, values: Sequence[Any], ids: Sequence[int]) -> None:
    if len(values) != len(ids):
        raise ValueError(
            f"column {name!r} has {len(values)} entries for {len(ids)} input_ids: want one each"
        )
