"""Ranks of one node know of each other by a board, and nodes of each other through the store."""

import json
import os
import signal
import stat
import subprocess
import sys

import pytest
from launches import ROOT
from torch.distributed import HashStore

from ddp_lab.config.errors import ConfigError
from ddp_lab.resilience.failure_report import Others, describe
from ddp_lab.resilience.node_board import FAILURE, OVERVIEW, RANKS, NodeBoard
from ddp_lab.resilience.node_link import NodeLink
from ddp_lab.resilience.node_watch import NodeWatch, find_dead_neighbour
from ddp_lab.resilience.overview import Overview, find_last, merge
from ddp_lab.resilience.unchanged import Pace, Unchanged
from ddp_lab.world.place import Place
from ddp_lab.world.runtime import Runtime
from ddp_lab.world.store import CountedStore


def beat(rank: int, step: int = 5, doing: str = "training", node: int = 0, **more) -> dict:
    """Return the heartbeat of a rank."""
    place = {"rank": rank, "host": f"host{node}", "pid": os.getpid(), "node": node, "beat": 1, "epoch": 1}
    return place | {"step": step, "doing": doing, "since": 0.0, "waits": False} | more


@pytest.fixture
def board(tmp_path):
    """Return the board of a node of four ranks, of which this process is the first."""
    made = NodeBoard(Runtime("cpu"), tmp_path)
    made.size = 4
    yield made
    made.close()


def test_place_is_that_of_torchrun_with_or_without_its_node():
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Place.of(environment) == Place(5, 8, 1, 2, node=2, nodes=4)
    assert Place.of(environment | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3"}) == Place(5, 8, 1, 2, node=1, nodes=3)
    assert Place.of({}) == Place()


def test_board_is_private_and_its_name_cannot_be_guessed(tmp_path, board):
    assert stat.S_IMODE(board.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(board.path.stat().st_mode) == 0o600
    other = NodeBoard(Runtime("cpu"), tmp_path)
    assert other.path != board.path
    other.close()


def test_pages_of_a_board_are_separate_and_empty_at_first(board):
    assert [board.read(page) for page in range(RANKS + 4)] == [None] * (RANKS + 4)
    board.write(RANKS + 1, beat(1))
    board.write(RANKS + 1, beat(1, step=6))
    board.write(OVERVIEW, {"states": {}})
    assert (board.read(FAILURE), board.read(OVERVIEW), board.heartbeats()) == (None, {"states": {}}, [beat(1, step=6)])


def test_board_is_removed_once_all_ranks_have_opened_it(board):
    for local in range(3):
        board.write(RANKS + local, beat(local))
    board.remove()
    assert board.path.exists(), "the fourth rank could not open it any more"
    board.write(RANKS + 3, beat(3))
    board.remove()
    assert not board.path.parent.exists()
    assert len(board.heartbeats()) == 4, "it must stay readable"


def test_board_of_a_killed_launch_is_removed_by_the_next_and_one_in_use_is_not(tmp_path, board):
    code = f"""
import os, signal, sys
from pathlib import Path
from ddp_lab.resilience.node_board import NodeBoard
from ddp_lab.world.runtime import Runtime
print(NodeBoard(Runtime("cpu"), Path({str(tmp_path)!r})).path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout.strip()
    assert os.path.exists(killed)
    assert killed != str(board.path)
    NodeBoard(Runtime("cpu"), tmp_path).close()
    assert not os.path.exists(os.path.dirname(killed))
    assert board.path.exists()


def test_board_that_cannot_be_created_is_an_error(tmp_path):
    with pytest.raises(
        ConfigError, match=r"nowhere: cannot create the file of the heartbeats there \(No such file or directory\)"
    ):
        NodeBoard(Runtime("cpu"), tmp_path / "nowhere")


def test_message_of_a_failure_lists_eight_other_ranks_and_sums_up_all():
    near = [beat(rank, node=0) for rank in range(4)]
    everyone = Overview.of([*near, *(beat(rank, step=rank % 3, node=rank // 4) for rank in range(4, 16))])
    message = describe(near[1], "exited", Others.of(1, 16, near, everyone))
    assert message.startswith("error: rank 1 on host0 ")
    listed, summary = message.split("The other ranks at that time: ")[1].split(". All ranks: ")
    assert listed.count("rank ") == 8
    assert listed.startswith("rank 0 training, step 5; rank 2 ")
    assert summary == str(everyone)


@pytest.fixture
def dead() -> int:
    """Return the id of a process that has exited."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("local_rank", "phases", "expected"),
    [
        (0, ["training", "DEAD", "training", "training"], 1),
        (1, ["training", "DEAD", "DEAD", "training"], 2),
        (3, ["done", "DEAD", "training", "training"], 1),  # the next one has left normally, so the one after it is watched
        (2, ["training", "DEAD", "training", "training"], None),  # rank 0 finds it
        (0, ["training", None, "DEAD", "training"], 2),  # rank 1 has not started yet
        (0, ["training", "done", "done", "done"], None),
    ],
)
def test_rank_finds_the_next_rank_dead(local_rank, phases, expected, board, dead):
    for local, doing in enumerate(phases):
        if doing:
            gone = doing == "DEAD"
            board.write(RANKS + local, beat(local, doing="training" if gone else doing, pid=dead if gone else os.getpid()))
    found = find_dead_neighbour(board, local_rank)
    assert (found and found[0]["rank"]) == expected


def test_overview_of_nodes_equals_the_overview_of_their_ranks():
    beats = [
        beat(rank, step=100 - rank % 7, doing=("training", "loading")[rank % 3 == 0], node=rank // 8) for rank in range(64)
    ]
    merged = merge(Overview.of(beats[i : i + 8]) for i in range(0, 64, 8))
    assert merged == Overview.of(beats)
    assert merged.states == {"loading": (22, 94, 100), "training": (42, 94, 100)}
    assert (len(merged.least), merged.least[0]["step"]) == (9, 94)


def test_last_rank_is_found_on_another_node_and_own_ranks_are_up_to_date():
    near = [beat(0, step=7), beat(1, step=8)]
    old = Overview.of([beat(0, step=3), beat(1, step=3), beat(2, step=7, node=1, doing="starting"), beat(3, step=9, node=1)])
    assert find_last(near, old)["rank"] == 2
    assert find_last(near, None)["rank"] == 0


@pytest.mark.parametrize(("world_size", "listed", "summary"), [(4, [0, 2, 3], None), (9, [0, 2, 3, 4, 5, 6, 7, 8], None)])
def test_all_other_ranks_of_a_small_launch_are_listed(world_size, listed, summary):
    near = [beat(rank) for rank in range(world_size)]
    others = Others.of(1, world_size, near, None)
    assert ([other["rank"] for other in others.listed], others.summary) == (listed, summary)


def test_eight_other_ranks_of_a_large_launch_are_listed_and_the_rest_summed_up():
    near = [beat(rank, node=1) for rank in (8, 9)]
    far = [beat(rank, step=4 if rank in (700, 900) else 6, node=rank // 8) for rank in range(1024) if rank not in (8, 9)]
    others = Others.of(9, 1024, near, Overview.of([*near, *far]))
    assert len(others.listed) == 8
    assert {8, 700, 900} <= {other["rank"] for other in others.listed}
    assert others.summary == "1,024 training, step 4 to 6"
    assert str(others).endswith("All ranks: 1,024 training, step 4 to 6")


def test_unchanged_counts_looks_since_the_last_change():
    unchanged = Unchanged()
    assert [unchanged.count("a", value) for value in (1, 1, 1, 2, 2)] == [0, 1, 2, 0, 1]
    assert unchanged.count("b", 2) == 0
    assert [unchanged.count("c", None) for _ in range(2)] == [0, 1]


class Clock:
    """A clock and an event: waiting for the event lets the time pass."""

    def __init__(self):
        self.now = 100.0

    def wait(self, seconds: float) -> bool:
        assert seconds >= 0
        self.now += seconds
        return False


def test_turns_are_a_second_apart_however_long_they_take_and_missed_ones_are_left_out(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    pace, turns = Pace(1.0), []
    for duration in (0.0, 0.25, 0.75, 3.5, 0.25, 0.0):
        clock.now += duration
        pace.wait(clock)
        turns.append(clock.now)
    assert turns == [101.0, 102.0, 103.0, 106.5, 107.5, 108.5]


def end_link(node: int, doing: str = "training") -> NodeLink:
    """Return the link of a node of two, which has sent two heartbeats: one before it was stopped, and the last."""
    runtime = Runtime("cpu", place=Place(node, 2, 0, 1, node, 2))
    runtime._store = CountedStore(HashStore())
    runtime.store.multi_set([f"nodes/{key}" for key in ("overview", "failure", "node/0", "node/1")], [""] * 4)
    made = NodeLink(runtime, lambda: Overview.of([beat(node, doing=doing)]))
    made.stop(ended=True)
    return made


def test_heartbeat_costs_two_operations_and_node_0_two_more():
    first, second = end_link(0), end_link(1)
    assert (first.turns, first.overview, first.vanished) == (1, Overview({"training": [1, 5, 5]}, [beat(0)]), None)
    assert first.runtime.store.traffic.operations["nodes"] == 4 + 3  # the last one reads nothing
    assert second.runtime.store.traffic.operations["nodes"] == 2 + 1
    assert json.loads(first.runtime.store.get("nodes/node/0"))["ended"]
    assert json.loads(first.runtime.store.get("nodes/overview"))["ended"]


@pytest.mark.parametrize(
    ("own", "doing", "ended", "turns", "vanished"),
    [
        ("training", "training", False, 8, True),
        ("training", "training", False, 7, False),
        ("training", "training", True, 9, False),
        ("starting", "starting", False, 9, False),
        ("training", "starting", False, 8, True),  # it vanished before it told that it had started
    ],
)
def test_node_vanishes_after_seven_seconds_without_a_heartbeat(own, doing, ended, turns, vanished):
    link = end_link(0, own)
    overview = {"states": {doing: [1, 5, 5]}, "least": [beat(1, node=1, doing=doing)]}
    link.runtime.store.set("nodes/node/1", json.dumps(overview | {"turns": 3, "ended": ended}))
    for _ in range(turns):
        link._publish(link.runtime.store.connect("nodes"))
    assert (link.vanished is not None and link.vanished["rank"] == 1) == vanished


def test_looks_while_the_process_group_opens_do_not_count_when_it_is_open():
    link = end_link(0, "starting")
    overview = {"states": {"starting": [1, 0, 0]}, "least": [beat(1, node=1, doing="starting")]}
    link.runtime.store.set("nodes/node/1", json.dumps(overview | {"turns": 3, "ended": False}))
    vanished = []
    for look in range(20):
        if look == 10:
            link.look = lambda: Overview.of([beat(0)])
        link._publish(link.runtime.store.connect("nodes"))
        vanished.append(link.vanished is not None)
    assert vanished == [False] * 17 + [True] * 3


def test_silence_of_the_store_while_the_process_group_opens_does_not_count_when_it_is_open(board):
    link = end_link(1, "starting")
    link.overview = Overview.of([beat(0, doing="starting"), beat(1, node=1, doing="starting")])
    board.write(RANKS, beat(1, node=1))
    watch = NodeWatch(link.runtime, board)
    watch.link = link
    found = []
    for look in range(40):
        if look == 20:
            link.look = lambda: Overview.of([beat(1, node=1)])
        found.append(watch.look())
    assert [one is not None for one in found] == [False] * 34 + [True] * 6
    assert found[-1][1].startswith("the ranks' store at "), "the message says what is lost"


SERVER = """
import os, signal, sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
RANK = """
import sys, time
from torch.distributed import TCPStore
from ddp_lab.resilience import node_link
from ddp_lab.resilience.overview import Overview
from ddp_lab.world.place import Place
from ddp_lab.world.runtime import Runtime
from ddp_lab.world.store import CountedStore

class Last:
    def __del__(self):  # the finalization has come to sys.modules
        print("finalizes", flush=True)
        time.sleep(2)

sys.modules["last"] = Last()
beat = {"step": 5, "waits": False, "doing": "training", "since": 0.0}
node_link.PERIOD = node_link.ANNOUNCE = 0.1
runtime = Runtime("cpu", place=Place(0, 2, 0, 1, 0, 2))  # node 0 waits for answers also at the end
runtime._store = CountedStore(TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False))
runtime.store.multi_set([f"nodes/{key}" for key in ("overview", "failure", "node/0", "node/1")], [""] * 4)
link = node_link.NodeLink(runtime, lambda: Overview.of([beat]))
while not link.turns:
    time.sleep(0.01)
print("sends heartbeats", flush=True)
input()
link.stop(ended=True)
runtime.exit_if_abandoned(0)
"""


def test_rank_that_ends_while_the_store_does_not_answer_is_not_aborted_when_it_does():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], **pipes) as server:
        port = server.stdout.readline().strip()
        with subprocess.Popen([sys.executable, "-c", RANK, port], cwd=ROOT, **pipes) as rank:
            assert rank.stdout.readline() == "sends heartbeats\n"
            os.kill(server.pid, signal.SIGSTOP)
            os.waitpid(server.pid, os.WUNTRACED)  # until it is stopped
            rank.stdin.write("\n")
            rank.stdin.flush()
            finalizes = rank.stdout.readline()  # empty if it has exited
            os.kill(server.pid, signal.SIGCONT)
            assert rank.wait(30) == 0
            assert not finalizes
        server.stdin.close()
