"""`read_cluster`: a cluster's file, `cluster.toml`, with the settings of its conductor, instances and launcher."""

import difflib
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from longctx.cluster.conductor.config import ROLES, ConductorConfig, Role, RoleConfig
from longctx.cluster.server_url import split_server_url
from longctx.serving.validation import check_integer, check_real

Launcher = Literal["processes", "ray", "static"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
"""Launchers of the instances: the router's own machine, a Ray cluster, or none for instances that run already."""
Messenger = Literal["zmq", "mooncake-tcp", "mooncake-rdma"]
"""The transports of pages between instances."""
STRATEGIES = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")

_MOST = 1024  # instances
_CONDUCTOR = tuple(each.name for each in fields(ConductorConfig) if each.name != "roles")
_TABLES = ("cluster", "engine", "roles", "ray", "simulation")
_NUMBERS = {"report_seconds": 1e-3, "bandwidth": 1.0, "latency": 0.0}  # of [cluster], and the least that they may be
_SIMULATED = ("model", "topology", "plan", "overlap", "first_token", "kv_dtype")  # texts of [simulation]
_COUNTS = ("page_size", "chunk", "coupled_chunk", "max_running", "host_bytes", "coupled_host_bytes")
_SECONDS = ("bandwidth", "latency", "report_seconds", "event_seconds", "call_seconds", "least_retry")
_SWITCHES = ("prefix_cache", "roles_change", "swaps")


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
      strategy: how Ray places instances on machines: one of `STRATEGIES`.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    strategy: str = "SPREAD"


@dataclass(frozen=True)
class ClusterFile:
    """Cluster as its file describes it.

    Attributes:
      instances: those that are there from the beginning; others may register.
      conductor: how requests are placed, and which are rejected.
      launcher: of the instances without a URL.
      report_seconds: between two looks at each instance.
      bandwidth: bytes per second at which an instance sends pages. latency: seconds until the first byte comes.
      engine: flags of `longctx serve`, by their names, for every instance.
      ray: see `RayOptions`.
      simulation: what `longctx simulate --cluster` is told of models, devices and links.
    """

    instances: tuple[InstanceEntry, ...] = ()
    conductor: ConductorConfig = field(default_factory=ConductorConfig)
    launcher: Launcher = "processes"
    report_seconds: float = 0.25
    bandwidth: float = 1e9
    latency: float = 0.0
    engine: Mapping[str, Any] = field(default_factory=dict)
    ray: RayOptions = field(default_factory=RayOptions)
    simulation: Mapping[str, Any] = field(default_factory=dict)

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
    try:
        return parse_cluster(contents, launcher)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def parse_cluster(contents: Mapping[str, Any], launcher: Launcher | None = None) -> ClusterFile:
    """Parse a file's contents; TypeError or ValueError as from `read_cluster`, without the file's name."""
    _check_keys("", contents, (*_TABLES, "instances"))
    for name in _TABLES:
        if not isinstance(contents.get(name, {}), dict):
            raise ValueError(f"{name} must be a table, [{name}], got {contents[name]!r}")
    settings, engine = dict(contents.get("cluster", {})), contents.get("engine", {})
    _check_keys("[cluster] ", settings, (*_CONDUCTOR, "launcher", *_NUMBERS))
    given = settings.pop("launcher", "processes")
    if given not in LAUNCHERS:
        raise ValueError(f"[cluster] launcher must be one of {', '.join(LAUNCHERS)}, got {given!r}")
    launcher = launcher or given
    numbers = {
        name: _number("[cluster] ", name, settings.pop(name), least)
        for name, least in _NUMBERS.items()
        if name in settings
    }
    try:
        conductor = ConductorConfig(**settings, roles=_read_roles(contents))
    except (TypeError, ValueError) as error:
        raise ValueError(f"[cluster] {error}") from None
    instances = _read_instances(contents.get("instances", []), launcher)
    _check_models(engine, instances)
    return ClusterFile(
        instances=instances,
        conductor=conductor,
        launcher=launcher,
        engine=MappingProxyType(dict(engine)),
        ray=_read_ray(contents.get("ray", {})),
        simulation=_read_simulation(contents.get("simulation", {})),
        **numbers,
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
    _check_keys(place, entry, ("name", "role", "count", "url", "flags", "devices", "processes"))
    role, name, url, flags = entry.get("role"), entry.get("name"), entry.get("url"), entry.get("flags", {})
    if role not in ROLES:
        raise ValueError(f"{place}role must be one of {', '.join(ROLES)}, got {role!r}")
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= 100 and name.isprintable()):
        raise ValueError(f"{place}name must be a text of up to 100 characters, got {name!r}")
    if not isinstance(flags, dict):
        raise ValueError(f"{place}flags must be a table, got {flags!r}")
    if url is None and launcher == "static":
        raise ValueError(f"{place}url must be there: with launcher 'static' nobody starts instances")
    if url is not None:
        if "count" in entry or flags or "devices" in entry or "processes" in entry:
            raise ValueError(f"{place}url is of an instance that runs: it contradicts count, flags, devices, processes")
        url = _check_url(f"{place}url", url)
    count = entry.get("count")
    if count is not None:
        _whole(place, "count", count, 1, _MOST)
    devices = _read_devices(place, entry.get("devices", []), count or 1, launcher)
    processes = _whole(place, "processes", entry.get("processes", 1), 1, _MOST)
    if processes > 1 and launcher != "processes":
        raise ValueError(f"{place}processes are for launcher 'processes': Ray starts one for each instance")
    if len(devices[0]) % processes:
        raise ValueError(f"{place}devices must be as many for each of {processes} processes, got {len(devices[0])}")
    for number in range(count or 1):
        own = f"{role}-{numbers[role]}" if name is None else name if count is None else f"{name}-{number}"
        if name is None:
            numbers[role] += 1
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


def _read_roles(contents: Mapping[str, Any]) -> RoleConfig | None:
    if "roles" not in contents:
        return None
    found = contents["roles"]
    _check_keys("[roles] ", found, [each.name for each in fields(RoleConfig)])
    try:
        return RoleConfig(**found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"[roles] {error}") from None


def _read_ray(found: Mapping[str, Any]) -> RayOptions:
    _check_keys("[ray] ", found, ("address", "cpus", "gpus", "strategy"))
    address, strategy = found.get("address"), found.get("strategy", "SPREAD")
    if address is not None and not isinstance(address, str):
        raise ValueError(f"[ray] address must be a text, got {address!r}")
    if strategy not in STRATEGIES:
        raise ValueError(f"[ray] strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    numbers = {name: _number("[ray] ", name, found[name], 0.0) for name in ("cpus", "gpus") if name in found}
    return RayOptions(address, strategy=strategy, **numbers)


def _read_simulation(found: Mapping[str, Any]) -> Mapping[str, Any]:
    place = "[simulation] "
    _check_keys(place, found, (*_SIMULATED, *_COUNTS, *_SECONDS, *_SWITCHES, "changes"))
    changes = found.get("changes", [])
    if not isinstance(changes, list) or not all(isinstance(each, dict) for each in changes):
        raise ValueError(f"{place}changes must be tables, [[simulation.changes]], got {changes!r}")
    for each in changes:
        _check_keys("[[simulation.changes]] ", each, ("at", "instance", "action"))
        for name, value in each.items():
            if name == "at":
                _number("[[simulation.changes]] ", name, value, 0.0)
            elif not isinstance(value, str):
                raise ValueError(f"[[simulation.changes]] {name} must be a text, got {value!r}")
    for name, value in found.items():
        if name in _SIMULATED and not isinstance(value, str):
            raise ValueError(f"{place}{name} must be a text, got {value!r}")
        if name in _SWITCHES and not isinstance(value, bool):
            raise ValueError(f"{place}{name} must be true or false, got {value!r}")
        if name in _COUNTS:
            _whole(place, name, value, 0, 2**63)
        if name in _SECONDS:
            _number(place, name, value, 0.0)
    return MappingProxyType(dict(found))


def _check_url(place: str, url: Any) -> str:
    parts = split_server_url(url)
    if parts is None:
        raise ValueError(f"{place} must be http://HOST:PORT, got {url!r}")
    return parts.geturl().rstrip("/")


def _check_keys(place: str, found: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, list(known), 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{place}unknown key {key!r}{hint}")


def _number(place: str, name: str, value: Any, least: float, most: float = math.inf) -> float:
    try:
        return check_real(name, value, least, most)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}{error}") from None


def _whole(place: str, name: str, value: Any, least: int, most: int) -> int:
    try:
        return check_integer(name, value, least, most)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}{error}") from None
