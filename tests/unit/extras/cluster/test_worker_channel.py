"""The connection between the run's process and a rollout worker."""

import asyncio
import pickle
import ssl
import subprocess
from shutil import which

import pytest

from openenv_pipe.errors import HostError
from openenv_pipe.extras.cluster.channel import KEY_BYTES, Listener, connect

LIMIT_S = 60.0
LOOPBACK = "127.0.0.1"


@pytest.fixture
async def listener():
    listener = Listener(LOOPBACK)
    await listener.start()
    yield listener
    await listener.close()


async def connected(listener):
    offer, accepted = listener.offer()
    inner = await connect(offer)
    return inner, await asyncio.wait_for(accepted, LIMIT_S)


async def test_messages_arrive_in_order_in_both_directions(listener):
    inner, outer = await connected(listener)
    large = b"x" * 2**22
    sent = [*range(100), {"large": large}, None]
    for one, other in ((inner, outer), (outer, inner)):
        for message in sent:
            one.send(message)
        assert [await asyncio.wait_for(other.receive(), LIMIT_S) for _ in sent] == sent
    outer.close()
    with pytest.raises(EOFError):
        await asyncio.wait_for(inner.receive(), LIMIT_S)
    inner.send("nobody receives this")  # no error: the lost connection shows in `receive`
    inner.close()


class Exploding:
    def __reduce__(self):
        return (pytest.fail, ("a stranger's message was unpickled",))


async def test_a_connection_without_the_key_is_closed_unread(listener):
    offer, accepted = listener.offer()
    stranger, writer = await asyncio.open_connection(offer.address, offer.port)
    writer.write(bytes(KEY_BYTES) + pickle.dumps(Exploding()))
    assert await asyncio.wait_for(stranger.read(), LIMIT_S) == b""
    writer.close()
    assert not accepted.done()
    inner = await connect(offer)  # the worker itself is still let in, once
    outer = await asyncio.wait_for(accepted, LIMIT_S)
    second = await connect(offer)
    with pytest.raises(EOFError):
        await asyncio.wait_for(second.receive(), LIMIT_S)
    for channel in (inner, outer, second):
        channel.close()


async def test_a_port_that_cannot_be_reached_is_named():
    listener = Listener(LOOPBACK)
    await listener.start()
    offer, _ = listener.offer()
    await listener.close()
    with pytest.raises(HostError, match=rf"cannot reach .* {LOOPBACK}:{offer.port} .*any TCP port"):
        await connect(offer)


async def test_rays_own_tls_encrypts_the_connection(monkeypatch, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    if which("openssl") is None:
        pytest.skip("not installed: openssl, which makes the certificate")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=nodes"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(key))
    for name in ("CA_CERT", "SERVER_CERT"):
        monkeypatch.setenv(f"RAY_TLS_{name}", str(certificate))
    listener = Listener(LOOPBACK)
    await listener.start()
    try:
        inner, outer = await connected(listener)
        inner.send("a secret")
        assert await asyncio.wait_for(outer.receive(), LIMIT_S) == "a secret"
        assert isinstance(inner._writer.get_extra_info("ssl_object"), ssl.SSLObject)
        monkeypatch.setenv("RAY_USE_TLS", "0")
        offer, _ = listener.offer()
        plain = await connect(offer)  # the key is no TLS greeting
        with pytest.raises(EOFError):
            await asyncio.wait_for(plain.receive(), LIMIT_S)
        for channel in (inner, outer, plain):
            channel.close()
    finally:
        await listener.close()
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", str(tmp_path / "none"))
    with pytest.raises(HostError, match="RAY_USE_TLS=1: cannot load"):
        await Listener(LOOPBACK).start()
