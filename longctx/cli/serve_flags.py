"""What `longctx serve` makes of its flags, for an engine and for a cluster."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx import extras
from longctx.cli.arguments.observe import OBSERVERS
from longctx.cli.arguments.serve import LIMITS, SETTINGS
from longctx.cli.engine_flags import engine_config, naming_flags, prefixing
from longctx.cli.files import read_text
from longctx.cli.kv_flags import page_hash_key, tier_config
from longctx.cluster.server_url import host_port
from longctx.models.builtin import TINY
from longctx.serving import EngineConfig
from longctx.serving.engine.admission_control import AdmissionLimits
from longctx.serving.server.settings import ApiKey, ServerSettings, read_keys
from longctx.serving.validation import check_real

if TYPE_CHECKING:
    from longctx.serving.server.observers import ObserverSettings

OBSERVER_NAMES = [*(name for name, *_ in OBSERVERS), "log_format", "log_prompts"]
_BUILTIN_NAME = "longctx-tiny"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_config(options: argparse.Namespace) -> EngineConfig:
    """The configuration of a server's engine, by the flags."""
    return engine_config(
        options,
        max_length=options.max_length,
        max_logprobs=options.max_logprobs,
        tenant_weights=dict(map(_read_weight, options.tenant_weight)),
        tiers=tier_config(options),
        verify_share=options.verify_share,
        hash_key=page_hash_key(options),
        transfers=options.role is not None,
    )


def server_settings(options: argparse.Namespace) -> ServerSettings:
    """The settings of a server, by the flags."""
    names = [name for name, *_ in SETTINGS]
    if options.profile_dir is not None and not options.profile_dir.is_dir():
        raise ValueError(f"--profile-dir {options.profile_dir} is no folder")
    keys, hosts = _keys(options, "api"), options.allow_host
    if not (keys or hosts) and options.host in _LOOPBACK:
        hosts = _LOOPBACK
    with naming_flags(names):
        return ServerSettings(
            api_keys=keys,
            admin_keys=_keys(options, "admin"),
            allow_hosts=tuple(name.lower() for name in hosts),
            **{name: getattr(options, name) for name in names},
            allow_origins=tuple(options.allow_origin),
            profile_dir=options.profile_dir,
        )


def admission_limits(options: argparse.Namespace) -> AdmissionLimits:
    names = [name for name, *_ in LIMITS]
    with naming_flags(names):
        return AdmissionLimits(
            **{name: getattr(options, name) for name in names}, heeds_deadlines=not options.ignore_deadlines
        )


def observer_settings(options: argparse.Namespace) -> "ObserverSettings":
    if options.otlp is not None:
        extras.check("otlp", "--otlp")
    from longctx.serving.server.observers import ObserverSettings

    with naming_flags(OBSERVER_NAMES):
        return ObserverSettings(**{name: getattr(options, name) for name in OBSERVER_NAMES})


def check_weights(options: argparse.Namespace, settings: ServerSettings) -> None:
    names = {key.name for key in settings.api_keys}
    for name, weight in map(_read_weight, options.tenant_weight):
        if name not in names:
            raise ValueError(f"--tenant-weight is of {name!r}, and no --api-key has that name")
        check_real(f"--tenant-weight {name}", weight, 1e-3, 1e3)


def _read_weight(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        return name, float(weight)
    except ValueError:
        raise ValueError(f"--tenant-weight must be NAME=X, got {text!r}") from None


def _keys(options: argparse.Namespace, who: str) -> tuple[ApiKey, ...]:
    lines = list(getattr(options, f"{who}_key"))
    file = getattr(options, f"{who}_key_file")
    if file is not None:
        lines += read_text(f"--{who}-key-file", file).splitlines()
    with prefixing(f"--{who}-key: "):
        return read_keys(lines, who)


def model_names(options: argparse.Namespace) -> tuple[str, ...]:
    """By which clients may call the model; the first one is in the answers."""
    return tuple(options.served_model_name) or (_model_name(options.model),)


def _model_name(model: str | Path) -> str:
    """What clients call a model: the hub's name of it, or that of its folder or file, never a path."""
    if model == TINY:
        return _BUILTIN_NAME
    path = Path(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else str(model)


def chat_template_text(options: argparse.Namespace) -> str | None:
    """Of `--chat-template`; None: the tokenizer's own is to be taken."""
    return None if options.chat_template is None else read_text("--chat-template", options.chat_template)


def address_text(name: tuple[Any, ...]) -> str:
    """Of a socket's name."""
    return host_port(*name[:2])
