"""The table of heartbeats within a node and over nodes, and what the watchdog concludes from it."""

import json
import os
import stat
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from ddp_lab.config.errors import ConfigError, SampleError
from ddp_lab.resilience import flight_recorder, heartbeats, stacks
from ddp_lab.resilience.flight_recorder import ALL_CALLED, describe_waits
from ddp_lab.resilience.heartbeats import (
    NodeLink,
    OwnHeartbeat,
    Table,
    least,
    start_of,
    suspicion,
)
from ddp_lab.resilience.watchdog import Watchdog, describe
from ddp_lab.world.process import RankInfo
from ddp_lab.world.runtime import Runtime


def beat(rank: int, step: int = 5, doing: str = "training", **more) -> dict:
    """Return the heartbeat of a rank."""
    place = {
        "rank": rank,
        "host": f"host{rank // 2}",
        "pid": os.getpid(),
        "epoch": 1,
        "step": step,
        "doing": doing,
    }
    return place | {"since": 0.0, "beat": 1, "waits": False, "called": {}, "call": None} | more


@pytest.fixture
def table() -> Table:
    """Return the table of a node of four ranks, of which this process is the first."""
    made = Table(Runtime("cpu"))
    made.size = 4
    os.truncate(made.path, start_of(4))
    return made


def watch(tmp_path: Path, table: Table, rank: int = 0, timeout: float = 60) -> Watchdog:
    """Return a rank's watchdog without its thread; instead of exiting it only reports."""
    rank_info = RankInfo(rank, table.size, rank, table.size, 0, 1)
    made = Watchdog(SimpleNamespace(path=tmp_path), Runtime("cpu", rank_info=rank_info), timeout)
    made.table = table
    made.leave = lambda grace: None
    made.heartbeat = OwnHeartbeat(table, rank, made.record)
    return made


def test_table_is_private_and_has_no_name_when_all_ranks_have_opened_it(monkeypatch):
    runtime = Runtime("cpu")
    modes = []

    def opened(key, value):
        path = Path(created[0])
        modes.append(stat.S_IMODE(path.stat().st_mode))

    created = []
    create = Table._create
    monkeypatch.setattr(Table, "_create", lambda table: created.append(create(table)) or created[0])
    runtime.gather_objects = opened
    table = Table(runtime)
    assert modes == [0o600], "the file has a name until all ranks have opened it"
    assert not Path(created[0]).exists()
    table.write(0, beat(0))
    assert table.path.read_bytes(), "status.json names it"
    assert (table.read("failure"), table.heartbeats()) == (None, [beat(0)])


def test_table_has_the_place_of_a_rank_at_once_and_the_rest_with_its_next_heartbeat(
    table, tmp_path
):
    made = watch(tmp_path, table, rank=1)
    assert table.read(1) is None
    made.heartbeat.write()
    for doing, step in (("loading", 17), ("training", 17), ("loading", 18)):
        made.record["beat"] = step
        made.heartbeat.at(doing, 3, step)
        read = table.read(1)
        assert (read["epoch"], read["step"], read["doing"]) == (3, step, doing)
        assert (read["since"], read["beat"]) == (made.record["since"], 0)
    made.heartbeat.write()
    assert table.heartbeats() == [made.record]


def test_table_that_cannot_be_created_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *of: False)  # no files in memory
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(
        ConfigError, match="nowhere: cannot create the file of the heartbeats there"
    ):
        Table(Runtime("cpu"))


@pytest.mark.parametrize(
    ("local_rank", "phases", "expected"),
    [
        (0, ["training", "DEAD", "training", "training"], 1),
        # the next one has left normally, so the one after it is watched
        (3, ["done", "DEAD", "training", "training"], 1),
        (2, ["training", "DEAD", "training", "training"], None),  # rank 0 finds it
        (0, ["training", None, "DEAD", "training"], 2),  # rank 1 has not started yet
    ],
)
def test_rank_finds_the_next_rank_dead(local_rank, phases, expected, table, tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    for local, doing in enumerate(phases):
        if doing:
            table.write(
                local, beat(local, **({"pid": dead.pid} if doing == "DEAD" else {"doing": doing}))
            )
    lost = watch(tmp_path, table, local_rank)._dead_neighbour()
    assert (lost and lost[0]["rank"]) == expected


@pytest.mark.parametrize("dead", [0, 2])
def test_lost_rank_is_named_if_the_error_that_follows_is_the_first_to_be_reported(
    dead, table, tmp_path, monkeypatch, capsys
):
    """On a busy machine no watchdog may have looked before the time for reports is over."""
    monkeypatch.setattr("ddp_lab.resilience.watchdog.GRACE", 0.1)
    ended = subprocess.Popen(["true"])
    ended.wait()
    for rank in range(4):
        table.write(rank, beat(rank, pid=ended.pid if rank == dead else os.getpid()))
    watchdog = watch(tmp_path, table, rank=1)
    try:
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:544] Connection closed by peer")
    except RuntimeError as error:
        watchdog.failed(error)
    record = json.loads((tmp_path / "failure.json").read_text())
    assert (record["kind"], record["rank"], record["reported_by"]) == ("lost_rank", dead, 1)
    assert f"error: rank {dead} on " in capsys.readouterr().err
    assert (
        "Error on rank 1 after another rank's failure" in (tmp_path / "train.rank1.log").read_text()
    )


@pytest.mark.parametrize(
    ("suspect", "others"),
    [
        (beat(2, step=15, waits=True), [beat(0, step=16), beat(1, step=16)]),
        # This has happened: rank 1 was frozen when gloo had delivered the sum to it, but not yet to
        # rank 0.
        (
            beat(1, step=16, doing="deciding", since=0.1),
            [beat(0, step=16, doing="loading", waits=True)],
        ),
        (beat(3, since=1.0), [beat(2, since=2.0)]),
    ],
)
def test_rank_for_which_the_others_wait_is_suspected(suspect, others):
    assert min([*others, suspect], key=suspicion) is suspect


def calls(rank: int, called: int, waits_in: str | None = None, size: int = 3, **more) -> dict:
    """Return the heartbeat of a rank that waits in the last of `called` collectives of a group."""
    call = waits_in and {
        "group": "0",
        "number": called,
        "size": size,
        "text": f"{waits_in} {called} of ranks 0-{size - 1}",
    }
    return beat(rank, called={"0": called, "1": 0}, call=call, **more)


@pytest.mark.parametrize(
    ("everyone", "expected"),
    [
        (
            [calls(0, 7, "all_reduce"), calls(1, 6), calls(2, 7, "all_reduce")],
            "all_reduce 7 of ranks 0-2: called by ranks 0, 2, not by rank 1",
        ),
        (  # the shapes or kinds differ: NCCL waits for ever
            [calls(0, 7, "all_reduce"), calls(1, 7, "broadcast"), calls(2, 7, "all_reduce")],
            "all_reduce 7 of ranks 0-2: called by ranks 0, 2\nbroadcast 7 of ranks 0-2: called by "
            "rank 1",
        ),
        (  # rank 1 is suspended
            [beat(1), calls(0, 7, "all_reduce"), calls(2, 7, "all_reduce")],
            "all_reduce 7 of ranks 0-2: called by ranks 0, 2; 1 more not known",
        ),
        (
            [calls(9, 6), *(calls(rank, 7, "all_gather", size=4096) for rank in range(8))],
            "all_gather 7 of ranks 0-4095: called by ranks 0-7, not by rank 9; 4087 more not known",
        ),
        ([calls(rank, 7, "all_reduce") for rank in range(3)], ALL_CALLED),
        ([calls(0, 7), calls(1, 7)], ALL_CALLED),
    ],
)
def test_collective_of_a_hang_is_described(everyone, expected, tmp_path):
    end = f"\nThe calls of each rank, for torchfrtrace: {tmp_path}"
    assert describe_waits(calls(0, 7), everyone, tmp_path) == expected + end


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        (
            [
                calls(0, 7, "all_reduce"),
                calls(1, 7, "all_reduce"),
                calls(2, 6, step=6),
                calls(3, 7, "all_reduce"),
            ],
            2,
        ),
        (
            [
                calls(0, 7, "all_reduce", step=6),
                calls(1, 6),
                calls(2, 7, "all_reduce", step=6),
                beat(3, step=6),
            ],
            1,
        ),
    ],
)
def test_rank_that_lacks_a_collective_reports_itself(beats, expected, table, tmp_path):
    """Whether it has made more progress than those that wait for it, or less."""
    for local, record in enumerate(beats):
        table.write(local, record)
    reports = {}
    for rank in range(4):
        watchdog = watch(tmp_path, table, rank, timeout=2)
        assert not any(watchdog._hang(False) for _ in range(4))
        reports[rank] = [
            who["rank"] for _ in range(4) for who, *_ in filter(None, [watchdog._hang(False)])
        ]
    assert reports == {rank: [rank] * 2 if rank == expected else [] for rank in range(4)}


@pytest.mark.parametrize(
    ("rank", "said"),
    [(0, ["training for 2 s (epoch 1, step 5)", "training for 4 s (epoch 1, step 5)"]), (1, [])],
)
def test_step_that_takes_long_is_logged_by_rank_0(rank, said, table, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("ddp_lab.resilience.watchdog.SILENT", 2.0)
    caplog.set_level("INFO", "ddp_lab")
    watchdog = watch(tmp_path, table, rank)
    watchdog.heartbeat.at("training", epoch=1, step=5)
    for _ in range(10):
        watchdog.look()
    assert caplog.messages == said
    watchdog.heartbeat.at("training", epoch=1, step=6)
    for _ in range(4):
        watchdog.look()
    assert caplog.messages == said, "steps that take less time are logged"


@pytest.mark.parametrize(
    ("act", "waits"), [(time.sleep, False), (lambda _: torch.futures.Future().wait(), True)]
)
def test_waiting_rank_shows_it_long_before_a_hang_is_judged(act, waits, table, tmp_path):
    """An innocent rank whose looks are late on a busy machine must not seem to hang."""
    table.size = 1
    thread = threading.Thread(target=act, args=[20.0], daemon=True)
    thread.start()
    watchdog = watch(tmp_path, table, timeout=8)
    watchdog._main = thread.ident
    for _ in range(6):  # a quarter of the timeout
        assert not table.read(0) or not table.read(0)["waits"]
        watchdog.look()
    assert table.read(0)["waits"] == waits


def test_waiting_rank_shows_it_after_20_seconds_however_long_the_timeout_is(
    table, tmp_path, monkeypatch
):
    """`ddp-lab watch` shows it. The calls of all ranks are read only when a hang is likely."""
    monkeypatch.setattr("ddp_lab.resilience.watchdog.SILENT", 2.0)
    monkeypatch.setattr(flight_recorder, "last_calls", lambda: pytest.fail("too early"))
    table.size = 1
    wait = torch.futures.Future().wait
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    watchdog = watch(tmp_path, table, timeout=600)
    watchdog._main = thread.ident
    for _ in range(6):
        watchdog.look()
    assert table.read(0)["waits"]
    watchdog.heartbeat.at("training", step=6)
    watchdog.look()
    watchdog.look()  # a look writes what the one before has found
    assert not table.read(0)["waits"]


def sleep_here(seconds: float) -> None:
    time.sleep(seconds)


@pytest.fixture
def sleeping(table, tmp_path) -> Watchdog:
    """Return the watchdog of a rank whose main thread sleeps in `sleep_here`."""
    thread = threading.Thread(target=sleep_here, args=[20.0], daemon=True)
    thread.start()
    table.size = 1
    watchdog = watch(tmp_path, table)
    watchdog._main = thread.ident
    return watchdog


def test_rank_answers_a_request_with_its_stacks_once(sleeping, tmp_path, monkeypatch):
    call = flight_recorder.LastCall("all_reduce 7 of ranks 0, 1 (Float [3])", has_ended=False)
    monkeypatch.setattr(flight_recorder, "last_call", lambda: call)
    sleeping.look()
    assert not (tmp_path / "stacks").exists(), "nobody has asked"
    number = stacks.request(tmp_path)
    sleeping.heartbeat.at("training", epoch=2, step=9)
    sleeping.look()
    (text,) = stacks.answers(tmp_path, number).values()
    head, last, _, first_thread, where, *_ = text.splitlines()
    assert head.startswith("rank 0 on ")
    assert ", epoch 2, step 9, training for " in head
    assert last == f"last collective: {call.text}, which has not ended"
    assert first_thread.startswith("Thread 0x")
    assert where.endswith(" in sleep_here"), "the main thread comes first"
    assert "in look\n" in text, "and all others follow"

    (tmp_path / "stacks" / number / "rank_0.txt").unlink()
    sleeping.look()
    assert stacks.answers(tmp_path, number) == {}
    later = stacks.request(tmp_path)
    sleeping.look()
    assert [*stacks.answers(tmp_path, later)] == [0]


def test_rank_does_not_answer_requests_of_before_its_launch(table, tmp_path):
    number = stacks.request(tmp_path)
    watchdog = watch(tmp_path, table)
    watchdog.look()
    assert stacks.answers(tmp_path, number) == {}


@pytest.mark.parametrize("text", ["../../elsewhere", "", "20261128-100000-000000\n"])
def test_request_that_is_none_leads_nowhere(text, sleeping, tmp_path):
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "request").write_text(text)
    sleeping.look()
    assert [path.name for path in tmp_path.rglob("*")] == ["stacks", "request"]


def test_stacks_are_written_if_the_recorder_fails(sleeping, tmp_path, monkeypatch):
    def fail() -> None:
        raise RuntimeError("no such backend")

    monkeypatch.setattr(flight_recorder, "last_call", fail)
    number = stacks.request(tmp_path)
    sleeping.look()
    (text,) = stacks.answers(tmp_path, number).values()
    assert "unknown: torch's Flight Recorder failed (RuntimeError: no such backend)" in text
    assert "sleep_here" in text


def test_overview_of_nodes_equals_that_of_their_ranks():
    beats = [
        beat(rank, step=100 - rank % 7, doing=("training", "loading")[rank % 3 == 0])
        for rank in range(64)
    ]
    merged = least(each for i in range(0, 64, 8) for each in least(beats[i : i + 8]))
    assert merged == least(beats)
    assert (len(merged), merged[0]["step"], merged[-1]["step"]) == (9, 94, 100), (
        "the last one may have skipped a collective"
    )


def test_message_lists_eight_other_ranks_those_with_the_least_progress_and_the_most():
    everyone = least(beat(rank, step=4 if rank in (1, 2, 3) else 5) for rank in range(1024))
    message = describe(everyone[0], "exited", everyone)
    assert message.startswith("error: rank 1 on host0 ")
    _, others = message.split(
        "The other ranks at that time: rank 0 training, step 5; rank 2 training, step 4; rank 3 "
        "training"
    )
    assert others.count("rank ") == 5


@pytest.fixture
def nodes() -> list[NodeLink]:
    """Return the links of two nodes of one rank each, with one store. Their threads do not run."""
    store = HashStore()
    links = []
    for node in (0, 1):
        runtime = Runtime("cpu", rank_info=RankInfo(node, 2, 0, 1, node, 2))
        runtime._store = store
        runtime.broadcast_from_rank0 = lambda key, create, per_node: create()
        runtime.gather_objects = lambda key, value: None
        links.append(NodeLink(runtime, Table(runtime)))
        links[-1].table.write(0, beat(node))
    return links


def exchange(link: NodeLink) -> None:
    link.exchange(link.runtime.connect("nodes"))


@pytest.mark.parametrize(
    ("here", "last", "turns", "vanished"),
    [
        ("training", "training", 7, False),
        ("training", "training", 8, True),
        ("training", "done", 9, False),  # it has left normally
        ("starting", "starting", 9, False),  # while the process group opens, the store may be busy
        ("training", "starting", 8, True),  # it vanished before it told that it had started
    ],
)
def test_node_vanishes_after_seven_seconds_without_a_heartbeat(here, last, turns, vanished, nodes):
    for link, doing in zip(nodes, (here, last), strict=True):
        link.table.write(0, beat(link.runtime.rank, doing=doing))
    exchange(nodes[1])
    for _ in range(turns):
        exchange(nodes[0])
    lost = nodes[0].find_lost(2)
    assert (
        lost is not None and lost[0]["rank"] == 1 and "has sent no heartbeat" in lost[2]
    ) == vanished


def test_looks_while_the_process_group_opens_do_not_count_when_it_is_open(nodes):
    """Neither those of node 0 at another node, nor those of another node at node 0's overview."""
    exchange(nodes[1])
    lost_nodes = []
    for turn in range(20):
        for link in nodes:
            link.table.write(
                0, beat(link.runtime.rank, doing="training" if turn >= 10 else "starting")
            )
        exchange(nodes[0])
        if turn == 0:
            exchange(nodes[1])
        lost_nodes.append([nodes[0].find_lost(1), nodes[1].find_lost(1)])
    assert [lost is not None for lost, _ in lost_nodes] == [False] * 17 + [True] * 3
    assert [lost is not None for _, lost in lost_nodes] == [False] * 17 + [True] * 3
    assert lost_nodes[-1][1][0]["rank"] == 0
    assert "or this node is cut off from the ranks' store at " in lost_nodes[-1][1][2]


OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB"
)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (
            ValueError("Expected more than 1 value per channel when training, got"),
            "with which the ranks together need two",
        ),
        (torch.OutOfMemoryError(OUT_OF_MEMORY), "predicts which ones fit"),
        (ValueError("own mistake"), "ValueError: own mistake"),
        (
            SampleError("sample 5 cannot be read"),
            "epoch 0, step 0, starting: sample 5 cannot be read",
        ),
    ],
)
def test_exception_is_reported_with_its_remedy(error, end, tmp_path, table, capsys):
    table.size = 1
    watch(tmp_path, table).failed(error)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["kind"] == "exception"
    assert str(error) in failure["message"]
    assert failure["message"].endswith(end)
    assert failure["message"] in capsys.readouterr().err
    assert type(error).__name__ in (tmp_path / "train.log").read_text()


def test_rank_that_ends_while_the_store_does_not_answer_exits_at_once(nodes, monkeypatch):
    """Without the interpreter's finalization.

    There torch would abort the process when the store answers.
    """
    link = nodes[0]
    answers = threading.Event()
    codes = []
    monkeypatch.setattr(heartbeats, "STOP", 0.1)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(link, "exchange", lambda store: answers.wait())
    link.start()
    link.stop()
    link.runtime.exit_if_abandoned(75)
    assert codes == [75]
    answers.set()
    link.join()
    link.runtime.exit_if_abandoned(75)
    assert codes == [75], "it ends normally if the store has answered"


def test_beat_of_a_waiting_rank_needs_no_stacks_and_its_dump_has_them(tmp_path, monkeypatch):
    """They can take more than a second, in which a rank would miss its beats."""
    asked = []

    def dump(stacks: bool) -> dict:
        asked.append(stacks)
        return {"entries": [], "pg_config": {}}

    monkeypatch.setattr(flight_recorder, "dump", dump)
    assert flight_recorder.last_calls() == {"called": {}, "call": None}
    assert flight_recorder.describe_last(0, 1) == ""
    assert asked == [False, False]
    flight_recorder.save(tmp_path, 7, 1)
    assert asked[2:] == [True]
    assert (flight_recorder.folder_of(tmp_path, 7) / "rank_1").is_file()
