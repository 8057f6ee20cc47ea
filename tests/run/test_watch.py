"""`ddp-lab watch`: what its page gets of a run, whom the server refuses, and a rank that hangs."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from browser import driven_page
from launches import SMALL, start, wait_for, wait_for_heartbeat

from ddp_lab.commands import watch
from ddp_lab.resilience.heartbeats import ROW, start_of
from ddp_lab.resilience.run_directory import write_status
from ddp_lab.run.lights import Lights, find_culprit, judge
from ddp_lab.run.watch_server import WatchServer
from ddp_lab.run.watched import MOST_ANSWERS, MOST_POINTS, Metrics, Watched

HERE = socket.gethostname()
LOCKED = (
    "import sys, pathlib, ddp_lab.resilience.run_directory as r; _ = "
    "r.lock(pathlib.Path(sys.argv[1]), 0); print(flush=True); input()"
)


def make_run(path: Path, status: str = "finished", ranks: int = 2) -> Path:
    """Make the directory of a run of two epochs."""
    path.mkdir(parents=True)
    (path / ".launch").write_text("an id")
    (path / ".lock").write_text(f"pid 1 on {HERE} since 2026-11-24 10:00:00")
    (path / "config.yaml").write_text(f"# number of ranks: {ranks}\nseed: 0\nepochs: 2\n")
    (path / "train.log").write_text("".join(f"line {number}\n" for number in range(100)))
    write_status(path, status, 2, 8)
    add_rows(path, *(epoch_row(epoch) for epoch in (1, 2)))
    return path


def epoch_row(epoch: int, **more: Any) -> dict[str, Any]:
    losses = {"train_loss": 2 / epoch, "val_loss": 3 / epoch, "val_accuracy": 0.25 * epoch}
    speed = {"seconds": 1.0, "samples_per_second": 1234.5}
    return {"kind": "epoch", "epoch": epoch, "step": 4 * epoch, **losses, **speed} | more


def step_row(step: int, loss: float = 1.0) -> dict[str, Any]:
    place = {"kind": "step", "epoch": 1, "step": step, "loss": loss, "lr": 0.1}
    speed = {"samples_per_second": 500.0, "data_wait": 0.25, "peak_memory_MiB": 321.0, "eta": 90.0}
    return place | speed | {"world_size": 2, "strategy": "ddp"}


def add_rows(path: Path, *rows: dict[str, Any]) -> None:
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def beat(rank: int, step: int = 5, since: float = 1000.0, **more: Any) -> dict[str, Any]:
    """Return the heartbeat of a rank that makes progress at the time 1000."""
    place = {"rank": rank, "host": "other", "pid": 1, "epoch": 1, "step": step}
    phase = {"doing": "training", "since": since, "beat": 1}
    return place | phase | {"waits": False, "called": {}, "call": None} | more


def write_table(run_dir: Path, beats: list[dict[str, Any]]) -> Path:
    """Write a table of heartbeats, which status.json names; return its path."""
    table = run_dir.parent / "table"
    content = bytearray(bytes(ROW * (2 + len(beats))))
    for local, record in enumerate(beats):
        line = json.dumps(record).encode() + b"\n"
        content[start_of(local) : start_of(local) + len(line)] = line
    table.write_bytes(content)
    write_status(run_dir, "running", 1, 5, heartbeats=table)
    return table


class Client:
    """What a browser can ask of a server."""

    def __init__(self, server: WatchServer):
        self.server = server

    def ask(self, path: str, post: bool = False, **headers: str) -> tuple[int, str]:
        """Return the code and the text of an answer; `X_Token` is the header X-Token."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = Request(self.server.address + path, data=b"" if post else None, headers=named)
        try:
            with urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    def get(self, path: str) -> Any:
        code, text = self.ask(path)
        assert code == 200, text
        return json.loads(text)


@pytest.fixture
def serve():
    """Return a function that serves a run and returns a client."""
    servers = []

    def begin(path: Path) -> Client:
        server = WatchServer(Watched(path), 0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        return Client(server)

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def running(tmp_path):
    """Return the directory of a run in which another process is writing."""
    path = make_run(tmp_path / "runs" / "mine", "running")
    with subprocess.Popen(
        [sys.executable, "-c", LOCKED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"\n"
        yield path
        process.communicate(b"\n")


def test_finished_run_has_grey_lights_curves_numbers_and_the_end_of_its_log(tmp_path, serve):
    path = make_run(tmp_path / "mine")
    client = serve(path)
    state = client.get("state")
    assert (state["name"], state["state"], state["failure"]) == ("mine", "finished", "")
    lights = [(light["rank"], light["colour"], light["step"]) for light in state["lights"]]
    assert lights == [(0, "grey", 8), (1, "grey", 8)]
    assert state["numbers"] == [["epoch", "2"], ["step", "8"], ["throughput", "1,234 samples/s"]]
    lines = state["log"].splitlines()
    assert (lines[0], lines[-1]) == ("line 60", "line 99")
    curves = client.get("curves")
    assert curves["loss"] == {"train": [[4, 2.0], [8, 1.0]], "val": [[4, 3.0], [8, 1.5]]}
    assert curves["accuracy"] == {"val": [[4, 0.25], [8, 0.5]]}
    assert curves["samples per second"] == {"by epoch": [[4, 1234.5], [8, 1234.5]]}


def test_failed_run_has_a_red_light_and_its_message(tmp_path, serve):
    path = make_run(tmp_path / "mine", "failed")
    (path / "failure.json").write_text('{"rank": 1, "message": "error: rank 1 has <b>failed</b>"}')
    state = serve(path).get("state")
    assert [light["colour"] for light in state["lights"]] == ["grey", "red"]
    assert state["failure"] == "error: rank 1 has <b>failed</b>"


def test_run_without_any_file_but_that_of_its_launch_is_shown(tmp_path, serve):
    path = tmp_path / "mine"
    path.mkdir()
    (path / ".launch").write_text("an id")
    (path / ".lock").write_text(f"pid 1 on {HERE} since 2026-11-24 10:00:00")
    client = serve(path)
    state = client.get("state")
    assert (state["state"], state["log"], state["numbers"]) == ("not started", "", [])
    assert (client.get("curves"), client.get("stacks")["request"]) == ({}, None)


def test_running_run_shows_speed_memory_and_its_heartbeats(running, serve):
    add_rows(running, epoch_row(1, energy_kWh=0.012361), step_row(9) | {"mfu": 0.4321})
    now = time.time()
    here = {"host": HERE, "pid": os.getpid()}
    write_table(running, [beat(0, 10, now - 3, **here), beat(1, 10, now - 30, **here)])
    state = serve(running).get("state")
    numbers = dict(state["numbers"])
    assert numbers["throughput"] == "500 samples/s"
    assert numbers["peak memory of rank 0"] == "321 MiB"
    assert (numbers["waiting for data"], numbers["left of the run"]) == ("25%", "01:30")
    assert (numbers["MFU"], numbers["energy"]) == ("43.2%", "0.01236 kWh")
    first, second = state["lights"]
    assert (first["colour"], first["step"], first["phase"]) == ("green", 10, "training")
    assert 3 <= first["age"] < 20
    pages = int(Path("/proc/self/statm").read_text().split()[1])  # in memory, of this process
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    assert first["memory_MiB"] == pytest.approx(resident, rel=0.1)
    assert (second["colour"], second["text"][:31]) == (
        "amber",
        "no progress: training for 30 s"[:31],
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: write_status(path, "running", 1, 5), "have not started yet"),
        (lambda path: (path.parent / "table").unlink(), "cannot be read (No such file"),
        (lambda path: (path.parent / "table").write_bytes(b"another file"), ""),
        (
            lambda path: (path / ".lock").write_text("pid 1 on far since 2026-11-24 10:00:00"),
            "in the memory of far: start `ddp-lab watch` there",
        ),
    ],
)
def test_lights_are_grey_where_the_heartbeats_cannot_be_read(change, problem, running):
    write_table(running, [beat(0), beat(1)])
    change(running)
    lights, said = Lights(running).look(2)
    assert [light.colour for light in lights] == ["grey", "grey"]
    assert problem in said


SLEEPS = beat(1, since=970.0)
WAITS = [beat(rank, since=971.0, waits=True) for rank in (0, 2)]


@pytest.mark.parametrize(
    ("beats", "silent", "colours"),
    [
        ([beat(0), beat(1)], {}, "green green"),
        ([WAITS[0], SLEEPS, WAITS[1]], {}, "amber red amber"),
        # the calls say it where all seem to wait: rank 2 has made one call less
        (
            [
                beat(0, waits=True, since=980.0, called={"a": 3}, call={"group": "a", "number": 3}),
                beat(2, waits=True, since=981.0, called={"a": 2}),
            ],
            {},
            "amber red",
        ),
        ([beat(0, since=900.0, waits=True)], {}, "amber"),  # nobody waits for it
        ([beat(0, since=979.0), beat(1, since=990.0)], {}, "amber green"),
        ([beat(0), beat(1)], {1: "its process is gone"}, "green red"),
        ([beat(0, doing="done"), beat(1)], {}, "grey green"),
    ],
)
def test_light_says_who_waits_for_whom(beats, silent, colours):
    assert " ".join(light.colour for light in judge(beats, 1000.0, silent)) == colours


def test_nobody_is_to_blame_in_a_launch_without_ranks():
    assert find_culprit([], 1000.0) is None


def test_rank_that_has_just_gone_on_does_not_wait_any_more():
    """Its watchdog finds it out up to a second later."""
    lights = judge([beat(0, since=999.5, waits=True), beat(1, since=999.5)], 1000.0, {})
    assert [light.colour for light in lights] == ["green", "green"]


def test_rank_without_a_process_and_one_that_is_suspended_are_red(running, monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    now = time.time()
    here = {"host": HERE, "pid": os.getpid()}
    gone = beat(1, since=now, host=HERE, pid=ended.pid)
    write_table(running, [beat(0, since=now, **here), gone])
    lights = Lights(running)
    assert [light.text for light in lights.look(2)[0]][1] == "its process is gone"
    clock = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    first, _ = lights.look(2)[0]
    assert first.colour == "red", "its beat has not changed for a minute"
    assert first.text.startswith("no heartbeat for 60 s: the process is suspended")
    write_table(running, [beat(0, since=now, **here | {"beat": 2}), gone])
    assert lights.look(2)[0][0].colour == "green", "it beats again"


def test_ranks_of_other_machines_come_from_the_overview(running):
    table = write_table(running, [beat(0), beat(1)])
    overview = {"ranks": [beat(0, step=1), beat(3, step=4)]}
    with table.open("r+b") as file:
        file.seek(start_of("overview"))
        file.write(json.dumps(overview).encode() + b"\n")
    lights, _ = Lights(running).look(4)
    assert [light.step for light in lights] == [5, 5, None, 4]
    assert lights[2].text == "its heartbeat is known on its machine only"


def test_curves_follow_the_file_and_stay_small(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.read()
    assert metrics.charts == {}
    add_rows(tmp_path, *(step_row(step, loss=float(step)) for step in range(1, 5001)))
    metrics.read()
    line = metrics.charts["loss"]["train, by step"].shown()
    assert line[0] == (1, 1.0)
    assert line[-1] == (5000, 5000.0)
    assert MOST_POINTS / 2 < len(line) <= 2 * MOST_POINTS + 1
    assert set(metrics.charts) == {"loss", "samples per second"}, "constants are no curves"

    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    metrics.read()
    assert metrics.newest["step"]["step"] == 5000
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('ep": 5001, "loss": 7.0}\n')
    metrics.read()
    assert metrics.charts["loss"]["train, by step"].last == (5001, 7.0)

    (tmp_path / "new").write_text(json.dumps(step_row(3, 0.5)) + "\n")
    (tmp_path / "new").replace(tmp_path / "metrics.jsonl")  # as a launch that resumes does
    metrics.read()
    assert metrics.charts["loss"]["train, by step"].shown() == [(3, 0.5)]


def test_button_asks_the_ranks_and_shows_their_answers(running, serve):
    client = serve(running)
    token = client.server.token
    code, text = client.ask("stacks", post=True, X_Token=token)
    number = json.loads(text)["request"]
    assert (code, (running / "stacks" / "request").read_text()) == (200, number)
    assert client.get("stacks")["answers"] == []
    folder = running / "stacks" / number
    folder.mkdir()
    for rank in range(20):
        (folder / f"rank_{rank}.txt").write_text(f"stack of rank {rank}")
    write_table(running, [beat(0, waits=True), beat(1, step=4), *map(beat, range(2, 20))])
    assert client.get("state")["request"] == number
    answers = client.get("stacks")
    assert answers["answers"][0] == [1, "stack of rank 1"], "that of the red one comes first"
    assert len(answers["answers"]) == MOST_ANSWERS
    assert answers["answered"] == list(range(20))
    assert answers["folder"] == str(folder)


def test_request_is_refused_without_the_token_of_the_page_or_from_another_page(running, serve):
    client = serve(running)
    token = client.server.token
    code, text = client.ask("stacks", post=True)
    assert (code, json.loads(text)["error"].partition(":")[0]) == (
        403,
        "the token is missing or wrong",
    )
    assert client.ask("stacks", post=True, X_Token=token[:-1] + "x")[0] == 403
    assert client.ask("stacks", post=True, X_Token=token, Origin="http://evil.example")[0] == 403
    assert client.ask("stacks", post=True, X_Token="\xe9")[0] == 403
    assert not (running / "stacks").exists(), "no rank was asked"
    own_origin = client.server.address.rstrip("/")
    assert client.ask("stacks", post=True, X_Token=token, Origin=own_origin)[0] == 200
    assert serve(running).server.token != token, "each server has another one"


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:9000", 200),  # of a tunnel
        ("127.0.0.1", 200),
        ("evil.example:8680", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1:8680@evil.example", 403),
        ("", 403),
    ],
)
def test_request_for_another_host_is_refused(host, code, tmp_path, serve):
    client = serve(make_run(tmp_path / "mine"))
    for path in ("", "state", "curves", "stacks"):
        assert client.ask(path, Host=host)[0] == code
    assert client.ask("stacks", post=True, Host=host, X_Token=client.server.token)[0] == (
        409 if code == 200 else 403
    )


def test_server_listens_on_this_machine_only(tmp_path, serve):
    server = serve(make_run(tmp_path / "mine")).server
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_page_is_one_file_that_runs_no_other_code(tmp_path, serve):
    client = serve(make_run(tmp_path / "<b>bold"))
    code, page = client.ask("")
    assert code == 200
    assert "<b>bold" not in page, "the page has nothing of the run"
    assert f'content="{client.server.token}"' in page
    assert not re.findall(r"(?:src|href)=.?(?!data:)[\w/:.]+", page)
    assert "innerHTML" not in page
    with urlopen(client.server.address, timeout=30) as answer:
        policy = answer.headers["Content-Security-Policy"]
        nonce = re.search(r'<script nonce="(\w+)">', answer.read().decode())[1]
    assert f"script-src 'nonce-{nonce}'" in policy
    assert "default-src 'none'" in policy
    assert nonce not in page, "each page has another one"
    assert client.ask("elsewhere")[0] == 404
    assert client.ask("state", post=True, X_Token=client.server.token)[0] == 404


def test_stacks_of_a_run_that_is_over_are_refused(tmp_path, serve):
    client = serve(make_run(tmp_path / "mine"))
    code, text = client.ask("stacks", post=True, X_Token=client.server.token)
    assert (code, json.loads(text)) == (409, {"error": "the run is finished: no rank can answer"})
    assert not (tmp_path / "mine" / "stacks").exists()


@pytest.mark.covers("watch --port", "watch --runs-dir")
def test_mistakes_are_one_message(tmp_path, command):
    make_run(tmp_path / "runs" / "mine")
    root = ["--runs-dir", tmp_path / "runs"]
    code, output, errors = command(watch.main, "mime", *root)
    assert (code, output) == (2, "")
    assert errors.startswith("error: mime: there is no such run")
    assert "Did you mean mine?" in errors
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, output, errors = command(watch.main, "mine", *root, "--port", port)
    assert (code, output) == (2, "")
    assert errors == (
        f"error: --port {port}: cannot be used (another program listens there). Choose another "
        "one, or --port 0 for a free one\n"
    )
    code, output, errors = command(watch.main, "mine", *root, "--port", 70000)
    assert (code, output) == (2, "")
    assert errors == ("error: --port 70000: must be from 0 to 65535; 0 chooses a free port\n")


def address_of(line: str) -> str:
    return re.search(r"http://127\.0\.0\.1:\d+/", line)[0]


def test_command_takes_a_name_or_a_path_and_ctrl_c_ends_it(tmp_path):
    path = make_run(tmp_path / "runs" / "mine")
    for words in ([f"--runs-dir={tmp_path / 'runs'}", "mine"], [str(path)]):
        process = start("ddp-lab watch --port 0", *words)
        try:
            line = process.stdout.readline()
            with urlopen(f"{address_of(line)}state", timeout=30) as answer:
                assert json.load(answer)["name"] == "mine"
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=30)
        finally:
            process.kill()
        assert (process.returncode, output.strip()) == (0, "stopped watching")


@pytest.mark.slow
def test_browser_shows_the_rank_that_hangs_and_the_function_in_which_it_does(tmp_path):
    overrides = [*SMALL, "epochs=3", "log_every=1", f"runs_dir={tmp_path}", "name=hung"]
    training = start(
        "torchrun --standalone --nproc_per_node=2 train.py strategy=ddp",
        *overrides,
        "timeout=80",
        "inject=hang@rank=1,step=8",
    )
    watching = None
    try:
        wait_for_heartbeat(tmp_path / "hung", 1, lambda record: record["step"] == 8, 120)
        watching = start("ddp-lab watch hung --port 0", f"--runs-dir={tmp_path}")
        with driven_page(address_of(watching.stdout.readline()), tmp_path) as page:
            shown = "[...document.querySelectorAll('.light')].map(light => light.className)"
            # a quarter of the timeout passes until rank 0 says that it waits
            colours = ["light amber", "light red"]
            wait_for("red light of rank 1", lambda: page.evaluate(shown) == colours, 70)
            page.evaluate("document.getElementById('dump').click()")
            count = "document.querySelectorAll('.answer').length"
            wait_for("answers of both ranks", lambda: page.evaluate(count) == 2, 30)
            texts = "[...document.querySelectorAll('.answer')].map(answer => answer.textContent)"
            hangs, waits = page.evaluate(texts)
            titles = page.evaluate(
                "[...document.querySelectorAll('figcaption')].map(each => each.textContent)"
            )
            asked = page.evaluate("document.getElementById('asked').textContent")
        assert hangs.startswith("rank 1 on ")
        stack = hangs.split("(most recent call first):")[1].splitlines()
        assert stack[1].endswith(" in _inject"), hangs
        assert re.search(r"last collective: \w+ \d+ of ranks 0, 1 .*, which has not ended", waits)
        assert titles == ["loss", "accuracy", "samples per second"]
        assert asked.startswith("2 of 2 ranks have answered")
    finally:
        for process in filter(None, (training, watching)):
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
