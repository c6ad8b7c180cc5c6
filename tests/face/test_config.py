"""Configuration: every fault at once with its place, and nothing guessed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from stepwell.config import (
    Config,
    DirectoryTier,
    MemoryTier,
    PeerTier,
    PluginTier,
    RemoteTier,
    load_config,
    show_config,
)
from stepwell.config import faults as config_faults
from stepwell.config.presets import PRESETS
from stepwell.errors import ConfigError

TIERS: list[object] = [{"kind": "memory"}, {"kind": "directory", "path": "checkpoints"}]


def faults_of(source: object, **overrides: object) -> list[str]:
    """Return the lines of the error that loading `source` raises."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)  # type: ignore[arg-type]
    return [line.strip() for line in str(caught.value).splitlines()]


def test_a_directory_opens_with_memory_and_that_directory(tmp_path: Path) -> None:
    config = load_config(tmp_path / "run")
    assert [tier.label for tier in config.tiers] == ["memory", "directory"]
    assert isinstance(config.tiers[0], MemoryTier)
    assert config.directory == DirectoryTier(path=str(tmp_path / "run"))
    assert (config.capture, config.delta, config.save_every) == ("gradient", "none", 1)


def test_a_file_url_names_the_same_directory(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    by_url = load_config((tmp_path / "a b").as_uri())
    assert by_url == load_config(tmp_path / "a b")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("s3://Bucket/run", "no name of a bucket"),
        ("s3://key:secret@bucket/run", "holds no credentials"),
        ("s3://bucket/run?x=1", "no query"),
        ("s3://bucket/../run", "'..' is no name"),
        ("s3://", "no name of a bucket"),
        ("file://elsewhere/run", "names no other machine"),
        ("", "must not be empty"),
    ],
)
def test_a_url_that_cannot_be_opened_says_so(source: str, what: str) -> None:
    assert what in "".join(faults_of(source))


def test_a_url_opens_with_memory_and_object_storage() -> None:
    config = load_config("s3://bucket/runs/night/")
    assert [tier.label for tier in config.tiers] == ["memory", "remote"]
    assert config.remote == RemoteTier(url="s3://bucket/runs/night")
    assert load_config("gs://bucket").remote == RemoteTier(url="gs://bucket")
    assert load_config("s3://bucket/run.yaml").remote == RemoteTier(url="s3://bucket/run.yaml")


def test_the_tiers_of_the_documentation_load(repository: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (repository / "docs/durability.md").read_text(), re.DOTALL)
    (tmp_path / "run.yaml").write_text(block)
    config = load_config(tmp_path / "run.yaml")
    assert config.remote is not None
    assert config.remote.options.bytes_per_s_max == 2e8
    (tmp_path / "shown.yaml").write_text(show_config(config))
    assert load_config(tmp_path / "shown.yaml") == config


@pytest.mark.parametrize(
    ("tier", "what"),
    [
        ({}, "tiers.0.url: missing"),
        ({"url": "bucket/run"}, "tiers.0.url: bucket/run: not a URL"),
        ({"url": "file:///x"}, "tiers.0.url: file:///x: a file: URL is a directory tier"),
        ({"url": "s3://b@d/run"}, "tiers.0.url: s3://...: a URL holds no credentials"),
        ({"url": "s3://bucket/a//b"}, "tiers.0.url: s3://bucket/a//b: key 'a//b' is refused"),
        ({"url": "s3://bucket", "endpoint": "http://10.0.0.1:9000"}, "http is allowed to this machine alone"),
        ({"url": "s3://bucket", "endpoint": "minio"}, "is no URL of a service"),
        ({"url": "s3://bucket", "endpoint": "https://k:s@host"}, "holds no credentials"),
        ({"url": "s3://bucket", "secret_key": "x"}, "tiers.0.secret_key: no such key"),
        ({"url": "s3://bucket", "byte_per_s_max": 1}, 'did you mean "bytes_per_s_max"?'),
        ({"url": "s3://bucket", "requests_max": 0}, "tiers.0.requests_max: should be greater than"),
        ({"url": "s3://bucket", "put_bytes_max": 6 << 30}, "tiers.0.put_bytes_max: should be less than"),
    ],
)
def test_a_remote_tier_says_what_is_wrong(tier: dict[str, object], what: str) -> None:
    lines = faults_of({"tiers": [{"kind": "remote", **tier}]})
    assert lines[0] == "1 fault in the configuration:"
    assert what in lines[1]


@pytest.mark.parametrize(
    "endpoint", ["https://minio.example:9000", "http://127.0.0.1:1", "http://localhost", "http://[::1]:5"]
)
def test_an_endpoint_is_encrypted_or_on_this_machine(endpoint: str) -> None:
    config = load_config({"tiers": [{"kind": "remote", "url": "s3://bucket", "endpoint": endpoint}]})
    assert config.remote is not None
    assert config.remote.endpoint == endpoint


def test_a_colon_in_a_plain_name_is_no_scheme(tmp_path: Path) -> None:
    config = load_config(str(tmp_path / "run:1"))
    assert config.directory is not None
    assert config.directory.path == str(tmp_path / "run:1")


def test_a_relative_directory_stays_where_it_was_when_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("run")
    assert config.directory is not None
    assert config.directory.path == str(tmp_path / "run")


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"x")
    assert "not the directory of a run" in "".join(faults_of(tmp_path / "weights.pt"))


def test_a_missing_configuration_file_never_becomes_a_directory(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("")
    assert faults_of(tmp_path / "rnu.yaml") == [
        f'{tmp_path}/rnu.yaml: no such configuration file; did you mean "run.yaml"?'
    ]


YAML_WITH_FAULTS = """\
run: "a b"
save_evry: 3
save_every: true
stall_limit_s: -1
backpressure: wiat
tiers:
  - kind: memroy
  - {kind: directory, pth: foo}
  - kind: memory
    slots: 1
  - plain
pipeline: [capture: gradient, {delt: none}, shard, replicate, {commit: now}]
"""


def test_every_fault_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(YAML_WITH_FAULTS)
    lines = faults_of(path)
    assert lines[0] == "12 faults in the configuration:"
    for line, key, what in [
        (1, "run", "'a b': up to 64 letters"),
        (2, "save_evry", 'no such key; did you mean "save_every"?'),
        (3, "save_every", "should be a valid integer, got True"),
        (4, "stall_limit_s", "should be greater than or equal to 0, got -1"),
        (5, "backpressure", "'wiat' is not one of wait, skip; did you mean \"wait\"?"),
        (7, "tiers.0.kind", 'no tier kind is called "memroy"'),
        (8, "tiers.1.path", "missing"),
        (8, "tiers.1.pth", 'no such key; did you mean "path"?'),
        (10, "tiers.2.slots", "should be greater than or equal to 2, got 1"),
        (11, "tiers.3", "a tier is a mapping with a `kind`"),
        (12, "pipeline.1", 'no stage is called "delt"'),
        (12, "pipeline.4", 'the stage "commit" takes no setting'),
    ]:
        assert any(fault.startswith(f"{path}:{line}: {key}: {what}") for fault in lines), (line, key, lines)


def test_toml_faults_have_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'run = "a"\nlog_budgt = 2.0\n\n[[tiers]]\nkind = "memory"\n\n[[tiers]]\nkind = "directory"\n'
        'path = "x"\nkeep = "2"\n'
    )
    lines = faults_of(path)
    assert f'{path}:2: log_budgt: no such key; did you mean "log_budget"?' in lines
    assert f"{path}:10: tiers.1.keep: should be a valid integer, got '2'" in lines


def test_toml_and_yaml_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        "base_every = 7\n"
        'pipeline = [{capture = "state"}, {delta = "ordered_delta"}, "shard", "replicate", "commit"]\n'
        '[[tiers]]\nkind = "directory"\npath = "x"\nname = "disk"\n'
    )
    (tmp_path / "a.yaml").write_text(
        "base_every: 7\npipeline: [capture: state, delta: ordered_delta, shard, replicate, commit]\n"
        "tiers: [{kind: directory, path: x, name: disk}]\n"
    )
    config = load_config(tmp_path / "a.yaml")
    assert config == load_config(tmp_path / "a.toml")
    assert (config.capture, config.delta) == ("state", "ordered_delta")
    assert config.directory is not None
    assert config.directory.path == str(tmp_path / "x"), "relative to the file, not to the process"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("run: a\nrun: b\n", ":2: run: this key is there already in line 1"),
        ("tiers:\n - {kind: memory, keep: 1,\n    keep: 2}\n", ":3: tiers.0.keep: this key is there already"),
        ("run: [\n", "not valid YAML"),
        ("- a\n- b\n", "a mapping of keys, not list"),
        ("run: !!python/object/apply:os.system ['true']\n", ":1: not valid YAML"),
        ("a: &a [*a]\n", "alias that contains itself"),
    ],
)
def test_a_yaml_file_that_cannot_be_meant(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert what in "\n".join(faults_of(tmp_path / "run.yaml"))


def test_aliases_that_multiply_are_refused_before_they_grow(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "run.yaml").write_text("\n".join(rows))
    assert "aliases" in faults_of(tmp_path / "run.yaml")[0]


@pytest.mark.parametrize(
    ("text", "what"),
    [("run = 'a'\nrun = 'b'\n", "not valid TOML"), ("x = [\n", "not valid TOML")],
)
def test_a_toml_file_that_cannot_be_meant(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    assert what in faults_of(tmp_path / "run.toml")[0]


def test_a_binary_or_huge_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in faults_of(tmp_path / "a.yaml")[0]
    (tmp_path / "b.yaml").write_bytes(b"#" * (1 << 20) + b"\n")
    assert "larger than" in faults_of(tmp_path / "b.yaml")[0]


def test_anchors_merge_keys_and_exponents_work(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "stall_limit_s: 1e1\n"
        "tiers:\n  - &disk {kind: directory, path: x, keep: 3}\n  - {<<: *disk, path: y, name: second}\n"
    )
    config = load_config(tmp_path / "a.yaml")
    assert config.stall_limit_s == 10.0
    assert [tier.keep for tier in config.tiers] == [3, 3]


@pytest.mark.parametrize(
    ("pipeline", "what"),
    [
        (["shard", "replicate", "commit"], "missing: capture"),
        (["capture", "shard", "commit"], "missing: replicate"),
        (["capture", "commit", "shard", "replicate"], "wrong order"),
        (["capture", "delta", "delta", "shard", "replicate", "commit"], '"delta" is there twice'),
        (["capture", {"delta": "ordered_delta"}, "shard", "replicate", "commit"], "needs capture: state"),
        (["capture", {"quantize": "int9"}, "shard", "replicate", "commit"], 'mean "int8"'),
        (["capture", {"quantize": {"wieght": "int8"}}, "shard", "replicate", "commit"], 'mean "weight"'),
        (["capture", {"quantize": {"variance": "int8"}}, "shard", "replicate", "commit"], "or log_quant"),
        (["capture", {"quantize": {"eps": 0}}, "shard", "replicate", "commit"], "eps cannot be 0"),
        (["capture", {"quantize": {"rules": ["x"]}}, "shard", "replicate", "commit"], "rules map patterns"),
        (
            ["capture", {"quantize": {"rules": {"*": "sparse"}}}, "shard", "replicate", "commit"],
            "but sparsify is none",
        ),
        (["capture", {"sparsify": {"rate": 0.6}}, "shard", "replicate", "commit"], "rate cannot be 0.6"),
        (["capture", {"sparsify": 0.1}, "shard", "replicate", "commit"], "such as {rate: 0.1}"),
        ([{"capture": "state"}, {"quantize": "int8"}, "shard", "replicate", "commit"], "delta: difference"),
        ([{"capture": "state", "delta": "none"}, "shard", "replicate", "commit"], "one name to its setting"),
        ([3, "shard", "replicate", "commit"], "a stage is a name"),
        ([], "missing: capture"),
    ],
)
def test_a_pipeline_that_cannot_run(pipeline: list[object], what: str) -> None:
    assert what in "\n".join(faults_of({"tiers": TIERS, "pipeline": pipeline}))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_list_of_stages_that_can_be_shown_and_written(preset: str) -> None:
    config = load_config({"tiers": TIERS, "preset": preset})
    written = config.model_copy(update={"preset": "exact"})
    assert [stage.written for stage in config.pipeline] == list(PRESETS[preset])
    assert load_config({"tiers": TIERS, "pipeline": list(PRESETS[preset])}).pipeline == config.pipeline
    shown = yaml.safe_load(show_config(config))
    assert (shown["preset"], shown["pipeline"]) == (preset, list(PRESETS[preset]))
    assert load_config(shown) == config
    assert load_config(written, {"preset": preset}) == config


def test_a_pipeline_of_ones_own_comes_before_the_preset() -> None:
    stages = ["capture", "shard", "replicate", "commit"]
    config = load_config({"tiers": TIERS, "preset": "compact", "pipeline": stages})
    assert config.stage("quantize") is None


def test_an_unknown_preset() -> None:
    assert 'did you mean "compact"' in faults_of({"tiers": TIERS, "preset": "compct"})[1]


def test_stages_left_out_are_none() -> None:
    config = load_config({"tiers": TIERS, "pipeline": ["capture", "shard", "replicate", "commit"]})
    assert (config.capture, config.delta, config.stage("sparsify")) == ("gradient", "none", None)


def test_third_parties_add_stages_and_stores_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"stepwell.stages": frozenset({"mine"}), "stepwell.stores": frozenset({"tape"})}
    monkeypatch.setattr("stepwell.config.stages.plugin_names", names.__getitem__)
    monkeypatch.setattr("stepwell.config.tiers.plugin_names", names.__getitem__)
    config = load_config(
        {
            "tiers": [{"kind": "tape", "options": {"drive": 1}}],
            "pipeline": ["capture", {"mine": {"level": 2}}, "shard", "replicate", "commit"],
        }
    )
    assert config.tiers == (PluginTier(kind="tape", options={"drive": 1}),)
    stage = config.stage("mine")
    assert stage is not None
    assert stage.setting == {"level": 2}
    late = {"tiers": TIERS, "pipeline": ["capture", "shard", "mine", "replicate", "commit"]}
    assert "come after capture and before shard" in "".join(faults_of(late))


def test_no_installed_plugin_shadows_ours() -> None:
    for group in ("stepwell.stages", "stepwell.stores"):
        assert not config_faults.plugin_names(group) & {"capture", "memory", "directory"}


def test_two_tiers_of_one_name() -> None:
    assert "two tiers are called 'memory'" in faults_of({"tiers": [{"kind": "memory"}] * 2})[1]


def test_a_second_memory_tier() -> None:
    tiers = [{"kind": "memory"}, {"kind": "memory", "name": "other"}]
    assert "one memory tier at most" in faults_of({"tiers": tiers})[1]


def test_a_mapping_without_tiers_shows_how() -> None:
    assert "tiers: [{kind: memory}, {kind: directory" in faults_of({})[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("save_every", "3"),
        ("save_every", 0),
        ("save_every", 1.0),
        ("rng", 1),
        ("log_budget", float("nan")),
        ("log_budget", float("inf")),
        ("chunk_bytes", 1),
        ("run", "../x"),
        ("run", ""),
        ("tiers", []),
        ("on_error", None),
    ],
)
def test_wrong_types_and_values_are_refused(key: str, value: object) -> None:
    lines = faults_of({"tiers": TIERS, key: value})
    assert lines[0] == "1 fault in the configuration:"
    assert lines[1].startswith(f"config: {key}: ")


def test_overrides_replace_and_are_checked(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("save_every: 2\ntiers: [{kind: directory, path: x}]\n")
    assert load_config(tmp_path / "run.yaml", {"save_every": 5, "tiers": TIERS}).save_every == 5
    (line,) = faults_of(tmp_path / "run.yaml", save_every="x")[1:]
    assert "save_every: should be a valid integer" in line
    assert ":1:" not in line, "the fault is in the argument, not in the file"


def test_paths_and_tuples_of_python_are_taken(tmp_path: Path) -> None:
    config = load_config({"tiers": ({"kind": "directory", "path": tmp_path},)})
    assert config.directory is not None
    assert config.directory.path == str(tmp_path)


def test_a_config_is_taken_as_it_is_and_cannot_be_changed() -> None:
    config = load_config({"tiers": TIERS})
    assert load_config(config) is config
    assert load_config(config, {"base_every": 9}).base_every == 9
    with pytest.raises(ValueError, match="frozen"):
        config.base_every = 9  # type: ignore[misc]


def test_what_is_shown_loads_to_the_same(tmp_path: Path) -> None:
    config = load_config(
        {
            "run": "night",
            "tiers": [{"kind": "memory", "directory": str(tmp_path / "m"), "slots": 2}, *TIERS[1:]],
            "pipeline": [{"capture": "state"}, {"delta": "ordered_delta"}, "shard", "replicate", "commit"],
        }
    )
    (tmp_path / "shown.yaml").write_text(show_config(config))
    assert load_config(tmp_path / "shown.yaml") == config


def test_arenas_of_different_runs_never_meet(tmp_path: Path, shared_memory_of_tests: Path) -> None:
    def arena(config: Config) -> Path:
        assert config.memory is not None
        return config.arena_directory(config.memory)

    first, second = load_config(tmp_path / "a"), load_config(tmp_path / "b")
    named = load_config(tmp_path / "a", {"run": "other"})
    assert arena(first) == arena(load_config(tmp_path / "a"))
    assert len({arena(first), arena(second), arena(named)}) == 3
    assert shared_memory_of_tests in arena(first).parents


def test_no_shared_memory_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.config.models.SHARED_MEMORY", tmp_path / "absent")
    config = load_config(tmp_path / "run")
    assert config.memory is not None
    with pytest.raises(ConfigError, match="set the tier's `directory`"):
        config.arena_directory(config.memory)


def test_a_tier_may_have_its_own_error_policy() -> None:
    config = load_config(
        {"on_error": "retry", "tiers": [{"kind": "memory", "on_error": "degrade"}, TIERS[1]]}
    )
    assert [config.error_policy(tier) for tier in config.tiers] == ["degrade", "retry"]


@pytest.mark.parametrize("address", ["10.0.0.2:7070", ["10.0.0.2:7070", "[fd00::2]:7071"]])
def test_a_peer_has_one_address_or_several(address: object) -> None:
    config = load_config({"tiers": [{"kind": "memory"}, {"kind": "peer", "address": address}]})
    tier = config.tiers[1]
    assert isinstance(tier, PeerTier)
    assert tier.addresses[0] == ("10.0.0.2", 7070)
    assert len(tier.addresses) == (1 if isinstance(address, str) else 2)
    assert config.error_policy(tier) == "degrade"


@pytest.mark.parametrize(
    "address", ["", "10.0.0.2", "10.0.0.2:", ":7070", "a:70000", "http://a:1", "fd00::2:1", []]
)
def test_what_is_no_address_is_refused(address: object) -> None:
    (line,) = faults_of({"tiers": [{"kind": "peer", "address": address}]})[1:]
    assert "address" in line
