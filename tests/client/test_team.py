"""Several teams and owners on one cluster: none stops or fences another's by accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raysvc.errors import ConfigError, FencedError, ServerError
from raysvc.team import own_name, ray_namespace, refuse_foreign, team_of

Served = Callable[..., Any]


def test_a_team_has_a_namespace_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYSVC_TEAM", raising=False)
    assert (ray_namespace(), team_of("raysvc")) == ("raysvc", "")
    monkeypatch.setenv("RAYSVC_TEAM", "search")
    assert (ray_namespace(), team_of("raysvc.search")) == ("raysvc.search", "search")
    assert team_of("raysvc-builds") is None, "builds are shared by all"
    monkeypatch.setenv("RAYSVC_TEAM", "a b")
    with pytest.raises(ConfigError, match=r"RAYSVC_TEAM: 'a b' is not a name; use letters"):
        ray_namespace()


def test_an_owner_may_touch_what_is_its_own_and_what_says_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSVC_OWNER", "alice")
    assert own_name() == "alice"
    refuse_foreign("sft", "alice", "--force")
    refuse_foreign("sft", "", "--force")  # a server of a version that does not say
    with pytest.raises(
        ServerError, match="belongs to bob, and you are alice; ask bob first; --force does it"
    ):
        refuse_foreign("sft", "bob", "--force")


@pytest.mark.ray
def test_servers_of_teams_do_not_meet_and_the_error_says_which_team_has_the_name(
    serve: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    import raysvc
    from raysvc.inspect import servers

    serve("shared")
    monkeypatch.setenv("RAYSVC_TEAM", "search")
    assert "shared" not in [facts["name"] for facts in servers.list_servers()]
    with pytest.raises(ServerError, match="is not served"):
        servers.stop("shared", force=True)
    serve("of-search")
    monkeypatch.delenv("RAYSVC_TEAM")
    with pytest.raises(ServerError, match="set RAYSVC_TEAM=search"):
        raysvc.attach("of-search")
    monkeypatch.setenv("RAYSVC_TEAM", "search")
    servers.stop("of-search")


@pytest.mark.ray
def test_a_server_says_the_team_that_its_metrics_carry(
    serve: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysvc.inspect import servers

    monkeypatch.setenv("RAYSVC_TEAM", "search")
    serve("of-search")
    monkeypatch.setenv("RAYSVC_TEAM", "ads")
    serve("of-search")
    assert [facts["team"] for facts in servers.list_servers()] == ["ads"]
    servers.stop("of-search")
    monkeypatch.setenv("RAYSVC_TEAM", "search")
    assert [facts["team"] for facts in servers.list_servers()] == ["search"]
    servers.stop("of-search")


@pytest.mark.ray
def test_who_did_not_start_a_server_neither_stops_nor_fences_it_unless_forced(
    serve: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    import raysvc
    from raysvc.inspect import servers

    monkeypatch.setenv("RAYSVC_OWNER", "alice")
    serve("hers")
    (facts,) = [facts for facts in servers.list_servers() if facts["name"] == "hers"]
    assert facts["owner"] == "alice"
    first = raysvc.attach("hers")
    monkeypatch.setenv("RAYSVC_OWNER", "bob")
    for touch in (
        lambda: servers.stop("hers"),
        lambda: servers.restart("hers"),
        lambda: raysvc.attach("hers", takeover=True),
    ):
        with pytest.raises(ServerError, match="belongs to alice, and you are bob"):
            touch()
    assert next(iter(first)).index == 0
    raysvc.attach("hers", takeover="force").detach()
    with pytest.raises(FencedError):
        first.detach()
    servers.stop("hers", force=True)
    with pytest.raises(ServerError, match="is not served"):
        raysvc.attach("hers")
