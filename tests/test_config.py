"""Settings come from flags, environment and file; each mistake is told once, with its place."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specdec_exporter.config import (
    ConfigError,
    Problem,
    Settings,
    Target,
    listen_address,
    load,
)
from specdec_exporter.duration import parse_duration
from specdec_exporter.thresholds import Thresholds
from specdec_exporter.tuner_settings import TunerSettings

Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str | bytes) -> Path:
        file = tmp_path / "specdec.yml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write


def read(file: Path | None = None, flags: dict[str, Any] | None = None, **environ: str) -> Settings:
    return load(file, flags, environ)


def mistakes(
    file: Path | None = None, flags: dict[str, Any] | None = None, **environ: str
) -> list[str]:
    """Each mistake on its one line, the file shown without its folder."""
    with pytest.raises(ConfigError) as caught:
        load(file, flags, environ)
    lines = [str(problem) for problem in caught.value.problems]
    assert lines
    assert all(line.isprintable() for line in lines)
    assert str(caught.value) == "\n".join(lines)
    return [line.replace(f"{file.parent}/", "") if file else line for line in lines]


def mistake(file: Path | None = None, flags: dict[str, Any] | None = None, **environ: str) -> str:
    (line,) = mistakes(file, flags, **environ)
    return line


# Sources

EACH = [
    # setting, what the file says, what a variable says, the value
    ("targets", "[http://a:1, b=http://b:2]", "http://a:1, b=http://b:2", None),
    ("listen", "'[::1]:1'", "[::1]:1", "[::1]:1"),
    ("interval", "1m30s", "1m30s", 90.0),
    ("timeout", "500ms", "500ms", 0.5),
    ("windows", "[5m, 1h]", "5m, 1h", (300.0, 3600.0)),
    ("max_page_bytes", "1000", "1000", 1000),
    ("variance_inflation", "2.5", "2.5", 2.5),
    ("allowed_hosts", "[a.example, b.example]", "a.example,b.example", ("a.example", "b.example")),
    ("admin_token", "hunter2", "hunter2", None),
    ("tuner", "{mode: apply}", '{"mode": "apply"}', TunerSettings(mode="apply")),
    ("state_file", "/var/lib/specdec.db", "/var/lib/specdec.db", Path("/var/lib/specdec.db")),
    ("rules", "{min_drafts: 3}", '{"min_drafts": 3}', Thresholds(min_drafts=3)),
    ("log_level", "debug", "debug", "debug"),
]


def test_the_table_of_sources_names_every_setting() -> None:
    assert [name for name, *_ in EACH] == list(Settings.model_fields)


@pytest.mark.parametrize(("name", "in_file", "in_environ", "value"), EACH)
def test_each_setting_is_read_from_file_and_environment_alike(
    name: str, in_file: str, in_environ: str, value: Any, write: Write
) -> None:
    more = "" if name in ("interval", "windows") else "\nwindows: [2h]"
    by_file = getattr(read(write(f"{name}: {in_file}{more}")), name)
    by_environ = getattr(load(None, None, {f"SPECDEC_{name.upper()}": in_environ}), name)
    assert by_file == by_environ
    assert by_file != Settings.model_fields[name].default
    if value is not None:
        assert by_file == value


def test_flags_win_over_environment_and_environment_wins_over_the_file(write: Write) -> None:
    file = write("interval: 1s\nlisten: 127.0.0.1:1\nlog_level: error\ntargets: [http://file]")
    got = read(
        file,
        {"interval": "3s", "targets": ["http://flag"], "listen": None},
        SPECDEC_INTERVAL="2s",
        SPECDEC_LISTEN="127.0.0.1:2",
        SPECDEC_TARGETS="http://environ",
    )
    assert got.interval == 3
    assert got.listen == "127.0.0.1:2"
    assert got.log_level == "error"
    assert [target.url for target in got.targets] == ["http://flag/metrics"]


def test_a_list_in_the_environment_is_a_json_array_or_parts_between_commas() -> None:
    target = {"url": "http://a:1/m?x=1,2", "name": "a", "labels": {"zone": "b"}}
    (got,) = read(SPECDEC_TARGETS=json.dumps([target])).targets
    assert (got.url, got.name, got.labels) == ("http://a:1/m?x=1,2", "a", {"zone": "b"})
    assert read(SPECDEC_WINDOWS='["5m", 60]').windows == (300, 60)
    assert read(SPECDEC_WINDOWS="5m,, 1m ,").windows == (300, 60)
    assert [t.name for t in read(SPECDEC_TARGETS="[::1]:8000,x=http://h").targets] == [
        "[::1]:8000",
        "x",
    ]
    assert read(SPECDEC_TARGETS="").targets == ()


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_INTERVAL", "7s")
    assert load().interval == 7


def test_an_empty_file_gives_the_defaults(write: Write) -> None:
    for text in ("", "\n# nothing\n", "---\n", "~"):
        assert read(write(text)).model_dump() == Settings().model_dump()


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read().interval = 3  # type: ignore[misc]


def test_the_timeout_is_the_interval_but_at_most_ten_seconds() -> None:
    assert read(SPECDEC_INTERVAL="3s").scrape_timeout == 3
    assert read(SPECDEC_INTERVAL="60s").scrape_timeout == 10
    assert read(SPECDEC_INTERVAL="60s", SPECDEC_TIMEOUT="40s").scrape_timeout == 40


# Mistakes and their places


def test_an_unknown_key_names_the_nearest_one_and_its_line_at_the_top_and_inside(
    write: Write,
) -> None:
    file = write(
        "inteval: 5s\ntargets:\n  - http://a\n  - url: http://b\n    nmae: x\n    zzz: 1\n"
    )
    assert sorted(mistakes(file)) == [
        "specdec.yml:1: inteval: no such setting; did you mean interval?",
        "specdec.yml:5: nmae: no such setting; did you mean name?",
        "specdec.yml:6: zzz: no such setting; there are actuator, baseline, labels, "
        "metric_prefix, name, reference, revision, role, sweep, url",
    ]


def test_an_unknown_variable_names_the_nearest_one() -> None:
    assert mistake(SPECDEC_INTERVL="5s") == (
        "SPECDEC_INTERVL: no such setting; did you mean SPECDEC_INTERVAL?"
    )
    assert mistakes(SPECDEC_TARGETS__0__URL="http://a")[0].startswith("SPECDEC_TARGETS__0__URL: ")


def test_variables_of_others_are_none_of_ours() -> None:
    others = {
        "SPECDEC_CONFIG": "read by the command line",
        "SPECDEC_EXPORTER_SERVICE_HOST": "10.0.0.1",
        "SPECDEC_EXPORTER_SERVICE_PORT": "19185",
        "SPECDEC_EXPORTER_SERVICE_PORT_HTTP": "19185",
        "SPECDEC_EXPORTER_PORT": "tcp://10.0.0.1:19185",
        "SPECDEC_EXPORTER_PORT_19185_TCP": "tcp://10.0.0.1:19185",
        "SPECDEC_EXPORTER_PORT_19185_TCP_ADDR": "10.0.0.1",
        "SPECDEC_EXPORTER_PORT_19185_TCP_PORT": "19185",
        "SPECDEC_EXPORTER_PORT_19185_TCP_PROTO": "tcp",
        "SPECDEC_PORT": "tcp://10.0.0.1:19185",
        "NOT_SPECDEC_INTERVAL": "x",
    }
    assert load(None, None, others).model_dump() == Settings().model_dump()


def test_a_wrong_value_is_told_with_its_file_and_line_its_variable_or_its_flag(
    write: Write,
) -> None:
    told = "'often' is not a duration; write it like 5s, 1m30s or 500ms"
    file = write("listen: 127.0.0.1:1\n\ninterval: often\n")
    assert mistake(file) == f"specdec.yml:3: interval: {told}"
    assert mistake(SPECDEC_INTERVAL="often") == f"SPECDEC_INTERVAL: interval: {told}"
    assert mistake(None, {"interval": "often"}) == f"--interval: interval: {told}"
    assert mistake(None, {"targets": ["ftp://a"]}).startswith("--target: targets.0.url: 'ftp://a'")
    assert mistake(write("targets:\n- url: http://a\n- name: x\n")) == (
        "specdec.yml:3: targets.1.url: it is missing, and is needed"
    )


def test_every_mistake_is_told_at_once_in_the_order_of_lines(write: Write) -> None:
    file = write("interval: 0\nlog_level: loud\nmax_page_bytes: -1\n")
    told = mistakes(file, None, SPECDEC_LISTN="x")
    assert [line.partition(": ")[0] for line in told] == [
        "SPECDEC_LISTN",
        "specdec.yml:1",
        "specdec.yml:2",
        "specdec.yml:3",
    ]


def test_settings_that_contradict_each_other_name_both(write: Write) -> None:
    shorter = "window 60s is shorter than the interval 120s"
    assert mistake(write("interval: 2m\nwindows: [5m, 1m]")) == f"specdec.yml:1: {shorter}"
    assert mistake(None, None, SPECDEC_INTERVAL="2m", SPECDEC_WINDOWS="1m") == (
        f"settings: {shorter}"
    )
    assert mistake(None, {"interval": "1s"}, SPECDEC_TIMEOUT="2s") == (
        "settings: timeout 2s is longer than the interval 1s"
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a\n- b\n", "specdec.yml:1: expected settings as `key: value` lines"),
        ("just words", "specdec.yml:1: expected settings as `key: value` lines"),
        (b"listen: \xff", "specdec.yml: not UTF-8 at byte 8"),
        ("a: [1\n", "specdec.yml:2:1: expected ',' or ']', but got '<stream end>'"),
        ("interval: 5s\ninterval: 6s\n", 'specdec.yml:2:1: found duplicate key "interval"'),
        ("listen: \0", "specdec.yml: not YAML: unacceptable character #x0000"),
        ("interval: 5s\n1: x\n", "specdec.yml:2: a setting's name is a plain word"),
        ("[a]: x\n", "specdec.yml:1: a setting's name is a plain word"),
        ("interval: 2001-13-45", "specdec.yml: a value cannot be read as YAML"),
        ("interval: !!float x", "specdec.yml: a value cannot be read as YAML"),
        ("listen: " + "[" * 600, "specdec.yml: nested too deeply"),
        ("targets: 5", "specdec.yml:1: targets: expected a list"),
        ("targets: [5]", "specdec.yml:1: targets.0: expected a URL or a mapping with one"),
        ("windows: []", "specdec.yml:1: windows: name one window or several different ones"),
        ("windows: [5m, 300s]", "specdec.yml:1: windows: name one window or several"),
        ("interval: 1" + "0" * 400, "specdec.yml:1: interval: infs is not above 0 and finite"),
        ("interval: .nan", "specdec.yml:1: interval: nans is not above 0 and finite"),
        ("interval: -5", "specdec.yml:1: interval: -5s is not above 0 and finite"),
        ("interval: yes", "specdec.yml:1: interval: 'yes' is not a duration"),
        ("interval: true", "specdec.yml:1: interval: True is not a duration"),
        ("variance_inflation: .inf", "specdec.yml:1: variance_inflation: Input should be a fin"),
        ("admin_token: ''", "specdec.yml:1: admin_token: the token is empty"),
        ("listen: 19185", "specdec.yml:1: listen: Input should be a valid string"),
    ],
)
def test_a_bad_file_is_told_by_place_and_reason(text: str | bytes, told: str, write: Write) -> None:
    assert mistake(write(text)).startswith(told)


def test_a_file_that_cannot_be_read_is_told_in_the_words_of_the_system(tmp_path: Path) -> None:
    assert mistake(tmp_path / "none.yml") == "none.yml: No such file or directory"
    assert mistake(tmp_path).endswith(": Is a directory")


def test_an_empty_token_in_the_environment_is_no_way_to_have_none() -> None:
    assert mistake(SPECDEC_ADMIN_TOKEN="").startswith("SPECDEC_ADMIN_TOKEN: admin_token: ")


def test_anchors_that_multiply_are_refused_without_being_written_out(write: Write) -> None:
    """A billion laughs: nine levels of ten references each."""
    lines = ["a0: &a0 lol"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    told = mistakes(write("\n".join(lines)))
    assert len(told) == 10
    lines = ["targets:", "- &a0 [lol]"]
    lines += [f"- &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    told = mistakes(write("\n".join(lines)))
    assert len(told) == 10
    assert max(map(len, told)) < 100


def test_an_anchor_inside_itself_is_told(write: Write) -> None:
    assert mistake(write("targets: &a [*a]")).startswith("specdec.yml:1: targets.0: expected")


def test_anchors_and_merge_keys_work(write: Write) -> None:
    file = write(
        "targets:\n- &a {url: http://a, labels: &l {zone: x}}\n- {<<: *a, name: b}\n"
        "- &a {url: http://c, labels: *l}\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [(t.name, t.labels) for t in read(file).targets] == [
            ("a:80", {"zone": "x"}),
            ("b", {"zone": "x"}),
            ("c:80", {"zone": "x"}),
        ]
    file = write("targets:\n- &a {url: http://a, nmae: x}\n- {<<: *a}\n")
    assert mistakes(file) == [
        "specdec.yml:2: nmae: no such setting; did you mean name?",
        "specdec.yml:3: nmae: no such setting; did you mean name?",
    ]


# Targets


@pytest.mark.parametrize(
    ("given_as", "name", "url"),
    [
        ("127.0.0.1:8000", "127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
        ("vllm", "vllm:80", "http://vllm/metrics"),
        ("http://vllm:8000", "vllm:8000", "http://vllm:8000/metrics"),
        ("http://vllm:8000/", "vllm:8000", "http://vllm:8000/metrics"),
        ("HTTPS://vllm", "vllm:443", "https://vllm/metrics"),
        ("http://vllm/v1/prom?x=1#top", "vllm:80", "http://vllm/v1/prom?x=1"),
        ("http://vllm/m?a=b&c=d", "vllm:80", "http://vllm/m?a=b&c=d"),
        ("vllm:8000/m?a=b", "vllm:8000", "http://vllm:8000/m?a=b"),
        ("http://vllm?a=b", "vllm:80", "http://vllm/metrics?a=b"),
        ("chat=http://vllm:8000", "chat", "http://vllm:8000/metrics"),
        ("chat = vllm:8000", "chat", "http://vllm:8000/metrics"),
        ("big chat=http://vllm/m?a=b", "big chat", "http://vllm/m?a=b"),
        ("=vllm:8000", "vllm:8000", "http://vllm:8000/metrics"),
        ("http://[::1]:8000", "[::1]:8000", "http://[::1]:8000/metrics"),
        ("[::1]:8000", "[::1]:8000", "http://[::1]:8000/metrics"),
        ("http://[fe80::1%25eth0]", "[fe80::1%25eth0]:80", "http://[fe80::1%25eth0]/metrics"),
        ("http://u:p@vllm:8000", "vllm:8000", "http://u:p@vllm:8000/metrics"),
    ],
)
def test_a_target_is_named_and_completed_from_each_form(given_as: str, name: str, url: str) -> None:
    target = Target.model_validate(given_as)
    assert (target.name, target.url) == (name, url)


@pytest.mark.parametrize(
    "given_as",
    ["", "chat=", "ftp://a", "http://", "http://:80", "http://a:0", "http://a:65536", "http://a:b",
     "http://[::1", "::1", "unix:///run/x.sock"],
)  # fmt: skip
def test_what_is_no_address_is_no_target(given_as: str) -> None:
    assert "is not a URL like http://127.0.0.1:8000" in mistake(None, {"targets": [given_as]})


def test_two_targets_of_one_name_are_refused() -> None:
    assert mistake(SPECDEC_TARGETS="http://a:1, http://a:1/other") == (
        "settings: two targets are called 'a:1'; give each a name of its own"
    )
    assert len(read(SPECDEC_TARGETS="http://a:1, b=http://a:1").targets) == 2


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ({"labels": {"a-b": "x"}}, "'a-b' is not a label name"),
        ({"labels": {"__a": "x"}}, "'__a' is not a label name"),
        ({"labels": {"target": "x"}}, "the label 'target' is taken"),
        ({"labels": {"url": "x"}}, "the label 'url' is taken"),
        ({"metric_prefix": "1_"}, "'1_' cannot begin the name of a metric"),
        ({"name": "a\udcff"}, "there are characters in it that are not Unicode"),
        ({"labels": {"a": "\ud800"}}, "there are characters in it that are not Unicode"),
        ({"url": "http://a/\ud800"}, "there are characters in it that are not Unicode"),
    ],
)
def test_what_no_page_of_metrics_could_carry_is_refused(target: dict[str, Any], told: str) -> None:
    assert mistake(None, {"targets": [{"url": "http://a", **target}]}).endswith(told)


# Secrets


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@vllm:99999",
        "http://user:hunter2@vllm:port",
        "http://user:hun/ter2@vllm",
        "http://user:12/hunter2@vllm",
        "http://user:hunt#er2@vllm:port",
        "http://user:hunt?er2@vllm:port",
        "http://user:hunter2@vl\u2100lm",
        "http://user:hunter2@[::1",
        "ftp://user:hunter2@vllm",
        "http://vllm:99999/m?key=hunter2",
    ],
)
def test_the_password_of_a_url_that_is_refused_is_not_shown(url: str, write: Write) -> None:
    for told in (
        mistake(None, {"targets": [url]}),
        mistake(SPECDEC_TARGETS=url),
        mistake(write(json.dumps({"targets": [{"url": url, "name": "x"}]}))),
    ):
        assert not re.search("hunt|ter2|er2", told)


def test_the_password_of_a_url_that_is_used_is_not_shown() -> None:
    (target,) = read(SPECDEC_TARGETS="http://user:hunter2@vllm:8000/m?key=hunter2").targets
    assert target.shown_url == "http://vllm:8000/m"
    assert target.name == "vllm:8000"


def test_a_token_is_shown_by_no_mistake_and_no_repr(write: Write) -> None:
    twice = "admin_token: hunter2\nadmin_token: hunter22\n"
    wrong_type = "admin_token: [hunter2]\ninterval: 0\n"
    dated = "admin_token: hunter2\ninterval: 2001-13-40\n"
    for text in (twice, wrong_type, dated):
        assert not any("hunter" in line for line in mistakes(write(text)))
    assert "hunter" not in repr(read(SPECDEC_ADMIN_TOKEN="hunter2"))


# Addresses and durations


@pytest.mark.parametrize(
    ("given_as", "address"),
    [
        ("127.0.0.1:19185", ("127.0.0.1", 19185)),
        (":0", ("0.0.0.0", 0)),
        ("localhost:1", ("localhost", 1)),
        ("[::1]:1", ("::1", 1)),
        ("[::]:1", ("::", 1)),
    ],
)
def test_a_listen_address_is_host_and_port(given_as: str, address: tuple[str, int]) -> None:
    assert listen_address(given_as) == address


@pytest.mark.parametrize(
    "given_as",
    ["", "19185", "a:", "a:b", "a:65536", "a:-1", "::1:1", "[::1]", "[a]:1", "[::1:1", "a\0b:1"],
)
def test_what_is_no_listen_address_is_refused(given_as: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|permitted|At least|Only hex"):
        listen_address(given_as)


@pytest.mark.parametrize(
    ("given_as", "seconds"),
    [("5s", 5), ("1m30s", 90), ("500ms", 0.5), ("1.5h", 5400), ("1w1d", 691200), (5, 5), (0.1, 0.1),
     (" 5s ", 5)],
)  # fmt: skip
def test_a_duration_is_written_as_for_prometheus_or_as_a_number_of_seconds(
    given_as: object, seconds: float
) -> None:
    assert parse_duration(given_as) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "given_as",
    ["", "5", "s", "5 s", "-5s", "0s", "5S", "5x", "1e3s", "5s!", ".5s", "9" * 400 + "s", 0, -1,
     float("nan"), float("inf"), 10**400, True, None, [], "5s\n5s"],
)  # fmt: skip
def test_what_is_no_duration_is_refused(given_as: object) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse_duration(given_as)


@given(
    st.lists(
        st.tuples(st.integers(0, 10_000), st.sampled_from(["ms", "s", "m", "h", "d", "w"])),
        min_size=1,
        max_size=6,
    ).filter(lambda parts: any(n for n, _ in parts))
)
def test_a_duration_is_the_sum_of_its_parts(parts: list[tuple[int, str]]) -> None:
    milliseconds = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
    milliseconds["w"] = 7 * milliseconds["d"]
    written = "".join(f"{n}{unit}" for n, unit in parts)
    exact = sum(n * milliseconds[unit] for n, unit in parts) / 1000
    assert parse_duration(written) == pytest.approx(exact)


@given(st.integers(1, 10**12))
def test_a_duration_written_out_reads_back(milliseconds: int) -> None:
    seconds, rest = divmod(milliseconds, 1000)
    assert parse_duration(f"{seconds}s{rest}ms") == pytest.approx(milliseconds / 1000)
    assert parse_duration(milliseconds / 1000) == milliseconds / 1000


# Any text at all

PIECES = st.sampled_from(
    [
        *Settings.model_fields, *Target.model_fields, ":", ": ", "- ", "\n", "\n  ", "\n- ", "{", "}",
        "[", "]", ", ", "&a ", "*a", "<<: ", "? ", "| \n", "> \n", "'", '"', "#", "---\n", "...\n",
        "%YAML 1.1\n", "!!int ", "!!float ", "!!bool ", "!!set ", "!!omap ", "!!binary ", "!x ",
        "!!timestamp ", "0x", "0o9", "1e999", "1:2:3", "2001-13-40", "~", "\t", "\\", "\ufeff", "\x85",
        ".inf", ".nan", "5s", "http://a:1", "a=b", "=", "@", "`",
    ]
)  # fmt: skip


def problems_of(reading: Callable[[], Settings]) -> tuple[Problem, ...]:
    try:
        reading()
    except ConfigError as error:
        return error.problems
    return ()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES, max_size=12).map("".join) | st.text(max_size=60) | st.binary(max_size=60))
def test_no_file_whatever_gives_anything_but_settings_or_told_mistakes(
    write: Write, text: str | bytes
) -> None:
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    problems = problems_of(lambda: read(write(content)))
    assert all(problem.message for problem in problems)


@given(
    st.dictionaries(
        st.sampled_from([f"SPECDEC_{name.upper()}" for name in Settings.model_fields]),
        st.text(max_size=40),
        max_size=4,
    )
)
def test_no_environment_whatever_gives_anything_but_settings_or_told_mistakes(
    environ: dict[str, str],
) -> None:
    problems = problems_of(lambda: load(None, None, environ))
    assert {problem.place for problem in problems} <= {*environ, "settings"}
