"""Ranks of the learner on nodes. integration/test_cluster starts some."""

import threading
import types

import pytest
import torch

from openenv_pipe.errors import TrainingError
from openenv_pipe.extras.cluster import node_ranks
from openenv_pipe.extras.cluster.node_ranks import RayRanks


def test_ranks_of_nodes_that_are_placed_after_the_end_are_released(monkeypatch):
    """`close` is called while another thread waits for the cluster."""
    is_connecting, may_connect = threading.Event(), threading.Event()
    ended = []

    class FakeReservation:
        def is_ready(self, timeout_s):
            return True

        def place(self, *_, **__):
            pytest.fail("a rank is placed after the end")

        def release(self):
            ended.append("reservation")

    class FakeCluster:
        def __init__(self, address):
            is_connecting.set()
            assert may_connect.wait(30)

        def reserve(self, *_, **__):
            return FakeReservation()

        def own_address(self):
            return "127.0.0.1"

        def close(self):
            ended.append("cluster")

    monkeypatch.setattr(node_ranks, "Nodes", FakeCluster)
    settings = types.SimpleNamespace(
        address="auto", learner_nodes=2, cpus_per_rank=1.0, start_timeout_s=60
    )
    nodes = RayRanks(settings, torch.device("cpu"))
    errors = []

    def start():
        try:
            nodes.start("builtins:object", 2, 1)
        except TrainingError as error:
            errors.append(str(error))
            nodes.close()

    starting = threading.Thread(target=start)
    starting.start()
    assert is_connecting.wait(30)
    nodes.close()
    may_connect.set()
    starting.join(30)
    assert "the run" in errors[0]
    assert ended == ["reservation", "cluster"]
