"""Makes shards beside the server: one process of a trainer's pool. No lease, and no state but what it has open.

Always true:
- what it returns is pure in (spec, step, roles, part), and has the bytes that the server itself would make;
- shards are returned by value: the trainer owns them, and Ray has another process make those that are lost;
- a step that the server did not admit is not made.
"""

from __future__ import annotations

from raysvc.actors.server.entry_stream import streams_of
from raysvc.actors.server.spec import AdmittedStep, Part, Role, ServeSpec, StepInfo
from raysvc.actors.server.step_maker import Made, make_and_tell
from raysvc.collate.reused_memory import keep_freed_memory
from raysvc.collate.shard import Wire
from raysvc.metrics import speak_for_server_of


class Collator:
    """See the module.

    Args:
        spec_json: the `ServeSpec` of the server.
    """

    def __init__(self, spec_json: str) -> None:
        self._spec = ServeSpec.model_validate_json(spec_json)
        speak_for_server_of(self._spec.team)
        keep_freed_memory()
        self._streams = streams_of(self._spec)

    def make(
        self, admitted: AdmittedStep, roles: tuple[Role, ...], part: Part, stream: str
    ) -> tuple[StepInfo | Wire, ...]:
        """An info of the step, then the shard of each mini-batch, as it travels (`Shard.to_wire`).

        Args:
            admitted: what the server's `admit` answered; its refusal is raised in place of this call.
            roles: that train on the step.
            part: whose shards.
            stream: of the step.

        Raises:
            StepFailed: the step could not be made; carries the cause.
        """
        source, step = self._streams[stream], admitted.step

        def make() -> Made:
            source.catch_up(admitted.decisions)
            return source.make(step, roles, part)

        info, shards = make_and_tell(self._spec.name, step, make)
        return (info, *(shard.to_wire() for shard in shards))
