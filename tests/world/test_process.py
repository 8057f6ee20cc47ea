"""What a process prints beside others on the same terminal."""

import io

from ddp_lab.world.process import print_line


class Terminal(io.RawIOBase):
    """Keeps what each write to it has written."""

    def __init__(self):
        self.writes: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.writes.append(bytes(data))
        return len(data)


def test_line_is_one_write_where_python_does_not_buffer():
    """Lines of two machines' ranks on one terminal were mixed: "train.logruns/nodes: lenet"."""
    terminal = Terminal()
    stream = io.TextIOWrapper(terminal, write_through=True)  # as with PYTHONUNBUFFERED
    print_line("rank 1 trains here", stream)
    assert terminal.writes == [b"rank 1 trains here\n"]
    terminal.writes.clear()
    print("rank 1 trains here", file=stream, flush=True)
    assert len(terminal.writes) == 2, "print would do, too"
