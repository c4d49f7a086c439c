"""One choice of a generation: engine events in, chunks of text out.

Three classes, in the order in which a token passes them. `Detokenizer` turns token ids into text, `StopStrings` finds where a
stop string ends it, and `ChoiceStream` ties them together for one sequence: it tells reasoning and calls from the text and attaches log
probabilities. None of them knows an engine or asyncio: `Completer` brings events and acts on `stopped`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.chat.types import CallPart, Chunk, TokenLogprob, TokenText
from quire.engine.types import FINISH_STOP, Event
from quire.runner.params import SamplingParams
from quire.runner.plan import Logprob

if TYPE_CHECKING:
    from quire.chat.tools.types import Pieces, Reading

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One stream of token ids to text: exact, with constant work for each token.

    It works on the bytes of tokens and never decodes a window again. What it hands out is final: half a character waits for the
    rest of it, and U+FFFD appears only where no later token could have completed the bytes. The texts of all `feed` calls and
    of `finish`, joined, are what `Tokenizer.decode` gives for all ids at once (`finish` of tokens that were cut may lack U+FFFD at
    the end). at_start=False is for a continuation, whose first space belongs to the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        at_start: bool = False,
        keep: frozenset[int] = frozenset(),
    ):
        """`keep` are special tokens that are written out where the others are skipped."""
        self._tokenizer = tokenizer
        self._keep = keep
        self._skip_special = skip_special
        self._strip = at_start and tokenizer.space_prefix
        self._decoder = _utf8("replace")

    def feed(self, token: int) -> str:
        """The text that is certain once this token is known; often that of the token, sometimes nothing yet."""
        if self._skip_special and self._tokenizer.is_special(token) and token not in self._keep:
            return ""
        data = self._tokenizer.token_bytes(token)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self, *, cut: bool = False) -> str:
        """The text that was held back: U+FFFD for bytes that never became a character, or nothing. Nothing, too, where the tokens
        were `cut`: the next one might have completed the character, so the text ends before it."""
        return "" if cut else self._decoder.decode(b"", final=True)


class StopStrings:
    """Stop strings over one stream of text. After a match, `matched` is set and nothing more comes out.

    The match is the one that is complete first; of several that are complete at the same character, the longest. So the answer
    does not depend on how the text was cut into pieces. Only the longest end of the text that some stop string begins with
    is held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self._stops = tuple(dict.fromkeys(s for s in stops if s))
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that may go out now."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        best: tuple[int, int, str] | None = None  # end, start, stop string
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = at + len(stop), at, stop
        if best is not None:
            end, start, self.matched = best
            self._held = ""
            return text[:end] if self._include else text[:start]
        keep = self._prefix_at_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, once no more can come."""
        held, self._held = self._held, ""
        return held

    def _prefix_at_end(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < len(text) - longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return longest


class _News:
    """The pieces that the tokens of one event became, in order. Within one entry: reasoning, then text, then calls."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: list[tuple[list[str], list[str], list[CallPart]]] = []

    def reasoning(self, text: str) -> None:
        if text:
            self._at(0)[0].append(text)

    def text(self, text: str) -> None:
        if text:
            self._at(1)[1].append(text)

    def calls(self, calls: list[CallPart]) -> None:
        if calls:
            self._at(2)[2].extend(calls)

    def _at(self, place: int) -> tuple[list[str], list[str], list[CallPart]]:
        if not self.entries or any(self.entries[-1][place + 1 :]):
            self.entries.append(([], [], []))
        return self.entries[-1]


class ChoiceStream:
    """Turns the events of one sequence into chunks. `stopped` is set once a stop string was found.

    With a `reading`, special tokens in `keep` are written out for its parser, and stop strings look at the text alone.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        reading: Reading | None = None,
        keep: frozenset[int] = frozenset(),
    ):
        self.index = index
        self.stopped = False
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._parser = None if reading is None else reading.parser()
        self._detokenizer = Detokenizer(tokenizer, skip_special=sampling.skip_special_tokens, keep=keep)
        self._stops = StopStrings(sampling.stop, include=sampling.include_stop)
        self._count = 0

    def chunks(self, event: Event) -> list[Chunk]:
        """News for the client; none when the event changes nothing for it. The first has the tokens, the last the end."""
        if self.stopped:
            return self._after_stop(event)
        news = _News()
        used = 0
        for token in event.tokens:
            used += 1
            self._count += 1
            if token == event.stop_id and used == len(event.tokens) and not self._sampling.include_stop:
                break  # the token that ended the answer is reported, but is not part of the text
            # Until min_tokens the answer may not stop, so the text does not take part in the search.
            self._take(news, self._detokenizer.feed(token), self._count > self._sampling.min_tokens)
            if self.stopped:
                break
        if event.finish is not None and not self.stopped:
            self._take(news, self._detokenizer.finish(cut=event.finish != FINISH_STOP), True)
            if self._parser is not None and not self.stopped:
                self._sort(news, self._parser.finish(), True)
            news.text(self._stops.finish())
        if not (event.tokens or event.prompt_logprobs or event.finish):
            return []
        finish, reason = event.finish, self._reason(event)
        if self.stopped:
            # The engine has not said its last word: the chunk with `finish` comes with its receipt.
            finish, reason = (FINISH_STOP, self._stops.matched) if event.finish is not None else (None, None)
        made: list[Chunk] = []
        entries = news.entries or [([], [], [])]
        for i, (reasoning, text, calls) in enumerate(entries):
            first, last = i == 0, i == len(entries) - 1
            made.append(
                Chunk(
                    index=self.index,
                    text="".join(text),
                    reasoning="".join(reasoning),
                    calls=calls,
                    tokens=event.tokens[:used] if first else [],
                    logprobs=[self._logprob(entry) for entry in event.logprobs[:used]] if first else [],
                    prompt_logprobs=[self._logprob(entry) for entry in event.prompt_logprobs] if first else [],
                    finish=finish if last else None,
                    stop_reason=reason if last else None,
                    error=event.error if last else None,
                    param=event.param if last else None,
                    receipt=event.receipt if last else None,
                )
            )
        return made

    def _take(self, news: _News, text: str, searching: bool) -> None:
        if self._parser is None:
            self._say(news, text, searching)
        elif text:
            self._sort(news, self._parser.feed(text), searching)

    def _sort(self, news: _News, pieces: list[Pieces], searching: bool) -> None:
        for piece in pieces:
            news.reasoning(piece.reasoning)
            self._say(news, piece.text, searching)
            if self.stopped:
                return  # what follows the stop string is not the client's
            news.calls(piece.calls)

    def _say(self, news: _News, text: str, searching: bool) -> None:
        news.text(self._stops.feed(text) if searching else text)
        self.stopped = self._stops.matched is not None

    def _after_stop(self, event: Event) -> list[Chunk]:
        """The engine's last event after a stop string: what it computed beyond the match is not the client's."""
        if event.finish is None:
            return []
        return [Chunk(index=self.index, finish=FINISH_STOP, stop_reason=self._stops.matched, receipt=event.receipt)]

    def _reason(self, event: Event) -> int | None:
        asked = event.finish == FINISH_STOP and event.stop_id in self._sampling.stop_token_ids
        return event.stop_id if asked else None

    def _logprob(self, entry: Logprob) -> TokenLogprob:
        return TokenLogprob(
            token=self._token(entry.token),
            logprob=entry.logprob,
            rank=entry.rank,
            top=[(self._token(token), logprob) for token, logprob in entry.top],
        )

    def _token(self, token: int) -> TokenText:
        data = self._tokenizer.token_bytes(token)
        return TokenText(id=token, text=data.decode("utf-8", "replace"), bytes=data)
