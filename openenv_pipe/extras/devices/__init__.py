"""`trainer.devices` above 1: a copy of the policy on each device, or a shard of it."""

from openenv_pipe.registry import Extra

EXTRA = Extra(name="devices", devices="openenv_pipe.extras.devices.build:SeveralDevices")
