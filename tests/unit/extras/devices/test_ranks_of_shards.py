"""How ranks reach each other, and what one says that cannot load its shards.

integration/test_sharding loads some.
"""

import pytest
from fakes import CPU

from openenv_pipe.config.compose import compose
from openenv_pipe.config.schema import HubModelConfig
from openenv_pipe.errors import ConfigError
from openenv_pipe.extras.devices.ranks import LOOPBACK, ConnectedRanks, interface_towards
from openenv_pipe.extras.devices.sharded_load import load_sharded_policy
from openenv_pipe.models import hub


def test_a_rank_names_the_machine_that_lacks_the_models_weights(monkeypatch, tmp_path):
    """Offline, the hub's client returns a folder that has the tokenizer only."""
    monkeypatch.setattr(hub, "find_model_folder", lambda _: None)
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    model = compose(["conf=smoke"]).config.model
    kept = model.model_dump(include={*HubModelConfig.model_fields} - {"type"})
    config = HubModelConfig.model_validate(
        kept | {"type": "hub", "path": "org/no-such-name", "revision": None}
    )
    with pytest.raises(ConfigError, match=r"no \*.safetensors of model.path=org/no-such-name"):
        load_sharded_policy(config, seed=0, device=CPU, ranks=ConnectedRanks(1, 2))


def test_ranks_talk_over_the_interface_that_reaches_rank_0():
    assert interface_towards("127.0.0.1", 9) == LOOPBACK
