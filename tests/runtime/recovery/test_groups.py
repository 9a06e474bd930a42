"""Meeting in one generation after the other, in one process."""

import socket
import threading
import time

import pytest
import torch.distributed as dist

from paceline.control.messages import Join
from paceline.runtime.recovery.groups import Groups, Interrupted, listen_for_store


def order(generation: int, port: int) -> Join:
    return Join(
        generation=generation,
        rank=0,
        local_rank=0,
        world_size=1,
        host="127.0.0.1",
        port=port,
        faults=[],
    )


def test_after_a_meeting_that_broke_off_the_next_has_the_names_of_everybody_else():
    groups = Groups(backend="gloo", listener=listen_for_store(0))
    alone = order(1, groups.address[1])
    two = Join(**{name: getattr(alone, name) for name in alone.__struct_fields__} | {"rank": 5})
    with pytest.raises((ValueError, RuntimeError, Interrupted)):
        groups.join(two)  # rank 5 of 1: the meeting breaks off inside torch
    groups.leave()
    groups.join(order(2, groups.address[1]))
    try:
        assert dist.distributed_c10d._get_process_group_name(dist.group.WORLD) == "0"
    finally:
        groups.leave()


def test_a_worker_whose_store_has_died_can_be_called_away_from_looking_for_it():
    gone = listen_for_store(0)
    port = gone.getsockname()[1]
    gone.close()
    groups = Groups(backend="gloo", listener=listen_for_store(0))
    caller = threading.Timer(0.3, groups.abort, [1])
    caller.start()
    began = time.monotonic()
    with pytest.raises(Interrupted):
        groups.join(order(1, port))
    assert time.monotonic() - began < 4.0  # a worker gets 5 s to leave
    groups.leave()


def test_a_store_listens_on_this_machine_alone():
    listener = listen_for_store(0)
    try:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert isinstance(listener, socket.socket)
    finally:
        listener.close()
