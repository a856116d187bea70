"""`read_cluster`: a cluster's file, `cluster.toml`, with the settings of its conductor, instances and launcher."""

import contextlib
import difflib
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from longctx.cluster.conductor.config import ROLES, ConductorConfig, Role, RoleConfig
from longctx.cluster.server_url import check_server_url
from longctx.serving.validation import FieldType, Range, check_fields

Launcher = Literal["processes", "ray", "static"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
"""Launchers of the instances: the router's own machine, a Ray cluster, or none for instances that run already."""
Messenger = Literal["zmq", "mooncake-tcp", "mooncake-rdma"]
"""The transports of pages between instances."""
Strategy = Literal["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"]

_MOST = 1024  # instances
_CONDUCTOR = tuple(each.name for each in fields(ConductorConfig) if each.name != "roles")
_DRIVER = ("launcher", "report_seconds", "bandwidth", "latency")
_TABLES = ("cluster", "engine", "roles", "ray", "simulation")
_AtLeastZero = Annotated[float, Range(0)]
_TEXT, _INSTANCES = FieldType(str), FieldType(int, range=Range(1, _MOST))
_ENTRY = {"role": FieldType(str, choices=ROLES), "name": _TEXT, "count": _INSTANCES, "url": _TEXT}
_ENTRY |= {"flags": FieldType(dict), "devices": FieldType(list), "processes": _INSTANCES}
"""Keys of an instance's table, and what their values may be."""


@dataclass(frozen=True)
class InstanceEntry:
    """Instance of a cluster.

    Attributes:
      name: no other one has it.
      url: where it runs already; None: it is to be started.
      flags: of `longctx serve`, by their names, for this instance alone.
      devices: numbers of the machine's GPUs that it sees; none: all of them.
      processes: that run it together, each with as many of its devices.
    """

    name: str
    role: Role
    url: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    processes: int = 1


@dataclass(frozen=True)
class RayOptions:
    """Resources of each instance on a Ray cluster.

    Attributes:
      address: of the cluster; None: one is started on this machine.
      cpus, gpus: of each instance.
      strategy: how Ray places instances on machines.
    """

    address: str | None = None
    cpus: _AtLeastZero = 1.0
    gpus: _AtLeastZero = 0.0
    strategy: Strategy = "SPREAD"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class ClusterFile:
    """Cluster as its file describes it.

    Attributes:
      instances: those that are there from the beginning; others may register.
      conductor: how requests are placed, and which are rejected.
      launcher: of the instances without a URL.
      report_seconds: between two reports of an instance, at least; it says each second that it lives.
      bandwidth: bytes per second at which an instance sends pages. latency: seconds until the first byte comes.
      engine: flags of `longctx serve`, by their names, for every instance.
      ray: see `RayOptions`.
      simulation: what `longctx simulate --cluster` is told of models, devices and links; it alone checks that.
    """

    instances: tuple[InstanceEntry, ...] = ()
    conductor: ConductorConfig = field(default_factory=ConductorConfig)
    launcher: Launcher = "processes"
    report_seconds: Annotated[float, Range(1e-3)] = 0.25
    bandwidth: Annotated[float, Range(1)] = 1e9
    latency: _AtLeastZero = 0.0
    engine: Mapping[str, Any] = field(default_factory=dict)
    ray: RayOptions = field(default_factory=RayOptions)
    simulation: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)

    def count(self, role: Role) -> int:
        """Count the instances of a role."""
        return sum(each.role == role for each in self.instances)


def read_cluster(path: Path, launcher: Launcher | None = None) -> ClusterFile:
    """Read a cluster's file.

    Args:
      path: of the file.
      launcher: instead of the file's.

    Raises:
      ValueError: it can't be read, or a key of it is unknown, or has a value that it can't have; the message names
        the file and the key.
    """
    try:
        contents = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
    with prefixed(f"{path}: "):
        return parse_cluster(contents, launcher)


def parse_cluster(contents: Mapping[str, Any], launcher: Launcher | None = None) -> ClusterFile:
    """Parse a file's contents; TypeError or ValueError as from `read_cluster`, without the file's name."""
    check_keys("", contents, (*_TABLES, "instances"))
    for name in _TABLES:
        if not isinstance(contents.get(name, {}), dict):
            raise ValueError(f"{name} must be a table, [{name}], got {contents[name]!r}")
    settings, engine = contents.get("cluster", {}), contents.get("engine", {})
    check_keys("[cluster] ", settings, (*_CONDUCTOR, *_DRIVER))
    own = _made("[cluster] ", {name: settings[name] for name in _DRIVER if name in settings}, ClusterFile)
    own = own if launcher is None else replace(own, launcher=launcher)
    roles = _made("[roles] ", contents["roles"], RoleConfig) if "roles" in contents else None
    chosen = {name: value for name, value in settings.items() if name in _CONDUCTOR}
    instances = _read_instances(contents.get("instances", []), own.launcher)
    _check_models(engine, instances)
    return replace(
        own,
        instances=instances,
        conductor=_made("[cluster] ", chosen | {"roles": roles}, ConductorConfig),
        engine=MappingProxyType(dict(engine)),
        ray=_made("[ray] ", contents.get("ray", {}), RayOptions),
        simulation=MappingProxyType(dict(contents.get("simulation", {}))),
    )


def _read_instances(entries: Any, launcher: Launcher) -> tuple[InstanceEntry, ...]:
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise ValueError(f"instances must be tables, [[instances]], got {entries!r}")
    numbers: Counter[str] = Counter()
    found: list[InstanceEntry] = []
    for place, entry in ((f"[[instances]] {i + 1}: ", entry) for i, entry in enumerate(entries)):
        found += _read_entry(place, entry, launcher, numbers)
        if len(found) > _MOST:
            raise ValueError(f"[[instances]] must be {_MOST} instances at most")
    shared = [device for device, times in Counter(d for each in found for d in each.devices).items() if times > 1]
    if shared:
        raise ValueError(f"[[instances]] devices must be one instance's alone, and {shared[0]} is of several")
    for what in ("name", "url"):
        values = Counter(getattr(each, what) for each in found if getattr(each, what) is not None)
        for value, count in values.items():
            if count > 1:
                raise ValueError(f"[[instances]] {what} must be one instance's alone, and {value!r} is {count} times")
    roles = {each.role for each in found}
    if found and launcher != "static" and not ("both" in roles or {"prefill", "decode"} <= roles):
        raise ValueError("[[instances]] role must be prefill for some and decode for others, or both for one at least")
    if launcher != "static" and not found:
        raise ValueError(f"[[instances]] must be there: launcher {launcher!r} has nothing to start")
    return tuple(found)


def _read_entry(
    place: str, entry: Mapping[str, Any], launcher: Launcher, numbers: Counter[str]
) -> Iterable[InstanceEntry]:
    """Yield the instances of an entry; `numbers` counts those of each role without a name of their own."""
    if "role" not in entry:
        raise ValueError(f"{place}role must be one of {', '.join(ROLES)}")
    check_keys(place, entry, _ENTRY)
    with prefixed(place):
        entry = {name: _ENTRY[name].check(name, value) for name, value in entry.items()}
    role, name, url, count = entry["role"], entry.get("name"), entry.get("url"), entry.get("count")
    flags, processes = entry.get("flags", {}), entry.get("processes", 1)
    if name is not None and not (0 < len(name) <= 100 and name.isprintable()):
        raise ValueError(f"{place}name must be a text of up to 100 characters, got {name!r}")
    if not isinstance(flags, dict):
        raise ValueError(f"{place}flags must be a table, got {flags!r}")
    if url is None and launcher == "static":
        raise ValueError(f"{place}url must be there: with launcher 'static' nobody starts instances")
    if url is not None:
        if {"count", "flags", "devices", "processes"} & entry.keys():
            raise ValueError(f"{place}url is of an instance that runs: it contradicts count, flags, devices, processes")
        url = check_server_url(f"{place}url", url)
    devices = _read_devices(place, entry.get("devices", []), count or 1, launcher)
    if processes > 1 and launcher != "processes":
        raise ValueError(f"{place}processes are for launcher 'processes': Ray starts one for each instance")
    if len(devices[0]) % processes:
        raise ValueError(f"{place}devices must be as many for each of {processes} processes, got {len(devices[0])}")
    for number in range(count or 1):
        own = f"{role}-{numbers[role]}" if name is None else name if count is None else f"{name}-{number}"
        numbers[role] += name is None
        yield InstanceEntry(own, role, url, MappingProxyType(flags), devices[number], processes)


def _read_devices(place: str, found: Any, count: int, launcher: Launcher) -> list[tuple[int, ...]]:
    """Share out devices to `count` instances, equally and in order."""
    if not isinstance(found, list) or not all(type(each) is int and each >= 0 for each in found):
        raise ValueError(f"{place}devices must be numbers of GPUs, got {found!r}")
    if found and launcher != "processes":
        raise ValueError(f"{place}devices are for launcher 'processes'; Ray gives each instance its own: [ray] gpus")
    if len(found) % count:
        raise ValueError(f"{place}devices must be as many for each of {count} instances, got {len(found)}")
    each = len(found) // count
    return [tuple(found[i * each : (i + 1) * each]) for i in range(count)]


def _check_models(engine: Mapping[str, Any], instances: Iterable[InstanceEntry]) -> None:
    """Raise ValueError unless all instances have one model, as they exchange pages."""
    for each in instances:
        for name in ("model", "dtype", "page_size", "page-size"):
            if name in each.flags and each.flags[name] != engine.get(name):
                raise ValueError(
                    f"[[instances]] {each.name}: flags.{name} must be that of [engine], {engine.get(name)!r}, as all "
                    f"exchange pages, got {each.flags[name]!r}"
                )


def _made(place: str, found: Mapping[str, Any], kind: Any) -> Any:
    """Make settings of a table; ValueError names the place and the key."""
    check_keys(place, found, [each.name for each in fields(kind)])
    with prefixed(place):
        return kind(**found)


@contextlib.contextmanager
def prefixed(place: str) -> Iterator[None]:
    """Begin the messages of errors within it with their place."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}{error}") from None


def check_keys(place: str, found: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ValueError for a key that is not known, and name the one that is meant."""
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, list(known), 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{place}unknown key {key!r}{hint}")
