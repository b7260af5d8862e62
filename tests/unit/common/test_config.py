"""One YAML file → frozen structs: what wins over what, and one clear line for everything that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagerelay.common.config import Config, cache_dir, load_config
from pagerelay.common.errors import ConfigError


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "pagerelay.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def refused(file: str | None = None, flags: dict[str, str] | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, flags, environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- precedence


def test_nothing_said_is_the_defaults() -> None:
    assert load_config(environ={}) == Config()


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = written(tmp_path, "engine: {max_num_seqs: 2, threads: 2, max_batch_tokens: 32}\n")
    config = load_config(
        file,
        {"engine.max_num_seqs": "4"},
        {"PAGERELAY_ENGINE_MAX_NUM_SEQS": "3", "PAGERELAY_ENGINE_THREADS": "3"},
    )
    assert config.engine.max_num_seqs == 4
    assert config.engine.threads == 3
    assert config.engine.max_batch_tokens == 32
    assert config.engine.cpu_ops == Config().engine.cpu_ops


def test_the_file_may_come_from_the_environment_and_a_flag_beats_it(tmp_path: Path) -> None:
    file = written(tmp_path, "log_level: debug\n")
    assert load_config(environ={"PAGERELAY_CONFIG": file}).log_level == "debug"
    assert (
        load_config(environ={"PAGERELAY_CONFIG": file, "PAGERELAY_LOG_LEVEL": "error"}).log_level == "error"
    )
    assert load_config(file, environ={"PAGERELAY_CONFIG": "/no/such/file"}).log_level == "debug"


def test_falsy_values_are_kept(tmp_path: Path) -> None:
    config = load_config(
        written(tmp_path, "cache: {prefix_cache: false}\nrouter: {max_recoveries: 0, port: 0}\n"),
        {"cluster.decode": "0"},
        {"PAGERELAY_CLUSTER_PREFILL": "0"},
    )
    assert config.cache.prefix_cache is False
    assert (config.router.max_recoveries, config.router.port) == (0, 0)
    assert (config.cluster.prefill, config.cluster.decode) == (0, 0)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_the_defaults(tmp_path: Path, text: str) -> None:
    assert load_config(written(tmp_path, text), environ={}) == Config()


def test_an_empty_environment_variable_means_not_given() -> None:
    assert load_config(environ={"PAGERELAY_ENGINE_THREADS": ""}).engine.threads is None


def test_lists_are_written_with_commas() -> None:
    config = load_config(environ={"PAGERELAY_WORKER_ROUTERS": "tcp://a:1, tcp://b:2,"})
    assert config.worker.routers == ("tcp://a:1", "tcp://b:2")


@pytest.mark.parametrize("path", ["123", "true", "null", "1e3", "a: b", "[x", "yes"])
def test_names_stay_text_whatever_yaml_would_make_of_them(path: str) -> None:
    assert load_config(environ={"PAGERELAY_MODEL_PATH": path}).model.path == path
    assert load_config(flags={"model.served_name": path}, environ={}).model.served_name == path


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=32))
def test_a_key_of_any_letters_arrives_as_it_is(key: str) -> None:
    assert load_config(environ={"PAGERELAY_CLUSTER_KEY": key}).cluster_key() == key


def test_every_setting_can_be_set_by_flag_and_by_environment() -> None:
    for section in Config.__struct_fields__:
        part = getattr(Config(), section)
        for name in getattr(part, "__struct_fields__", ()):
            now = getattr(part, name)
            if now is None:
                continue  # "not given" has no spelling of its own
            value = ",".join(now) if isinstance(now, tuple) else str(now)
            flag = load_config(flags={f"{section}.{name}": value}, environ={})
            environ = load_config(environ={f"PAGERELAY_{section}_{name}".upper(): value})
            assert flag == environ == Config(), (section, name)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("engine: {max_seqs: 3}\n", "max_seqs"),
        ("engin: {}\n", "engin"),
        ("engine: {max_num_seqs: 0}\n", "$.engine.max_num_seqs"),
        ("engine: {max_num_seqs: '3'}\n", "$.engine.max_num_seqs"),
        ("engine: {max_num_seqs: true}\n", "$.engine.max_num_seqs"),
        ("engine: {max_num_seqs: 3.5}\n", "$.engine.max_num_seqs"),
        ("cache: {block_size: 17}\n", "$.cache.block_size"),
        ("router: {port: 65536}\n", "$.router.port"),
        ("router: {stall_timeout_s: .nan}\n", "$.router.stall_timeout_s"),
        ("router: {stall_timeout_s: .inf}\n", "$.router.stall_timeout_s"),
        ("router: {stall_timeout_s: -1}\n", "$.router.stall_timeout_s"),
        ("worker: {transport: rdma}\n", "$.worker.transport"),
        ("engine: {device: gpu}\n", "$.engine.device"),
        ("engine: {device: 'cuda:'}\n", "$.engine.device"),
        ("engine: {device: 'cuda:-1'}\n", "$.engine.device"),
        ("engine: []\n", "$.engine"),
        ("log_level: loud\n", "$.log_level"),
        ("engine: {threads: 1}\nengine: {threads: 2}\n", "'engine' stands twice"),
        ("engine: {threads: 1, threads: 2}\n", "'threads' stands twice"),
        ("- a\n- b\n", "mapping of sections"),
        ("just text\n", "mapping of sections"),
        ("engine: {threads: [\n", "line"),
        ("engine: !!python/object/apply:os.system ['true']\n", "python/object"),
    ],
)
def test_a_bad_file_is_refused_with_file_and_place(tmp_path: Path, text: str, named: str) -> None:
    file = written(tmp_path, text)
    message = refused(file)
    assert named in message
    assert file in message


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:15"])
def test_a_gpu_and_a_way_that_carries_its_memory(device: str) -> None:
    for transport in ("auto", "cuda_ipc", "tcp"):
        config = load_config(flags={"engine.device": device, "worker.transport": transport}, environ={})
        assert (config.engine.device, config.worker.transport) == (device, transport)
    message = refused(flags={"engine.device": device, "worker.transport": "shm"})
    assert f"shm, which cannot carry a pool on engine.device {device}: set it to auto, tcp or" in message
    assert "tcp or shm" in refused(flags={"worker.transport": "cuda_ipc"})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "/no/such.yaml: No such file" in refused("/no/such.yaml")
    assert "Is a directory" in refused(str(tmp_path))
    (tmp_path / "latin").write_bytes(b"model: {path: caf\xe9}\n")
    assert "not UTF-8" in refused(str(tmp_path / "latin"))


def test_an_unknown_flag_is_refused() -> None:
    assert "--set engine.thread: no such setting; `pagerelay config`" in refused(flags={"engine.thread": "1"})
    assert "--set engine: no such setting" in refused(flags={"engine": "1"})


def test_a_mistyped_variable_is_refused() -> None:
    assert "PAGERELAY_ENGINE_THREAD" in refused(PAGERELAY_ENGINE_THREAD="2")
    assert load_config(environ={"PAGERELAY_CACHE": "/models", "PAGERELAY_IMAGE": "x"}) == Config()


def test_a_bad_value_from_the_environment_is_refused() -> None:
    assert "$.engine.threads" in refused(PAGERELAY_ENGINE_THREADS="many")
    assert "$.router.port" in refused(PAGERELAY_ROUTER_PORT="-1")


def test_colocated_beside_prefill_is_refused(tmp_path: Path) -> None:
    assert "colocated workers do both jobs" in refused(
        written(tmp_path, "cluster: {colocated: 1, prefill: 1}\n")
    )
    config = load_config(written(tmp_path, "cluster: {colocated: 2, prefill: 0, decode: 0}\n"), environ={})
    assert config.cluster.colocated == 2


# ---------------------------------------------------------------- the cluster key


def test_the_key_comes_from_its_file_without_the_newline(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k" * 40 + "\n")
    assert (
        load_config(environ={"PAGERELAY_CLUSTER_KEY_FILE": str(tmp_path / "key")}).cluster_key() == "k" * 40
    )
    assert load_config(environ={}).cluster_key() is None


def test_an_unusable_key_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("abc\n")
    for file, why in (("missing", "No such file"), ("short", "at least 32")):
        config = load_config(environ={"PAGERELAY_CLUSTER_KEY_FILE": str(tmp_path / file)})
        with pytest.raises(ConfigError, match=f"{file}: .*{why}"):
            config.cluster_key()


def test_a_printed_configuration_hides_the_key() -> None:
    shown = load_config(environ={"PAGERELAY_CLUSTER_KEY": "s" * 40}).masked()
    assert "sss" not in str(shown)
    assert shown["cluster"]["key"] == "********"
    assert Config().masked()["cluster"]["key"] is None


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGERELAY_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("PAGERELAY_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "pagerelay"


# ---------------------------------------------------------------- keys of clients


def test_client_keys_come_from_the_environment_and_a_file_and_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-in-a-file\n\n  another-key  \n")
    config = load_config(
        None,
        {"router.api_keys_file": str(file)},
        {"PAGERELAY_ROUTER_API_KEYS": "key-of-environment, 12345678"},
    )
    keys = ("key-of-environment", "12345678", "key-in-a-file", "another-key")
    assert config.client_keys() == keys
    assert not any(key in str(config.masked()) for key in keys)
    assert Config().client_keys() == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# nothing\n", "holds no key"),
        ("short\n", "at least 8"),
        ("with a blank\n", "no blanks"),
        (None, "No such"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(None, {"router.api_keys_file": str(file)}, {}).client_keys()


def test_a_workers_name_is_one_word() -> None:
    assert load_config(None, {"worker.name": "0042"}, {}).worker.name == "0042"
    assert "worker.name" in refused(None, {"worker.name": "two words"})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"prompt_lookup_min": "5"}, "engine.prompt_lookup_min is 5, above engine.prompt_lookup_max"),
        ({"max_num_seqs": "4", "speculative": "ngram"}, "raise engine.max_num_seqs"),
        ({"speculative": "draft"}, "speculative"),
        ({"num_speculative_tokens": "0"}, "num_speculative_tokens"),
    ],
)
def test_guesses_that_cannot_be_made(flags: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, {f"engine.{name}": value for name, value in flags.items()}, {})


def test_guesses_are_off_unless_asked_for() -> None:
    assert load_config(None, {"engine.max_num_seqs": "1"}, {}).engine.speculative == "none"
