import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import warm
from parts import divide, read_part

from ddp_lab.launchers.command import command as launch_command

# Helper modules with asserts: pytest rewrites them to show the values in a failed assert.
pytest.register_assert_rewrite("cases", "checkpoints", "run_checks")

# These files take the longest and therefore start first, of them those that wait a lot. Each file
# runs in a single pytest process.
FIRST = [
    "models_of_others",
    "tutorial",
    "machines",
    "equivalence",
    "slurm",
    "launch_over_ssh",
    "stragglers",
    "agents",
    "packaging",
    "bench",
    "traced",
    "verify_command",
    "by_strategy",
    "faults",
    "trackers",
    "exercises",
    "museum",
    "verify",
    "launch",
    "user_hooks",
    "command",
    "sum_losses",
    "nested_batches",
    "truth",
    "every_key",
    "tensor_parallel",
    "mutants",
    "collated_runs",
    "first_cause",
    "startup",
    "shapes",
    "meter",
    "fit",
    "examples",
    "from_outside",
    "runtime",
    "units",
    "captured_pipeline",
    "ending",
]
FIRST += [
    "advise",
    "calls",
    "mistakes",
    "keep_whole",
    "path",
    "divided_optimizer",
    "compile",
    "mesh",
    "host_memory",
    "scale_sim",
    "runs",
    "signals",
    "sweep",
    "resume",
    "measure",
    "after_training",
    "optuna",
    "doctor",
    "watchdog",
    "lost_worker",
    "validation",
    "loss_scale",
    "ranks",
    "laptop",
]


COLLECTED = pytest.StashKey[list[pytest.Item]]()

# by default 700 new objects start a collection, which takes a twentieth of the time
gc.set_threshold(20_000)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = list(items)  # before -m leaves some out
    for item in items:
        if item.get_closest_marker("extra"):
            item.add_marker(pytest.mark.slow)  # which all commands leave out that want fast tests
    names = [f"test_{name}.py" for name in FIRST]
    items.sort(
        key=lambda item: names.index(item.path.name) if item.path.name in names else len(names)
    )
    if part := config.getoption("part"):
        items[:], others = divide(items, read_part(part))
        config.hook.pytest_deselected(items=others)


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        metavar="NUMBER/COUNT",
        help="of the slow tests, run only those of every COUNTth file, from the NUMBERth on",
    )


def pytest_configure(config):
    """Start the server that launches are forked from, once for all pytest processes.

    What this process spawns by multiprocessing is forked from it, too, and so are the processes of
    pytest-xdist, which need not import torch then. Only those run tests, so that this one imports
    little.
    """
    if (
        sys.platform == "linux"
        and warm.VARIABLE not in os.environ
        and not config.option.collectonly
    ):
        folder = tempfile.TemporaryDirectory(prefix="warm-")
        server = warm.start_server(Path(folder.name))
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(server.wait)
        config.add_cleanup(server.kill)
        specs = config.getoption("tx", [])
        if not warm.HAS_GPUS:
            forked = f"popen//python={warm.programs() / 'python'}"
            config.option.tx = [forked if spec == "popen" else spec for spec in specs]
    if hasattr(config, "workerinput") or not config.getoption("tx", []):
        importlib.import_module("quick_compose")
        importlib.import_module("small_digits").use_few_digits()
        importlib.import_module("empty_pictures").draw_none()
    if warm.VARIABLE in os.environ:
        multiprocessing.set_executable(str(warm.programs() / "python"))


def pytest_unconfigure():
    gc.unfreeze()  # libraries complain at exit of objects that nothing frees


@pytest.fixture(scope="module", autouse=True)
def skip_older_objects():
    """Let the garbage collector skip what exists, mainly modules: Runtime collects when it ends.

    With the objects of all test files and of torch a collection takes 0.5 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_process_group_leaks():
    """Fail a test that leaves a process group open."""
    yield
    import torch.distributed as dist

    leaked = dist.is_initialized()
    if leaked:
        dist.destroy_process_group()
    assert not leaked, "the test left a process group open"


@pytest.fixture(autouse=True)
def same_signal_handlers():
    """Undo what a command that runs in this process has set, for later tests' processes."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def need_gpus(request):
    """Skip a test with `@pytest.mark.gpu(n)` if fewer than n GPUs are visible."""
    marker = request.node.get_closest_marker("gpu")
    if marker is None:
        return
    import torch

    visible = torch.cuda.device_count()
    if visible < marker.args[0]:
        pytest.skip(f"needs {marker.args[0]} GPUs, {visible} are visible")


@pytest.fixture
def command(monkeypatch, capsys):
    """Return a function that runs a command here and returns its exit code, output and errors."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # commands append to it
    monkeypatch.setattr("faulthandler.enable", lambda: None)  # it would replace pytest's

    def run(main, *arguments) -> tuple[object, str, str]:
        words = list(map(str, arguments))
        try:
            with launch_command():
                main(words)
            code = 0
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run
