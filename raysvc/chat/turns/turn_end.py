"""Finds where the model has written the last token of a turn: rules 3 to 5 of `turn_spans`."""

from __future__ import annotations

from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.turns.token_texts import behind_blanks
from raysvc.chat.turns.turn_signs import Frame, TurnSigns, follows_itself


class TurnEnd:
    """Finds where the turns of one template end.

    Args:
        signs: of it.
    """

    def __init__(self, signs: TurnSigns) -> None:
        self._signs, self._tokens = signs, signs.tokens

    def of(self, text: str, part: tuple[int, int], block_end: int, example: ChatExample, place: int) -> int:
        """Behind the last token that the model must produce.

        Args:
            text: of the render.
            part: [start, stop) of the last stretch that is the message's own.
            block_end: of its last block.
            example, place: whose message it is.

        Raises:
            RowFault: the turn has no end, where turns have one.
        """
        start, stop = part
        frame = self._signs.frame_of(example, place)
        marked, follows = self._signs.template.marks_generation, follows_itself(example, place + 1)
        end = self._in_block(text, part, block_end, None if marked else frame)
        if end is None:
            end = start + len(text[start:stop].rstrip())
            if frame is not None and frame.eot and not follows and not marked:
                raise RowFault("a trained turn has no end of turn", repr(text[max(start, stop - 60) : stop]))
        if marked:
            return self._with_end_of_sequence(text, end, example, place)
        if stop < block_end:  # the results of its calls follow
            ended = frame is not None and frame.eot and text.endswith(frame.eot, start, end)
            end = end if ended else self._with_next_stop(text, end, stop)
        elif self._signs.writes_end:
            end = self._with_end_of_sequence(text, end, example, place)
        elif not follows or self._ends_behind(text, block_end):
            end = self._with_next_stop(text, end, block_end)
        return self._tokens.first_end(text, start, end, self._signs.heads)

    def is_endless(self, text: str, end: int, example: ChatExample, place: int) -> bool:
        """Returns whether a turn that ends there has no end: no token, no text behind every turn, and it does not go on."""
        if self._tokens.closes(text, end) or follows_itself(example, place + 1):
            return False
        ends = [frame.eot.strip() for frame in self._signs.frames]
        return not any(eot and text.endswith(eot, 0, end) for eot in ends)

    def _in_block(self, text: str, part: tuple[int, int], block_end: int, frame: Frame | None) -> int | None:
        """Rule 3; None where no token and no text ends the turn."""
        start, stop = part
        behind = frame.trailer if frame else ""
        if frame and stop == block_end and self._ends_as_usual(text, part, frame):
            return stop - len(behind)
        if frame and behind.strip() and text.endswith(frame.eot + behind, start, block_end):
            return block_end - len(behind)
        if frame and frame.eot and not self._tokens.one.search(frame.eot):
            end = start + len(text[start:block_end].rstrip())
            return end if text.endswith(frame.eot.strip(), start, end) else None
        run = self._tokens.begin_of_run(text, start, block_end)
        if run < 0 or run > stop:
            return self._tokens.last_end(text, start, stop)
        return self._tokens.last_end(text, run, block_end)

    def _ends_as_usual(self, text: str, part: tuple[int, int], frame: Frame) -> bool:
        """Returns whether a block ends with what a plain turn ends with, a token and blanks, and no sequence begins in it."""
        (start, stop), tokens = part, self._tokens
        if not frame.closed or frame.trailer.strip() or not tokens.are_apart:
            return False
        if not text.endswith(frame.eot + frame.trailer, start, stop):
            return False
        return tokens.begin in ("", tokens.end) or text.find(tokens.begin, start, stop) < 0

    def _with_next_stop(self, text: str, end: int, block_end: int) -> int:
        """Rule 4."""
        if text[end:block_end].strip():
            return end
        token = self._tokens.one.match(text, behind_blanks(text, block_end))
        if token is None:
            return end
        if self._signs.stops:
            return token.end() if token.group() in self._signs.stops else end
        return end if token.group() == self._tokens.begin else token.end()

    def _ends_behind(self, text: str, block_end: int) -> bool:
        """Returns whether the next block begins with a token that neither opens a turn nor stands inside of one."""
        token = self._tokens.one.match(text, behind_blanks(text, block_end))
        return token is not None and token.group() not in self._signs.opening | self._signs.inner

    def _with_end_of_sequence(self, text: str, end: int, example: ChatExample, place: int) -> int:
        """Rule 5."""
        eos = self._tokens.end
        if place != len(example.messages) - 1 or not eos or not self._tokens.run.fullmatch(text, end):
            return end
        last = text.rfind(eos, end)
        return last + len(eos) if last >= 0 else end
