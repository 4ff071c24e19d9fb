"""The learner's end of a rollout server: it may do what producers do, and says which weights train.

Always true:
- what is told here is known after every commit that was made before it, and not earlier.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from raysvc.actors.server.spec import ServeSpec
from raysvc.client.arguments import integer, mapping, optional_text
from raysvc.client.connection import Connection
from raysvc.client.rl.rollouts import Rollouts


class LearnerRollouts(Rollouts):
    """`BatchClient.rollouts`.

    Args:
        connection: the lease.
        next_step: returns the next step that the learner trains.
    """

    def __init__(self, connection: Connection, next_step: Callable[[], int]) -> None:
        spec_json, _ = connection.get(connection.control("spec_json"))
        spec = ServeSpec.model_validate_json(spec_json)
        assert spec.rollouts is not None, "a rollout server has a spec of rollouts"
        super().__init__(connection.lease.name, connection.server, ttl_s=spec.rollouts.producer_ttl_s)
        self._connection, self._next_step, self._journal = connection, next_step, str(spec.journal)

    def set_weight_version(self, version: int) -> None:
        """Say which weights train from now on.

        Raises:
            ConfigError: it would make rows of a step that is planned already too old.
        """
        told = integer("set_weight_version(version)", version, 0)
        self._connection.after_commits("set_weight_version", told, self._next_step())

    def publish(self, version: int, state_dict: Mapping[str, Any], *, folder: str | None = None) -> None:
        """Give weights to the producers (`Rollouts.weights`), and say that they train from now on, as `set_weight_version` does.

        Call it before the first step, too, and after a rewind: producers take what was published last, whatever its version.

        Args:
            version: of the weights.
            state_dict: name -> tensor, on any device; it is copied to the CPU.
            folder: one that trainer and producers see, or fsspec URL: the weights lie there as safetensors, the newest two of this run and
                those that a producer reads, and a server that was killed knows them again. None: in Ray's object store, where they are gone
                with the server until the next call.

        Raises:
            ConfigError: as `set_weight_version`, or a value is no tensor.
        """
        import numpy as np
        import ray

        from raysvc.rl.weights import blob_of, remove_older, run_of, write_blob

        told = integer("publish(version)", version, 0)
        optional_text("publish(folder)", folder)
        blob = blob_of(mapping("publish(state_dict)", state_dict))
        if folder is None:
            ref = ray.put(np.frombuffer(blob, np.uint8))
            self._connection.after_commits("publish", told, ref, uuid.uuid4().hex, self._next_step())
            return
        run = run_of(self._journal)
        root, name = write_blob(folder, run, told, blob)
        in_use = self._connection.after_commits("publish", told, root, name, self._next_step())
        if in_use is not None:
            remove_older(root, run, in_use)

    def delete_before(self, step: int) -> int:
        """Let the server remove what only steps below `step` need; returns how many files went.

        Call it when the checkpoints that go back further are gone. A rewind or a state below `step` is refused from
        then on.

        Raises:
            StepOutOfOrder: a step below is not committed.
        """
        return int(self._connection.after_commits("delete_before", integer("delete_before(step)", step, 0)))
