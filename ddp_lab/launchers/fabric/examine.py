"""The sequence of `ddp-lab doctor --fabric` on a rank."""

import fcntl
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.launchers.fabric import measure, nvidia_smi
from ddp_lab.launchers.fabric.child import Child
from ddp_lab.launchers.fabric.clocks import BUSY_SECONDS, WAIT, check_clocks
from ddp_lab.launchers.fabric.interfaces import check_interface, list_interfaces
from ddp_lab.launchers.fabric.libraries import check_libraries
from ddp_lab.launchers.fabric.links import Place, link_of
from ddp_lab.launchers.fabric.locks import Lock, check_locks
from ddp_lab.launchers.fabric.measure import Exchange, Measure
from ddp_lab.launchers.fabric.nvidia_smi import Table
from ddp_lab.launchers.fabric.peer_access import check_peer_access, explain_relief
from ddp_lab.launchers.fabric.processors import check_processors
from ddp_lab.launchers.fabric.shared_memory import check_shared_memory
from ddp_lab.launchers.fabric.slow_pairs import Result, check_pairs, describe
from ddp_lab.launchers.fabric.transfer import keep_busy, measure_pair, open_device
from ddp_lab.launchers.preflight import Finding, check_network, check_shared
from ddp_lab.world.cpus import allowed_cpus, cpu_quota
from ddp_lab.world.runtime import Runtime


class Options(NamedTuple):
    """What the check needs to know of a launch, and what a test replaces.

    Attributes:
        runs_dir: the config's.
        workers: worker processes of each rank.
        measure: exchanges with another rank.
        lock: locks a file as fcntl.lockf.
    """

    runs_dir: Path
    workers: int
    measure: Measure = measure_pair
    lock: Lock = fcntl.lockf


def examine_fabric(runtime: Runtime, options: Options) -> None:
    """Print the findings about machines and links of a launch. Collective.

    The first rank of each machine prints what concerns its machine, and rank 0 everything else.

    Args:
        runtime: the ranks.
        options: of the launch.

    Raises:
        NodeError: the ranks do not reach their store.
        ConfigError: a pair of ranks cannot exchange.
    """
    check_network(runtime)
    child = Child(open_device, str(runtime.device))  # starts while the machine is examined
    try:
        results = examine_with(runtime, child, options)
    finally:
        child.end()
    runtime.gather_objects("end", "")  # rank 0 may keep the store, so it ends last
    failed = [result for result in results if result.rate is None]
    if failed:
        names = ", ".join(result.name for result in failed)
        raise ConfigError(
            f"ranks {names}: cannot exchange data, so a launch would hang or fail. The warnings "
            "above have the likely cause; NCCL_DEBUG=INFO shows what NCCL does"
        )


def examine_with(runtime: Runtime, child: Child, options: Options) -> list[Result]:
    """Print all findings and return what the pairs have come to. Collective."""
    table = nvidia_smi.links() if runtime.local_rank == 0 else {}
    is_first = runtime.local_rank == 0
    backend = "nccl" if runtime.device.type == "cuda" else "gloo"
    if is_first:
        show(check_peer_access(table, nvidia_smi.peer_states()), runtime)
        show(check_shared_memory(runtime.local_world_size), runtime)
        show(check_interface(backend, runtime.nodes, list_interfaces()), runtime)
        show(check_libraries(), runtime)
    processors = count_processors(runtime)
    clocks = check_clocks_under_load(runtime, child)
    if clocks is not None:
        show(check_processors(options.workers, runtime.local_world_size, processors), runtime)
        show(clocks, runtime)
    places = gather_places(runtime)
    tables = gather_tables(runtime, table)
    exchanges = measure.measure_rounds(runtime, child, options.measure)
    results = [result_of(exchange, places, tables) for exchange in exchanges]
    relieved = None
    if has_peer_access(runtime):
        local = [
            exchange
            for exchange, result in zip(exchanges, results, strict=True)
            if exchange.problem and result.link != "network"
        ]
        relieved = measure.works_without_peers(runtime, child, options.measure, local)
    if runtime.is_main:
        print_pairs(runtime.world_size, results, places, relieved)
    check_runs_dir(runtime, child, options)
    return results


def check_runs_dir(runtime: Runtime, child: Child, options: Options) -> None:
    """Print the findings about the directory of the runs. Collective.

    Raises:
        ConfigError: As of `check_shared`.
    """
    shared = check_shared(options.runs_dir, runtime)
    locks = check_locks(runtime, child, options.runs_dir, options.lock)
    for finding in (shared, locks) if runtime.is_main else ():
        print(finding, flush=True)


def show(finding: Finding, runtime: Runtime) -> None:
    """Print a finding about this machine, with its name if there are several."""
    if runtime.nodes > 1:
        finding = finding._replace(text=f"{socket.gethostname()}: {finding.text}")
    print(finding, flush=True)


def print_pairs(
    ranks: int, results: list[Result], places: list[Place], relieved: tuple[int, int] | None
) -> None:
    """Print a line for each pair, and the findings about all of them.

    Args:
        ranks: number of ranks.
        results: of the pairs.
        places: of the ranks.
        relieved: the pair that exchanges without peer-to-peer access only; None if there is none.
    """
    for result in sorted(results):
        print(describe(result, results), flush=True)
    if relieved is not None:
        print(explain_relief(relieved), flush=True)
    print(check_pairs(results, [place.host for place in places]), flush=True)
    missing = ranks * (ranks - 1) // 2 - len(results)
    if missing:
        print(
            Finding(
                "warning",
                "time",
                f"{count(missing, 'pair')} not measured, because the others took too long",
            ),
            flush=True,
        )


def result_of(exchange: Exchange, places: list[Place], tables: dict[int, Table]) -> Result:
    """Return an exchange with the kind of its link.

    Args:
        exchange: of a pair.
        places: of the ranks.
        tables: of `nvidia-smi topo -m`, by machine.
    """
    one, other = exchange.pair
    link = link_of(places[one], places[other], tables[places[one].node])
    return Result(exchange.pair, link, exchange.rate, exchange.problem, exchange.hung)


def has_peer_access(runtime: Runtime) -> bool:
    """Return whether NCCL may use direct access between the GPUs of a machine."""
    return runtime.device.type == "cuda"


def count_processors(runtime: Runtime) -> int:
    """Return how many processors the ranks of this machine may use together. Collective."""
    by_rank = runtime.gather_and_decide(
        "processors", [runtime.node, allowed_cpus()], lambda values: values
    )
    here = {each for node, processors in by_rank if node == runtime.node for each in processors}
    quota = cpu_quota()
    usable = len(here) if quota is None else min(len(here), int(quota))
    return max(1, usable)


def check_clocks_under_load(runtime: Runtime, child: Child) -> Finding | None:
    """Return a finding about the clocks of this machine's GPUs while the ranks keep them busy.

    Collective: the ranks begin at the same time.

    Returns:
        The finding on the first rank of each machine, and None on the others.
    """
    busy = None
    if runtime.device.type == "cuda":
        child.call(keep_busy, 0.0)  # the start of the process does not count
        runtime.gather_and_decide("busy", "", lambda values: "")
        busy = threading.Thread(target=partial(child.call, keep_busy, BUSY_SECONDS))
        busy.start()
        time.sleep(WAIT)
    finding = check_clocks() if runtime.local_rank == 0 else None
    if busy is not None:
        busy.join()
    return finding


def gather_places(runtime: Runtime) -> list[Place]:
    """Return where the ranks are, in order of rank. Collective."""
    place = place_of(runtime)
    by_rank = runtime.gather_and_decide("places", list(place), lambda values: values)
    return [Place(*values) for values in by_rank]


def gather_tables(runtime: Runtime, table: Table) -> dict[int, Table]:
    """Return the tables of all machines by their index. Collective.

    Args:
        runtime: the ranks.
        table: of `nvidia-smi topo -m`, on the first rank of each machine; {} on the others.
    """
    cells = [[*key, cell] for key, cell in table.items()]
    by_rank = runtime.gather_and_decide("tables", [runtime.node, cells], lambda values: values)
    tables: dict[int, Table] = {}
    for node, rows in by_rank:
        tables.setdefault(node, {}).update({(one, other): cell for one, other, cell in rows})
    return tables


def place_of(runtime: Runtime) -> Place:
    """Return where this rank is."""
    host = socket.gethostname()
    if runtime.device.type != "cuda":
        return Place(host, runtime.node, None, "")
    properties = torch.cuda.get_device_properties(runtime.device)
    uuid = f"GPU-{properties.uuid}"
    gpu = next((gpu.number for gpu in nvidia_smi.list_gpus() if gpu.uuid == uuid), None)
    address = (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )
    return Place(host, runtime.node, gpu, address)
