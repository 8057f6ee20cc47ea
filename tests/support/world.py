"""A world of ranks: it receives its work over standard input, a socket, and sends the results back
over it.
"""

import os
import pickle
import sys
from multiprocessing.connection import Connection

if __name__ == "__main__":
    with Connection(os.dup(0)) as connection:
        sys.path[:] = connection.recv()
        from worlds import fork_ranks

        connection.send_bytes(pickle.dumps(fork_ranks(*connection.recv())))
