"""Processes of one host as the ranks of a gloo group: started once per test file, they run all cases of it.

One process imports what the file needs, and its forks are the ranks: imports take most of the time.
"""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh

from support.machine_code import keep_machine_code


def _run(rank, size, port, work, folder, timeout):
    torch.set_num_threads(1)
    keep_machine_code(load=True)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    torch.save(work(rank, size), folder / f"{rank}.pt")
    dist.destroy_process_group()


def _forks(_, size, *rest):
    torch.multiprocessing.start_processes(_run, (size, *rest), nprocs=size, start_method="fork")


def once(group, compute):
    """Return on all ranks what the first computes: one device's results need not be computed by each."""
    group = group.get_group() if isinstance(group, DeviceMesh) else group
    found = [compute() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(found, dist.get_global_rank(group, 0), group)
    return found[0]


def on_ranks(size, work, folder, timeout=60):
    """Return the result of ``work(rank, size)`` in each of ``size`` processes that lived on, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_forks, (size, port, work, folder, timeout), nprocs=1)
    paths = {rank: folder / f"{rank}.pt" for rank in range(size)}
    return {rank: torch.load(path, weights_only=False) for rank, path in paths.items() if path.exists()}
