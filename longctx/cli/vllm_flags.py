"""Flags of `vllm serve` for `longctx serve`: those that mean the same are read, others name what to use here."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

SAME = {
    "--max-model-len": "--max-length",
    "--tensor-parallel-size": "--tensor",
    "-tp": "--tensor",
    "--pipeline-parallel-size": "--stage",
    "-pp": "--stage",
    "--max-num-seqs": "--max-running",
    "--max-num-batched-tokens": "--token-budget",
    "--block-size": "--page-size",
    "--num-gpu-blocks-override": "--num-pages",
    "--kv-cache-dtype": "--kv-dtype",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--no-enable-prefix-caching": "--no-prefix-cache",
}
_VALUES: Mapping[str, Mapping[str, str]] = {  # none: the default here
    "--kv-cache-dtype": {"auto": "", "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"},
    "--dtype": {"auto": "", "half": "float16", "float": "float32"},
}
ALWAYS = ("--enable-prefix-caching", "--enable-chunked-prefill", "--enable-auto-tool-choice")
INSTEAD = {
    "--allowed-origins": "use --allow-origin, once for each",
    "--chat-template-content-format": "leave it out, content is read in both forms",
    "--cpu-offload-gb": "weights stay on devices; use --tensor, --stage or `longctx quantize`",
    "--data-parallel-size": "use --cluster, a file of instances behind one address",
    "--decode-context-parallel-size": "use --context, and --exchange kvp",
    "--disable-log-requests": "leave it out, prompts are not logged; --no-access-log leaves out requests",
    "--disable-log-stats": "use --quiet",
    "--disable-uvicorn-access-log": "use --no-access-log",
    "--enable-lora": "leave it out, there are no adapters here: merge them into the checkpoint",
    "--enable-request-id-headers": "leave it out, X-Request-Id is always answered",
    "--enforce-eager": "leave it out, steps are always compiled, once: --buckets says for which sizes",
    "--generation-config": "leave it out, the checkpoint's generation_config.json is read",
    "--gpu-memory-utilization": "set XLA_PYTHON_CLIENT_MEM_FRACTION=X in the environment, or --num-pages",
    "--guided-decoding-backend": "leave it out, grammars are llguidance's",
    "--hf-overrides": "change the checkpoint's config.json",
    "--kv-events-config": "use --kv-events, --kv-events-replay and --kv-events-topic",
    "--kv-transfer-config": "use --role and --kv-peer",
    "--load-format": "leave it out, safetensors and GGUF are told apart",
    "--middleware": "put a proxy in front",
    "--quantization": "make an FP8 checkpoint by `longctx quantize`; FP8 and GGUF are read as they are",
    "--reasoning-parser": "leave it out, the chat template says how the model thinks",
    "--revision": "use --model OWNER/NAME@REVISION",
    "--root-path": "have the proxy in front strip the path",
    "--scheduling-policy": "use --policy; --max-priority lets clients give priorities",
    "--seed": "leave it out, each request has its own seed",
    "--speculative-config": "leave it out, no tokens are drafted here",
    "--ssl-ca-certs": "use --tls-ca, which clients' certificates must then be from",
    "--swap-space": "use --kv-host-bytes, such as 4GiB",
    "--task": "leave it out, /v1/embeddings is always there",
    "--tokenizer": "put the tokenizer into the checkpoint's folder",
    "--trust-remote-code": "leave it out, no code of checkpoints is run",
}


class Translated(NamedTuple):
    """Arguments of `longctx serve`, and the flags as they were given, by those here."""

    arguments: list[str]
    given: dict[str, str]

    def named(self, text: str) -> str:
        """Return an error with the flags that were given."""
        for ours, theirs in self.given.items():
            text = text.replace(f"{ours}:", f"{theirs}:").replace(f"{ours} ", f"{theirs} ")
        return text


def translate(arguments: Sequence[str]) -> Translated:
    """Return the arguments of `longctx serve` for those of `vllm serve`, whose first may be the model.

    Raises:
      ValueError: a flag means nothing here; the message says what to use instead.
    """
    rest, found, given = list(arguments), list[str](), dict[str, str]()
    if rest and not rest[0].startswith("-"):
        if any(each.partition("=")[0] == "--model" for each in rest):
            raise ValueError(f"--model is given twice: the first argument, {rest[0]!r}, is a model too")
        found += ["--model", rest.pop(0)]
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        flag = name.replace("_", "-")
        if flag in INSTEAD:
            raise ValueError(f"{name} is vLLM's: {INSTEAD[flag]}")
        if flag in ALWAYS and not equals:
            continue
        ours = SAME.get(flag, name)
        if ours != name:
            given[ours] = name
        if flag in _VALUES:
            if not equals and not rest:
                found.append(ours)  # which the parser refuses
                continue
            value = value if equals else rest.pop(0)
            value = _VALUES[flag].get(value, value)
            found += [f"{ours}={value}"] if value else []
        else:
            found.append(f"{ours}{equals}{value}")
    return Translated(found, given)
