"""Which seat a process has: from coordinates, from torch's meshes, and from what launchers say."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from raysvc.actors.mesh import Mesh, MeshRank
from raysvc.client.seats.launched import MEGATRON, launched_rank
from raysvc.client.seats.own_seat import own_seat, seat_asked_for
from raysvc.errors import ConfigError

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")
SIZES = ("DP_REPLICATE", "DP_SHARD", "CP", "SP", "TP")


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHERS, *(f"PARALLELISM_CONFIG_{size}_SIZE" for size in SIZES)):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def process_group(rank: int, world: int) -> Iterator[None]:
    """A process group in which nobody else is: torch's own, for tests."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_coordinates_name_every_seat_once_and_an_axis_of_one_may_be_left_out() -> None:
    mesh = Mesh(dp=2, tp=2, cp=3)
    seats = [
        own_seat(mesh, {"dp": dp, "cp": cp, "tp": tp})
        for dp, cp, tp in itertools.product(range(2), range(3), range(2))
    ]
    assert [seat.number for seat in seats] == list(range(12))
    assert seats[-1].coords == MeshRank(dp=1, pp=0, cp=2, tp=1)


@pytest.mark.parametrize(
    ("coords", "said"),
    [
        ({"dp": 0}, r"attach_rank\(coords\): lacks tp, whose size is 2"),
        ({"dp": 0, "tp": 2}, r"attach_rank\(coords\['tp'\]\): 2 must be in \[0, 2\)"),
        ({"dp": 0, "tp": True}, "True is not an integer"),
        ({"dp": 0, "tp": 0, "ep": 0}, "has no axis 'ep'"),
        (None, "knows neither a process group nor RANK"),
    ],
)
def test_coordinates_that_are_wrong_are_named(coords: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        own_seat(Mesh(dp=2, tp=2), coords)


@pytest.mark.parametrize("sizes", [{"dp": 0}, {"dp": 2, "tp": -1}, {"dp": 2.0}, {"dp": True}])
def test_a_size_that_is_no_positive_integer_is_refused(sizes: Any) -> None:
    with pytest.raises(ConfigError, match="no positive integer"):
        Mesh(**sizes)


@pytest.mark.parametrize(
    "given",
    [
        {"mesh": None, "coords": {"dp": 0}},
        {"mesh": Mesh(2), "rank": 0},
        {"mesh": Mesh(2), "dp_size": 2},
        {"mesh": "launched", "coords": {"dp": 0}},
        {"mesh": 4, "coords": None},
    ],
)
def test_arguments_that_exclude_each_other_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"attach_rank\((mesh|coords)\)"):
        seat_asked_for(**{"coords": None, "dp_size": None, "rank": None, **given})


def test_a_rank_is_the_seat_of_a_mesh_of_dp_alone() -> None:
    asked = seat_asked_for(None, None, 4, 3)
    assert (asked.mesh, asked.number, asked.mesh.name(3)) == (Mesh(4), 3, "rank 3")


def test_a_mesh_of_another_size_than_the_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"\(dp=2, tp=2\) has 4 processes, and this launch has 8"):
        own_seat(Mesh(dp=2, tp=2), {"dp": 0, "tp": 0})
    assert own_seat(Mesh(dp=4, tp=2), None).coords == MeshRank(dp=2, pp=0, cp=0, tp=1)
    with pytest.raises(ConfigError, match="order pipeline stages and data-parallel ranks differently"):
        own_seat(Mesh(dp=2, pp=2, tp=2), None)


NAMES: list[tuple[tuple[str, ...], tuple[int, ...]]] = [
    (("dp",), (4,)),
    (("ddp", "fsdp"), (2, 4)),  # verl
    (("dp", "sp"), (2, 4)),  # Ulysses
    (("data_parallel", "tensor_parallel"), (4, 2)),  # Lightning
    (("pp", "dp_replicate", "dp_shard", "cp", "tp"), (2, 2, 1, 2, 2)),  # torchtitan
    (("dp_replicate", "dp_shard", "cp", "tp"), (2, 2, 2, 2)),
]


@pytest.mark.parametrize(("names", "sizes"), NAMES)
def test_a_mesh_of_torch_gives_every_process_its_own_seat_and_peers_one_dp_rank(
    names: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    world = math.prod(sizes)
    dp_of, numbers = {}, set()
    for rank in range(world):
        with process_group(rank, world):
            seat = own_seat(init_device_mesh("cpu", sizes, mesh_dim_names=names), None)
        assert seat.mesh.size == world
        numbers.add(seat.number)
        place = dict(zip(names, _place(rank, sizes), strict=True))
        own = tuple(at for name, at in place.items() if name.startswith(("d", "f")))
        assert dp_of.setdefault(own, seat.coords.dp) == seat.coords.dp, (
            "one dp rank for those that differ elsewhere"
        )
    assert numbers == set(range(world))
    assert len(set(dp_of.values())) == len(dp_of) == seat.mesh.dp


def _place(rank: int, sizes: tuple[int, ...]) -> list[int]:
    """Coordinates of a rank where the last dimension is the fastest, as numpy numbers them."""
    import numpy as np

    return [int(at) for at in np.unravel_index(rank, sizes)]


def test_a_part_of_the_mesh_and_a_dimension_of_another_name_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    with process_group(0, 8):
        whole = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(ConfigError, match="has 4 processes, and this launch has 8"):
            own_seat(whole["dp"], None)
        with pytest.raises(ConfigError, match="a dimension 'ep'"):
            own_seat(init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "ep")), None)
        with pytest.raises(ConfigError, match="names no dimension"):
            own_seat(init_device_mesh("cpu", (8,)), None)


@pytest.mark.parametrize("sizes", [(1, 2, 2, 1, 2), (2, 2, 1, 1, 2), (1, 2, 1, 1, 4)])
def test_the_environment_of_accelerate_means_the_mesh_that_accelerate_builds(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = pytest.importorskip("accelerate.parallelism_config")
    for name, size in zip(SIZES, sizes, strict=True):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", str(size))
    for rank in range(8):
        with process_group(rank, 8):
            theirs = own_seat(accelerate.ParallelismConfig().build_device_mesh("cpu"), None)
            assert own_seat("launched", None) == theirs


def test_torchrun_alone_means_ranks_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="knows neither a process group nor WORLD_SIZE"):
        own_seat("launched", None)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert own_seat("launched", None) == (Mesh(3), 2)
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(ConfigError, match=r"\(dp=1, tp=2\) has 2 processes, and this launch has 3"):
        own_seat("launched", None)
    monkeypatch.setenv("WORLD_SIZE", "three")
    with pytest.raises(ConfigError, match="environment WORLD_SIZE: 'three' is not a number"):
        launched_rank()


TITAN: list[dict[str, int]] = [
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
    {"dp_shard": 2, "tp": 2, "pp": 2},
    {"dp_shard": 1, "cp": 2, "tp": 2, "pp": 2},
]


@pytest.mark.parametrize("sizes", TITAN)
def test_the_dimensions_of_torchtitan_mean_the_places_on_its_meshes(sizes: dict[str, int]) -> None:
    """Against its own loading mesh, and against the mesh that it shards parameters on."""
    titan = pytest.importorskip("torchtitan.distributed.parallel_dims", reason="torchtitan is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(titan, "device_type", "cpu")
        for rank in range(8):
            with process_group(rank, 8):
                every = {"dp_replicate": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, **sizes}
                dims = titan.ParallelDims(**every, world_size=8)
                seat = own_seat(dims, None)
                for names in (["pp", "batch", "cp", "tp"], ["pp", "dp_replicate", "dp_shard", "cp", "tp"]):
                    assert seat == own_seat(dims.get_optional_mesh(names, include_singleton_axes=True), None)
                for axis, name in {"dp": "batch", "cp": "cp", "tp": "tp", "pp": "pp"}.items():
                    own = dims.get_optional_mesh(name, include_singleton_axes=True)
                    assert getattr(seat.coords, axis) == own.get_local_rank()
                    assert getattr(seat.mesh, axis) == own.size()


def test_dimensions_of_torchtitan_count_stages_slowest_and_another_launch_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dims: Any = SimpleNamespace(dp_replicate=2, dp_shard=2, cp=1, tp=2, pp=2)
    with pytest.raises(ConfigError, match="knows neither a process group nor RANK"):
        own_seat(dims, None)
    monkeypatch.setenv("RANK", "13")
    assert own_seat(dims, None).coords == MeshRank(dp=2, pp=1, cp=0, tp=1)
    monkeypatch.setenv("WORLD_SIZE", "32")
    with pytest.raises(ConfigError, match=r"\(dp=4, tp=2, pp=2\) has 16 processes, and this launch has 32"):
        own_seat(dims, None)
    with pytest.raises(ConfigError, match="knows them"):
        own_seat(dims, {"dp": 0})


def test_a_mesh_whose_fsdp_may_hold_context_parallel_ranks_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    with process_group(0, 8):
        mesh = init_device_mesh("cpu", (1, 2, 4, 1), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
        with pytest.raises(ConfigError, match="give torchtitan's ParallelDims"):
            own_seat(mesh, None)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
def test_the_seats_of_megatrons_parallel_state_are_those_of_its_groups(order: str) -> None:
    """Against the ranks of its own groups."""
    state = pytest.importorskip(MEGATRON, reason="megatron-core is not installed")
    import torch.distributed as dist

    seats, groups = {}, {}
    for rank in range(16):
        with process_group(rank, 16):
            state.initialize_model_parallel(
                2, 2, context_parallel_size=2, order=order,
                expert_tensor_parallel_size=4, create_gloo_process_groups=False,
            )  # fmt: skip
            seats[rank] = own_seat("launched", None)
            names = ("data_parallel", "pipeline_model_parallel", "context_parallel", "tensor_model_parallel")
            groups[rank] = {
                axis: dist.get_process_group_ranks(getattr(state, f"get_{name}_group")())
                for axis, name in zip(("dp", "pp", "cp", "tp"), names, strict=True)
            }
            state.destroy_model_parallel()
    assert {seat.number for seat in seats.values()} == set(range(16))
    for rank, of_axis in groups.items():
        for axis, members in of_axis.items():
            for place, member in enumerate(members):
                assert seats[member].coords == seats[rank].coords._replace(**{axis: place})


def test_megatron_says_its_own_coordinates_whatever_the_order_of_ranks_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = {"data_parallel": (3, 1), "pipeline_model_parallel": (2, 1)}
    places |= {"context_parallel": (1, 0), "tensor_model_parallel": (4, 2)}

    def says(value: int) -> Callable[[], int]:
        return lambda: value

    state = SimpleNamespace(is_initialized=lambda: True)
    for name, (size, at) in places.items():
        setattr(state, f"get_{name}_world_size", says(size))
        setattr(state, f"get_{name}_rank", says(at))
    monkeypatch.setitem(sys.modules, MEGATRON, state)
    monkeypatch.setenv("RANK", "19")
    monkeypatch.setenv("WORLD_SIZE", "24")
    seat = own_seat("launched", None)
    assert seat.mesh == Mesh(dp=3, tp=4, pp=2)
    assert seat.coords == MeshRank(dp=1, pp=1, cp=0, tp=2)
