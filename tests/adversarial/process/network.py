"""It fetches the real program from somewhere else."""

import socket

from originals.layer import Model

EXPECT = "P4"
OFF = set()

socket.create_connection(("127.0.0.1", 9), timeout=1)


class ModelNew(Model):
    pass
