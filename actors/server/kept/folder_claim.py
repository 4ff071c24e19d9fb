"""The claim of a server on its folder, with what Ray knows about the owner before it."""

from __future__ import annotations

from contextlib import suppress

from raysvc.actors.server.spec import ServeSpec
from raysvc.cache.store.claim import Claim, Owner
from raysvc.cache.store.open import open_store
from raysvc.errors import RaysvcError
from raysvc.team import ray_namespace


def claim_of(spec: ServeSpec, incarnation_id: str) -> Claim | None:
    """The claim on the journal of a spec, taken if that is possible now; None: it keeps none.

    A process that took it later, after it had slept, would take it from the one that Ray started in its place. Why it cannot be taken is
    told to whoever asks for what is in the folder.
    """
    if spec.journal is None:
        return None
    owner = Owner("server", spec.name, ray_namespace(), incarnation_id, _cluster())
    remedy = "end that one (`raysvc stop`, or kill the process), or give another run_dir"
    claim = Claim(open_store(spec.journal, spec.storage_options), owner, _is_served, remedy)
    with suppress(RaysvcError, OSError):
        claim.take()
    return claim


def _cluster() -> str:
    """An id of this process's Ray cluster; "" outside of one, or where Ray does not say it."""
    import ray

    if not ray.is_initialized():
        return ""
    client = getattr(ray._private.worker.global_worker, "gcs_client", None)
    found = getattr(client, "cluster_id", None)
    return "" if found is None else found.hex()


def _is_served(owner: Owner) -> bool:
    import ray

    named = {"name": owner.name, "namespace": owner.namespace}
    return named in ray.util.list_named_actors(all_namespaces=True)
