"""One YAML file → frozen structs. Precedence: flag > environment > file > default; an unknown key is an
error.

Every field can be set in four ways, the same for all::

    engine: {max_num_seqs: 32}            # pagerelay.yaml, given by --config or PAGERELAY_CONFIG
    PAGERELAY_ENGINE_MAX_NUM_SEQS=32      # environment
    --set engine.max_num_seqs=32          # flag
    --max-num-seqs 32                     # short flag, for the common ones (see cli)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct, field

from pagerelay.common.errors import ConfigError

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]

MIN_API_KEY = 8
DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


def cache_dir() -> Path:
    """Where models and compiled kernels live: ``$PAGERELAY_CACHE``, else ``~/.cache/pagerelay``."""
    return Path(os.environ.get("PAGERELAY_CACHE") or Path.home() / ".cache" / "pagerelay")


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class ModelConfig(Section, frozen=True):
    path: str = DEFAULT_MODEL
    """A Hugging Face model folder, a hub id, or the name of a model that ``pagerelay fetch-model`` makes."""
    served_name: str | None = None
    """Name in the API; default: the folder's name."""
    max_model_len: Positive | None = None
    """Longest prompt + answer in tokens; default: what the model's config says."""


class CacheConfig(Section, frozen=True):
    block_size: Annotated[int, Meta(ge=16, le=256, multiple_of=16)] = 16
    """Tokens per KV block."""
    kv_memory_mib: Annotated[int, Meta(ge=1)] | None = None
    """Size of one worker's KV pool; ``num_blocks`` overrides it. Default: 768 on CPU, on a GPU what
    ``engine.gpu_memory_utilization`` leaves."""
    num_blocks: Annotated[int, Meta(ge=2)] | None = None
    prefix_cache: bool = True


class EngineConfig(Section, frozen=True):
    max_num_seqs: Positive = 64
    """Most sequences in one step."""
    max_batch_tokens: Annotated[int, Meta(ge=16)] | None = None
    """Token budget of one step; longer prompts are computed in chunks of it. Sequences that decode run even
    beyond it. Default: 256 on CPU, 2048 on a GPU."""
    threads: Positive | None = None
    """CPU threads of a worker's model; default: cores divided by the workers of a local cluster, at least
    1."""
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,2})?)$")] = "cpu"
    """Where a worker's model and KV pool lie: ``cpu``, ``cuda`` (the first GPU visible) or ``cuda:N``."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Of weights and KV, the same on all workers. ``auto``: float32 on CPU, which has no other; on a GPU the
    model's own, and bfloat16 for float32 models."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Part of a GPU's memory that one worker takes for everything; default: 0.9, divided by the workers of a
    local cluster."""
    enforce_eager: bool = False
    """On a GPU: launch each step's kernels one by one, without CUDA graphs."""
    step_ahead: bool = True
    """On a GPU: plan and launch a step while the one before it runs."""
    deterministic: bool = False
    """On a GPU: attention whose sums do not depend on what else is in a step; slower."""
    cpu_ops: Literal["auto", "c", "torch"] = "auto"
    """Kernels on CPU: compiled C where a compiler is found (auto), C or an error, or torch's own."""
    cpu_weights: Literal["fp32", "int8"] = "fp32"
    """int8: weights rounded to 255 steps per output, faster and near the model's own results; needs the C
    kernels."""
    speculative: Literal["none", "ngram"] = "none"
    """ngram: a decode worker guesses the next tokens to be those that followed the last few before, and
    computes them in the same step; the answers are the same, those that copy come sooner."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=32)] = 4
    """Most guesses for one sequence in one step."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=32)] = 2
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=32)] = 4
    """So many last tokens are looked for, the most first."""


class RouterConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    port: Port = 8000
    """HTTP port; 0 takes a free one and announces it."""
    workers_endpoint: str = "tcp://127.0.0.1:5555"
    """Where workers dial in; port 0 takes a free one."""
    api_keys: tuple[str, ...] = ()
    """Keys of which a client must show one (``Authorization: Bearer``); better in a file. None: open to
    all."""
    api_keys_file: str | None = None
    """File with such keys, one a line; lines that begin with # are comments."""
    max_requests: Positive = 512
    """Requests in the house at once; one more is answered 429."""
    max_body_bytes: Positive = 16 * 1024 * 1024
    max_choices: Positive = 128
    """Prompts x n of one HTTP request."""
    tool_parser: Literal[
        "auto", "hermes", "llama3_json", "mistral", "mistral_args", "qwen3_coder", "none"
    ] = "auto"
    """How the model writes calls of tools; ``auto``: found by its chat template."""
    request_timeout_s: Seconds = 600.0
    queue_timeout_s: Seconds = 120.0
    """Longest wait for the first token's prefill to start."""
    probe_s: Seconds = 1.0
    """A worker that is silent about a request for this long is asked whether a message was lost."""
    stall_timeout_s: Seconds = 60.0
    """Longest silence of a worker within a running request."""
    stuck_after_s: Seconds = 60.0
    """A worker whose engine has been at one step for this long gets nothing new, and its requests recover."""
    keepalive_s: Seconds = 15.0
    """A silent stream gets an SSE comment at this interval, so that proxies keep it open."""
    write_timeout_s: Seconds = 30.0
    """A reader that takes nothing for this long loses its stream."""
    drain_s: Seconds = 20.0
    max_recoveries: Annotated[int, Meta(ge=0, le=16)] = 2
    dead_after_s: Seconds = 3.0
    heartbeat_s: Seconds = 0.5


class WorkerConfig(Section, frozen=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    """Id of the worker, unique among all; a new process of the same name takes its predecessor's place at
    once. Default: made of the role and a random part."""
    routers: tuple[str, ...] = ("tcp://127.0.0.1:5555",)
    data_host: str = "127.0.0.1"
    """Address that a prefill worker's data socket binds to."""
    advertise_host: str | None = None
    """Address that decode workers are told; default: the one this host uses towards the router."""
    data_port: Port = 0
    transport: Literal["auto", "shm", "cuda_ipc", "tcp"] = "auto"
    lease_s: Seconds = 10.0
    """A prompt's KV is kept this long after the last sign of life of the decode worker that wants it."""
    drain_s: Seconds = 20.0
    drain: Literal["finish", "hand-over"] = "finish"
    """What a decode worker does on SIGTERM with what it runs: finish it, or hand its KV over to another."""
    checksums: bool = True
    """One per KV block: made by the worker that computed it, compared by the one that fetched it."""
    tcp_window_blocks: Positive = 16
    """Blocks a decode worker asks for ahead over TCP: its credit."""


class ClusterConfig(Section, frozen=True):
    prefill: Annotated[int, Meta(ge=0, le=64)] = 1
    decode: Annotated[int, Meta(ge=0, le=64)] = 1
    colocated: Annotated[int, Meta(ge=0, le=64)] = 0
    key: str | None = None
    """Cluster key (``pagerelay keygen``); needed by every socket that is not on loopback."""
    key_file: str | None = None


class Config(Section, frozen=True):
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def cluster_key(self) -> str | None:
        """The cluster key from config or its file, or ``None``. Raises :class:`ConfigError` if the file is
        unusable."""
        if self.cluster.key:
            return _checked_key(self.cluster.key, "cluster.key")
        if not self.cluster.key_file:
            return None
        where = f"cluster.key_file {self.cluster.key_file}"
        key = _read_secret(self.cluster.key_file, where, "; make one with `pagerelay keygen > FILE`")
        return _checked_key(key.strip(), where)

    def client_keys(self) -> tuple[str, ...]:
        """The keys that clients may show, from config and file; empty: no key is asked for. Raises
        :class:`ConfigError` if the file is unusable."""
        keys = list(self.router.api_keys)
        if self.router.api_keys_file:
            where = f"router.api_keys_file {self.router.api_keys_file}"
            lines = [line.strip() for line in _read_secret(self.router.api_keys_file, where, "").splitlines()]
            found = [line for line in lines if line and not line.startswith("#")]
            if not found:
                raise ConfigError(f"{where} holds no key; write one a line")
            keys += found
        for key in keys:
            if len(key) < MIN_API_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"router.api_keys: a key has at least {MIN_API_KEY} printable ASCII characters, no blanks"
                )
        return tuple(keys)

    def masked(self) -> dict[str, Any]:
        """The effective configuration for printing, secrets masked."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        if shown["cluster"]["key"]:
            shown["cluster"]["key"] = "********"
        shown["router"]["api_keys"] = ["********"] * len(self.router.api_keys)
        return shown


def _read_secret(path: str, where: str, remedy: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not a text file") from error
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}{remedy}") from error


def _checked_key(key: str, setting: str) -> str:
    if len(key) < 32:
        raise ConfigError(f"{setting}: a key has at least 32 characters; make one with `pagerelay keygen`")
    return key


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a doubled key is an error, as it is nearly always a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_SECTION_PREFIXES = tuple(f"PAGERELAY_{section.upper()}_" for section in Config.__struct_fields__)


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not UTF-8 text") from error
    try:
        data = yaml.load(text, _UniqueKeyLoader)  # noqa: S506 - a SafeLoader that also refuses doubled keys
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"config file {path}: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path}: the top level must be a mapping of sections")
    return data


def _known_paths() -> dict[str, tuple[str, ...]]:
    """Environment name → path of every setting."""
    paths: dict[str, tuple[str, ...]] = {"PAGERELAY_LOG_LEVEL": ("log_level",)}
    for section in Config.__struct_fields__:
        kind = type(getattr(Config(), section))
        if issubclass(kind, Section):
            for name in kind.__struct_fields__:
                paths[f"PAGERELAY_{section}_{name}".upper()] = (section, name)
    return paths


def _insert(tree: dict[str, Any], path: tuple[str, ...], value: str, source: str) -> None:
    node = tree
    for part in path[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{source}: {part} is not a section")
        node = child
    # A list is written with commas; everything else keeps YAML's reading of a scalar.
    if path in (("worker", "routers"), ("router", "api_keys")):
        node[path[-1]] = [item.strip() for item in value.split(",") if item.strip()]
        return
    if path in (("cluster", "key"), ("model", "path"), ("model", "served_name"), ("worker", "name")):
        node[path[-1]] = value
        return
    try:
        node[path[-1]] = yaml.safe_load(value) if value.strip() else None
    except (yaml.YAMLError, ValueError):
        node[path[-1]] = value


def _check_speculation(engine: EngineConfig) -> None:
    if engine.prompt_lookup_min > engine.prompt_lookup_max:
        raise ConfigError(
            f"engine.prompt_lookup_min is {engine.prompt_lookup_min}, above engine.prompt_lookup_max, which "
            f"is {engine.prompt_lookup_max}: lower the one or raise the other"
        )
    if engine.speculative != "none" and engine.num_speculative_tokens >= engine.max_num_seqs:
        raise ConfigError(
            f"engine.num_speculative_tokens is {engine.num_speculative_tokens} and engine.max_num_seqs is "
            f"{engine.max_num_seqs}: a step has room for so many rows, guesses included; raise "
            "engine.max_num_seqs above it"
        )


def load_config(
    file: str | None = None,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Merges file, environment and flags (``{"engine.threads": "2"}``). Raises :class:`ConfigError` in one
    clear line."""
    environ = os.environ if environ is None else environ
    file = file or environ.get("PAGERELAY_CONFIG") or None
    tree = _read_yaml(file) if file else {}
    known = _known_paths()
    for name, value in environ.items():
        if name in known and value.strip():  # an empty variable is one that is not given
            _insert(tree, known[name], value, f"environment variable {name}")
        elif name not in known and name.startswith(_SECTION_PREFIXES):
            raise ConfigError(
                f"environment variable {name}: no such setting; `pagerelay config` prints all of them"
            )
    for dotted, value in (flags or {}).items():
        path = tuple(dotted.split("."))
        if path not in known.values():
            raise ConfigError(f"--set {dotted}: no such setting; `pagerelay config` prints all of them")
        _insert(tree, path, value, f"--set {dotted}")
    cluster = tree.get("cluster")
    if isinstance(cluster, dict) and cluster.get("colocated"):
        # Colocated workers do both jobs: the default of one prefill and one decode worker is not meant then.
        cluster.setdefault("prefill", 0)
        cluster.setdefault("decode", 0)
    try:
        config = msgspec.convert(tree, Config, strict=True)
    except msgspec.ValidationError as error:
        where = f" (file {file})" if file else ""
        raise ConfigError(f"configuration{where}: {error}") from error
    if config.cluster.colocated and (config.cluster.prefill or config.cluster.decode):
        raise ConfigError("cluster: colocated workers do both jobs; drop prefill and decode, or colocated")
    on_gpu = config.engine.device != "cpu"
    if not on_gpu and config.engine.dtype not in ("auto", "float32"):
        raise ConfigError(
            f"engine.dtype is {config.engine.dtype}: the CPU computes in float32 only; set it to auto"
        )
    if on_gpu and config.engine.cpu_weights != "fp32":
        raise ConfigError(
            f"engine.cpu_weights is {config.engine.cpu_weights}, which is for the CPU, and engine.device is "
            f"{config.engine.device}"
        )
    _check_speculation(config.engine)
    if config.worker.transport == ("shm" if on_gpu else "cuda_ipc"):
        raise ConfigError(
            f"worker.transport is {config.worker.transport}, which cannot carry a pool on engine.device "
            f"{config.engine.device}: set it to auto, tcp or {'cuda_ipc' if on_gpu else 'shm'}"
        )
    return config
