"""Ranks that meet at a store, each in a thread of its own, and strangers among them."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, unlisted
from torch.distributed.distributed_c10d import Store

from clusterddp.distributed import rendezvous, tcp_store
from clusterddp.distributed.rendezvous import Identity, RunStore, agree, open_store
from clusterddp.errors import TrainingError
from clusterddp.ranks.dist_env import DistEnv

PATIENCE = 60
with tcp_store.without_name_servers():  # one may take seconds where the tests run
    tcp_store._have_torch_ask_nobody()


def env(rank: int, world_size: int, port: int, address: str = "127.0.0.1") -> DistEnv:
    return DistEnv.from_environ(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
    )


def meet(
    ranks: list[DistEnv], decide: Callable[[list[dict[str, Any]]], dict[str, Any]],
    timeout: float = PATIENCE, environ: Mapping[int, Mapping[str, str]] | None = None,
    decision_seconds: float = PATIENCE,
) -> list[Any]:  # fmt: skip
    """Each rank in a thread of its own; what each of them got, or the error it raised.

    timeout: of the agreement; the store has its time to answer.
    """
    results: list[Any] = [None] * len(ranks)
    stores = []

    def run(position: int) -> None:
        ours = ranks[position]
        try:
            store = open_store(ours, (environ or {}).get(position, {}), PATIENCE)
            stores.append(store)
            hello = {"rank": ours.rank, "world_size": ours.world_size}
            results[position] = agree(store, ours, hello, decide, timeout, decision_seconds)
            rendezvous.leave(store, ours)
        except TrainingError as error:
            results[position] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    return results


def count(hellos: list[dict[str, Any]]) -> dict[str, Any]:
    return {"ranks": [hello["rank"] for hello in hellos]}


NONCE = "5f0c" * 8
RUN_A = {"SLURM_JOB_ID": "17", "CLUSTERDDP_NONCE": NONCE}
RUN_B = {"SLURM_JOB_ID": "18", "CLUSTERDDP_NONCE": "77ab" * 8}
# Another attempt of A: were its nonce ever the same, its messages would still not pass.
RUN_A_AGAIN = {**RUN_A, "SLURM_RESTART_COUNT": "1"}
UNPROVEN = {name: value for name, value in RUN_A.items() if name != "CLUSTERDDP_NONCE"}


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start `call` in a thread; what is returned waits for it and gives what it returned."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(3 * PATIENCE)
        return results[0]

    return join


def client(port: int) -> Any:
    """Anybody who reaches the port: torch asks for no credential."""
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def keys_of(environ: Mapping[str, str], store: Store, round: int = 0) -> Any:
    """The part of the store in which the ranks with this environment write."""
    return RunStore(store, replace(Identity.from_environ(environ), round=round))
