"""An order by a function of the user: the page's examples, what identifies it, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysvc.errors import ConfigError, PlanError, StateMismatch
from raysvc.job.config import PlanConfig
from raysvc.plan.entry_plan import eval_plan
from raysvc.plan.groups import Groups
from raysvc.plan.plan import Plan
from raysvc.plan.plan_rows import HeldRows
from raysvc.plan.state import PlanState

PAGE = Path(__file__).parents[2] / "docs" / "concepts.md"
LENGTHS = np.random.default_rng(0).integers(3, 90, 60).astype(np.int32)
DOMAINS = np.array(["math", "math", "math", "code", "chat", "math"] * 10)
Module = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """Writes a module and returns its name, a new one each time."""
    import sys

    monkeypatch.syspath_prepend(str(tmp_path))
    names = [f"orders_of_{tmp_path.name}_{number}" for number in range(9)]
    unused = iter(names)

    def write(code: str) -> str:
        name = next(unused)
        (tmp_path / f"{name}.py").write_text(code)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


def plan_of(order: str | None, uids: list[str] | None = None, **more: Any) -> Plan:
    config = PlanConfig(batch_size=6, mini_batch_size=6, epochs=2, order=order, **more)
    groups = Groups.singles(len(LENGTHS)) if uids is None else Groups.of_uids(uids)
    return Plan(config, HeldRows(LENGTHS, groups, row_values={"domain": DOMAINS}.__getitem__))


def rows_of(plan: Plan, step: int) -> list[int]:
    return [row for mini in plan.step(step, 2).mini_batches for row in mini.row_ids.tolist()]


def of_the_page() -> str:
    return str(
        re.search(r"```python\n(import numpy as np\n\n\ndef curriculum.+?)```", PAGE.read_text(), re.S)[1]
    )  # type: ignore[index]


def test_the_curriculum_of_the_page_begins_with_short_rows_and_has_each_once(module: Module) -> None:
    plan = plan_of(f"{module(of_the_page())}:curriculum", seed=3)
    for epoch in (0, 1):
        steps = [rows_of(plan, 10 * epoch + step) for step in range(10)]
        means = [LENGTHS[rows].mean() for rows in steps]
        assert means[0] < means[4] < means[9]
        assert sorted(chain.from_iterable(steps)) == list(range(60))
    assert rows_of(plan, 0) != rows_of(plan, 10), "epochs differ"


def test_the_stratified_order_of_the_page_has_every_domain_in_its_share_in_every_step(module: Module) -> None:
    plan = plan_of(f"{module(of_the_page())}:stratified")
    for step in range(20):
        counts = {
            name: int((DOMAINS[rows_of(plan, step)] == name).sum()) for name in ("math", "code", "chat")
        }
        assert 3 <= counts["math"] <= 5, counts
        assert counts["code"] <= 2, counts
        assert counts["chat"] <= 2, counts
    assert sorted(chain.from_iterable(rows_of(plan, step) for step in range(10))) == list(range(60))


def test_a_group_has_the_tokens_of_its_rows_and_the_column_of_its_first(module: Module) -> None:
    name = module(
        "def order(epoch, rows):\n    seen.append(rows)\n    return list(range(rows.num_groups))\nseen = []"
    )
    uids = [f"u{row // 3}" for row in range(60)]
    plan = plan_of(f"{name}:order", uids)
    import sys

    assert plan.identity["num_groups"] == 20
    [rows, *_] = sys.modules[name].seen
    assert rows.lengths.tolist() == LENGTHS.reshape(20, 3).sum(1).tolist()
    assert rows.column("domain").tolist() == DOMAINS[::3].tolist()
    assert rows_of(plan, 0) == list(range(18))


def test_a_state_of_another_order_is_refused_by_name(module: Module) -> None:
    code = "import numpy as np\ndef order(epoch, rows):\n    return np.roll(np.arange(rows.num_groups), {})"
    one, other = (plan_of(f"{module(code.format(shift))}:order") for shift in (1, 2))
    state = PlanState.from_json(PlanState.of(one, 2).to_json())
    assert state.check(one) == ()
    with pytest.raises(StateMismatch, match=r"order was \{'name': .*'first_epoch'.*\} and is \{'name'"):
        state.check(other)
    with pytest.raises(StateMismatch, match=r"order was \{.*\} and is None"):
        state.check(plan_of(None))
    assert plan_of(None).identity.keys() & {"order"} == set(), "plans without one keep their hash"


def test_a_function_that_changed_under_its_name_is_another_plan(module: Module, tmp_path: Path) -> None:
    import importlib
    import sys

    name = module("def order(epoch, rows):\n    return list(range(rows.num_groups))")
    state = PlanState.of(plan_of(f"{name}:order"), 0)
    (tmp_path / f"{name}.py").write_text(
        "def order(epoch, rows):\n    return list(range(rows.num_groups))[::-1]"
    )
    del sys.modules[name]
    importlib.invalidate_caches()
    with pytest.raises(StateMismatch, match="order was"):
        state.check(plan_of(f"{name}:order"))


LATER_EPOCHS_ROLL = (
    "import numpy as np\ndef order(epoch, rows):\n    return np.roll(np.arange(rows.num_groups), {} * epoch)"
)


def test_a_function_that_changed_for_the_epoch_of_the_state_is_refused_with_that_epoch(
    module: Module, tmp_path: Path
) -> None:
    import importlib
    import sys

    name = module(LATER_EPOCHS_ROLL.format(1))
    plan = plan_of(f"{name}:order")
    saved = [json.loads(json.dumps(PlanState.of(plan, step).to_json())) for step in (4, 9, 14, 19)]
    (tmp_path / f"{name}.py").write_text(LATER_EPOCHS_ROLL.format(22))
    del sys.modules[name]
    importlib.invalidate_caches()
    changed = plan_of(f"{name}:order")
    assert changed.hash == plan.hash, "epoch 0 is the same"
    assert rows_of(changed, 15) != rows_of(plan, 15)
    first, before_epoch_1, in_epoch_1, done = map(PlanState.from_json, saved)
    assert first.check(changed) == (), "what is left of epoch 0 is the same"
    assert done.check(changed) == ()
    for state in (before_epoch_1, in_epoch_1):
        assert state.check(plan) == ()
        with pytest.raises(StateMismatch, match=f"the order of epoch 1 by {name}:order was .* and is"):
            state.check(changed)


def test_a_client_refuses_two_orders_of_an_epoch_that_processes_made() -> None:
    from types import SimpleNamespace

    from raysvc.client.connection import Connection

    connection: Any = SimpleNamespace(
        orders={}, lease=SimpleNamespace(identity={"order": {"name": "mine:order"}})
    )
    for epoch, digest in ((0, "a"), (1, "b"), (1, "b"), (2, None)):
        Connection.note_order(connection, SimpleNamespace(epoch=epoch, order=digest))  # type: ignore[arg-type]
    assert connection.orders == {0: "a", 1: "b"}
    with pytest.raises(PlanError, match="mine:order returned another order of epoch 1 in another process"):
        Connection.note_order(connection, SimpleNamespace(epoch=1, order="c"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("[0] * rows.num_groups", "left 59 of 60 groups out of epoch 0"),
        ("list(range(59))", r"returned int64 \[59\] for epoch 0"),
        ("[0.0] * 60", r"returned float64 \[60\]"),
        ("[-1, *range(59)]", "left 1 of 60 groups out"),
        ("list(range(60)) if not epoch else [0] * 60", "left 59 of 60 groups out of epoch 1"),
        ("iter(range(60))", "returned range_iterator for epoch 0"),
        ("[[1], [2, 3]]", "raised ValueError for epoch 0: .*inhomogeneous"),
        (
            "1 // (1 - epoch) * list(range(60))",
            r"raised ZeroDivisionError for epoch 1: .* \(orders_of.*, line 2\)",
        ),
        ("rows.column('nope')", r"raised KeyError for epoch 0: 'nope' \(orders_of.*, line 2\)"),
    ],
)
def test_what_is_no_order_is_refused_with_its_epoch(module: Module, body: str, what: str) -> None:
    name = module(f"def order(epoch, rows):\n    return {body}")
    with pytest.raises(PlanError, match=what):
        plan_of(f"{name}:order").step(10, 2)


def test_an_order_that_changes_when_it_is_asked_again_is_refused(module: Module) -> None:
    unseeded = module("import random\ndef order(epoch, rows):\n    return random.sample(range(60), 60)")
    with pytest.raises(PlanError, match=r"returned two orders for epoch 0; draw from rows.seed and epoch"):
        plan_of(f"{unseeded}:order")
    later = "import random\ndef order(epoch, rows):\n    return random.sample(range(60), 60) if epoch == 1 else list(range(60))"
    plan = plan_of(f"{module(later)}:order")
    plan.order.at(1, np.arange(3))
    plan.order.at(2, np.arange(3))
    plan.order.at(3, np.arange(3))
    with pytest.raises(PlanError, match="returned two orders for epoch 1"):
        plan.order.at(1, np.arange(3))


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("def order(:", "SyntaxError: invalid syntax"),
        ("\nundefined", r"NameError: name 'undefined' is not defined \(orders_of.*, line 2\)"),
    ],
)
def test_a_module_that_does_not_load_is_refused_with_its_line(module: Module, code: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be imported: {what}"):
        plan_of(f"{module(code)}:order")


def test_a_function_of_other_arguments_is_refused(module: Module) -> None:
    with pytest.raises(PlanError, match=r"raised TypeError for epoch 0: .*2 were given; correct"):
        plan_of(f"{module('def order(epoch): pass')}:order")


def test_a_name_that_is_no_function_is_refused(module: Module) -> None:
    name = module("order = 3")
    with pytest.raises(ConfigError, match="cannot be called"):
        plan_of(f"{name}:order")
    with pytest.raises(ConfigError, match=r"cannot be imported: .*make it importable where the server runs"):
        plan_of(f"{name}:other")
    with pytest.raises(ConfigError, match="No module named 'not_there'"):
        plan_of("not_there:order")
    with pytest.raises(ValueError, match="order"):
        PlanConfig(batch_size=2, order="no colon")
    with pytest.raises(ValueError, match="one of groups"):
        PlanConfig(batch_size=2, order="a:b", layout="stream", window=8)


def test_an_eval_keeps_the_order_of_its_entry() -> None:
    assert eval_plan(PlanConfig(batch_size=2, order="a:b"), 4).order is None


def test_rollouts_come_in_the_order_in_which_they_are_complete(tmp_path: Path) -> None:
    import raysvc

    with pytest.raises(ConfigError, match=r"plan\.order"):
        raysvc.serve_rollouts(
            "x", run_dir=str(tmp_path), pad_token_id=0, plan={"batch_size": 2, "order": "a:b"}
        )
