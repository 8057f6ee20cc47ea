"""One rank of a world: it receives its work over standard input, a socket, and sends the result back over it."""

import os
import sys
from multiprocessing.connection import Connection

if __name__ == "__main__":
    connection = Connection(os.dup(0))
    sys.path[:] = connection.recv()
    from worlds import run_rank

    run_rank(*connection.recv(), connection)
