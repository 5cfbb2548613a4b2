"""Settings: where they come from, and which of them are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost import config
from fencepost.errors import InvalidRequest


def load(folder: Path, text: str = "", **environment: str) -> config.Settings:
    (folder / "fencepost.toml").write_text(text, "utf-8")
    return config.load(folder, environment)


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    assert config.load(tmp_path, {}) == config.Settings()
    assert config.load(tmp_path, {}).store.url == "sqlite:///fencepost.db"


def test_the_environment_outweighs_the_file(tmp_path: Path) -> None:
    text = '[store]\nurl = "sqlite:///a.db"\n[work]\nttl = 20\nqueues = ["a"]\n'
    assert load(tmp_path, text).store.url == "sqlite:///a.db"
    found = load(tmp_path, text, FENCEPOST_STORE="sqlite:///b.db", FENCEPOST_WORK_TTL="45", FENCEPOST_WORK_QUEUES="x,y")
    assert found.store.url == "sqlite:///b.db"
    assert (found.work.ttl, found.work.queues) == (45.0, ("x", "y"))


def test_all_unknown_keys_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        load(tmp_path, '[store]\nulr = ""\n[work]\nttll = 3\n[wrok]\n')
    for word in ("store.ulr (did you mean url?)", "work.ttll (did you mean ttl?)", "[wrok] (did you mean work?)"):
        assert word in str(refused.value)


def test_an_unknown_setting_in_the_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"FENCEPOST_WORK_TTLS: is no setting \(did you mean ttl\?\)"):
        load(tmp_path, FENCEPOST_WORK_TTLS="3")


@pytest.mark.parametrize(
    ("work", "field"),
    [
        ("ttl = 0", "work.ttl"),
        ("ttl = -1", "work.ttl"),
        ("ttl = nan", "work.ttl"),
        ("ttl = inf", "work.ttl"),
        ("ttl = 700000", "work.ttl"),
        ("ttl = 30\ntrust_window = 30", "work.trust_window"),
        ("ttl = 30\ntrust_window = 20\nrenew_interval = 20", "work.renew_interval"),
        ("ttl = 30\nrenew_interval = 30", "work.renew_interval"),
        ("queues = []", "work.queues"),
        ('queues = ["a\\u0007b"]', "work.queues"),
        ("concurrency = 0", "work.concurrency"),
        ("concurrency = 1001", "work.concurrency"),
        ("drain_timeout = -1", "work.drain_timeout"),
    ],
)
def test_what_cannot_be_safe_is_refused_by_name(tmp_path: Path, work: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        load(tmp_path, f"[work]\n{work}\n")
    assert refused.value.field == field


@pytest.mark.parametrize("work", ['ttl = "30"', "ttl = true", 'on_epoch = "later"', 'result = "xml"', "queues = 3"])
def test_a_wrong_type_is_refused(tmp_path: Path, work: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        load(tmp_path, f"[work]\n{work}\n")
    assert work.split()[0] in str(refused.value)


def test_what_is_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"fencepost\.toml: is not TOML"):
        load(tmp_path, "[work\n")


def test_the_pools_max_ttl_bounds_the_ttl() -> None:
    with pytest.raises(InvalidRequest, match="max_ttl of 60 seconds"):
        config.check_work(config.WorkSettings(ttl=61.0), max_ttl=60.0)
    config.check_work(config.WorkSettings(ttl=60.0), max_ttl=60.0)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///tasks.db", "sqlite:///tasks.db"),
        ("postgresql://ada:secret@host:5432/db", "postgresql://ada@host:5432/db"),
        ("postgresql://:secret@host/db", "postgresql://host/db"),
    ],
)
def test_a_printed_url_has_no_password(url: str, shown: str) -> None:
    assert config.without_password(url) == shown
