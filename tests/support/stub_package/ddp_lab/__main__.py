"""`python -m ddp_lab train ... name=BEHAVIOUR`: a launcher without ranks, which loads no torch."""

import json
import os
import signal
import subprocess
import sys
import time

arguments = sys.argv[1:]
address = arguments[arguments.index("--local-addr") + 1] if "--local-addr" in arguments else "alone"
behaviour = next(each[5:] for each in arguments if each.startswith("name="))


def fail(text: str, secondary: bool, seconds: float, code: int = 1) -> None:
    """Write an error as the launcher of ranks does, and exit."""
    extra = {"py_callstack": text, "time": seconds, "timestamp": "0", "secondary": secondary}
    record = {"message": {"message": text, "errorCode": code, "extraInfo": extra}}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump(record, file)
    sys.exit(1)


def save(number: int, frame: object) -> None:
    print(f"saved after {signal.Signals(number).name}", flush=True)
    sys.exit(128 + number)


def save_slowly(number: int, frame: object) -> None:
    """Save into the file `runs_dir` for a second, as a rank its checkpoint."""
    time.sleep(1)
    with open(next(each[9:] for each in arguments if each.startswith("runs_dir=")), "w") as file:
        file.write("saved")
    sys.exit(128 + number)


def start_stubborn() -> None:
    """Start a process that is in a session of its own and ignores signals, for two minutes."""
    ignoring = "trap '' TERM INT HUP; echo $$; for i in $(seq 120); do sleep 1; done"
    subprocess.Popen(["setsid", "--fork", "sh", "-c", ignoring])


def refuse_to_end() -> None:
    """Hold out against signals for two minutes, with a process of another session."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_stubborn()
    os.write(1, b"ready\n")  # at once: print would let the other process write before the newline
    time.sleep(120)


if behaviour == "prints":
    print(json.dumps(arguments), flush=True)
    print(f"{os.environ.get('NCCL_DEBUG')} {os.getcwd()}", file=sys.stderr, flush=True)
    sys.stdout.write("without a newline")
elif behaviour == "fails":
    if address == "127.0.0.2":
        fail("Traceback\nConnectionError: other", secondary=True, seconds=1.0)
    fail("Traceback\nValueError: mine", secondary=False, seconds=2.0)
elif behaviour == "late":
    seconds = {"127.0.0.2": 8.0, "127.0.0.3": 7.0}[address]
    fail(f"Traceback\nValueError: of {address}", secondary=False, seconds=seconds)
elif behaviour == "refuses":
    fail("error: epochs=0: must be at least 1", secondary=False, seconds=1.0, code=2)
elif behaviour == "waits":
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, save)
    print("ready", flush=True)
    time.sleep(120)
elif behaviour == "saves":
    signal.signal(signal.SIGTERM, save_slowly)
    print("ready", flush=True)
    time.sleep(120)
elif behaviour == "leaves":
    start_stubborn()
    time.sleep(1)  # in which it prints its process id
elif behaviour == "hangs":
    refuse_to_end()
elif behaviour == "one-fails":
    if address == "127.0.0.3":
        sys.exit(9)
    refuse_to_end()
