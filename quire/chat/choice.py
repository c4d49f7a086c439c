"""One choice of a generation: engine events in, chunks of text out.

Owns the order of things for a single sequence: detokenize, look for stop strings, attach log probabilities. Knows no
engine and no asyncio: `Completer` brings it events and acts on `stopped`.
"""

from __future__ import annotations

from quire.chat.detokenizer import Detokenizer
from quire.chat.stop import StopStrings
from quire.chat.tokenizer import Tokenizer
from quire.chat.types import Chunk, TokenLogprob, TokenText
from quire.engine.types import FINISH_STOP, Event
from quire.runner.params import SamplingParams
from quire.runner.plan import Logprob


class ChoiceStream:
    """Turns the events of one sequence into chunks. `stopped` is set once a stop string was found."""

    def __init__(self, index: int, tokenizer: Tokenizer, sampling: SamplingParams):
        self.index = index
        self.stopped = False
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._detokenizer = Detokenizer(tokenizer, skip_special=sampling.skip_special_tokens)
        self._stops = StopStrings(sampling.stop, include=sampling.include_stop)
        self._count = 0

    def chunk(self, event: Event) -> Chunk | None:
        """News for the client, or None when the event changes nothing for it."""
        if self.stopped:
            return self._after_stop(event)
        texts: list[str] = []
        used = 0
        for token in event.tokens:
            used += 1
            self._count += 1
            if token == event.stop_id and used == len(event.tokens) and not self._sampling.include_stop:
                break  # the token that ended the answer is reported, but is not part of the text
            text = self._detokenizer.feed(token)
            # Until min_tokens the answer may not stop, so the text does not take part in the search.
            texts.append(self._stops.feed(text) if self._count > self._sampling.min_tokens else text)
            if self._stops.matched is not None:
                self.stopped = True
                break
        if event.finish is not None and not self.stopped:
            texts.append(self._stops.feed(self._detokenizer.finish()))
            self.stopped = self._stops.matched is not None
            texts.append(self._stops.finish())
        if not (event.tokens or event.prompt_logprobs or event.finish):
            return None
        finish, reason = event.finish, self._reason(event)
        if self.stopped:
            # The engine has not said its last word: the chunk with `finish` comes with its receipt.
            finish, reason = (FINISH_STOP, self._stops.matched) if event.finish is not None else (None, None)
        return Chunk(
            index=self.index,
            text="".join(texts),
            tokens=event.tokens[:used],
            logprobs=[self._logprob(entry) for entry in event.logprobs[:used]],
            prompt_logprobs=[self._logprob(entry) for entry in event.prompt_logprobs],
            finish=finish,
            stop_reason=reason,
            error=event.error,
            param=event.param,
            receipt=event.receipt,
        )

    def _after_stop(self, event: Event) -> Chunk | None:
        """The engine's last event after a stop string: what it computed beyond the match is not the client's."""
        if event.finish is None:
            return None
        return Chunk(index=self.index, finish=FINISH_STOP, stop_reason=self._stops.matched, receipt=event.receipt)

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
