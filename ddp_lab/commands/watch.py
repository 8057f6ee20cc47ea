"""Show a run on a page in a browser of this machine, while it trains or afterwards.

ddp-lab watch mine              the run of this name in runs, or the run in this directory
ddp-lab watch mine --port 0     on a free port, which is printed

The page has the curves of metrics.jsonl, a light for each rank with the step and the age of its
heartbeat, the throughput, the memory and the end of the log. A red light is the rank that the
others wait for, or one whose process is gone. The button "dump stacks" asks each rank for the
stacks of its threads and its last collective; the answers are also in the folder stacks of the run
directory. Ctrl-C ends the command, and not the run.

The page is served on 127.0.0.1 only, where every user of this machine can open it. From another
machine: ssh -L 8680:localhost:8680 HOST. The heartbeats are in the memory of the machine of rank 0,
so start the command there.
"""

import argparse
from pathlib import Path

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.arguments import Parser
from ddp_lab.launchers.run_names import RUNS, existing_run
from ddp_lab.run.watch_server import WatchServer
from ddp_lab.run.watched import Watched

PORT = 8680


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("ddp-lab watch", __doc__)
    parser.add_argument("run", help="the run: its name, as ddp-lab runs lists it, or its directory")
    parser.add_argument(
        "--runs-dir",
        type=Path,
        default=RUNS,
        metavar="DIR",
        help="runs_dir of the runs (default: runs)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        metavar="N",
        help=f"port of the page; 0: a free one (default: {PORT})",
    )
    namespace = parser.parse_args(arguments)
    if not 0 <= namespace.port < 2**16:
        raise ConfigError(
            f"--port {namespace.port}: must be from 0 to 65535; 0 chooses a free port"
        )
    return namespace


def main(arguments: list[str]) -> None:
    namespace = parse(arguments)
    path = existing_run(namespace.run, namespace.runs_dir)
    with WatchServer(Watched(path.resolve()), namespace.port) as server:
        print(f"{path}: {server.address} (Ctrl-C ends this command, not the run)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nstopped watching")
