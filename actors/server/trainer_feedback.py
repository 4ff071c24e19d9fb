"""Takes what the trainer of a server says back: decisions about the steps to come, and outcomes of rows. No Ray.

Always true:
- a decision is on disk before a step follows it, and before the call returns;
- a call that comes again is answered as the first time, and so is a decision that a resumed trainer makes again;
- no decision changes a step that was handed out to the trainer that makes it.
"""

from __future__ import annotations

import logging
import threading

from raysvc.actors.server.entry_stream import EntryStream, feedback_log
from raysvc.actors.server.spec import ServeSpec
from raysvc.cache.store.claim import Claim
from raysvc.errors import ServerError, StepOutOfOrder
from raysvc.feedback.decision import Decision, decision_of
from raysvc.feedback.feedback_log import FeedbackLog
from raysvc.feedback.request import Request, RowOutcomes

log = logging.getLogger(__name__)


class TrainerFeedback:
    """See the module.

    Args:
        spec: of the server.
        entry: what is trained; None: rollouts.
        claim: of the journal's folder.
    """

    def __init__(self, spec: ServeSpec, entry: EntryStream | None, claim: Claim | None = None) -> None:
        self._spec, self._entry = spec, entry
        self._log = feedback_log(spec.journal, spec.storage_options, claim) if spec.journal else None
        self._lock = threading.Lock()  # one decision, or one report, at a time

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Those made so far, in their order."""
        return self._entry.decisions if self._entry is not None else ()

    def read_again(self) -> None:
        """Follow what is in the run folder, which may have been moved away since."""
        if self._entry is not None and self._log is not None:
            with self._lock:
                self._entry.follow(self._log.decisions())

    def decide(self, request: Request, asked: int) -> Decision:
        """Keep a decision, and have the entry follow it; one that is kept already is given back.

        Args:
            asked: the steps below were handed out.

        Raises:
            PlanError: the plan cannot follow it.
            StepOutOfOrder: its step was handed out, or is not there.
            ServerError: nobody may decide here, or another server writes into the run folder.
        """
        name, (entry, kept) = self._spec.name, self._of_one_trainer()
        with self._lock:
            known, from_step = entry.decisions, asked if request.from_step is None else request.from_step
            for one in known:
                if one.call == request.call:
                    return one
            if not 0 <= from_step < entry.schedule.num_steps:
                raise StepOutOfOrder(name, from_step, f"a step below {entry.schedule.num_steps}")
            made = decision_of(request, from_step, *entry.decides())
            equal = [one for one in known if one.mark == made.mark]
            newest = [one.mark for one in known if one.from_step == from_step and one.counts][-1:]
            if equal and (from_step < asked or not made.counts or newest == [made.mark]):
                return equal[-1]
            if from_step < asked:
                expected = f"step {asked} or a later one, because those below were handed out"
                raise StepOutOfOrder(name, from_step, expected)
            if not kept.add(len(known), made):
                what = "another server wrote a decision into its run folder"
                raise ServerError(f"server.name {name!r}", what, "end one of the two, and serve again")
            entry.follow((*known, made))
        log.info("decided name=%s from_step=%d number=%d", name, from_step, len(known))
        return made

    def report(self, outcomes: RowOutcomes) -> None:
        """Keep outcomes of whole steps; on disk when it returns.

        Raises:
            ServerError: nobody may report here.
        """
        entry, kept = self._of_one_trainer()
        with self._lock:
            kept.report(outcomes, len(entry.decisions))

    def outcomes(self, first: int, stop: int) -> RowOutcomes:
        """Returns what was reported of the steps `first` to `stop - 1`.

        Raises:
            ServerError: nobody may report here.
        """
        entry, kept = self._of_one_trainer()
        return kept.outcomes(first, stop, entry.decisions)

    def _of_one_trainer(self) -> tuple[EntryStream, FeedbackLog]:
        what = remedy = ""
        if self._entry is None:
            what, remedy = "serves rollouts", "change what is put"
        elif self._spec.share != "none":
            what, remedy = (
                "has several readers, and a decision would be for all",
                "serve with server.share=none",
            )
        elif self._log is None:
            what, remedy = "keeps no journal", "serve it with a run folder"
        if self._entry is None or self._log is None or what:
            raise ServerError(f"server.name {self._spec.name!r}", what, remedy)
        return self._entry, self._log
