"""The bodies of the router's own routes."""

from typing import Annotated, Literal

from pydantic import Field

from longctx.serving.server.schemas import Body

_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Url = Annotated[str, Field(max_length=2048)]


class RegisterBody(Body):
    """An instance at a URL, `http://HOST:PORT`; without a name, that is its host and port."""

    url: _Url
    name: _Name | None = None
    role: Literal["prefill", "decode", "both"] = "both"


class InstanceBody(Body):
    """An instance, by its name or URL."""

    name: _Name | None = None
    url: _Url | None = None


class RoleBody(InstanceBody):
    """What an instance does from now on."""

    role: Literal["prefill", "decode", "both"]
