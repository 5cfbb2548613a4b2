"""connect: what a URL means, and that it goes on meaning it."""

from __future__ import annotations

from pathlib import Path

import pytest

import fencepost
from fencepost.errors import InvalidRequest, StoreRefused, Unavailable
from fencepost.wire import NewTask


async def test_connect_is_awaited_or_entered() -> None:
    client = await fencepost.connect("memory://")
    await client.close()
    async with fencepost.connect("memory://") as client:
        await client.submit(NewTask(1))
    with pytest.raises(Unavailable):
        await client.submit(NewTask(1))


async def test_a_relative_path_stays_where_it_was_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    async with fencepost.connect("sqlite:///a file?.db".replace("?", "%3F")) as client:
        await client.submit(NewTask(1, task_id="t"))
        monkeypatch.chdir(tmp_path / "there")
        other = await client.clone()
        assert not isinstance(await other.task("t"), fencepost.Refused)
        await other.close()
    assert not list((tmp_path / "there").iterdir())
    assert (tmp_path / "here" / "a file?.db").exists()


@pytest.mark.parametrize(
    "url", ["", "sqlite://", "sqlite:///", "sqlite://host/x.db", "sqlite:///x.db?mode=ro", "mysql://x", "x.db", None, 7]
)
async def test_a_url_that_names_no_store_is_a_wrong_call(url: str) -> None:
    with pytest.raises(InvalidRequest, match="url"):
        await fencepost.connect(url)


async def test_create_false_makes_no_database(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused):
        await fencepost.connect(f"sqlite:///{tmp_path}/none.db", create=False)
    assert not list(tmp_path.iterdir())


async def test_an_epoch_that_is_no_number_is_a_wrong_call_before_anything_is_opened(tmp_path: Path) -> None:
    for epoch in (-1, 1.5, True, "1", {"default": "1"}):
        with pytest.raises(InvalidRequest, match="epoch"):
            await fencepost.connect(f"sqlite:///{tmp_path}/t.db", epoch=epoch)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
