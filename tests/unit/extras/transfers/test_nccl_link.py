"""The learner's end of a link over NCCL, as far as it needs no GPU."""

import pytest
import torch

from openenv_pipe.extras.transfers import nccl as transfer_nccl
from openenv_pipe.extras.transfers.link import TransferError


def test_a_server_that_does_not_connect_ends_the_wait(monkeypatch):
    monkeypatch.setattr(transfer_nccl, "CALL_LIMIT_S", 0.05)
    with pytest.raises(TransferError, match="the server did not connect within"):
        transfer_nccl.NcclLink().send({"weight": torch.zeros(1)})


def test_a_closed_link_ends_the_wait():
    link = transfer_nccl.NcclLink()
    link.close()
    with pytest.raises(TransferError, match="the server has not connected"):
        link.send({"weight": torch.zeros(1)})
