"""Keys of forgotten groups, against a set of the keys themselves."""

from __future__ import annotations

import sys

from raysvc.actors.rollouts.forgotten_keys import LEAST_PACKED, ForgottenKeys, Key


def test_what_was_added_is_in_it_and_nothing_else_packed_or_not() -> None:
    keys, known = ForgottenKeys(), set[Key]()
    asked = [
        (uid, attempt) for number in range(3000) for uid in (f"g{number}", f"ä{number}") for attempt in (0, 1)
    ]
    for number in range(0, 3000, 50):
        fresh = [(f"g{each}", each % 2) for each in range(number, number + 50)]
        keys.add(fresh)
        known.update(fresh)
        if number % 500 == 0:
            assert {key for key in asked if key in keys} == known
    assert {key for key in asked if key in keys} == known
    assert len(known) > 2 * LEAST_PACKED, "some are packed"
    assert (bool(keys), bool(ForgottenKeys())) == (True, False)


def test_a_key_takes_16_bytes_once_it_is_packed() -> None:
    keys, count = ForgottenKeys(), 50_000
    keys.add((f"a-name-as-long-as-a-producer-likes/{number}", 0) for number in range(count))
    assert sys.getsizeof(keys._packed) < 16 * count + 200
    assert not keys._newest
