"""The keys of `host=attach`."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from openenv_pipe.config.schema.base import (
    HeaderName,
    HeaderValue,
    Seconds,
    SecondsOrZero,
    ServerUrl,
)
from openenv_pipe.config.schema.host import HostBlock


class AttachHostConfig(HostBlock):
    """Servers that run already, on this machine or elsewhere (conf/host/attach.yaml)."""

    type: Literal["attach"]
    urls: Annotated[list[ServerUrl], Field(min_length=1)] = Field(
        description="http(s) or ws(s) URLs of the servers"
    )
    headers: dict[HeaderName, HeaderValue] = Field(
        description="HTTP headers of every request and connection, such as Authorization"
    )
    verify_tls: bool = Field(
        description="check the servers' certificates; false: anyone can pose as the server"
    )
    ca_file: str | None = Field(
        description="PEM file of authorities to trust beside the system's; null: none"
    )
    connect_timeout_s: Seconds = Field(description="time limit of opening a connection")
    max_outage_s: SecondsOrZero = Field(
        description="how long a server may be unreachable before the run fails"
    )

    @model_validator(mode="after")
    def _urls_differ(self) -> "AttachHostConfig":
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls names a server twice; raise sessions_per_server instead")
        return self

    @property
    def capacity(self) -> int:
        return len(self.urls) * self.sessions_per_server

    @property
    def servers(self) -> dict[str, Any]:
        return {"urls": self.urls}

    def for_one_session(self) -> Self:
        return self.model_copy(update={"sessions_per_server": 1, "urls": self.urls[:1]})
