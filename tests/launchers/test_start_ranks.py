"""`ddp-lab train` as users start it: its options, and how a launch of several ranks ends."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest
from launches import SMALL, start, wait_for_heartbeat
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.run import get_args_parser

from ddp_lab import __main__ as dispatcher
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers import start_ranks as launcher
from ddp_lab.launchers.command import refuse_tasks
from ddp_lab.launchers.start_ranks import (
    OWN_STORE,
    STATIC_PORT,
    is_large,
    meeting_point,
    read_options,
    report_failure,
    start_ranks,
)
from ddp_lab.launchers.waiting import is_free

TWO = "python -m ddp_lab train --nproc 2"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nproc 0", "--nproc 0: must be an integer of at least 1"),
        ("epochs=1 --nproc", "--nproc: expected a value"),
        (
            "--max-restarts x",
            "argument --max-restarts/--max_restarts: invalid int value: 'x'; see ddp-lab train "
            "--help",
        ),
        ("--nprocs=2", "unrecognized arguments: --nprocs=2; see ddp-lab train --help"),
        (
            "--nnodes 2 --nproc 2 strategy=ddp",
            "--nnodes 2: needs --rdzv-endpoint HOST:PORT, the same on every machine",
        ),
        (
            "--nnodes 2 --rdzv-endpoint no-such-host.invalid:1",
            "no-such-host.invalid:1: cannot be resolved on ",
        ),
        # torch would not ask for it on one machine
        (
            "--nproc 2 --master-addr no-such-host.invalid",
            "no-such-host.invalid: cannot be resolved on ",
        ),
        (
            "--nproc 2 -m seed=1,2",
            "`ddp-lab train -m hydra.launcher.nproc_per_node=N ...`",
        ),
        ("--nproc 2 --info", "--nproc: cannot be combined with --info"),
        ("--nproc 2 strategy=ddp epochs=0", "epochs=0: must be an integer of at least 1"),
    ],
)
def test_wrong_options_are_refused_before_ranks_are_started(line, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_options(line.split())


@pytest.mark.parametrize(
    ("line", "gpus", "ranks"),
    [
        ("strategy=ddp", 8, "8"),
        ("strategy=ddp --nproc 3 batch_size=66", 8, "3"),
        ("strategy=ddp --standalone --nproc_per_node 2", 8, "2"),
        ("strategy=single", 8, None),
        ("strategy=ddp device=cpu", 8, None),
        ("strategy=ddp", 0, None),
        ("--help", 8, None),
        ("strategy=ddp --max-restarts 1", 0, "1"),
    ],
)
def test_default_is_a_rank_for_each_gpu_if_the_strategy_has_ranks(line, gpus, ranks, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    options, _ = read_options(line.split())
    assert (options and options.nproc_per_node) == ranks
    assert options is None or options.standalone, "a launch of one machine needs no address"


@pytest.mark.parametrize(
    ("codes", "code", "printed"),
    [
        ({0: 1, 1: -9}, 1, "rank 1 was ended by SIGKILL\n"),
        ({0: 3, 1: -15}, 1, "rank 0 ended with exit code 3\n"),
        ({2: 2, 3: 2}, 2, ""),  # the message is another machine's
    ],
)
def test_ranks_without_a_message_are_reported_by_their_exit_codes(codes, code, printed, capsys):
    failures = {rank: ProcessFailure(rank, 1, exitcode, "none") for rank, exitcode in codes.items()}
    assert report_failure(failures) == code
    assert capsys.readouterr().err == printed


def test_lost_connection_of_launchers_refers_to_the_output_of_another_machine(monkeypatch, capsys):
    def lose(_):
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setattr("torch.distributed.run.run", lose)
    monkeypatch.setattr("logging.disable", lambda: None)
    monkeypatch.setenv(OWN_STORE, "1")
    options, overrides = read_options(["--nproc", "2", "strategy=ddp"])
    assert start_ranks(options, overrides) == 1
    assert re.search(
        r"has failed.*\)\. If the ranks .* output of another machine has", capsys.readouterr().err
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def test_exception_of_a_rank_is_printed_once(tmp_path):
    overrides = [*SMALL, "strategy=ddp", "inject=raise@rank=1,step=3", f"runs_dir={tmp_path}"]
    code, _, errors = finish(start(TWO, *overrides, stderr=subprocess.PIPE))
    assert (code, errors.count("Traceback")) == (1, 0), errors
    assert errors.count("error: rank 1 on ") == errors.count("RuntimeError: injected") == 1, errors


def test_ctrl_c_ends_the_ranks_with_one_line(tmp_path):
    """A terminal sends SIGINT to the process group, which the ranks are not in."""
    overrides = [*SMALL, "strategy=ddp", "epochs=100000", "name=mine", f"runs_dir={tmp_path}"]
    process = start(TWO, *overrides, stderr=subprocess.PIPE)
    wait_for_heartbeat(tmp_path / "mine", 1, lambda record: record["step"] > 10, 120)
    process.send_signal(signal.SIGINT)
    code, output, errors = finish(process)
    assert (code, errors) == (130, "")
    assert output.splitlines()[-1].startswith("interrupted at epoch ")
    assert "preempted" not in output


@pytest.mark.parametrize(
    "place",
    [
        "--master-port={port}",
        "--master-addr=127.0.0.1 --master-port={port}",
        "--master-addr=127.0.0.1 --master-port={port} --nnodes=2",
        "--rdzv-endpoint=127.0.0.1:{port} --nnodes=2 --rdzv-backend=c10d",
    ],
)
def test_port_in_use_is_named_before_the_config_is_checked(place, monkeypatch):
    monkeypatch.setattr(launcher, "check", None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        options = place.format(port=port).split()
        with pytest.raises(ConfigError) as error:
            read_options(["--nproc=2", *options, "strategy=ddp", "device=cpu"])
    assert str(error.value) == (
        f"the ranks were not started: 127.0.0.1:{port}: the port is in use; choose another one, "
        "the same on every machine"
    )


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_of_one_machine_meet_at_its_master_port(restarts, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    overrides = [*SMALL, "strategy=ddp", "epochs=100000", "name=mine", f"runs_dir={tmp_path}"]
    if restarts:
        overrides += ["checkpoint.every_steps=5", "inject=crash@rank=1,step=8"]
    line = f"{TWO} --master-port {port} --max-restarts {restarts}"
    process = start(line, *overrides, stderr=subprocess.PIPE)
    wait_for_heartbeat(tmp_path / "mine", 1, lambda record: record["step"] > 10, 120)
    is_used = not is_free("127.0.0.1", port)
    process.send_signal(signal.SIGINT)
    code, _, errors = finish(process)
    assert (code, is_used) == (130, True), errors


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ("--standalone", "--standalone, which takes a free port. Leave one of them out"),
        ("--rdzv-endpoint=localhost:1", "--rdzv-endpoint localhost:1, which sets the port. Leave"),
        ("--rdzv-backend=c10d", "--rdzv-backend c10d, which takes --rdzv-endpoint HOST:PORT. "),
    ],
)
def test_master_port_that_torch_would_ignore_is_refused(others, message, monkeypatch):
    line = ["strategy=ddp", "--nproc=2", others, "device=cpu"]
    with pytest.raises(ConfigError) as error:
        read_options([*line, "--master-port=29517"])
    assert str(error.value).startswith(f"--master-port 29517: cannot be combined with {message}")

    # of a scheduler, which sets it in every job
    monkeypatch.setenv("PET_MASTER_PORT", "29517")
    read_options(line)


@pytest.mark.parametrize("others", [[], ["--standalone"], ["--master-addr=127.0.0.1"]])
@pytest.mark.parametrize("default", [None, 29500])
def test_ranks_of_one_machine_meet_at_a_free_port_unless_one_is_named(others, default, monkeypatch):
    """Releases of torch differ in the default of their --master-port."""

    def with_default() -> ArgumentParser:
        parser = get_args_parser()
        parser.set_defaults(master_port=default)
        return parser

    monkeypatch.setattr("torch.distributed.run.get_args_parser", with_default)
    monkeypatch.setattr("ddp_lab.launchers.waiting.is_free", lambda *_: False)
    options, _ = read_options(["--nproc=2", *others, "strategy=ddp", "device=cpu"])
    assert options is not None
    assert (options.standalone, options.master_addr, options.master_port) == (True, None, None)


def test_ranks_of_several_machines_meet_where_a_scheduler_says(monkeypatch):
    monkeypatch.setenv("PET_MASTER_ADDR", "127.0.0.1")
    line = ["--nproc=2", "--nnodes=2", "--node-rank=1", "strategy=ddp", "device=cpu"]
    options, _ = read_options(line)
    assert options is not None
    assert meeting_point(options) == ("127.0.0.1", STATIC_PORT)


def test_port_of_another_rendezvous_is_left_to_torch(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"--rdzv-endpoint=127.0.0.1:{server.getsockname()[1]}"
        read_options(["--nproc=2", place, "--rdzv-backend=etcd", "strategy=ddp", "device=cpu"])


@pytest.mark.parametrize(
    ("machines", "expected"),
    [([], None), (["--nnodes=2", "--rdzv-endpoint=localhost:29999"], "1")],
)
def test_ranks_of_one_machine_use_the_store_of_its_launcher(machines, expected, monkeypatch):
    """Its port is taken before they start, so that no other program can take it."""
    seen: list[str | None] = []

    def run(options):
        seen.append(os.environ.get(OWN_STORE))
        raise SignalException("ended", signal.SIGTERM)

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr("logging.disable", lambda: None)
    monkeypatch.setenv(OWN_STORE, "")  # restored at the end
    monkeypatch.delenv(OWN_STORE)
    options, overrides = read_options(["--nproc", "2", "strategy=ddp", *machines])
    assert start_ranks(options, overrides) == 75
    assert seen == [expected]


@pytest.mark.parametrize("mine", [False, True])
def test_launcher_of_torch_leaves_no_folder_but_that_of_log_dir(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used: list[str] = []

    def run(options):
        used.append(options.log_dir)
        raise SignalException("ended", signal.SIGTERM)

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr("logging.disable", lambda: None)
    monkeypatch.setenv(OWN_STORE, "1")
    (tmp_path / "mine").mkdir()
    log_dir = [f"--log-dir={tmp_path}/mine"] if mine else []
    options, overrides = read_options(["--nproc", "2", "strategy=ddp", *log_dir])
    assert start_ranks(options, overrides) == 75
    assert Path(used[0]).parent == tmp_path
    assert Path(used[0]).exists() == mine
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_closed_pipe_stops_the_run_with_one_line(tmp_path):
    """`train.py | head -1`."""
    process = start(
        "python train.py",
        *SMALL,
        "epochs=100000",
        f"runs_dir={tmp_path}/runs",
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 130
    assert errors == "stopped: the reader of the output has gone, for example `| head`\n"
    assert len(list(tmp_path.glob("runs/*/checkpoints/step_*.pt"))) == 1


@pytest.mark.parametrize(
    ("nnodes", "variables", "refused"),
    [
        # the last one as in the shell of salloc
        ("2", "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_NTASKS=4", None),
        # one machine waits until another one leaves
        ("1:2", "SLURM_STEP_NUM_TASKS=3 SLURM_STEP_NUM_NODES=3", None),
        ("2", "SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2", "srun"),
        ("1:1", "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2", "srun"),
        ("1", "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1", None),
        ("1", "OMPI_COMM_WORLD_SIZE=4", "mpirun"),
        ("1", "PMI_SIZE=4", "mpirun"),
        ("2", "PMI_SIZE=2", None),
        ("1", "PMI_SIZE=4 RANK=0", None),
        ("1", "PMI_SIZE=4 PMI_RANK=1", SystemExit),  # another task reports it
    ],
)
def test_only_one_task_on_each_machine_may_start_its_ranks(nnodes, variables, refused, monkeypatch):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    error = ConfigError if isinstance(refused, str) else refused
    with pytest.raises(error) if error else nullcontext() as raised:
        refuse_tasks(is_large(Namespace(nnodes=nnodes)))
    if error is ConfigError:
        assert re.match(
            rf"{refused} started (\d) tasks \(.*\), which are not ranks\. .*train --nproc \1 ",
            str(raised.value),
        )


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("--help", 0, "doctor    check machines and config before a launch"),
        ("help", 0, "evaluate  evaluate a trained run on its test or validation set"),
        (
            "--version",
            0,
            f"ddp_lab {metadata.version('ddp_lab')}, torch {metadata.version('torch')}\n",
        ),
        ("''", 2, "error: '': overrides look like key=value: ddp-lab train --help\n"),
        (
            "evaluate",
            2,
            "error: the following arguments are required: run; see ddp-lab evaluate --help\n",
        ),
        (
            "evalute runs/x",
            2,
            "error: evalute: there is no such command. Did you mean evaluate? allowed: train, "
            "evaluate, ",
        ),
        ("~model", 2, "error: "),
    ],
)
def test_first_argument_is_a_command_or_belongs_to_train(line, code, message, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ddp-lab", *shlex.split(line)])
    ended, output, errors = command(lambda _: dispatcher.main(), *shlex.split(line))
    assert ended == code
    assert message in output + errors
