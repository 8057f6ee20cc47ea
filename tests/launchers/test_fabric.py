"""`ddp-lab doctor --fabric`: the faults that it names, and what it measures.

Faults that only hardware shows come from a fake tree as /sys, and a fake nvidia-smi
(tests/support/fake_machines.py). Locks that are refused, and links that hang or are slow, come from
functions that take the place of the real ones in the child processes. The others are real.
"""

import re
import socket
from itertools import combinations
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from child_calls import leaves, prepares, sleeps
from configs import config
from fabric_cases import (
    Case,
    Report,
    garbles,
    is_slow,
    locks_of_this_machine,
    needs_detour,
    no_locks,
    run_cases,
    stops,
)
from fake_machines import (
    ACS_REDIRECTS,
    GPUS,
    PEERS,
    TOPOLOGY,
    clocks,
    write_nvidia_smi,
    write_sys,
)
from launches import launch
from namespaces import launch_where_mounted
from worlds import once, run_world

from ddp_lab.commands import doctor
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.fabric import examine, links, nvidia_smi, processors, transfer
from ddp_lab.launchers.fabric import interfaces as interfaces_module
from ddp_lab.launchers.fabric.child import Child
from ddp_lab.launchers.fabric.clocks import check_clocks
from ddp_lab.launchers.fabric.interfaces import Interface, check_interface, choose
from ddp_lab.launchers.fabric.links import Place, link_of
from ddp_lab.launchers.fabric.peer_access import check_peer_access
from ddp_lab.launchers.fabric.rounds import rounds_of
from ddp_lab.launchers.fabric.slow_pairs import Result, check_pairs
from ddp_lab.launchers.fabric.start import read_launch

FAULTS = {
    "healthy": Case(env={"LD_LIBRARY_PATH": "", "LD_PRELOAD": ""}, sys=True, free=2**40),
    "peer access": Case(nvidia_smi=True, sys=True),
    "shared memory": Case(free=2**26),
    "interface": Case(env={"GLOO_SOCKET_IFNAME": "nosuch9"}),
    "libraries": Case(env={"LD_LIBRARY_PATH": "FOLDER/module:"}, maps=True),
    "processors": Case("data.loader=workers data.num_workers=500"),
    "clocks": Case(nvidia_smi=True),
    "locks": Case(options={"lock": no_locks}),
    "local locks": Case(options={"lock": locks_of_this_machine}),
    "garbled": Case(options={"measure": garbles}),
    "blocked": Case(options={"measure": needs_detour}, peers=True),
}
ON_THREE = {
    "hangs": Case(options={"measure": stops}),
    "slow": Case(options={"measure": is_slow}),
}
# what each finding says: its cause, and its remedy
EXPECTED = {
    "peer access": (
        "peer access",
        [
            "nvidia-smi topo -p2p r reports GPU1-GPU2: CNS; ",
            f"the IOMMU translates the addresses of {', '.join(GPUS)}; ",
            "ACS redirects peer traffic at the bridges 0000:00:01.0, 0000:01:00.0. ",
            "disable it: iommu=pt on the kernel's command line",
        ],
    ),
    "shared memory": (
        "shared memory",
        [
            "/dev/shm has 64.0 MiB free, and 2 ranks may need 128.0 MiB: ",
            "`docker run --shm-size=1g`",
        ],
    ),
    "interface": (
        "interface",
        [
            "GLOO_SOCKET_IFNAME=nosuch9: matches no interface that is up",
            "Those are: ",
            "Set GLOO_SOCKET_IFNAME=",
            ", or unset it",
        ],
    ),
    "libraries": (
        "libraries",
        [
            "cuDNN of FOLDER/module (libcudnn.so.9) comes before the wheel's in FOLDER/wheel; ",
            "this process has loaded FOLDER/conda/libnccl.so.2, not the NCCL of FOLDER/wheel. ",
            "Unset LD_LIBRARY_PATH",
        ],
    ),
    "processors": (
        "processors",
        ["500 workers x 2 ranks on ", " CPUs: ", "Use data.num_workers=", "--cpus-per-task"],
    ),
    "clocks": (
        "clocks",
        [
            "GPU 2 runs at 1200 MHz, the others at 1980 MHz, lowered by heat, by the driver. ",
            "Check its cooling and power",
        ],
    ),
    "locks": (
        "locks",
        [
            "runs_dir=FOLDER/runs: its files cannot be locked on ",
            "No locks available",
            "Mount the file system with",
        ],
    ),
    "local locks": ("locks", [" got a lock that rank 0 on ", "Lustre: -o flock"]),
    "blocked": (
        "pair 0-1 without peer access",
        [
            "the ranks exchange with NCCL_P2P_DISABLE=1 only: ",
            "is blocked, most likely by ACS or the IOMMU. Disable these (iommu=pt",
        ],
    ),
    "garbled": (
        "pairs",
        ["ranks 0 and 1 (", "RuntimeError: other data arrived than were sent", "Check the cable"],
    ),
}


def write_machines(root: Path) -> None:
    """Write the fake machines of the cases into their folders."""
    write_sys(root / "peer_access/sys", iommu="DMA-FQ", acs=ACS_REDIRECTS)
    answers = {"topo -m": TOPOLOGY, "topo -p2p r": PEERS}
    write_nvidia_smi(root / "peer_access/bin", answers)
    reasons = "--query-gpu=clocks_throttle_reasons.active"  # an older driver knows this one
    write_nvidia_smi(
        root / "clocks/bin",
        {"--query-gpu=index": clocks(1980, 1965, 1200, 1995), reasons: "0x0000000000000021\n"},
    )
    folder = root / "libraries"
    for name in ("module/libcudnn.so.9", "wheel/libcudnn.so.9", "wheel/libnccl.so.2"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (folder / "maps").write_text(
        f"7f00-7f01 r-xp 00000000 08:01 42    {folder}/conda/libnccl.so.2\n"
        f"7f02-7f03 r-xp 00000000 08:01 43    {folder}/wheel/libcudnn.so.9\n"
        "7f04-7f05 rw-p 00000000 00:00 0\n"
    )


@once
def reports(root: Path) -> dict[str, list[Report]]:
    """Return the reports of both ranks, by the name of the case."""
    write_machines(root)
    by_rank = run_world(2, run_cases, FAULTS, root, timeout=280)
    return {name: [rank[name] for rank in by_rank] for name in FAULTS}


@once
def reports_of_three(root: Path) -> dict[str, list[Report]]:
    by_rank = run_world(3, run_cases, ON_THREE, root, timeout=200)
    return {name: [rank[name] for rank in by_rank] for name in ON_THREE}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("fabric")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_fault_is_named_with_its_remedy_in_time(name, root):
    report, other = reports(root)[name]
    about, texts = EXPECTED[name]
    (line,) = report.lines(about)
    assert line.startswith("warning  ")
    folder = str(root / name.replace(" ", "_"))
    missing = [text for text in texts if text.replace("FOLDER", folder) not in line]
    assert not missing, line
    assert report.seconds < 60
    assert other.output == "", "the first rank of a machine reports what concerns it"


def test_healthy_ranks_have_no_warning_and_a_measured_pair(root):
    report, _ = reports(root)["healthy"]
    assert (report.code, report.errors) == (0, ""), report
    warnings = [line for line in report.output.splitlines() if line.startswith("warning")]
    assert not warnings
    (line,) = report.lines("pair 0-1")
    rate = float(re.fullmatch(r"ok       pair 0-1: (\S+) GB/s, host memory", line)[1])
    assert 0.001 < rate < 100
    assert report.lines("pairs")[0].startswith("ok       pairs: all exchange at ")
    assert "gloo will use " in report.lines("interface")[0]
    assert not list((root / "healthy/runs").iterdir()), "the locked file is removed"


@pytest.mark.parametrize(
    ("rate", "largest"), [(1e9, transfer.LARGEST_BYTES["cpu"]), (8e6, transfer.FIRST_BYTES)]
)
def test_bandwidth_is_that_of_the_measured_exchanges(rate, largest, monkeypatch):
    """A link of so many bytes a second, whose first exchange also connects the ranks for 9 s."""
    exchanged: list[int] = []

    def exchange(device: torch.device, role: int, size: int, repeats: int) -> float:
        exchanged.append(size * repeats)
        connecting = 9.0 if len(exchanged) == 1 else 0.0
        return size * repeats / rate + connecting

    monkeypatch.setattr(transfer, "exchange", exchange)
    assert transfer.bandwidth(torch.device("cpu"), 0) == pytest.approx(rate / 1e9)
    assert exchanged[-1] == transfer.REPEATS * largest


@pytest.mark.parametrize("name", ["interface", "garbled"])
def test_pair_that_cannot_exchange_ends_with_exit_code_2(name, root):
    report, other = reports(root)[name]
    assert report.code == other.code == 2
    assert report.errors.startswith("error: ranks 0-1: cannot exchange data, ")
    assert report.errors.count("\n") == 1
    assert other.errors == ""
    assert report.lines("locks")[0].startswith("ok"), "what follows the pairs is examined, too"


def test_faults_that_only_slow_a_launch_end_with_exit_code_0(root):
    for name in ("peer access", "shared memory", "libraries", "processors", "clocks", "locks"):
        report, _ = reports(root)[name]
        assert (report.code, report.errors) == (0, ""), name
        assert report.lines("pair 0-1")[0].startswith("ok"), name


@pytest.mark.slow
def test_pair_that_hangs_is_named_and_the_others_are_measured(root):
    report = reports_of_three(root)["hangs"][0]
    assert report.code == 2
    assert report.lines("pair 1-2") == [
        "warning  pair 1-2: did not exchange within 10 s, host memory"
    ]
    for pair in ("pair 0-1", "pair 0-2"):
        assert re.search(rf"{pair}: [\d.]+ GB/s, ", report.lines(pair)[0])
    (line,) = report.lines("pairs")
    # on a busy machine one of the other pairs may be much slower, which is said in this line, too
    assert re.search(r"ranks 1 and 2 \([^)]+\) did not exchange within 10 s[.;] ", line), line
    assert "Check the cable" in line
    assert report.errors.startswith("error: ranks 1-2: cannot exchange data")
    assert report.seconds < 60


@pytest.mark.slow
def test_pair_that_is_much_slower_than_the_others_is_named(root):
    report = reports_of_three(root)["slow"][0]
    assert (report.code, report.errors) == (0, "")
    (line,) = report.lines("pair 0-1")
    assert re.match("warning  pair 0-1: .* GB/s, host memory; pairs like it reach .* GB/s", line)
    assert report.lines("pair 0-2")[0].startswith("ok")
    (line,) = report.lines("pairs")
    assert re.match(r"warning  pairs: ranks 0 and 1 \(.*\) reach .* GB/s, pairs like it ", line)


@pytest.mark.covers("doctor --fabric")
def test_command_starts_two_ranks_on_a_cpu_and_measures_the_pair(tmp_path):
    line = f"ddp-lab doctor --fabric device=cpu runs_dir={tmp_path}/runs"
    code, output = launch(line)
    assert code == 0, output
    assert re.findall(r"^ok       pair (\S+): ", output, re.MULTILINE) == ["0-1"]
    assert "config: device=cpu" in output


def test_command_takes_the_options_of_train(command, monkeypatch):
    for variable in ("RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(variable, raising=False)
    launch = read_launch(["--nproc", "3", "device=cpu", "epochs=3"])
    assert (launch.options.nproc_per_node, launch.options.standalone) == ("3", True)
    assert launch.arguments == ["device=cpu", "epochs=3"]
    assert read_launch(["--help"]) is None, "Hydra's help"

    code, _, errors = command(doctor.main, "--fabric", "--nnodes", "2")
    assert (code, "--nnodes 2: needs --rdzv-endpoint HOST:PORT" in errors) == (2, True)
    code, _, errors = command(doctor.main, "--fabric", "epochs=none")
    assert (code, errors.startswith("error: epochs=")) == (2, True), errors
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    code, _, errors = command(doctor.main, "--fabric")
    assert (code, errors.startswith("error: srun started 4 tasks")) == (2, True), errors


def test_options_of_ssh_without_fabric_are_refused_with_it(command):
    code, _, errors = command(doctor.main, "--hosts", "a,b")
    expected = "error: --hosts: is an option of `ddp-lab doctor --fabric`, which examines several "
    assert (code, errors.startswith(expected)) == (2, True), errors


def test_port_of_another_program_is_refused_before_the_config(monkeypatch):
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"--rdzv-endpoint=127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match="the port is in use; choose another one"):
            read_launch(["--nproc=1", "--nnodes=2", place, "epochs=none"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 9])
def test_every_pair_of_ranks_meets_once_in_rounds_of_disjoint_pairs(ranks):
    rounds = rounds_of(ranks)
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == list(combinations(range(ranks), 2))
    assert len(rounds) == max(1, ranks - 1 + ranks % 2)
    for pairs in rounds:
        players = [rank for pair in pairs for rank in pair]
        assert len(players) == len(set(players))


def test_tables_of_nvidia_smi_name_links_and_states_of_gpus():
    table = nvidia_smi.parse_table(TOPOLOGY)
    assert table == {
        (0, 1): "NV18",
        (0, 2): "SYS",
        (1, 0): "NV18",
        (1, 2): "PIX",
        (2, 0): "SYS",
        (2, 1): "PIX",
    }
    assert nvidia_smi.parse_table(PEERS)[1, 2] == "CNS"
    assert nvidia_smi.parse_table("No devices were found") == {}


def test_kind_of_link_is_that_of_nvidia_smi_or_of_the_bridges_in_sys(tmp_path, monkeypatch):
    table = nvidia_smi.parse_table(TOPOLOGY)
    first, second, third = (Place("a", 0, gpu, "") for gpu in range(3))
    assert link_of(first, second, table) == "NVLink (NV18)"
    assert link_of(second, third, table) == "PCIe, one switch (PIX)"
    assert link_of(first, third, table) == "PCIe via host, two sockets (SYS)"
    assert link_of(first, Place("b", 1, 1, ""), table) == "network"
    assert link_of(Place("a", 0, None, ""), Place("a", 0, None, ""), {}) == "host memory"

    monkeypatch.setattr(links, "SYS", write_sys(tmp_path / "sys", "identity", acs=0))
    hidden = [Place("a", 0, 0, address) for address in (*GPUS, "0000:81:00.0")]
    assert link_of(hidden[0], hidden[1], {}) == "PCIe, below one switch; NVLink unknown"
    assert link_of(hidden[0], hidden[2], {}) == "PCIe via host; NVLink unknown"


@pytest.mark.parametrize(
    ("iommu", "acs", "level"),
    [("identity", 0x01, "ok"), ("DMA", 0x01, "warning"), ("identity", 0x04, "warning")],
)
def test_iommu_and_acs_are_found_each_alone(iommu, acs, level, tmp_path, monkeypatch):
    monkeypatch.setattr(links, "SYS", write_sys(tmp_path / "sys", iommu, acs))
    assert check_peer_access({}, {}).level == level
    nvlink = {(0, 1): "NV18", (1, 0): "NV18"}
    assert check_peer_access(nvlink, {}).level == "ok", "NVLink does not pass the bridges"


LOOPBACK = Interface("lo", ("127.0.0.1", "::1"), True)
DOCKER = Interface("docker0", ("172.17.0.1",), True)
ETHERNET = Interface("eth0", ("10.0.0.2",), True)
SECOND = Interface("eth1", ("10.1.0.2",), True)
INFINIBAND = Interface("ib0", ("10.2.0.2",), True)
DOWN = Interface("eno1", ("10.3.0.2",), False)
ALL = [LOOPBACK, DOCKER, DOWN, ETHERNET, SECOND, INFINIBAND]


@pytest.mark.parametrize(
    ("setting", "interfaces", "chosen"),
    [
        ("", ALL, "ib0"),
        ("", ALL[:-1], "eth0"),
        ("", ALL[:2], "docker0"),
        ("", ALL[:1], "lo"),
        ("eth1", ALL, "eth1"),
        ("eth", ALL, "eth0"),
        ("=eth", ALL, None),
        ("^ib,docker,lo", ALL, "eth0"),
        ("^=eth0,lo,docker0,ib0", ALL, "eth1"),
        ("eno1", ALL, None),
    ],
)
def test_interface_of_nccl_is_chosen_as_nccl_does(setting, interfaces, chosen):
    usable = [each for each in interfaces if each.is_up]
    choice = choose("nccl", setting, usable)
    assert (choice.name if choice else None) == chosen


@pytest.mark.parametrize(
    ("setting", "interfaces", "nodes", "level", "text"),
    [
        ("", ALL[:4], 2, "ok", "NCCL will use eth0 (10.0.0.2) (by default)"),
        ("docker0", ALL[:4], 1, "ok", "NCCL will use docker0 (172.17.0.1) (by NCCL_SOCKET_IFNAME="),
        ("docker0", ALL[:4], 2, "warning", "no other machine reaches. Usable here: "),
        ("lo", ALL[:4], 2, "warning", "Set NCCL_SOCKET_IFNAME=eth0 on this machine"),
        ("eno1", ALL[:4], 1, "warning", "Set NCCL_SOCKET_IFNAME=eth0, or unset it"),
        ("", [DOWN], 2, "warning", "NCCL's own choice: matches no interface that is up"),
    ],
)
def test_interface_that_does_not_lead_to_other_machines_is_named(
    setting, interfaces, nodes, level, text, monkeypatch
):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", setting)
    finding = check_interface("nccl", nodes, interfaces)
    assert finding.level == level
    assert text in finding.text


def test_interface_of_gloo_has_an_address_of_the_host_name(monkeypatch):
    addresses = ["10.1.0.2"]
    monkeypatch.setattr(interfaces_module, "addresses_of_host", lambda: addresses)
    assert choose("gloo", "", ALL) == SECOND
    addresses[:] = ["127.0.1.1"]  # Debian's entry in /etc/hosts
    assert choose("gloo", "", ALL) == LOOPBACK
    addresses[:] = ["192.0.2.1"]
    assert choose("gloo", "", ALL) == LOOPBACK, "gloo falls back to it"


def test_host_name_without_an_address_leaves_gloo_the_loopback(monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert interfaces_module.addresses_of_host() == []
    assert choose("gloo", "", ALL) == LOOPBACK


def test_failed_pairs_with_one_rank_in_common_name_it():
    failed = [
        Result(pair, "network", None, "did not exchange within 10 s", True)
        for pair in ((0, 2), (1, 2))
    ]
    good = Result((0, 1), "network", 10.0)
    finding = check_pairs([good, *failed], ["a", "b", "c"])
    assert "All of them have rank 2 on c. Check the cable" in finding.text
    single = check_pairs([good, failed[0]], ["a", "b", "c"])
    assert "All of them" not in single.text


def test_idle_gpus_and_other_models_are_not_compared(tmp_path, monkeypatch):
    folder = write_nvidia_smi(tmp_path / "bin", {"--query-gpu=index": clocks(1980, 345, load=0)})
    monkeypatch.setenv("PATH", str(folder))
    assert check_clocks() == ("ok", "clocks", "fewer than two GPUs are busy, so none is compared")
    other = clocks(1980, 1200).replace("H100 80GB HBM3, GPU-1", "L4, GPU-1")
    monkeypatch.setenv(
        "PATH", str(write_nvidia_smi(tmp_path / "other", {"--query-gpu=index": other}))
    )
    assert check_clocks().text == "2 busy GPUs run at 1200 to 1980 MHz"


@pytest.mark.parametrize(("quota", "expected"), [(None, 3), (1.5, 1), (0.5, 1), (8.0, 3)])
def test_processors_of_a_machine_are_those_of_its_ranks_up_to_its_quota(
    quota, expected, monkeypatch
):
    runtime = MagicMock(node=1)
    runtime.gather_and_decide.return_value = [[0, [0, 1, 2, 3]], [1, [0, 1]], [1, [1, 2]]]
    monkeypatch.setattr(examine, "cpu_quota", lambda: quota)
    assert examine.count_processors(runtime) == expected


def test_workers_that_need_more_processors_than_there_are_get_a_warning():
    assert processors.check_processors(2, 4, 8).level == "ok"
    finding = processors.check_processors(3, 4, 8)
    assert (finding.level, "Use data.num_workers=2, " in finding.text) == ("warning", True)


def test_child_that_dies_or_hangs_is_replaced():
    child = Child(prepares)
    try:
        assert child.call(leaves) == (None, "the process ended with exit code 7", False)
        hung = child.call(sleeps, 60.0, limit=0.5)
        assert hung == (None, "no answer within 0.5 s", True)
        assert child.call(sleeps, 0.0) == (1, "", False)
        assert child.call(sleeps, 0.0) == (2, "", False), "the process is kept"
    finally:
        child.end()


@pytest.mark.slow
def test_container_without_shared_memory_is_named_by_ranks_of_torchrun(tmp_path):
    ended = launch_where_mounted(
        "-t tmpfs -o size=64m none /dev/shm",
        "device=cpu",
        f"runs_dir={tmp_path}",
        program=("-m", "ddp_lab", "doctor", "--fabric"),
    )
    assert ended.returncode == 0, ended.stderr
    assert "warning  shared memory: /dev/shm has 64.0 MiB free, and 2 ranks" in ended.stdout
    assert "\nok       pair 0-1: " in ended.stdout


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        (["data.loader=workers", "data.num_workers=3"], 3),
        (["data.loader=workers", "data.num_workers=auto"], 0),
        (["data.loader=device", "data.num_workers=3"], 0),
    ],
)
def test_worker_processes_are_those_that_the_config_asks_for(overrides, workers):
    assert doctor.count_workers(config(*overrides)) == workers
